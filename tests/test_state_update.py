"""The decoding step: against the token loop and the scan, on slots of a pool, and under torch.compile."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from tests import scan_oracle
from tests.scanning import Shape, Wrapper, call, error
from tilegym_mamba2 import (
    BackendUnavailable,
    interpreter,
    mamba2_state_update,
    ops_step,
    registry,
    use_backend,
)
from tilegym_mamba2.backends.cutile import state_update as cutile_step
from tilegym_mamba2.backends.cutile.state_update import StateUpdateConfig, override
from tilegym_mamba2.budgets import check
from tilegym_mamba2.calls import CALLS
from tilegym_mamba2.spec import SPECS, select
from tilegym_mamba2.validate_scan import validate_state_update

BACKENDS = [name for name in ("torch", "cutile") if name in registry.ops()["mamba2_state_update"].backends]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
PRECISION = {"torch": (torch.float64, 1e-12), "cutile": (torch.float32, 2e-6)}
PER_TOKEN = ("x", "dt", "b", "c", "z")
EVERYTHING = Shape(
    tokens=3, d="HP", z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.3, 1.2), init_state=True
)


@contextlib.contextmanager
def running(backend: str) -> Iterator[None]:
    with interpreter.interpret() if backend == "cutile" else contextlib.nullcontext():
        yield


def step(state: torch.Tensor, values: dict[str, Any], tokens: Any = slice(None), **options: Any) -> Any:
    """`tokens` of the values as one step; an integer gives the form without K."""
    cut = {n: v[:, tokens] if n in PER_TOKEN else v for n, v in values.items()} | options
    positional = [cut.pop(name) for name in ("x", "dt", "a", "b", "c")]
    for name in ("init_state", "chunk_size"):
        cut.pop(name, None)
    return mamba2_state_update(state, *positional, **cut)


# ---- against the token loop


@st.composite
def problems(draw: Any) -> Shape:
    heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)]))
    return Shape(
        tokens=draw(st.integers(1, 4)),
        batch=draw(st.integers(1, 4)),
        heads=heads,
        head_size=draw(st.integers(1, 9)),
        groups=groups,
        state_size=draw(st.integers(1, 9)),
        d=draw(st.sampled_from([None, "H", "HP"])),
        z=draw(st.booleans()),
        dt_bias=draw(st.booleans()),
        dt_softplus=draw(st.booleans()),
        dt_limit=draw(st.sampled_from([(0.0, math.inf), (0.05, 0.3)])),
        init_state=True,
    )


@every_backend
@settings(max_examples=60, derandomize=True, database=None)
@given(problems(), st.booleans(), st.integers(0, 2**20))
def test_random_steps(backend: str, shape: Shape, pooled: bool, seed: int) -> None:
    dtype, tolerance = PRECISION[backend]
    values = shape.values(dtype, seed)
    out, final, *_ = scan_oracle.scan(**values)
    state = values["init_state"].clone()
    indices = None
    if pooled:
        pool = torch.full((shape.batch + 3, *state.shape[1:]), math.nan, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        indices = torch.randperm(shape.batch + 3, generator=generator)[: shape.batch]
        pool[indices] = state
        state = pool
    with running(backend):
        got = step(state, values, state_indices=indices, backend=backend)
    assert got.shape == out.shape and got.dtype == dtype
    assert error(got, out) <= tolerance
    assert error(state if indices is None else state[indices], final) <= tolerance
    if pooled:
        assert state.isnan().flatten(1).all(1).sum() == 3


@every_backend
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(backend: str, dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    values = EVERYTHING.values(dtype, seed=4)
    values["init_state"] = values["init_state"].to(state_dtype)
    out, final, *_ = scan_oracle.scan(**values)
    state = values["init_state"].clone()
    with running(backend):
        got = step(state, values, backend=backend)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
    assert (got.dtype, state.dtype) == (dtype, state_dtype)
    assert error(got, out) <= rounding[dtype]
    # K tokens round the state once.
    assert error(state, final) <= rounding[state_dtype]


@every_backend
def test_one_token_without_and_with_k(backend: str) -> None:
    dtype, _ = PRECISION[backend]
    values = EVERYTHING.values(dtype)
    first, second = (values["init_state"].clone() for _ in range(2))
    with running(backend):
        without = step(first, values, 1, backend=backend)
        with_k = step(second, values, slice(1, 2), backend=backend)
    assert without.shape == (2, 4, 3) and with_k.shape == (2, 1, 4, 3)
    assert torch.equal(without, with_k[:, 0]) and torch.equal(first, second)


@every_backend
@pytest.mark.parametrize("name", select("step-test"))
def test_specs_within_budgets(backend: str, name: str) -> None:
    spec, entry = SPECS[name], registry.ops()["mamba2_state_update"]
    inputs = spec.get_sample_inputs(device="cpu")
    before = inputs["state"].clone()
    call = CALLS["mamba2_state_update"]
    fresh = call.fresh(inputs)
    with running(backend):
        found = call.call(fresh, backend)
    assert torch.equal(inputs["state"], before) and not torch.equal(fresh["state"], before)
    verdicts = check(entry, found, inputs, dtype=spec.dtype, decay=spec.decay)
    assert len(verdicts) == 2 and not [v for v in verdicts if not v.ok]


# ---- with the scan


@every_backend
@pytest.mark.parametrize("d", ["H", "HP"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_prefill_and_steps_equal_one_scan(backend: str, d: str, at_once: int) -> None:
    shape = Shape(
        tokens=100, d=d, z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.2, 1.0), init_state=True
    )
    values = shape.values(torch.float32, seed=7)
    scan_backend = backend if backend in registry.ops()["mamba2_chunk_scan"].backends else "torch"
    prefill = {n: v[:, :40] if n in PER_TOKEN else v for n, v in values.items()}
    with running(backend):
        whole, whole_final = call(values, backend=scan_backend)
        out, state = call(prefill, backend=scan_backend)
        outs = [out]
        for t in range(40, 100, at_once):
            outs.append(step(state, values, slice(t, t + at_once), backend=backend))
    assert error(torch.cat(outs, dim=1), whole) <= 1e-5
    assert error(state, whole_final) <= 1e-5


@every_backend
def test_4096_steps_keep_their_digits(backend: str) -> None:
    # h <- e^-0.001 h + 0.01: 0.01 (1 - e^-4.096) / (1 - e^-0.001) = 9.83853.
    state = torch.zeros(1, 1, 1, 1)
    one, a = torch.ones(1, 1, 1), torch.tensor([-1e-3])
    dt, b = torch.ones(1, 1), torch.full((1, 1, 1), 0.01)
    with running(backend), torch.no_grad():
        for _ in range(4096):
            mamba2_state_update(state, one, dt, a, b, one, backend=backend)
    assert state.item() == pytest.approx(9.83853, rel=5e-5)


# ---- slots


@every_backend
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "indices", [(3, -1, 0, 5), (-1, 2, -1, 0), (0, -1, 3, -1), (-1, -1, -1, -1), (0, 1, 2, 3)]
)
def test_slots_of_a_pool(backend: str, indices: tuple[int, ...], index_dtype: torch.dtype) -> None:
    dtype, tolerance = PRECISION[backend]
    shape = Shape(tokens=2, batch=4, d="H", z=True, init_state=True)
    values = shape.values(dtype)
    pool = torch.randn(6, 4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
    before = pool.clone()
    used = [i for i in indices if i >= 0]
    for row, slot in enumerate(indices):
        values["init_state"][row] = before[slot] if slot >= 0 else 0
        if slot < 0:
            # A row without a slot may hold anything.
            values["x"][row] = values["dt"][row] = math.nan
    with running(backend):
        out = step(pool, values, state_indices=torch.tensor(indices, dtype=index_dtype), backend=backend)
    for row in [row for row, slot in enumerate(indices) if slot < 0]:
        assert not out[row].any()
        values["x"][row] = values["dt"][row] = 0
    expected, final, *_ = scan_oracle.scan(**values)
    for row, slot in enumerate(indices):
        if slot >= 0:
            assert error(out[row], expected[row]) <= tolerance
            assert error(pool[slot], final[row]) <= tolerance
    untouched = [i for i in range(6) if i not in used]
    assert torch.equal(pool[untouched], before[untouched])


@every_backend
def test_writes_into_out_and_strided_state(backend: str) -> None:
    dtype, _ = PRECISION[backend]
    values = EVERYTHING.values(dtype)
    plain = values["init_state"].clone()
    wide = torch.full((2, 3, 4, 7, 5), math.nan, dtype=dtype)
    state = wide[:, 1, :, 2:5]
    state.copy_(plain)
    target = torch.full((2, 3, 8, 3), math.nan, dtype=dtype)
    with running(backend):
        expected = step(plain, values, backend=backend)
        got = step(state, values, out=target[:, :, ::2], backend=backend)
    assert got.data_ptr() == target.data_ptr()
    assert torch.equal(target[:, :, ::2], expected) and target[:, :, 1::2].isnan().all()
    assert torch.equal(state, plain)
    assert wide.isnan().sum() == wide.numel() - state.numel()


@every_backend
def test_no_rows(backend: str) -> None:
    dtype, _ = PRECISION[backend]
    values = Shape(tokens=1, batch=0, init_state=True).values(dtype)
    pool = torch.ones(2, 4, 3, 5, dtype=dtype)
    with running(backend):
        out = step(pool, values, 0, state_indices=torch.zeros(0, dtype=torch.int64), backend=backend)
    assert out.shape == (0, 4, 3) and (pool == 1).all()


@every_backend
@pytest.mark.parametrize("token", [0, slice(None)], ids=["one", "several"])
def test_no_slots(backend: str, token: Any) -> None:
    values = EVERYTHING.values(PRECISION[backend][0])
    pool = values["init_state"][:0]
    with running(backend):
        out = step(pool, values, token, state_indices=torch.tensor([-1, -1]), backend=backend)
        assert out.shape == values["x"][:, token].shape and not out.any()
        with pytest.raises(ValueError, match=r"^state_indices must be in \[-1, 0\), got 0 at index 1$"):
            step(pool, values, token, state_indices=torch.tensor([-1, 0]), backend=backend)


# ---- what torch puts around it


@every_backend
@pytest.mark.parametrize("token", [0, slice(None)], ids=["one", "several"])
def test_compiled_equals_eager(backend: str, token: Any) -> None:
    values = EVERYTHING.values(torch.float32)
    values.pop("dt_limit")
    indices = torch.tensor([2, -1])
    pool = torch.randn(3, 4, 3, 5)

    def twice(pool: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = step(pool, values, token, state_indices=indices, backend=backend)
        return first, step(pool, values, token, state_indices=indices, backend=backend), pool.sum()

    counter = CompileCounterWithBackend("aot_eager")
    eager_pool, compiled_pool = pool.clone(), pool.clone()
    with running(backend), torch.no_grad():
        expected = twice(eager_pool)
        got = torch.compile(twice, fullgraph=True, dynamic=True, backend=counter)(compiled_pool)
    assert all(torch.equal(g, e) for g, e in zip(got[:2], expected[:2], strict=True))
    assert got[2].item() == pytest.approx(expected[2].item(), rel=1e-5)
    assert torch.equal(compiled_pool, eager_pool) and not torch.equal(compiled_pool, pool)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@every_backend
def test_opcheck(backend: str) -> None:
    values = EVERYTHING.values(torch.float32)
    state, x = values["init_state"], values["x"]
    middle = (values["dt"], values["a"], values["b"], values["c"], values["d"], values["z"])
    arguments = (state, x, *middle, values["dt_bias"], torch.tensor([1, -1]), True, 0.3, 1.2)
    with running(backend):
        torch.library.opcheck(ops_step.state_update, (*arguments, torch.zeros_like(x), backend))


@every_backend
def test_inference_mode_and_autocast(backend: str) -> None:
    values = EVERYTHING.values(torch.float32)
    state, plain = values["init_state"].clone(), values["init_state"].clone()
    low = {n: v.bfloat16() if n in ("x", "b", "c", "z") else v for n, v in values.items()}
    with running(backend):
        expected = step(plain, low, backend=backend)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            got = step(state, values, backend=backend)
    assert got.dtype == torch.bfloat16 and torch.equal(got, expected) and torch.equal(state, plain)


def test_gradients_are_refused() -> None:
    values = EVERYTHING.values(torch.float32)
    values["a"].requires_grad_()
    state = values["init_state"].clone()
    with pytest.raises(RuntimeError, match="not differentiable, and an input requires grad: call it under"):
        step(state, values)
    assert torch.equal(state, values["init_state"])
    with torch.no_grad():
        assert not step(state, values, backend="torch").requires_grad


def test_eager_calls_skip_torch_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_step, "state_update", None)
    values = EVERYTHING.values()
    assert step(values["init_state"], values, backend="torch").shape == (2, 3, 4, 3)


# ---- calls of a form that was seen before


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Calls are kept by their form, as those on a GPU are; the list grows by one with every validation."""
    validated: list[int] = []

    def validate(*arguments: Any) -> None:
        validated.append(1)
        validate_state_update(*arguments)

    monkeypatch.setattr(ops_step, "validate_state_update", validate)
    monkeypatch.setattr(ops_step, "_known", {})
    monkeypatch.setattr(ops_step, "_last", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    with interpreter.interpret(), torch.no_grad():
        yield validated


@pytest.mark.parametrize("token", [0, slice(None)], ids=["one", "several"])
@pytest.mark.parametrize("given_out", [False, True])
def test_a_known_form_gives_the_same_bits(as_on_a_gpu: list[int], token: Any, given_out: bool) -> None:
    values = EVERYTHING.values(torch.float32)
    first, second = values["init_state"].clone(), values["init_state"].clone()
    target = torch.empty_like(values["x"][:, token].contiguous()) if given_out else None
    expected = step(first, values, token, backend="cutile", out=target).clone()
    got = step(second, values, token, backend="cutile", out=target)
    assert len(as_on_a_gpu) == 1
    assert torch.equal(got, expected) and torch.equal(first, second)
    assert target is None or got is target


@pytest.mark.parametrize("name", ["x", "dt", "a", "b", "c", "d", "z", "dt_bias"])
@pytest.mark.parametrize("known", [False, True])
def test_a_sign_beside_the_memory_counts(as_on_a_gpu: list[int], name: str, known: bool) -> None:
    """Of views such as `z.conj().imag`, whose memory has the other sign."""
    values = EVERYTHING.values(torch.float32)

    def run(negated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = values["init_state"].clone()
        return step(state, values | {name: negated}, backend="cutile"), state

    if known:
        run(values[name])
    got, expected = run(torch._neg_view(values[name])), run(-values[name])
    assert all(map(torch.equal, got, expected))
    # What is kept of such a call is no other call's.
    assert all(map(torch.equal, run(-values[name]), expected))


@pytest.mark.parametrize("name", ["state", "out"])
@pytest.mark.parametrize("known", [False, True])
def test_a_negated_view_is_not_written(as_on_a_gpu: list[int], name: str, known: bool) -> None:
    values = EVERYTHING.values(torch.float32)
    written = {"state": values["init_state"], "out": torch.zeros_like(values["x"])}
    if known:
        step(written["state"], values, backend="cutile", out=written["out"])
    written[name] = torch._neg_view(written[name])
    with pytest.raises(ValueError) as raised:
        step(written["state"], values, backend="cutile", out=written["out"])
    assert str(raised.value) == f"{name} is written, and must not be a negated view (is_neg()), got one"


def assert_inference_tensors_are_not_written(values: dict[str, Any], name: str, backend: str) -> None:
    with torch.inference_mode():
        inference = {"state": values["init_state"].clone(), "out": torch.zeros_like(values["x"])}
    written = {"state": values["init_state"].clone(), "out": torch.zeros_like(values["x"])}
    written[name] = inference[name]
    before = {n: tensor.clone() for n, tensor in written.items()}
    with torch.no_grad(), pytest.raises(ValueError) as raised:
        step(written["state"], values, backend=backend, out=written["out"])
    assert str(raised.value) == (
        f"{name} is written, and must not be an inference tensor outside torch.inference_mode(), got one"
    )
    assert all(torch.equal(written[n], before[n]) for n in written)
    with torch.inference_mode():
        step(written["state"], values, backend=backend, out=written["out"])
    assert not any(torch.equal(written[n], before[n]) for n in written)


@every_backend
@pytest.mark.parametrize("name", ["state", "out"])
def test_an_inference_tensor_is_not_written_outside_its_mode(backend: str, name: str) -> None:
    values = EVERYTHING.values(PRECISION[backend][0])
    with running(backend):
        assert_inference_tensors_are_not_written(values, name, backend)


@pytest.mark.parametrize("name", ["state", "out"])
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_known_form_writes_no_inference_tensor_outside_its_mode(
    as_on_a_gpu: list[int], name: str, first: Callable
) -> None:
    values = EVERYTHING.values(torch.float32)
    for _ in range(2):
        with first():
            written = values["init_state"].clone(), torch.zeros_like(values["x"])
            for _ in range(2):
                step(written[0], values, backend="cutile", out=written[1])
        assert_inference_tensors_are_not_written(values, name, "cutile")


def test_a_known_form_is_checked_for_overlap(as_on_a_gpu: list[int]) -> None:
    values = EVERYTHING.values(torch.float32)
    shape, size = values["x"].shape, values["init_state"].numel()
    buffer = torch.zeros(size + 2 * values["x"].numel())
    state, free = buffer[:size].view_as(values["init_state"]), buffer[size:].chunk(2)
    for out in free:
        step(state, values, backend="cutile", out=out.view(shape))
    assert len(as_on_a_gpu) == 1
    before = buffer.clone()
    for start in (0, size - 4):
        with pytest.raises(ValueError, match="out must not overlap state"):
            step(state, values, backend="cutile", out=buffer[start:][: len(free[0])].view(shape))
    with pytest.raises(ValueError, match="state is written, and must not repeat"):
        step(state[:1].expand(state.shape), values, backend="cutile")
    assert torch.equal(buffer, before)


def test_another_form_is_checked_again(as_on_a_gpu: list[int]) -> None:
    values = EVERYTHING.values(torch.float32)
    state, pool = values["init_state"], torch.zeros(5, 4, 3, 5)
    slots = torch.tensor([4, 1])
    steps = (
        {},
        {"backend": "torch"},
        {"dt_softplus": False},
        {"dt_limit": (0.25, 1.5)},
        {"d": None},
        {"d": values["d"][:, 0]},
        {"z": None},
        {"dt_bias": None},
        {"out": torch.empty(2, 3, 4, 3)},
        {"out": torch.empty(2, 3, 3, 4).transpose(2, 3)},
        {"a": torch.cat([values["a"]] * 2)[1:5]},
        {"b": values["b"].transpose(2, 3).contiguous().transpose(2, 3)},
        {"x": values["x"].transpose(0, 2).contiguous().transpose(0, 2)},
    )
    for change in steps:
        step(state, values, **({"backend": "cutile"} | change))
    count = len(as_on_a_gpu)
    assert count == len(steps)
    step(pool, values, backend="cutile", state_indices=slots)
    step(pool, values, backend="cutile", state_indices=slots.int())
    assert len(as_on_a_gpu) == count + 2
    step(pool, values, backend="cutile", state_indices=slots)
    assert len(as_on_a_gpu) == count + 2


class Repeated:
    """Stands for the packed launches, and keeps which of them got which addresses."""

    def __init__(self) -> None:
        self.launches: list[list[int]] = []
        self.numbers: list[int] = []
        self.count = 0
        self.takes = True

    def of_number(self, number: int) -> SimpleNamespace:
        def launch_aligned(stream: int, addresses: list[int]) -> bool:
            if any(address % 16 for address in addresses):
                return False
            self.numbers.append(number)
            return self.launch(stream, addresses)

        return SimpleNamespace(launch_aligned=launch_aligned)

    def launch(self, stream: int, addresses: list[int]) -> bool:
        self.launches += [addresses] if self.takes else []
        return self.takes


@pytest.fixture
def repeated(as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> Repeated:
    """What calls are given to that repeat the one before them."""
    repeated, run_plan = Repeated(), cutile_step.run_plan

    def run(launches: Any, device: torch.device, op: str, seen: Any) -> None:
        seen.packed = [repeated.of_number(repeated.count)]
        repeated.count += 1
        run_plan(launches, device, op, seen)

    monkeypatch.setattr(cutile_step, "run_plan", run)
    monkeypatch.setattr(cutile_step, "_plans", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return repeated


@pytest.mark.parametrize("given_out", [False, True])
def test_a_repeated_call_is_launched_on_its_own_tensors(repeated: Repeated, given_out: bool) -> None:
    for seed in range(3):
        values = EVERYTHING.values(torch.float32, seed)
        target = torch.empty_like(values["x"]) if given_out else None
        out = step(values["init_state"], values, backend="cutile", out=target)
        names = ("init_state", "x", "dt", "a", "b", "c", "d", "z", "dt_bias")
        addresses = [*(values[name].data_ptr() for name in names), out.data_ptr()]
        assert target is None or out is target
        assert len(repeated.launches) == seed and repeated.launches[seed - 1 :] in ([], [addresses])


def test_what_differs_from_the_last_call_is_no_repetition(repeated: Repeated) -> None:
    values = EVERYTHING.values(torch.float32)
    state, pool, slots = values["init_state"], torch.zeros(5, 4, 3, 5), torch.tensor([4, 1])
    shifted = torch.cat([values["a"]] * 2)[1:5]
    changes = (
        {"dt_softplus": False},
        {"dt_limit": (0.25, 1.5)},
        {"d": None},
        # The same number of tensors, each as another one was.
        {"dt_bias": None, "d": values["d"][:, 0].contiguous()},
        {"z": None},
        {"out": torch.empty(2, 3, 4, 3)},
        {"a": shifted},
        {"dt": values["dt"].bfloat16()},
        {"a": torch.nn.Parameter(values["a"])},
        {"b": values["b"].transpose(2, 3).contiguous().transpose(2, 3)},
        {"state": pool, "state_indices": slots},
        {"state": pool, "state_indices": slots.int()},
    )
    for change in changes:
        change = {"state": state, "backend": "cutile"} | change
        step(change.pop("state"), values, **change)
        assert not repeated.launches, change
    # Off 16 bytes again: never by the way that takes aligned ones.
    step(state, values, backend="cutile", a=shifted)
    step(state, values, backend="cutile", a=shifted)
    assert not repeated.launches
    with override(replace(StateUpdateConfig(), tile_elements=64)):
        step(state, values, backend="cutile")
    assert not repeated.launches


def test_a_repeated_call_hides_no_gradient(repeated: Repeated) -> None:
    values = EVERYTHING.values(torch.float32)
    values["a"].requires_grad_()
    state = values["init_state"]
    for _ in range(2):
        step(state, values, backend="cutile")
    assert len(repeated.launches) == 1
    with torch.enable_grad(), pytest.raises(RuntimeError, match="not differentiable"):
        step(state, values, backend="cutile")
    assert len(repeated.launches) == 1


def test_code_for_tensors_off_16_bytes_is_not_repeated_on_others(repeated: Repeated) -> None:
    values = EVERYTHING.values(torch.float32)
    state, shifted = values["init_state"], torch.cat([values["a"]] * 2)[1:5]
    # The way of the first form, the other's, and the first's again.
    for a, count in ((values["a"], 0), (values["a"], 1), (shifted, 1), (values["a"], 2), (values["a"], 3)):
        step(state, values, backend="cutile", a=a)
        assert len(repeated.launches) == count and set(repeated.numbers) <= {0}


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_a_form_is_recognised_in_another_mode_too(repeated: Repeated, first: Callable) -> None:
    values = EVERYTHING.values(torch.float32)
    with first():
        step(values["init_state"], values, backend="cutile")
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            step(values["init_state"], values, backend="cutile")
            before = len(repeated.launches)
            step(values["init_state"], values, backend="cutile")
            assert len(repeated.launches) == before + 1


@pytest.mark.parametrize("name", ["x", "dt", "a", "b", "c"])
def test_a_repeated_call_hides_no_missing_tensor(repeated: Repeated, name: str) -> None:
    values = EVERYTHING.values(torch.float32)
    for _ in range(2):
        step(values["init_state"], values, backend="cutile")
    positional = [None if n == name else values[n] for n in ("x", "dt", "a", "b", "c")]
    options = {n: values[n] for n in ("d", "z", "dt_bias", "dt_softplus", "dt_limit")}
    with pytest.raises(TypeError) as raised:
        mamba2_state_update(values["init_state"], *positional, **options, backend="cutile")
    assert str(raised.value) == f"{name} must be a torch.Tensor, got NoneType"


def test_a_repeated_call_hides_no_tangent(repeated: Repeated) -> None:
    values = EVERYTHING.values(torch.float32)
    for _ in range(2):
        step(values["init_state"], values, backend="cutile")
    with forward_ad.dual_level(), pytest.raises(BackendUnavailable, match="forward-mode"):
        dual = forward_ad.make_dual(values["x"], torch.ones_like(values["x"]))
        step(values["init_state"], values, backend="cutile", x=dual)
    assert len(repeated.launches) == 1


@pytest.mark.parametrize("name", ["x", "dt", "a", "b", "z", "dt_bias"])
@pytest.mark.parametrize("known", [False, True])
def test_a_wrapped_tensor_is_read_where_it_is(
    as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch, name: str, known: bool
) -> None:
    run_plan = cutile_step.run_plan

    def run(launches: Any, *rest: Any) -> None:
        assert not any(isinstance(arg, Wrapper) for item in launches for arg in item.args)
        run_plan(launches, *rest)

    monkeypatch.setattr(cutile_step, "run_plan", run)
    values = EVERYTHING.values(torch.float32)
    first, second = values["init_state"].clone(), values["init_state"].clone()
    expected = step(first, values, backend="cutile")
    if not known:
        ops_step._known.clear()
        ops_step._last.clear()
    got = step(second, values | {name: Wrapper(values[name])}, backend="cutile")
    assert torch.equal(got, expected) and torch.equal(first, second)


@pytest.mark.parametrize("given", [False, True])
def test_autograd_sees_that_a_step_overwrites(repeated: Repeated, given: bool) -> None:
    values = EVERYTHING.values(torch.float32)
    state, out = values["init_state"].clone(), torch.empty_like(values["x"]) if given else None
    for calls in range(1, 4):
        before = state._version, None if out is None else out._version
        with torch.no_grad():
            step(state, values, backend="cutile", **({"out": out} if given else {}))
        assert state._version > before[0] and (out is None or out._version > before[1]), calls
    with torch.enable_grad():
        loss = (torch.ones_like(state, requires_grad=True) * state).sum()
    with torch.no_grad():
        step(state, values, backend="cutile")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_launch_that_is_refused_is_made_another_way(repeated: Repeated) -> None:
    values = EVERYTHING.values(torch.float32)
    first, second = values["init_state"].clone(), values["init_state"].clone()
    expected = step(first, values, backend="cutile")
    repeated.takes = False
    assert torch.equal(step(second, values, backend="cutile"), expected) and torch.equal(first, second)
    assert not repeated.launches


@pytest.mark.parametrize(
    ("error_type", "change"),
    [
        (TypeError, {"dt_softplus": 1}),
        (TypeError, {"dt_limit": (0, True)}),
        (ValueError, {"dt_limit": (1.0, 0.0)}),
        (ValueError, {"dt_limit": (0, 10**400)}),
        (TypeError, {"dt_limit": (math.inf, [])}),
        (TypeError, {"a": 1.0}),
        (ValueError, {"a": torch.ones(5)}),
        (TypeError, {"c": torch.ones(2, 3, 2, 5, dtype=torch.float16)}),
        (ValueError, {"z": torch.ones(2, 3, 4, 1)}),
        (TypeError, {"out": torch.empty(2, 3, 4, 3, dtype=torch.float16)}),
        (BackendUnavailable, {"backend": "none such"}),
    ],
)
def test_a_known_form_hides_no_error(
    as_on_a_gpu: list[int], error_type: type[Exception], change: dict[str, Any]
) -> None:
    values = EVERYTHING.values(torch.float32) | {"dt_limit": (0, 1)}
    state = values["init_state"].clone()
    step(state, values, backend="cutile")
    before = state.clone()
    with pytest.raises(error_type):
        step(state, values, **({"backend": "cutile"} | change))
    assert torch.equal(state, before)


def test_a_known_form_follows_what_was_chosen(as_on_a_gpu: list[int], monkeypatch: Any) -> None:
    values = EVERYTHING.values(torch.float32)
    state = values["init_state"]
    with use_backend("cutile"):
        step(state, values)
        step(state, values)
    assert len(as_on_a_gpu) == 1
    with use_backend("torch"):
        step(state, values)
    assert len(as_on_a_gpu) == 2
    monkeypatch.setattr(registry, "_generation", registry.generation() + 1)
    with use_backend("cutile"):
        step(state, values)
        assert len(as_on_a_gpu) == 3
        values["x"].requires_grad_()
        with torch.enable_grad(), pytest.raises(RuntimeError, match="not differentiable"):
            step(state, values)


def test_tilegym_knows_the_op() -> None:
    import tilegym

    assert tilegym.ops.mamba2_state_update is mamba2_state_update


# ---- on a GPU


@pytest.mark.gpu
@every_backend
def test_a_replayed_graph_follows_new_data(backend: str) -> None:
    values = {n: v.cuda() if torch.is_tensor(v) else v for n, v in EVERYTHING.values(torch.float32).items()}
    indices = torch.tensor([2, -1], device="cuda")
    pool = torch.randn(3, 4, 3, 5, device="cuda")
    with torch.no_grad():
        step(pool.clone(), values, state_indices=indices, backend=backend)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(pool.clone(), values, state_indices=indices, backend=backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph, captured_pool = torch.cuda.CUDAGraph(), pool.clone()
        with torch.cuda.graph(graph):
            captured = step(captured_pool, values, state_indices=indices, backend=backend)
        captured_pool.copy_(pool)
        values["x"].mul_(2)
        indices.copy_(torch.tensor([-1, 0], device="cuda"))
        graph.replay()
        expected_pool = pool.clone()
        expected = step(expected_pool, values, state_indices=indices, backend=backend)
    assert torch.equal(captured, expected) and torch.equal(captured_pool, expected_pool)

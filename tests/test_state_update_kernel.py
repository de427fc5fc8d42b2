"""The kernel of the decoding step: against a token step in float64, for the compiler, and on a GPU."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.mutating import mutate
from tilegym_mamba2 import interpreter
from tilegym_mamba2.backends.cutile import inspection
from tilegym_mamba2.backends.cutile import state_update as backend
from tilegym_mamba2.backends.cutile.state_update import StateUpdateConfig
from tilegym_mamba2.spec import Mamba2ProblemSpec

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Half a unit in the last place, relative.
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-23}
# What float32 arithmetic may lose of the terms of a sum, per token.
ARITHMETIC = 5e-6
INPUTS = ("state", "x", "dt", "a", "b", "c", "d", "z", "dt_bias", "state_indices")
PER_TOKEN = ("x", "dt", "b", "c", "z")
NO_LIMIT = (0.0, math.inf)


class Sizes(NamedTuple):
    batch: int = 2
    tokens: int = 1
    heads: int = 4
    head_size: int = 8
    groups: int = 2
    state_size: int = 16
    slots: int = 5


class Options(NamedTuple):
    softplus: bool = True
    limit: tuple[float, float] = NO_LIMIT


DEFAULT = Options()


def draw(
    sizes: Sizes,
    dtype: torch.dtype = BF16,
    state_dtype: torch.dtype = FP32,
    missing: tuple[str, ...] = (),
    d_per_row: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of the step; slots are taken at random, none of them twice, and row 0 has none if it can."""
    batch, tokens, heads, head_size, groups, state_size, slots = sizes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    taken = torch.randperm(slots, generator=generator)[:batch].to(torch.int32)
    if batch > 1:
        taken[0] = -1
    inputs = {
        "state": normal(slots, heads, head_size, state_size).to(state_dtype),
        "x": normal(batch, tokens, heads, head_size).to(dtype),
        "dt": normal(batch, tokens, heads),
        "a": -torch.rand(heads, generator=generator) * 3,
        "b": normal(batch, tokens, groups, state_size).to(dtype),
        "c": normal(batch, tokens, groups, state_size).to(dtype),
        "d": normal(heads, head_size) if d_per_row else normal(heads),
        "z": 3 * normal(batch, tokens, heads, head_size).to(dtype),
        "dt_bias": normal(heads),
        "state_indices": taken,
    }
    return inputs | dict.fromkeys(missing)


def run(inputs: dict[str, Any], options: Options = DEFAULT, **changes: Any) -> torch.Tensor:
    """One call, in place on the inputs' state; returns out."""
    inputs = inputs | changes
    out = torch.empty(inputs["x"].shape, dtype=inputs["x"].dtype, device=inputs["x"].device)
    backend.mamba2_state_update(*(inputs[name] for name in INPUTS), options.softplus, options.limit, out)
    return out


def exactly(inputs: dict[str, Any], options: Options) -> dict[str, np.ndarray]:
    """Token by token, head by head, in float64: out and state, and the sums of their terms' sizes."""
    values = {
        name: None if value is None else value.detach().cpu().double().numpy()
        for name, value in inputs.items()
    }
    state, x = values["state"].copy(), values["x"]
    batch, tokens, heads, _ = x.shape
    heads_per_group = heads // values["b"].shape[2]
    out, out_size, state_size = np.zeros_like(x), np.zeros_like(x), np.abs(state)
    for row in range(batch):
        slot = row if values["state_indices"] is None else int(values["state_indices"][row])
        if slot < 0:
            continue
        for token in range(tokens):
            for head in range(heads):
                step = values["dt"][row, token, head]
                if values["dt_bias"] is not None:
                    step = step + values["dt_bias"][head]
                if options.softplus:
                    step = np.logaddexp(0.0, step)
                step = min(max(step, options.limit[0]), options.limit[1])
                b, c = (values[name][row, token, head // heads_per_group] for name in ("b", "c"))
                token_x, decay = x[row, token, head], math.exp(values["a"][head] * step)
                taken = np.outer(step * token_x, b)
                state[slot, head] = decay * state[slot, head] + taken
                state_size[slot, head] = decay * state_size[slot, head] + np.abs(taken)
                y, y_size = state[slot, head] @ c, state_size[slot, head] @ np.abs(c)
                if values["d"] is not None:
                    y = y + values["d"][head] * token_x
                    y_size = y_size + np.abs(values["d"][head] * token_x)
                if values["z"] is not None:
                    z = values["z"][row, token, head]
                    gate = z / (1 + np.exp(-z))
                    y, y_size = y * gate, y_size * np.abs(gate)
                out[row, token, head], out_size[row, token, head] = y, y_size
    return {"out": out, "state": state, "out_size": out_size, "state_size": state_size}


def assert_exact(inputs: dict[str, Any], options: Options = DEFAULT) -> None:
    """Runs the step on a copy of the state; every element must be as close as float32 and storing allow."""
    state = inputs["state"].clone(memory_format=torch.preserve_format)
    if state.stride() != inputs["state"].stride():
        old = inputs["state"]
        state = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device).copy_(old)
    out = run(inputs, options, state=state)
    if out.ndim == 3:
        inputs = inputs | {n: inputs[n].unsqueeze(1) for n in PER_TOKEN if inputs[n] is not None}
        out = out.unsqueeze(1)
    reference = exactly(inputs, options)
    tokens = inputs["x"].shape[1]
    for name, got in (("out", out), ("state", state)):
        expected = reference[name]
        allowed = ARITHMETIC * tokens * reference[f"{name}_size"] + ROUNDING[got.dtype] * np.abs(expected)
        # Below the smallest normal number of fp16 there are fewer digits.
        error = np.abs(got.cpu().double().numpy() - expected) - allowed - 2.0**-24
        assert error.max() <= 0, f"{name} is off by {error.max()} more than allowed at {error.argmax()}"


@pytest.fixture
def interpreted() -> Iterator[None]:
    with interpreter.interpret():
        yield


# ---- against the definition


def strided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in another layout."""
    if how == "wide":
        whole = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 3), torch.nan).to(tensor)
        whole[..., : tensor.shape[-1]] = tensor
        return whole[..., : tensor.shape[-1]]
    if how == "reversed":
        axes = tuple(range(tensor.ndim))[::-1]
        return tensor.permute(axes).contiguous().permute(axes)
    if how == "expanded":
        return (
            tensor.flatten()[:1].expand(tensor.shape)
            if tensor.ndim == 1
            else tensor[..., :1].expand_as(tensor)
        )
    return tensor


@st.composite
def problems(draw_from: st.DrawFn) -> tuple[dict[str, Any], Options]:
    pick = draw_from
    groups = pick(st.integers(1, 3))
    batch = pick(st.integers(1, 3))
    sizes = Sizes(
        batch=batch,
        tokens=pick(st.integers(1, 3)),
        heads=groups * pick(st.integers(1, 3)),
        head_size=pick(st.sampled_from((1, 5, 8, 16, 20, 33))),
        groups=groups,
        state_size=pick(st.sampled_from((1, 3, 16, 24, 40))),
        slots=batch + pick(st.integers(0, 2)),
    )
    missing = tuple(name for name in ("d", "z", "dt_bias", "state_indices") if pick(st.booleans()))
    dtype, state_dtype = (pick(st.sampled_from((BF16, FP16, FP32))) for _ in range(2))
    inputs = draw(sizes, dtype, state_dtype, missing, pick(st.booleans()), pick(st.integers(0, 2**20)))
    if inputs["state_indices"] is not None and pick(st.booleans()):
        inputs["state_indices"] = inputs["state_indices"].long()
    for name in ("dt", "a", "d", "dt_bias"):
        if inputs[name] is not None:
            inputs[name] = strided(
                inputs[name].to(pick(st.sampled_from((FP32, dtype)))), pick(LAYOUT | EXPANDED)
            )
    for name in ("state", "x", "b", "c", "z"):
        if inputs[name] is not None:
            inputs[name] = strided(inputs[name], pick(LAYOUT))
    if sizes.tokens == 1 and pick(st.booleans()):
        for name in PER_TOKEN:
            if inputs[name] is not None:
                inputs[name] = inputs[name].squeeze(1)
    limit = pick(st.sampled_from((NO_LIMIT, (0.0, 0.5), (0.1, 1.0), (0.05, math.inf))))
    return inputs, Options(pick(st.booleans()), limit)


LAYOUT = st.sampled_from(("contiguous", "wide", "reversed"))
EXPANDED = st.just("expanded")


@settings(max_examples=100)
@given(problem=problems(), tile_elements=st.sampled_from((64, 8192)), unchecked=st.booleans())
def test_any_step_equals_the_definition(
    problem: tuple[dict[str, Any], Options], tile_elements: int, unchecked: bool
) -> None:
    # Small tiles too: heads are cut, as those of a model are.
    config = StateUpdateConfig(tile_elements=tile_elements, warps=1, min_blocks=1)
    with interpreter.interpret(), backend.override(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_plans", {})
        patch.setattr(backend, "_unchecked_loads", lambda: unchecked)
        assert_exact(*problem)


@pytest.mark.usefixtures("interpreted")
class TestSizes:
    @pytest.mark.parametrize(("p", "n"), [(80, 96), (64, 128), (16, 256), (8, 512)])
    @pytest.mark.parametrize("state_dtype", [FP32, BF16])
    def test_of_models(self, p: int, n: int, state_dtype: torch.dtype) -> None:
        assert_exact(draw(Sizes(head_size=p, state_size=n), state_dtype=state_dtype))

    @pytest.mark.parametrize("empty", ["batch", "tokens"])
    def test_nothing_to_do(self, empty: str) -> None:
        inputs = draw(Sizes()._replace(**{empty: 0}))
        before = inputs["state"].clone()
        assert run(inputs).numel() == 0
        assert torch.equal(inputs["state"], before)


# ---- what a step must keep


@pytest.mark.usefixtures("interpreted")
class TestSlots:
    def test_others_keep_their_bits(self) -> None:
        inputs = draw(Sizes(batch=3, slots=7))
        pool = torch.randn(7, 4, 8, 20)
        inputs["state"] = pool[..., :16]
        before = pool.clone()
        run(inputs)
        taken = [slot for slot in inputs["state_indices"].tolist() if slot >= 0]
        untouched = torch.ones_like(pool, dtype=torch.bool)
        untouched[taken, :, :, :16] = False
        assert len(taken) == 2 and torch.equal(pool[untouched], before[untouched])
        assert (pool[~untouched] != before[~untouched]).all()

    def test_rows_without_one_give_zeros_whatever_they_hold(self) -> None:
        inputs = draw(Sizes(batch=3, tokens=2))
        inputs["state_indices"][:] = -1
        for name in ("x", "dt", "b", "c", "z"):
            inputs[name].fill_(torch.nan)
        before = inputs["state"].clone()
        out = run(inputs)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(inputs["state"], before)

    def test_a_row_in_another_slot_gets_the_same_bits(self) -> None:
        inputs = draw(Sizes(batch=2, slots=6))
        inputs["state_indices"] = torch.tensor([1, 4])
        moved = inputs | {"state": inputs["state"].roll(1, 0), "state_indices": torch.tensor([2, 5])}
        assert torch.equal(run(inputs), run(moved))
        assert torch.equal(inputs["state"].roll(1, 0), moved["state"])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_tokens_at_once_are_tokens_one_by_one(state_dtype: torch.dtype) -> None:
    inputs = draw(Sizes(tokens=3), state_dtype=state_dtype)
    one_by_one = inputs | {"state": inputs["state"].clone()}
    out = run(inputs)
    for k in range(3):
        token = {name: inputs[name][:, k : k + 1] for name in ("x", "dt", "b", "c", "z")}
        alone = run(one_by_one, **token)
        if state_dtype is FP32:
            assert torch.equal(alone[:, 0], out[:, k])
    if state_dtype is FP32:
        assert torch.equal(one_by_one["state"], inputs["state"])
    # One rounding instead of three.
    assert torch.allclose(one_by_one["state"].float(), inputs["state"].float(), rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    ("dt", "expected"),
    [(12.0, 12.0000061), (100.0, 100.0), (0.0, math.log(2)), (-30.0, math.exp(-30)), (88.5, 88.5)],
)
def test_softplus(dt: float, expected: float, dtype: torch.dtype) -> None:
    # A state of x·b = 1 taken up once is the step itself.
    inputs = draw(Sizes(batch=1, heads=1, groups=1, head_size=1, state_size=1), missing=INPUTS[6:])
    inputs["state"].zero_()
    inputs |= {"dt": torch.full((1, 1, 1), dt, dtype=dtype)}
    for name in ("x", "b", "c"):
        inputs[name].fill_(1)
    run(inputs)
    assert inputs["state"][0].item() == pytest.approx(expected, rel=3e-7)


@pytest.mark.usefixtures("interpreted")
def test_bias_comes_before_softplus_and_the_clamp_last() -> None:
    inputs = draw(
        Sizes(batch=1, heads=1, groups=1, head_size=1, state_size=1), missing=("d", "z", "state_indices")
    )
    for name in ("x", "b", "c", "dt_bias"):
        inputs[name].fill_(1)
    for dt, limit, expected in (
        (1.0, NO_LIMIT, 2.1269280),
        (1.0, (0.0, 2.0), 2.0),
        (-9.0, (0.01, 2.0), 0.01),
    ):
        inputs["state"].zero_()
        inputs["dt"].fill_(dt)
        run(inputs, Options(limit=limit))
        assert inputs["state"][0].item() == pytest.approx(expected, rel=3e-7)


@pytest.mark.usefixtures("interpreted")
def test_nan_in_a_step_is_not_clamped_away() -> None:
    inputs = draw(Sizes(batch=1))
    inputs["dt"][0, 0, 1] = torch.nan
    out = run(inputs, Options(limit=(0.0, 1.0)))
    assert out[0, 0, 1].isnan().all() and not out[0, 0, [0, 2, 3]].isnan().any()


@pytest.mark.usefixtures("interpreted")
def test_gates_of_any_size_are_finite() -> None:
    inputs = draw(Sizes(batch=1, head_size=8), dtype=FP32)
    inputs["z"][0, 0] = torch.tensor([-1e30, -200.0, -90.0, -88.0, 0.0, 88.0, 200.0, 1e4])
    out = run(inputs)
    plain = run(draw(Sizes(batch=1, head_size=8), dtype=FP32, missing=("z",)))
    assert out.isfinite().all() and (out[..., :3].abs() < 1e-30).all() and (out[..., 4] == 0).all()
    assert torch.allclose(out[..., 5:], plain[..., 5:] * inputs["z"][..., 5:], rtol=1e-6)


@pytest.mark.usefixtures("interpreted")
def test_a_long_walk_keeps_its_digits() -> None:
    # The sum of a geometric series: 0.01·(1 − r^4096) / (1 − r), r = exp(−1e-3).
    inputs = draw(
        Sizes(batch=1, tokens=4096, heads=1, groups=1, head_size=1, state_size=1), FP32, missing=INPUTS[6:]
    )
    inputs["state"].zero_()
    for name, value in {"x": 0.1, "b": 0.1, "c": 1.0, "dt": 1.0, "a": -1e-3}.items():
        inputs[name].fill_(value)
    out = run(inputs, Options(softplus=False))
    assert out[0, -1].item() == pytest.approx(9.83853, rel=5e-5)


def test_float64_is_refused() -> None:
    inputs = draw(Sizes())
    assert backend.supports("mamba2_state_update", *(inputs[name] for name in INPUTS)) == (True, "")
    for name in ("state", "x", "dt", "d"):
        changed = inputs | {name: inputs[name].double()}
        with pytest.raises(
            TypeError, match="mamba2_state_update: backend 'cutile' takes .* use backend='torch'"
        ):
            backend.supports("mamba2_state_update", *(changed[key] for key in INPUTS))


# ---- kernels broken on purpose

MODULES = ("steps", "gate", "state_update")
KERNEL = "state_update"
MUTATIONS = {
    "group by tiling": (KERNEL, "head // HEADS_PER_GROUP", "head % (NUM_HEADS // HEADS_PER_GROUP)"),
    "no decay": (KERNEL, "h[i] * exp2(rate * step) +", "h[i] +"),
    "decay in another base": (KERNEL, "number(a, (head,)) * LOG2E", "number(a, (head,))"),
    "missing dt": (KERNEL, "(step * x_tile)[:, None]", "x_tile[:, None]"),
    "output of the state before": (
        KERNEL,
        "ct.sum(h_tile * c_tile[None, :], axis=1)",
        "ct.sum((h_tile - (step * x_tile)[:, None] * b_tile[None, :]) * c_tile[None, :], axis=1)",
    ),
    "skip past the gate": (KERNEL, "y = y * silu(", "y = skip[i] * x_tile + (y - skip[i] * x_tile) * silu("),
    "gate without its sigmoid": ("gate", "return _over(v, 1.0 +", "return _over(v, 1.0 + 0.0 *"),
    "skip of the first head": (KERNEL, "number(d_skip, (head,))", "number(d_skip, (0,))"),
    "skip of the first rows": (KERNEL, "load_tile(d_skip, (head, first + i)", "load_tile(d_skip, (head, 0)"),
    "bias of the first head": (KERNEL, "number(dt_bias, (head,))", "number(dt_bias, (0,))"),
    "dt of the first token": (KERNEL, "load_step(dt, row, k, head)", "load_step(dt, row, 0, head)"),
    "slot is the row": (
        KERNEL,
        "slot = ct.gather(state_indices, row,",
        "slot = row + 0 * ct.gather(state_indices, row,",
    ),
    "clamp before softplus": (
        KERNEL,
        "            if SOFTPLUS:",
        "            step = clamp(step, dt_min, dt_max)\n            if SOFTPLUS:",
    ),
    "no lower limit": ("steps", "ct.maximum(v, low, propagate_nan=True)", "v"),
    "no upper limit": (
        "steps",
        "return ct.minimum(ct.maximum(v, low, propagate_nan=True), high,",
        "return ct.maximum(v, low,",
    ),
    "softplus is relu": ("steps", "+ log1p_up_to_one(ct.exp(-ct.abs(v)))", "+ 0.0"),
    "a short series": ("steps", "_ATANH = (1 / 3, 1 / 5,", "_ATANH = (1 / 3, 0 / 5,"),
    "x of the first part": (
        KERNEL,
        "load_row(array, (row, token, head, first + i), width, fits)",
        "load_row(array, (row, token, head, first), width, fits)",
    ),
    "state of the first part": (
        KERNEL,
        "load_tile(state, (slot, head, first + i, 0)",
        "load_tile(state, (slot, head, first, 0)",
    ),
    "state not kept": (KERNEL, "store_slot(state, (slot, head, first), h, PARTS, FITS)", "pass"),
}


def suite() -> None:
    # With 16-bit states two blocks to a head, each of two tiles.
    sizes = Sizes(batch=2, tokens=2, heads=4, head_size=64, groups=2, state_size=16)
    config = StateUpdateConfig(tile_elements=512, warps=1, min_blocks=1)
    with interpreter.interpret(), backend.override(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_unchecked_loads", lambda: True)
        assert_exact(draw(sizes._replace(head_size=8), FP32), Options(limit=(0.6, 1.0)))
        inputs = draw(sizes, FP32, BF16, missing=("z",), d_per_row=True)
        inputs["state_indices"] = torch.tensor([3, 1])
        assert_exact(inputs)


def test_the_suite_passes_unbroken() -> None:
    suite()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, backend, MODULES, {"state_update": "_kernels"}, MUTATIONS[name])
    # Plans hold on to the kernel that they were made with.
    monkeypatch.setattr(backend, "_plans", {})
    with pytest.raises((AssertionError, interpreter.InterpreterError)):
        suite()


# ---- how it is cut


@pytest.mark.parametrize(
    ("heads", "p", "tile_n", "element_size", "expected"),
    [
        (256 * 128, 64, 128, 4, 64),
        (80, 64, 128, 4, 8),
        (80, 64, 128, 2, 16),
        (256 * 50, 80, 128, 4, 16),
        (256 * 128, 64, 512, 4, 16),
        (1, 1, 1, 4, 1),
        (1, 64, 16384, 4, 1),
    ],
)
def test_rows_of_a_block(heads: int, p: int, tile_n: int, element_size: int, expected: int) -> None:
    assert StateUpdateConfig().tile_p(heads, p, tile_n, element_size) == expected


def test_tiles_of_a_block() -> None:
    config = StateUpdateConfig()
    assert config.parts(64, 128, 2, True) == 2 and config.parts(64, 128, 4, True) == 1
    # Threads without 16 bytes each, and tiles across a border, are one.
    assert config.parts(16, 128, 2, True) == 1 and config.parts(64, 128, 2, False) == 1


def test_calls_of_one_form_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_plans", {})
    with interpreter.interpret():
        for seed in range(3):
            run(draw(Sizes(), seed=seed))
        assert len(backend._plans) == 1
        run(draw(Sizes(batch=1)))
        run(draw(Sizes(), missing=("z",)))
        run(draw(Sizes(), d_per_row=True))
    assert len(backend._plans) == 4


# ---- as the compiler sees it

MANY = Mamba2ProblemSpec(256, 1, 8, 128, 128, 64, 64, BF16, FP32)
ONE = replace(MANY, batch_size=1, num_heads=80, num_groups=1)
BARE = dict.fromkeys(("d", "z", "dt_bias", "state_indices")) | {"dt_softplus": False}


def meta(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_jobs() -> dict[tuple[str, str], Any]:
    launches = inspection.state_update_launches
    jobs = {}
    for arch in inspection.ARCHS:
        jobs["many", arch], jobs["one", arch] = launches(MANY), launches(ONE)
    for dtype, state_dtype in ((BF16, BF16), (FP16, FP16), (FP32, FP32)):
        spec = replace(MANY, dtype=dtype, state_dtype=state_dtype)
        jobs[f"{dtype} state {state_dtype}", "sm_90"] = launches(spec)
        jobs[f"{dtype} state {state_dtype} bare", "sm_90"] = launches(spec, **BARE)
        jobs[f"{dtype} state {state_dtype} no slots", "sm_90"] = launches(spec, state_indices=None)
    for p, n in ((16, 16), (80, 96), (128, 256), (256, 512), (64, 1000)):
        for state_dtype in (FP32, BF16):
            spec = replace(MANY, head_size=p, state_size=n, state_dtype=state_dtype)
            jobs[f"p{p} n{n} {state_dtype}", "sm_90"] = launches(spec)
    changes = {
        "bare": BARE,
        "no slots": {"state_indices": None},
        "64-bit": {"state": meta(4096, 128, 64, 128)},
        "long slots": {"state_indices": torch.empty(256, dtype=torch.int64, device="meta")},
        "strided": {
            "dt": meta(256, 1, 128, 64)[..., 0],
            "a": meta(1).expand(128),
            "d": meta(128, 1).expand(128, 64),
            "dt_bias": meta(1).expand(128),
            "state": meta(256, 128, 128, 64).transpose(2, 3),
        },
    }
    for name, change in changes.items():
        jobs[name, "sm_90"] = launches(MANY, **change)
    jobs["64-bit bare", "sm_90"] = launches(MANY, **changes["64-bit"], **BARE)
    for name, spec in (("many", MANY), ("one", ONE)):
        batch, heads, groups = spec.batch_size, spec.num_heads, spec.num_groups
        tokens = {"x": meta(batch, heads, 64, dtype=BF16), "dt": meta(batch, heads)}
        tokens |= dict.fromkeys("bc", meta(batch, groups, 128, dtype=BF16)) | dict.fromkeys(
            ("z", "out"), tokens["x"]
        )
        jobs[f"{name} without K", "sm_90"] = launches(spec, **tokens)
    jobs["four tokens", "sm_90"] = launches(MANY, 4)
    return {key: launch for key, (launch,) in jobs.items()}


@pytest.mark.usefixtures("tileiras")
def test_it_compiles_and_spills_nothing() -> None:
    jobs = compile_jobs()

    def compile_one(key: tuple[str, str]) -> inspection.Code:
        launch = jobs[key]
        return inspection.compiled(launch.kernel, inspection.signature_of(launch), key[1])

    with ThreadPoolExecutor(2) as pool:
        codes = dict(zip(jobs, pool.map(compile_one, jobs), strict=True))
    # One register or two where a fourth block to a multiprocessor is worth more.
    assert {key: code.stack for key, code in codes.items() if code.stack > 8 and key[1] == "sm_90"} == {}
    many, one = codes["many", "sm_90"], codes["one", "sm_90"]
    # Four blocks of 256 threads to a multiprocessor of 65536 registers; no warps of the compiler's own.
    assert many.registers <= 64 and one.registers <= 64
    assert not any(code.opcodes["UTMALDG"] or code.opcodes["UTMASTG"] for code in codes.values())


def test_signatures_do_not_depend_on_the_batch_size() -> None:
    # 1 and multiples of 16 are other constants to the compiler, and few rows are cut finer.
    symbols = {
        inspection.signature_of(inspection.state_update_launches(replace(MANY, batch_size=batch))[0]).symbol
        for batch in (5, 6, 7, 9, 17, 100, 255)
    }
    assert len(symbols) == 1


# ---- on a GPU


@pytest.fixture
def on_gpu() -> dict[str, Any]:
    return {name: value.cuda() for name, value in draw(Sizes(4, 1, 16, 64, 2, 128, 9)).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("missing", [(), ("d",), ("z",), ("dt_bias",), ("state_indices",), INPUTS[6:]])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(3, 1, 16, 64, 2, 128, 9),
        Sizes(3, 4, 6, 80, 3, 96, 4),
        Sizes(2, 2, 4, 16, 1, 512),
        Sizes(1, 1, 80, 64, 1, 128),
    ],
)
@pytest.mark.parametrize(("dtype", "state_dtype"), [(BF16, FP32), (BF16, BF16), (FP16, FP16), (FP32, FP32)])
def test_parity(sizes: Sizes, dtype: torch.dtype, state_dtype: torch.dtype, missing: tuple[str, ...]) -> None:
    inputs = draw(sizes, dtype, state_dtype, missing, d_per_row=sizes.tokens == 4)
    on_device = {name: None if value is None else value.cuda() for name, value in inputs.items()}
    assert_exact(on_device, Options(limit=(0.0, 2.0)))


@pytest.mark.gpu
def test_parity_of_strided_tensors() -> None:
    inputs = draw(Sizes(3, 2, 16, 64, 2, 128, 9), d_per_row=True)
    inputs = {name: value.cuda() for name, value in inputs.items()}
    for name in ("dt", "a", "d", "dt_bias"):
        inputs[name] = inputs[name].flatten()[:1].expand(inputs[name].shape)
    for name in ("state", "x", "b", "c", "z"):
        for how in ("wide", "reversed"):
            assert_exact(inputs | {name: strided(inputs[name], how)})


@pytest.mark.gpu
def test_a_slice_of_a_pool_leaves_the_rest_alone() -> None:
    inputs = {name: value.cuda() for name, value in draw(Sizes(3, 1, 16, 64, 2, 128, 9)).items()}
    pool = torch.randn(9, 2, 16, 64, 128, device="cuda")
    before = pool.clone()
    run(inputs, state=pool[:, 1])
    taken = [slot for slot in inputs["state_indices"].tolist() if slot >= 0]
    untouched = torch.ones_like(pool, dtype=torch.bool)
    untouched[taken, 1] = False
    assert torch.equal(pool[untouched], before[untouched])
    assert not torch.equal(pool[~untouched], before[~untouched])


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_a_row_has_the_same_bits_in_any_batch(state_dtype: torch.dtype) -> None:
    inputs = draw(Sizes(64, 1, 16, 64, 2, 128, 64), state_dtype=state_dtype, missing=("state_indices",))
    inputs = {name: None if value is None else value.cuda() for name, value in inputs.items()}
    per_row = ("state", "x", "dt", "b", "c", "z")
    alone = inputs | {name: inputs[name][5:6].clone() for name in per_row}
    assert torch.equal(run(inputs)[5:6], run(alone))
    assert torch.equal(inputs["state"][5:6], alone["state"])


@pytest.mark.gpu
def test_a_graph_replays_on_other_slots(on_gpu: dict[str, Any]) -> None:
    eager = {name: value.clone() for name, value in on_gpu.items()}
    run(on_gpu | {"state": on_gpu["state"].clone()})
    out = torch.empty_like(on_gpu["x"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.mamba2_state_update(*(on_gpu[name] for name in INPUTS), True, NO_LIMIT, out)
    for slots in ([3, 1, -1, 8], [-1, 0, 2, 4], [5, 6, 7, 0]):
        for inputs in (on_gpu, eager):
            inputs["state_indices"].copy_(torch.tensor(slots))
        on_gpu["x"].normal_()
        eager["x"].copy_(on_gpu["x"])
        graph.replay()
        assert torch.equal(out, run(eager))
        assert torch.equal(on_gpu["state"], eager["state"])


@pytest.mark.gpu
def test_capturing_what_is_not_compiled_says_so() -> None:
    inputs = {name: value.cuda() for name, value in draw(Sizes(2, 1, 7, 24, 7, 48)).items()}
    with pytest.raises(RuntimeError, match="mamba2_state_update: warm up first"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run(inputs)


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu(on_gpu: dict[str, Any]) -> None:
    run(on_gpu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(on_gpu)
        run(on_gpu, Options(False, (0.1, 0.2)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stride", [2**31 + 64, 2**31 - 8])
@pytest.mark.parametrize("which", ["x", "out"])
def test_what_reaches_past_32_bits_has_64_bit_indices(which: str, stride: int) -> None:
    sizes = Sizes(batch=2, heads=2, head_size=16, groups=1, state_size=16)
    tensors = {name: t.to("meta") for name, t in draw(sizes).items() if isinstance(t, torch.Tensor)}
    tensors |= {name: t[:, 0] for name, t in tensors.items() if name in PER_TOKEN}
    tensors["out"] = torch.empty_like(tensors["x"])
    for wide in (False, True):
        if wide:
            x = tensors["x"]
            tensors[which] = torch.empty_strided(x.shape, (stride, 16, 1), dtype=x.dtype, device="meta")
        given = tuple(tensors.get(name) for name in INPUTS)
        plan = backend.by_form((which, stride, wide), given, False, NO_LIMIT, tensors["out"])
        assert plan.wide is wide

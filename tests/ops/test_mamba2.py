"""The Mamba-2 ops on every backend: parity with float64, and what must hold whoever computes it.

The cutile backend runs on the GPU with `-m gpu`, and otherwise through the tile interpreter on the CPU.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import tilegym
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilegym_mamba2
from tilegym_mamba2 import interpreter, registry
from tilegym_mamba2.budgets import check
from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec, select

from .. import common

__all__ = ["Mamba2ProblemSpec", "common"]

FORWARD, BACKWARD = "mamba2_chunk_forward", "mamba2_chunk_backward"
TEST_SPECS = select("test")
FEW_ROWS = 64


class Runner(NamedTuple):
    """A backend and where it runs: on "cpu", on "cuda", or through the tile interpreter."""

    backend: str
    place: str

    @property
    def device(self) -> str:
        return "cuda" if self.place == "cuda" else "cpu"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with interpreter.interpret() if self.place == "interpreter" else contextlib.nullcontext():
            yield

    def forward(self, inputs: dict[str, Any], **changes: Any) -> dict[str, torch.Tensor]:
        arguments = {name: value for name, value in (inputs | changes).items() if name in _FORWARD_ARGUMENTS}
        with self.running():
            results = tilegym.ops.mamba2_chunk_forward(**arguments, backend=self.backend)
        return dict(zip(registry.ops()[FORWARD].outputs, results, strict=True))

    def backward(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor | None]:
        arguments = {name: inputs[name] for name in (*_FORWARD_ARGUMENTS, "dout", "dfinal_state")}
        with self.running():
            results = tilegym.ops.mamba2_chunk_backward(**arguments, backend=self.backend)
        return dict(zip(registry.ops()[BACKWARD].outputs, results, strict=True))


_FORWARD_ARGUMENTS = ("x", "a", "b", "c", "d", "dt", "init_state", "chunk_size")
RUNNERS = [
    pytest.param(Runner("torch", "cpu"), id="torch"),
    pytest.param(Runner("cutile", "interpreter"), id="cutile-interpreter"),
    pytest.param(Runner("torch", "cuda"), id="torch-gpu", marks=pytest.mark.gpu),
    pytest.param(Runner("cutile", "cuda"), id="cutile-gpu", marks=pytest.mark.gpu),
]
every_runner = pytest.mark.parametrize("runner", RUNNERS)


@lru_cache(maxsize=64)
def sample(spec: Mamba2ProblemSpec, device: str, backward: bool = False) -> dict[str, Any]:
    return spec.get_sample_inputs(with_backward=backward, device=device)


def assert_within_budget(
    op: str, spec: Mamba2ProblemSpec, results: dict, references: dict, slack: float = 1.0
) -> None:
    verdicts = check(registry.ops()[op], results, references, dtype=spec.dtype, decay=spec.decay, slack=slack)
    broken = [f"{v.output}: {v.error:.3e} > {v.budget:.3e}" for v in verdicts if not v.ok]
    assert not broken, f"{spec.id}: " + "; ".join(broken)


# ---- parity with float64


@every_runner
@pytest.mark.parametrize("name", TEST_SPECS)
def test_forward_parity(runner: Runner, name: str) -> None:
    spec = TEST_SPECS[name]
    inputs = sample(spec, runner.device)
    results = runner.forward(inputs)
    assert results["out"].dtype == spec.dtype
    assert results["final_state"].dtype == spec.state_dtype
    assert results["out"].device == inputs["x"].device
    assert_within_budget(FORWARD, spec, results, inputs)


@every_runner
@pytest.mark.parametrize("name", TEST_SPECS)
def test_backward_parity(runner: Runner, name: str) -> None:
    if runner.backend not in registry.ops()[BACKWARD].backends:
        pytest.skip(f"{runner.backend} registers no backward")
    spec = TEST_SPECS[name]
    inputs = sample(spec, runner.device, backward=True)
    results = runner.backward(inputs)
    for argument in _FORWARD_ARGUMENTS[:-1]:
        assert results[f"d{argument}"].dtype == inputs[argument].dtype
    results["da"] = against_its_terms(results["da"], inputs)
    assert_within_budget(BACKWARD, spec, results, inputs)


def against_its_terms(da: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    """da with its error made smaller where its terms cancel: relative to the sum of their sizes.

    da sums r·dt over batch and tokens, terms of either sign, and the tokens of a tile share their rounded
    states; for one or two heads the sum can be near 0 by chance. From the exact gradients:
    a·r·dt = dt·ddt − Σ_p x (dx − d·dout).
    """
    exact = {name: value.double() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    da_exact = exact["da"]
    if not exact["a"].all():
        exact["a"] = torch.full_like(exact["a"], -1e-6)
        exact |= {n: g for n, g in float64_reference(inputs | {"a": exact["a"]}).items() if g is not None}
    skip = exact["d"][:, None] * exact["dout"] if "d" in exact else 0.0
    moved = exact["dt"] * exact["ddt"] - (exact["x"] * (exact["dx"] - skip)).sum(-1)
    terms = (moved / exact["a"]).abs().sum((0, 1))
    scale = (terms.norm() / da_exact.norm()).clamp(min=1).nan_to_num(1.0)
    return da_exact + (da.double() - da_exact) / scale


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mamba2ProblemSpec, tuple[str, ...]]:
    """A small problem of any shape, dtypes, decay and layout, and the arguments that are None in it."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    # Differences of float32 sums as large as the violent ones lose more digits than float32 inputs allow.
    decays = ["published", "slow", "none"] + ["violent"] * (dtype != torch.float32)
    spec = Mamba2ProblemSpec(
        batch_size=draw(st.integers(1, 2)),
        num_tokens=draw(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 96, 127, 130, 200])),
        num_groups=groups,
        num_heads=groups * draw(st.integers(1, 2)),
        state_size=draw(st.sampled_from([16, 32, 48, 64, 96, 128])),
        head_size=draw(st.sampled_from([16, 24, 32, 40, 64, 80])),
        chunk_size=draw(st.sampled_from([1, 16, 40, 50, 64, 96, 128, 256])),
        dtype=dtype,
        state_dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 1000)),
        decay=draw(st.sampled_from(decays)),
        dt_dtype=draw(st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16])),
        layout=draw(st.sampled_from(["contiguous", "sliced"])),
    )
    missing = draw(st.sampled_from([(), (), ("d",), ("init_state",), ("d", "init_state")]))
    return spec, missing


@every_runner
@settings(max_examples=150)
@given(problem=problems())
def test_any_problem(runner: Runner, problem: tuple[Mamba2ProblemSpec, tuple[str, ...]]) -> None:
    spec, missing = problem
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device=runner.device)
    inputs |= dict.fromkeys(missing)
    results = runner.forward(inputs)
    expected = torch.float32 if "init_state" in missing else spec.state_dtype
    assert results["final_state"].dtype == expected
    references = float64_reference(inputs)
    if spec.batch_size * spec.num_tokens * spec.num_heads < FEW_ROWS:
        # One cancellation between the terms of a row would decide alone: measure against their sizes instead.
        sizes = {name: value.abs() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        scale = (
            float64_reference(inputs | sizes | {"a": inputs["a"]})["out"].norm() / references["out"].norm()
        )
        results["out"] = references["out"] + (results["out"] - references["out"]) / scale.clamp(min=1)
    # Small problems have few roundings to average: the worst of 400 emulated ones takes 1.15 budgets.
    assert_within_budget(FORWARD, spec, results, references, slack=1.3)


@every_runner
@settings(max_examples=100)
@given(problem=problems(), silent=st.sampled_from(["", "", "dout", "dfinal_state"]))
def test_any_gradient(
    runner: Runner, problem: tuple[Mamba2ProblemSpec, tuple[str, ...]], silent: str
) -> None:
    spec, missing = problem
    inputs = spec.get_sample_inputs(with_reference=False, device=runner.device) | dict.fromkeys(missing)
    # The reference knows no None among the gradients that come in.
    references = float64_reference(inputs | {n: torch.zeros_like(inputs[n]) for n in [silent] if n})
    results = runner.backward(inputs | dict.fromkeys([silent]))
    for argument in missing:
        assert results[f"d{argument}"] is None
    if silent:
        inputs[silent] = torch.zeros_like(inputs[silent])
    few = spec.batch_size * spec.num_tokens * spec.num_heads < FEW_ROWS
    sizes = sizes_of_terms(inputs) if few or silent == "dout" else {}
    # A few numbers, each of few roundings: no average of them.
    room_of_da = 1.5
    if not few and silent == "dout":
        # Through final_state alone it sums products over P · N, of either sign, with one rounded state for
        # all tokens: of 500 such problems the worst takes 6 budgets at this scale.
        sizes = {"da": sizes["da"] / math.sqrt(spec.head_size * spec.state_size)}
        room_of_da = 10.0
    elif not few:
        results["da"] = against_its_terms(results["da"], inputs | references)
    broken = []
    for v in check(
        registry.ops()[BACKWARD], results, references, dtype=spec.dtype, decay=spec.decay, slack=1.3
    ):
        of_decay, exact = v.output in ("da", "ddt"), references[v.output].norm()
        # What a and dt feel is the decay between neighbours, a difference of float32 sums g: where a lone
        # head forgets at once, those stand near 1e3 ("violent": 1e5), with steps of 1e-4 (1e-2).
        scale = {"published": 2.0, "violent": 30.0}.get(spec.decay, 1.0) if of_decay else 1.0
        scale *= room_of_da if v.output == "da" else 1.0
        if v.output in sizes and exact:
            scale *= max(1.0, (sizes[v.output].norm() / exact).item())
        # Below float32's normal numbers the kernels have zero.
        nothing = 1e-12 if of_decay and spec.decay == "violent" else 1e-30
        if exact < nothing:
            right = results[v.output].double().norm() < nothing
        else:
            right = v.error <= scale * v.budget
        if not right:
            broken.append(f"{v.output}: {v.error:.3e} > {v.budget:.3e} · {scale:.2f}")
    assert not broken, f"{spec.id}: " + "; ".join(broken)


def sizes_of_terms(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients with every term counted by its size: what their errors are relative to."""
    exact = {n: value.double() for n, value in inputs.items() if isinstance(value, torch.Tensor)}
    sizes = {n: value if n == "a" else value.abs() for n, value in exact.items()}
    gradients = float64_reference(inputs | sizes)
    skip = sizes["d"][:, None] * sizes["dout"] if "d" in sizes else 0.0
    # ddt = direct + a∘r, both of one sign only when a is counted by its size too.
    direct = (sizes["x"] * (gradients["dx"] - skip)).sum(-1) / sizes["dt"]
    gradients["ddt"] = (2 * direct - gradients["ddt"]).nan_to_num(0.0, 0.0, 0.0)
    found = {f"d{n}": gradients[f"d{n}"] for n in ("x", "a", "b", "c", "dt", "init_state")}
    return {n: gradient for n, gradient in found.items() if gradient is not None}


# ---- on a GPU only: the published benchmark, and what only size brings out

LARGE_SPECS = [
    name
    for name in ("published", "published-slow", "published-none", *select("edge"))
    if name not in TEST_SPECS
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE_SPECS)
@pytest.mark.parametrize("backend", ["cutile", "torch"])
def test_large_forward_parity(backend: str, name: str) -> None:
    spec = SPECS[name]
    inputs = spec.get_sample_inputs(with_backward=False, device="cuda")
    assert_within_budget(FORWARD, spec, Runner(backend, "cuda").forward(inputs), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in LARGE_SPECS if "2g" not in name])
def test_large_backward_parity(name: str) -> None:
    spec = SPECS[name]
    inputs = spec.get_sample_inputs(device="cuda")
    results = Runner("cutile", "cuda").backward(inputs)
    results["da"] = against_its_terms(results["da"], inputs)
    assert_within_budget(BACKWARD, spec, results, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16-slow", "fp16-published", "fp32-slow", "p80-n96", "violent"])
def test_interpreter_agrees_with_the_gpu(name: str) -> None:
    spec = TEST_SPECS[name]
    on_gpu = Runner("cutile", "cuda").forward(sample(spec, "cuda"))
    interpreted = Runner("cutile", "interpreter").forward(sample(spec, "cpu"))
    references = {output: tensor.double() for output, tensor in interpreted.items()}
    assert_within_budget(
        FORWARD, spec, {output: tensor.cpu() for output, tensor in on_gpu.items()}, references
    )


# ---- identities

IDENTITY_SPECS = ("bf16-slow", "fp32-slow", "ragged")


@every_runner
@settings(max_examples=8)
@given(name=st.sampled_from(IDENTITY_SPECS), split=st.integers(0, 200))
def test_split_and_carry_equals_whole(runner: Runner, name: str, split: int) -> None:
    spec = TEST_SPECS[name]
    inputs = sample(spec, runner.device)
    tokens = ("x", "b", "c", "dt")
    first = runner.forward(inputs, **{k: inputs[k][:, :split] for k in tokens})
    second = runner.forward(
        inputs, **{k: inputs[k][:, split:] for k in tokens}, init_state=first["final_state"]
    )
    second["out"] = torch.cat([first["out"], second["out"]], dim=1)
    assert_within_budget(FORWARD, spec, second, inputs)


@every_runner
@settings(max_examples=8)
@given(token=st.integers(0, 199), name=st.sampled_from(["x", "b", "c", "dt"]))
def test_a_token_changes_nothing_before_it(runner: Runner, token: int, name: str) -> None:
    spec = TEST_SPECS["bf16-slow"]
    inputs = sample(spec, runner.device)
    before = runner.forward(inputs)["out"]
    changed = inputs[name].clone()
    changed[:, token] += 1.0
    after = runner.forward(inputs, **{name: changed})["out"]
    assert torch.equal(before[:, :token], after[:, :token])
    assert not torch.equal(before[:, token], after[:, token])


@every_runner
def test_batch_rows_are_independent(runner: Runner) -> None:
    spec = replace(TEST_SPECS["bf16-slow"], batch_size=3)
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device=runner.device)
    whole = runner.forward(inputs)
    poisoned = {name: inputs[name].clone() for name in ("x", "b", "c", "dt", "init_state")}
    for tensor in poisoned.values():
        tensor[0] = torch.nan
        tensor[2] = torch.nan
    alone = runner.forward(inputs, **poisoned)
    for output in ("out", "final_state"):
        assert torch.equal(whole[output][1], alone[output][1])
        assert alone[output][0].isnan().all()


@every_runner
def test_heads_read_groups_in_blocks(runner: Runner) -> None:
    spec = replace(TEST_SPECS["bf16-slow"], num_heads=6, num_groups=3)
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device=runner.device)
    whole = runner.forward(inputs)
    poisoned = inputs["b"].clone()
    poisoned[:, :, 1] = torch.nan
    results = runner.forward(inputs, b=poisoned)
    for output, head_dim in (("out", 2), ("final_state", 1)):
        touched = results[output].isnan().movedim(head_dim, 0).flatten(1).any(1)
        assert touched.tolist() == [False, False, True, True, False, False]
        untouched = [0, 1, 4, 5]
        assert torch.equal(
            results[output].movedim(head_dim, 0)[untouched], whole[output].movedim(head_dim, 0)[untouched]
        )


TERMS = {
    "skip": {"zero": ("b", "c", "init_state")},
    "input": {"zero": ("init_state",), "none": ("d",)},
    "initial state": {"zero": ("x",), "none": ("d",)},
    "nothing": {"zero": ("x", "init_state")},
}


@every_runner
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("name", ["bf16-slow", "fp32-published"])
def test_each_term_alone(runner: Runner, name: str, term: str) -> None:
    spec = TEST_SPECS[name]
    inputs = sample(spec, runner.device)
    changes = {argument: torch.zeros_like(inputs[argument]) for argument in TERMS[term].get("zero", ())}
    changes |= dict.fromkeys(TERMS[term].get("none", ()))
    results = runner.forward(inputs, **changes)
    assert_within_budget(FORWARD, spec, results, float64_reference(inputs | changes))
    if term == "skip":
        skip = (inputs["d"].float()[:, None] * inputs["x"].float()).to(spec.dtype)
        assert torch.equal(results["out"], skip)


@every_runner
def test_inputs_stay_as_they_are(runner: Runner) -> None:
    for name in ("bf16-slow", "sliced"):
        inputs = sample(TEST_SPECS[name], runner.device)
        copies = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        runner.forward(inputs)
        for key, copy in copies.items():
            assert torch.equal(inputs[key], copy), key


@every_runner
def test_two_calls_agree_bit_for_bit(runner: Runner) -> None:
    inputs = sample(TEST_SPECS["bf16-slow"], runner.device)
    first, second = runner.forward(inputs), runner.forward(inputs)
    assert all(torch.equal(first[output], second[output]) for output in first)


# ---- closed forms and traps


@every_runner
@pytest.mark.parametrize("chunk_size", [1, 2, 8, 64, 256])
def test_closed_form(runner: Runner, chunk_size: int) -> None:
    # h_t = e^(-1/2) h_(t-1) + 1: the geometric series.
    expected = {1: 1.0, 7: 2.464747611, 8: 2.494944995, 9: 2.513260634, 17: 2.540976969}
    for tokens, value in expected.items():
        ones = torch.ones(1, tokens, 1, 1, device=runner.device)
        one = torch.ones(1, device=runner.device)
        inputs = {"x": ones, "b": ones, "c": ones, "dt": ones[..., 0], "a": -0.5 * one, "d": 0 * one}
        inputs |= {"init_state": torch.zeros(1, 1, 1, 1, device=runner.device), "chunk_size": chunk_size}
        results = runner.forward(inputs)
        assert results["out"][0, -1].item() == pytest.approx(value, rel=1e-6)
        assert results["final_state"].item() == pytest.approx(value, rel=1e-6)


@every_runner
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decay_that_forgets_everything(runner: Runner, dtype: torch.dtype) -> None:
    # Every token starts anew: out = dt · x · (b·c) = 10 · 16, state = dt · x · b = 10.
    options = {"device": runner.device}
    inputs = {name: torch.ones(1, 64, 1, 16, dtype=dtype, **options) for name in ("x", "b", "c")}
    inputs |= {"a": torch.full((1,), -16.0, **options), "d": torch.zeros(1, **options)}
    inputs |= {"dt": torch.full((1, 64, 1), 10.0, **options), "chunk_size": 64}
    inputs["init_state"] = torch.ones(1, 1, 16, 16, **options)
    results = runner.forward(inputs)
    assert torch.equal(results["out"], torch.full_like(results["out"], 160.0))
    assert torch.equal(results["final_state"], torch.full_like(results["final_state"], 10.0))


@every_runner
def test_state_beyond_the_range_of_fp16(runner: Runner) -> None:
    options = {"dtype": torch.float16, "device": runner.device}
    shape = (1, 2048, 1, 16)
    inputs = {"x": torch.full(shape, 8.0, **options), "b": torch.full(shape, 8.0, **options)}
    inputs |= {"c": torch.full(shape, 1e-3, **options), "chunk_size": 64}
    inputs |= {"a": torch.full((1,), -1e-5, device=runner.device), "d": torch.zeros(1, device=runner.device)}
    inputs["dt"] = torch.ones(1, 2048, 1, device=runner.device)
    inputs["init_state"] = torch.zeros(1, 1, 16, 16, device=runner.device)
    reference = float64_reference(inputs)
    assert reference["final_state"].max() > 65504
    results = runner.forward(inputs)
    for output in ("out", "final_state"):
        assert results[output].isfinite().all()
        assert torch.allclose(results[output].double(), reference[output], rtol=2e-2, atol=0)


@every_runner
def test_no_decay_factor_exceeds_one(runner: Runner) -> None:
    spec = replace(TEST_SPECS["bf16-none"], num_tokens=256, chunk_size=256)
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device=runner.device)
    # One huge step, then tiny ones: the sum stands near 1e9, where float32 counts in steps of 64.
    inputs["a"] = torch.full_like(inputs["a"], -1e6)
    inputs["dt"][:, 100] = 1e3
    inputs["dt"][:, 101:] = 1e-7
    results = runner.forward(inputs)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    undecayed = {name: value.abs() for name, value in tensors.items()} | {"a": torch.zeros_like(inputs["a"])}
    bound = float64_reference(undecayed)
    for output in ("out", "final_state"):
        assert results[output].isfinite().all()
        assert (results[output].abs() <= 1.01 * bound[output]).all()


# ---- the published snippet


def test_published_snippet_on_the_torch_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Mamba2ProblemSpec(4, 512, 1, 8, 128, 64, 128, torch.bfloat16, torch.float32)
    assert replace(spec, num_tokens=16384) == SPECS["published"]
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False)
    monkeypatch.setattr(tilegym.backend.selector, "_CURRENT_BACKENDS", tilegym.backend.get_current_backend())
    tilegym.set_backend("torch")
    result = common.benchmark(lambda: tilegym.ops.mamba2_chunk_forward(**inputs), use_cupti=True)
    times = result["forward"]
    assert set(times) == {"median", "min", "max", "p20", "p80"}
    assert 0 < times["min"] <= times["p20"] <= times["median"] <= times["p80"] <= times["max"]
    assert tilegym_mamba2.registry.resolve(FORWARD, None, (inputs["x"],))[0] == "torch"

"""The forward kernels through the tile interpreter: each against its formula, any configuration, any layout.

What the op as a whole must do on every backend is in `ops/test_mamba2.py`.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym_mamba2 import interpreter, registry
from tilegym_mamba2.backends.cutile import forward, tuning
from tilegym_mamba2.backends.cutile.tuning import ForwardConfig
from tilegym_mamba2.budgets import budget_for, relative_error
from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

LOG2E = math.log2(math.e)
ENTRY = registry.ops()["mamba2_chunk_forward"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BASE = Mamba2ProblemSpec(1, 130, 1, 2, 32, 32, 64, BF16, FP32, decay="slow")


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter.interpret():
        yield


def draw(spec: Mamba2ProblemSpec) -> dict[str, Any]:
    return spec.get_sample_inputs(with_reference=False, with_backward=False, device="cpu")


def assert_close(
    what: str,
    got: torch.Tensor,
    ref: torch.Tensor,
    spec: Mamba2ProblemSpec,
    slack: float = 1.0,
    room: float = 0.0,
) -> None:
    """Within the budget of `out` or `final_state`, whichever `what` is named after, and `room` on top."""
    assert got.shape == ref.shape
    output = "out" if what == "out" else "final_state"
    budget = slack * budget_for(ENTRY, output, spec.dtype, spec.decay, ref, got.dtype) + room
    assert relative_error(got, ref) <= budget, f"{what} of {spec.id}: {relative_error(got, ref)} > {budget}"


def token_by_token(inputs: dict[str, Any], chunk_size: int) -> dict[str, torch.Tensor]:
    """The definition in float64: decay_log2 (B, H, T), the state before every chunk, out and final_state."""
    x, b, c, dt = (inputs[name].double() for name in ("x", "b", "c", "dt"))
    rate, heads = inputs["a"].double() * dt, x.shape[2]
    b, c = (value.repeat_interleave(heads // value.shape[2], dim=2) for value in (b, c))
    init = inputs["init_state"]
    state = torch.zeros(*x.shape[:1], *x.shape[2:], b.shape[3], dtype=torch.float64)
    state = state if init is None else init.double()
    skip = 0 if inputs["d"] is None else inputs["d"].double()[:, None] * x
    entries, out = [], []
    for t in range(x.shape[1]):
        if t % chunk_size == 0:
            entries.append(state)
        state = state * rate[:, t].exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        out.append((state * c[:, t, :, None]).sum(-1))
    chunks = [part.cumsum(1) for part in rate.split(chunk_size, dim=1)]
    return {
        "decay_log2": LOG2E * torch.cat(chunks, dim=1).transpose(1, 2),
        "entry_states": torch.stack(entries, dim=2),
        "out": torch.stack(out, dim=1) + skip,
        "final_state": state,
    }


# ---- chunk_cumsum

CHUNKS = (1, 16, 40, 50, 64, 96, 256)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize(("tokens", "heads"), [(219, 3), (1, 2), (64, 50)])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_chunk_cumsum(tokens: int, heads: int, chunk_size: int, dtype: torch.dtype) -> None:
    spec = replace(BASE, batch_size=2, num_tokens=tokens, num_heads=heads, state_size=1, head_size=1)
    inputs = draw(replace(spec, dt_dtype=dtype))
    got = forward.chunk_cumsum(inputs["a"], inputs["dt"], chunk_size=chunk_size)
    assert got.dtype == FP32 and got.shape == (2, heads, tokens)
    expected = token_by_token(inputs, chunk_size)["decay_log2"]
    assert torch.allclose(got.double(), expected, rtol=3e-6, atol=0)
    for chunk in got.split(chunk_size, dim=2):
        assert (chunk.diff(dim=2) <= 0).all()


def test_the_running_sum_of_bf16_steps_is_float32() -> None:
    # In bf16 a sum of 0.01s stops at 4.
    dt = torch.full((1, 1024, 1), 0.01, dtype=BF16)
    got = forward.chunk_cumsum(-torch.ones(1), dt, chunk_size=1024)
    assert got[0, 0, -1].item() == pytest.approx(-1024 * dt[0, 0, 0].item() * LOG2E, rel=1e-5)


def huge_sums(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a (3,) and dt (1, 256, 3) whose sums pass 1e9, with steps far below what float32 resolves there."""
    generator = torch.Generator().manual_seed(seed)
    dt = 10.0 ** (-7 + 10 * torch.rand(1, 256, 3, generator=generator))
    dt[:, 20] = 1e3
    return torch.tensor([-1e6, -1.1e6, -37.0]), dt


@pytest.mark.parametrize("seed", range(5))
def test_no_decay_rises_however_large_its_sums(seed: int) -> None:
    a, dt = huge_sums(seed)
    got = forward.chunk_cumsum(a, dt, chunk_size=256)
    assert got.isfinite().all() and got.min() < -1e9
    assert (got.diff(dim=2) <= 0).all()
    exact = LOG2E * (a.double() * dt.double()).cumsum(1).transpose(1, 2)
    assert torch.allclose(got.double(), exact, rtol=1e-5)


@pytest.mark.parametrize("tokens", [256, 250, 201, 1])
def test_rows_hold_no_factor_above_one_and_end_at_the_last_token(tokens: int) -> None:
    a, dt = huge_sums(1)
    dt = dt[:, :tokens]
    tiles = math.ceil(tokens / 64)
    rows = torch.empty(4, 1, 3, tiles, 64)
    launch = forward.rows_step(1, 3, tiles, ForwardConfig(), False).launch((a, dt, rows), {"rows": rows})
    interpreter.launch(launch.grid, launch.kernel, launch.args, outputs=launch.outputs)
    g, steps, weight, exp_g = rows[:, 0].flatten(2)
    padded = torch.nn.functional.pad(dt[0].T, (0, tiles * 64 - tokens))
    assert torch.equal(steps, padded)
    assert (exp_g >= 0).all() and (exp_g <= 1).all()
    assert (weight >= 0).all() and (weight <= steps).all()
    last = g[:, tokens - 1 :]
    assert torch.equal(last, last[:, :1].expand_as(last))
    # The last token has decayed by nothing when its tile ends.
    assert torch.equal(weight[:, tokens - 1], dt[0, -1])


# ---- the published kernels, one after the other

PROBLEMS = {
    **{f"chunk{chunk}": replace(BASE, num_tokens=219, chunk_size=chunk) for chunk in CHUNKS if chunk >= 16},
    "chunk1": replace(BASE, num_tokens=21, chunk_size=1),
    "chunk40-fp32": replace(BASE, dtype=FP32, chunk_size=40, num_tokens=90),
    "chunk96-fp16": replace(BASE, dtype=FP16, chunk_size=96, num_tokens=100),
    "chunk100-bf16-state": replace(BASE, state_dtype=BF16, chunk_size=100),
    "groups": replace(BASE, num_heads=6, num_groups=3, num_tokens=70),
    "heads-50": replace(BASE, num_heads=50, num_groups=10, num_tokens=20, head_size=16, state_size=16),
    "one-token": replace(BASE, batch_size=2, num_tokens=1, chunk_size=256),
    "published": replace(BASE, decay="published", chunk_size=50),
    "no-decay": replace(BASE, decay="none", chunk_size=50),
    "violent": replace(BASE, decay="violent", chunk_size=256, num_tokens=200),
    "sliced": replace(BASE, layout="sliced", chunk_size=50, dt_dtype=BF16, num_heads=4, num_groups=2),
    "sliced-chunk64": replace(BASE, layout="sliced", num_tokens=71),
    **{
        f"p{p}-n{n}": replace(BASE, head_size=p, state_size=n, num_tokens=70, chunk_size=50)
        for p, n in [(16, 16), (40, 96), (80, 256), (96, 16), (128, 96), (256, 16), (16, 512)]
    },
    "p80-n96-fp32": replace(BASE, head_size=80, state_size=96, num_tokens=70, dtype=FP32),
}


@pytest.mark.parametrize("missing", [(), ("d", "init_state")], ids=["", "bare"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_published_kernels(name: str, missing: tuple[str, ...]) -> None:
    spec = PROBLEMS[name]
    size = {"chunk_size": spec.chunk_size}
    inputs = draw(spec) | dict.fromkeys(missing)
    expected = token_by_token(inputs, spec.chunk_size)
    x, a, b, c, d, dt, init_state = (inputs[k] for k in ("x", "a", "b", "c", "d", "dt", "init_state"))

    decay = forward.chunk_cumsum(a, dt, **size)
    entries, final = forward.fwd_pass_state(x, b, dt, decay, init_state, **size)
    assert entries.dtype == FP32
    assert final.dtype == (FP32 if init_state is None else init_state.dtype)
    assert_close("entry_states", entries, expected["entry_states"], spec, slack=1.1)
    assert_close("final_state", final, expected["final_state"], spec, slack=1.1)

    # From exact entry states, so that what is wrong in one kernel does not blame the next.
    out = forward.compute_out(x, b, c, d, dt, decay, expected["entry_states"].float(), **size)
    assert out.dtype == spec.dtype
    assert_close("out", out, expected["out"], spec, slack=1.1)


def test_published_kernels_take_no_tokens() -> None:
    inputs = draw(replace(BASE, num_tokens=0))
    x, b, c, dt, init = (inputs[k] for k in ("x", "b", "c", "dt", "init_state"))
    decay = forward.chunk_cumsum(inputs["a"], dt, chunk_size=64)
    entries, final = forward.fwd_pass_state(x, b, dt, decay, init, chunk_size=64)
    out = forward.compute_out(x, b, c, None, dt, decay, entries, chunk_size=64)
    assert (decay.shape, entries.shape, out.shape) == ((1, 2, 0), (1, 2, 0, 32, 32), (1, 0, 2, 32))
    assert torch.equal(final, init)
    assert not forward.fwd_pass_state(x, b, dt, decay, None, chunk_size=64)[1].any()


# ---- configurations: S = 1, S > 1, and all that are shipped

ONE_TILE = ForwardConfig(min_segment_tiles=1, segment_blocks=10**6)
CONFIGS = {
    "s1": ONE_TILE,
    "s1-passed": replace(ONE_TILE, fold_segments=1),
    "s2": ForwardConfig(min_segment_tiles=2, segment_blocks=10**6, fold_segments=1),
    "s3-folded": ForwardConfig(min_segment_tiles=3, segment_blocks=10**6, fold_segments=8),
    "one-segment": ForwardConfig(min_segment_tiles=10**6),
    "tile-32": replace(ONE_TILE, tile_tokens=32),
    "tile-128": replace(ONE_TILE, tile_tokens=128),
    "narrow-tiles": replace(ONE_TILE, state_tile_n=16, out_tile_n=16, pass_tile_p=8, rows_heads=1),
    "wide-tiles": ForwardConfig(state_tile_n=512, out_tile_n=512, pass_tile_p=64, rows_heads=16),
}


def shipped_configs() -> dict[str, ForwardConfig]:
    """Every entry of the shipped tables and every default, once for each way to compute."""
    keys = {
        f"{arch}/{dtype}/P64/N{n}/H{heads}/T16384"
        for arch in ("sm_80", "sm_90", "sm_100", "sm_120")
        for dtype in ("bfloat16", "float16", "float32")
        for n in (16, 64, 128, 256, 512)
        for heads in (8, 64)
    }
    found = {f"default {key}": tuning.default_config(key) for key in sorted(keys)}
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        for key, entry in tuning.shipped_table(arch)["entries"].items():
            found[key] = replace(tuning.default_config(key), **entry["config"])
    hints = ("occupancy", "warps", "latency")
    distinct: dict[ForwardConfig, str] = {}
    for key, config in found.items():
        names = [name for name in vars(config) if name.endswith(hints)]
        distinct.setdefault(replace(config, **{name: getattr(ForwardConfig(), name) for name in names}), key)
    return {key: config for config, key in distinct.items()}


CONFIGS |= shipped_configs()
CONFIG_PROBLEMS = {
    "bf16": replace(BASE, num_tokens=330, state_size=40),
    "fp32": replace(BASE, num_tokens=200, num_heads=1, dtype=FP32),
    "fp16-wide": replace(BASE, num_tokens=150, num_heads=1, dtype=FP16, state_size=160, head_size=80),
    "bf16-states-published": replace(BASE, num_tokens=200, state_dtype=BF16, decay="published"),
}


def run(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    out, final_state = forward.mamba2_chunk_forward(**inputs)
    return {"out": out, "final_state": final_state}


@pytest.mark.parametrize("problem", CONFIG_PROBLEMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration(config: str, problem: str) -> None:
    spec = CONFIG_PROBLEMS[problem]
    inputs = draw(spec)
    with tuning.override(CONFIGS[config]):
        results = run(inputs)
    for output, ref in float64_reference(inputs).items():
        assert_close(output, results[output], ref, spec)


@pytest.mark.parametrize("config", ["s1", "s1-passed", "s2", "one-segment"])
def test_a_state_past_fp16_stays_right(config: str) -> None:
    shape = (1, 2048, 1, 16)
    inputs: dict[str, Any] = {name: torch.full(shape, 8.0, dtype=FP16) for name in ("x", "b")}
    inputs |= {"c": torch.full(shape, 1e-3, dtype=FP16), "dt": torch.ones(1, 2048, 1)}
    inputs |= {"a": torch.full((1,), -1e-5), "d": torch.zeros(1), "init_state": None}
    expected = float64_reference(inputs)
    assert expected["final_state"].max() > 65504
    with tuning.override(CONFIGS[config]):
        results = run(inputs)
    for output, got in results.items():
        assert got.isfinite().all()
        assert torch.allclose(got.double(), expected[output], rtol=2e-2, atol=0)


@pytest.mark.parametrize("config", ["s1", "s1-passed", "one-segment"])
def test_huge_sums_give_no_more_than_no_decay_would(config: str) -> None:
    inputs = draw(replace(BASE, num_tokens=256, num_heads=3, chunk_size=256))
    inputs["a"], inputs["dt"] = huge_sums(0)
    with tuning.override(CONFIGS[config]):
        results = run(inputs)
    sizes = {k: v.abs() for k, v in inputs.items() if isinstance(v, torch.Tensor)}
    bound = float64_reference(inputs | sizes | {"a": torch.zeros(3)})
    for output, got in results.items():
        assert got.isfinite().all()
        assert (got.abs() <= 1.01 * bound[output]).all()


@pytest.mark.parametrize("config", ["s1", "s1-passed", "s2"])
@pytest.mark.parametrize("split", [64, 100])
def test_split_and_carry(config: str, split: int) -> None:
    inputs = draw(replace(BASE, num_tokens=200))
    tokens = ("x", "b", "c", "dt")
    with tuning.override(CONFIGS[config]):
        first = run(inputs | {k: inputs[k][:, :split] for k in tokens})
        carried = {k: inputs[k][:, split:] for k in tokens} | {"init_state": first["final_state"]}
        second = run(inputs | carried)
    expected = float64_reference(inputs)
    assert_close("out", torch.cat([first["out"], second["out"]], dim=1), expected["out"], BASE)
    assert_close("final_state", second["final_state"], expected["final_state"], BASE)


SOUND_KEY = "sm_90/bfloat16/P32/N32/H2/T128"


@pytest.mark.parametrize(
    "entries",
    [
        [],
        {SOUND_KEY: {"config": []}},
        {SOUND_KEY: {"config": None}},
        {SOUND_KEY.replace("H2", "H0"): {"config": {}}},
        *(
            {SOUND_KEY: {"config": {name: value}}}
            for name, value in (
                ("tile_tokens", 0),
                ("tile_tokens", 48),
                ("tile_tokens", 2**20),
                ("min_segment_tiles", 0),
                ("rows_heads", 3),
                ("out_tile_n", 8),
                ("pass_tile_p", 0),
                ("out_latency", 11),
                ("out_warps", 3),
                ("out_occupancy", 0),
                ("chained", 2),
            )
        ),
    ],
    ids=str,
)
def test_a_table_that_would_break_the_call_is_ignored(
    entries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(tuning.CACHE_ENV, str(tmp_path))
    tuning.user_table_path("sm_90").write_text(json.dumps({"schema": tuning.SCHEMA, "entries": entries}))
    forward._plans.clear()
    inputs = draw(BASE)
    expected = float64_reference(inputs)
    for output, got in run(inputs).items():
        assert_close(output, got, expected[output], BASE)
    assert "ignoring the tuning table" in caplog.text


def test_every_value_that_the_tuner_tries_may_stand_in_a_table() -> None:
    for key in (SOUND_KEY, "sm_90/float32/P64/N256/H64/T16384", "sm_100/bfloat16/P64/N128/H8/T1024"):
        for config in tuning.candidates(key):
            values = vars(config)
            tuning._checked({"schema": tuning.SCHEMA, "entries": {key: {"config": values}}}, Path("table"))


# ---- layouts: read in place, and the documented copies


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with tokens and heads transposed in memory."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def tokens_last(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the tokens of a head next to each other, so that the last axis has gaps."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with NaN between them."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values from an address that no 16 bytes divide."""
    flat = torch.full((tensor.numel() + 1,), math.nan, dtype=tensor.dtype)
    flat[1:] = tensor.reshape(-1)
    return flat[1:].view(tensor.shape)


def repeated(tensor: torch.Tensor) -> torch.Tensor:
    """The first batch row (or entry) for all, by a stride of zero."""
    return tensor[:1].expand_as(tensor)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads_first": heads_first,
    "tokens_last": tokens_last,
    "every_other": every_other,
    "off_by_one": off_by_one,
    "repeated": repeated,
}
TENSORS = ("x", "a", "b", "c", "d", "dt", "init_state")
COPIED = {"tokens_last", "every_other"}


class HostWork(TorchDispatchMode):
    """Counts what torch does for a call: nothing may compute."""

    VIEWS = {"unsqueeze", "view", "slice", "select", "expand", "detach", "transpose", "as_strided", "alias"}
    ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty"}

    def __init__(self) -> None:
        super().__init__()
        self.copied = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "zero_", "_to_copy"):
            self.copied[name] += 1
        elif name not in self.VIEWS | self.ALLOCATIONS:
            raise AssertionError(f"torch computes {func}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def host_work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, torch.Tensor], Counter]]:
    """Runs the op and counts the copies, with memory as torch gives it: filling it would be counted too."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, getattr(torch, name).__wrapped__)

    def counted(inputs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Counter]:
        with HostWork() as mode:
            results = run(inputs)
        return results, mode.copied

    return counted


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_read_in_place_or_copied_as_documented(layout: str, name: str, host_work) -> None:
    if LAYOUTS[layout] in (heads_first, tokens_last) and name in ("a", "d"):
        pytest.skip("one axis has one order")
    spec = replace(BASE, batch_size=2, num_tokens=70, num_groups=2)
    inputs = draw(spec)
    inputs[name] = LAYOUTS[layout](inputs[name])
    expected = float64_reference(inputs)
    with tuning.override(ONE_TILE):
        results, copied = host_work(inputs)
    wanted = {"clone": 1} if layout in COPIED and name in ("x", "b", "c") else {}
    assert copied == wanted
    for output, got in results.items():
        assert_close(output, got, expected[output], spec)


@pytest.mark.parametrize("config", ["s1", "s1-passed", "one-segment"])
@pytest.mark.parametrize("missing", [(), ("d",), ("init_state",)])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_torch_computes_nothing(config: str, missing: tuple[str, ...], state_dtype, host_work) -> None:
    inputs = draw(replace(BASE, layout="sliced", state_dtype=state_dtype)) | dict.fromkeys(missing)
    with tuning.override(CONFIGS[config]):
        _, copied = host_work(inputs)
    assert not copied


def test_without_tokens_the_state_is_copied_or_zero(host_work) -> None:
    inputs = draw(replace(BASE, num_tokens=0))
    results, copied = host_work(inputs)
    assert torch.equal(results["final_state"], inputs["init_state"]) and copied == {"copy_": 1}
    results, copied = host_work(inputs | {"init_state": None})
    assert not results["final_state"].any() and copied == {"zero_": 1}


@pytest.mark.parametrize("sizes", [{"num_tokens": 0}, {"head_size": 1}, {"state_size": 1}], ids=str)
def test_gaps_in_the_last_axis_of_what_counts_as_contiguous(sizes: dict[str, int]) -> None:
    # For torch the stride of an axis of one counts for nothing, nor does any where there is no element.
    spec = replace(BASE, num_groups=2, **sizes)
    inputs = draw(spec)
    expected = float64_reference(inputs)
    for name in ("x", "b", "c"):
        shape, stride = inputs[name].shape, inputs[name].stride()
        if shape[-1] == 1 or not shape[1]:
            inputs[name] = inputs[name].as_strided(shape, (*stride[:-1], 2))
            assert inputs[name].is_contiguous() and inputs[name].stride(-1) == 2
    for output, got in run(inputs).items():
        assert_close(output, got, expected[output], spec)


def test_the_mode_sees_a_computation() -> None:
    ones = torch.ones(2)
    with pytest.raises(AssertionError, match="torch computes aten.mul"), HostWork():
        ones.mul(2)


@pytest.mark.parametrize("tokens", [64, 71, 130])
@pytest.mark.parametrize("config", ["s1", "s1-passed", "one-segment"])
def test_rows_past_the_end_are_never_used(tokens: int, config: str) -> None:
    # The slices' parents hold NaN past T and beside every row.
    spec = replace(BASE, layout="sliced", num_tokens=tokens, dt_dtype=BF16, head_size=40, state_size=48)
    inputs = draw(spec)
    assert inputs["dt"].untyped_storage().data_ptr() == inputs["x"].untyped_storage().data_ptr()
    with tuning.override(CONFIGS[config]):
        results = run(inputs)
    for output, ref in float64_reference(inputs).items():
        assert_close(output, results[output], ref, spec)


@pytest.mark.parametrize("config", ["s1", "s2", "s1-passed"])
def test_the_same_bits_in_every_run_and_for_every_batch(config: str) -> None:
    # The interpreter shuffles the blocks anew in each run.
    inputs = draw(replace(BASE, batch_size=3, num_tokens=200))
    alone = {k: inputs[k][:1] for k in ("x", "b", "c", "dt", "init_state")}
    with tuning.override(CONFIGS[config]):
        first, second, one_row = run(inputs), run(inputs), run(inputs | alone)
    for output in first:
        assert torch.equal(first[output], second[output])
        assert torch.equal(first[output][:1], one_row[output])


# ---- any problem


@st.composite
def problems(
    draw: st.DrawFn,
) -> tuple[Mamba2ProblemSpec, dict[str, str], tuple[str, ...], ForwardConfig, bool]:
    """A small problem, the layout of some tensors, what is None, a configuration, and whether a and d have
    x's dtype."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    dtype = draw(st.sampled_from([BF16, FP16, FP32]))
    spec = Mamba2ProblemSpec(
        batch_size=draw(st.integers(1, 2)),
        num_tokens=draw(st.sampled_from([1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130, 200])),
        num_groups=groups,
        num_heads=groups * draw(st.integers(1, 2)),
        state_size=draw(st.sampled_from([16, 24, 48, 64, 96])),
        head_size=draw(st.sampled_from([8, 16, 40, 64, 80])),
        chunk_size=64,
        dtype=dtype,
        state_dtype=draw(st.sampled_from([FP32, FP32, BF16])),
        seed=draw(st.integers(0, 1000)),
        decay=draw(st.sampled_from(["published", "slow", "none"] + ["violent"] * (dtype != FP32))),
        dt_dtype=draw(st.sampled_from([None, FP32, BF16, FP16])),
        layout=draw(st.sampled_from(["contiguous", "sliced"])),
    )
    names = st.sampled_from(("x", "b", "c", "dt", "init_state"))
    layouts = draw(st.dictionaries(names, st.sampled_from(sorted(LAYOUTS)), max_size=3))
    missing = draw(st.sampled_from([(), (), ("d",), ("init_state",), ("d", "init_state")]))
    config = ForwardConfig(
        tile_tokens=draw(st.sampled_from([16, 32, 64, 64, 128])),
        min_segment_tiles=draw(st.sampled_from([1, 1, 2, 3, 10**6])),
        segment_blocks=draw(st.sampled_from([1, 8, 64, 10**6])),
        fold_segments=draw(st.sampled_from([1, 2, 8])),
        state_tile_n=draw(st.sampled_from([16, 64, 128])),
        out_tile_n=draw(st.sampled_from([16, 64, 128])),
        pass_tile_p=draw(st.sampled_from([4, 16, 64])),
        rows_heads=draw(st.sampled_from([1, 4, 8])),
    )
    # fp16 holds no violent rate.
    narrow = draw(st.booleans()) and not (dtype is FP16 and spec.decay == "violent")
    return spec, layouts, missing, config, narrow


@settings(max_examples=200)
@given(problem=problems())
def test_any_problem_at_any_configuration(problem: Any) -> None:
    spec, layouts, missing, config, narrow = problem
    inputs = draw(spec)
    inputs |= {name: LAYOUTS[layout](inputs[name]) for name, layout in layouts.items()}
    if narrow:
        inputs |= {name: inputs[name].to(spec.dtype) for name in ("a", "d")}
    inputs |= dict.fromkeys(missing)
    with tuning.override(config):
        results = run(inputs)
    assert results["final_state"].dtype == (FP32 if inputs["init_state"] is None else spec.state_dtype)
    expected = float64_reference(inputs)
    if spec.batch_size * spec.num_tokens * spec.num_heads < 64:
        # One cancellation between the terms of a row would decide alone: measure against their sizes instead.
        sizes = {name: value.abs() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        bound = float64_reference(inputs | sizes | {"a": inputs["a"]})["out"]
        scale = (bound.norm() / expected["out"].norm()).clamp(min=1)
        results["out"] = expected["out"] + (results["out"] - expected["out"]) / scale
    room = 0.0
    if spec.dtype is FP32:
        # A decay between two tokens is the difference of two float32 sums over a tile.
        exponents = (inputs["dt"].double() * inputs["a"].double().abs()).split(config.tile_tokens, dim=1)
        room = min(1e-4, 2**-24 * max(exponent.sum(1).max().item() for exponent in exponents))
    for output, got in results.items():
        assert_close(output, got, expected[output], spec, slack=1.3, room=room)


def test_specs_for_tests_cover_what_the_kernels_distinguish() -> None:
    sizes = {(spec.head_size, spec.state_size) for spec in SPECS.values()}
    assert {p for p, _ in sizes} >= {16, 40, 64, 80, 96, 128, 256}
    assert {n for _, n in sizes} >= {16, 64, 96, 128, 256, 512}


@pytest.mark.parametrize(("rate", "step"), [(-16.0, 10.0), (-8000.0, 20.0)])
def test_tokens_that_forget_everything_cost_later_ones_little(rate: float, step: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x, b, c = (torch.randn(1, 128, 1, 32, generator=generator) for _ in range(3))
    dt = torch.full((1, 128, 1), step)
    dt[:, 40:] = -0.5 / rate
    arguments = (x, torch.tensor([rate]), b, c, None, dt, None)
    with interpreter.interpret():
        out, _ = forward.mamba2_chunk_forward(*arguments)
    names = ("x", "a", "b", "c", "d", "dt", "init_state")
    reference = float64_reference(dict(zip(names, arguments, strict=True)))["out"]
    later = slice(41, 64)
    assert (out[:, later] - reference[:, later]).norm() < 5e-4 * reference[:, later].norm()

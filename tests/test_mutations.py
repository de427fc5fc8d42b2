"""Kernels of the forward broken on purpose: a small suite through the interpreter has to notice each.

A mutation is one replacement in the source of the kernels' modules, which then run beside the real ones.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.mutating import mutate
from tilegym_mamba2 import interpreter, registry
from tilegym_mamba2.backends.cutile import forward, tuning
from tilegym_mamba2.backends.cutile.tuning import ForwardConfig
from tilegym_mamba2.budgets import check
from tilegym_mamba2.reference import float64_reference
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

ENTRY = registry.ops()["mamba2_chunk_forward"]
ARGUMENTS = ("x", "a", "b", "c", "d", "dt", "init_state")
# Importers come after what they import, to see its mutant.
MODULES = ("decay", "products", "tiles", "chunk_cumsum", "fwd_pass_state", "compute_out")
HOST_NAMES = {"chunk_cumsum": "_cumsum", "fwd_pass_state": "_states", "compute_out": "_out"}

# What is broken: (module, what its source says, what it says instead).
MUTATIONS = {
    "mask off by one": ("decay", "tokens[None, :] >= tokens[:, None]", "tokens[None, :] > tokens[:, None]"),
    "mask off by one, to the future": (
        "decay",
        "tokens[None, :] >= tokens[:, None]",
        "tokens[None, :] >= tokens[:, None] - 1",
    ),
    "decay at the wrong row: the state's from the first token": (
        "chunk_cumsum",
        "exp2(ct.min(g, axis=1, keepdims=True) - g)",
        "exp2(g)",
    ),
    "decay at the wrong row: the outputs' to the end": (
        "compute_out",
        "row(rows, ROW_EXP_G)[None, :]",
        "row(rows, ROW_STATE_WEIGHT)[None, :]",
    ),
    "decay at the wrong row: of the row before": (
        "decay",
        "g[None, :] - g[:, None], _MASKED",
        "ct.minimum(g[None, :] - g[:, None], ct.min(g) * 0.001), _MASKED",
    ),
    "group mapping by tiling, in the states": (
        "fwd_pass_state",
        "group = head // heads_per_group",
        "group = head % (x.shape[2] // heads_per_group)",
    ),
    "group mapping by tiling, in the outputs": (
        "compute_out",
        "group = head // heads_per_group",
        "group = head % (x.shape[2] // heads_per_group)",
    ),
    "missing dt, in the states": ("chunk_cumsum", "keepdims=True) - g) * dt", "keepdims=True) - g)"),
    "missing dt, in the outputs": ("decay", "_MASKED)) * dt[:, None]", "_MASKED))"),
    "state not decayed by a tile": ("compute_out", "states[n] * decay", "states[n]"),
    "state not decayed by later tiles": (
        "fwd_pass_state",
        "row(rows_tile, ROW_STATE_WEIGHT) * later_decay",
        "row(rows_tile, ROW_STATE_WEIGHT)",
    ),
    "state not decayed by a segment": ("fwd_pass_state", "state * decay + local", "state + local"),
    "state not decayed by a segment that is folded": (
        "compute_out",
        "state * load_segment_decay(segment_decay, (batch, head, before)) + local",
        "state + local",
    ),
    "last chunk treated as full, in the rows": (
        "chunk_cumsum",
        "hold_after(g, dt.shape[1] - tile * L)",
        "hold_after(g, L)",
    ),
    "last chunk treated as full, in a given decay": (
        "chunk_cumsum",
        "ct.where(tokens < stop, decay, last)",
        "decay",
    ),
    "last chunk treated as full, in the states": (
        "fwd_pass_state",
        "ct.cdiv(ct.minimum(segment_tokens, num_tokens - segment * segment_tokens), L)",
        "ct.cdiv(segment_tokens, L)",
    ),
    "last chunk treated as full, in the outputs": (
        "compute_out",
        "ct.cdiv(ct.minimum(segment_tokens, num_tokens - segment * segment_tokens), L)",
        "ct.cdiv(segment_tokens, L)",
    ),
    "d dropped": ("compute_out", "y = y + d_skip * x_t", "y = y + 0.0 * x_t"),
    "init_state dropped in the outputs": ("compute_out", "if entries == 1:", "if entries == -1:"),
    "init_state dropped in the pass": ("fwd_pass_state", "if HAS_INIT:", "if False:"),
    "transposed state": (
        "tiles",
        "tile.astype(array.dtype).reshape((1, 1, 1, *tile.shape))",
        "tile.transpose().astype(array.dtype).reshape((1, 1, 1, *tile.shape))",
    ),
    "transposed final state": (
        "tiles",
        "tile.astype(array.dtype).reshape((1, 1, *tile.shape))",
        "tile.transpose().astype(array.dtype).reshape((1, 1, *tile.shape))",
    ),
    "bf16 running sum": (
        "decay",
        "ct.cumsum(rate_log2, axis=axis)",
        "ct.cumsum(rate_log2.astype(ct.bfloat16), axis=axis).astype(ct.float32)",
    ),
    "the sum of a tile is not carried on": (
        "chunk_cumsum",
        "carried = ct.min(g, axis=1, keepdims=True)",
        "carried = carried * 1.0",
    ),
    "small parts of fp32 operands dropped": ("products", "ct.mma(x_high, y_low, acc)", "acc"),
    "a decay that rises": (
        "decay",
        "ct.scan(ct.cumsum(rate_log2, axis=axis), axis, _smaller, 0.0)",
        "ct.cumsum(rate_log2, axis=axis)",
    ),
}


# ---- the suite: problems of a few tiles, each of which says what is wrong, or nothing

# Tiles of 32 tokens in segments of two, the last one short; two groups of two heads; P ≠ N.
SMALL = replace(SPECS["fp32-slow"], batch_size=1, num_tokens=150, head_size=16, state_size=32)
PASSED = ForwardConfig(tile_tokens=32, min_segment_tiles=2, segment_blocks=10**4, fold_segments=1)


def broken_outputs(spec: Mamba2ProblemSpec, results: dict, references: dict) -> list[str]:
    verdicts = check(ENTRY, results, references, dtype=spec.dtype, decay=spec.decay)
    return [f"{v.output}: {v.error} > {v.budget}" for v in verdicts if not v.ok]


def of_the_op(spec: Mamba2ProblemSpec, config: ForwardConfig) -> list[str]:
    inputs = spec.get_sample_inputs(with_backward=False, device="cpu")
    with tuning.override(config):
        results = forward.mamba2_chunk_forward(*(inputs[name] for name in ARGUMENTS))
    return broken_outputs(spec, dict(zip(ENTRY.outputs, results, strict=True)), inputs)


def of_the_published_kernels(spec: Mamba2ProblemSpec) -> list[str]:
    inputs = spec.get_sample_inputs(with_backward=False, device="cpu")
    x, a, b, c, d, dt, init_state = (inputs[name] for name in ARGUMENTS)
    size = {"chunk_size": spec.chunk_size}
    decay = forward.chunk_cumsum(a, dt, **size)
    entries, final = forward.fwd_pass_state(x, b, dt, decay, init_state, **size)
    out = forward.compute_out(x, b, c, d, dt, decay, entries, **size)
    return broken_outputs(spec, {"out": out, "final_state": final}, inputs)


def of_tokens_that_forget_everything() -> list[str]:
    """Exact whatever the sums of the decay are, unless padding, which rounds them anew, ends a tile."""
    spec = replace(SMALL, num_tokens=59, num_heads=16)
    inputs = spec.get_sample_inputs(with_reference=False, with_backward=False, device="cpu")
    # Each token decays the state by 2**-101 to 2**-136.
    inputs |= {"a": torch.full((16,), -8.0), "dt": 8.8 + 30 * inputs["dt"].clamp(max=0.1)}
    with tuning.override(PASSED):
        results = forward.mamba2_chunk_forward(*(inputs[name] for name in ARGUMENTS))
    return broken_outputs(spec, dict(zip(ENTRY.outputs, results, strict=True)), float64_reference(inputs))


def of_a_decay_with_huge_sums() -> list[str]:
    dt = torch.logspace(-7, 3, 256).roll(40)[None, :, None]
    decay = forward.chunk_cumsum(torch.tensor([-1e6]), dt, chunk_size=256)
    return ["decay rises"] * bool((decay.diff(dim=2) > 0).any())


SUITE: list[Callable[[], list[str]]] = [
    lambda: of_the_op(SMALL, PASSED),
    lambda: of_the_op(SMALL, replace(PASSED, fold_segments=8)),
    lambda: of_the_published_kernels(replace(SMALL, num_tokens=90, chunk_size=80)),
    of_tokens_that_forget_everything,
    of_a_decay_with_huge_sums,
]


def failures() -> list[str]:
    """What the suite finds, up to the first problem that fails; an error of the interpreter is a find."""
    forward._plans.clear()
    try:
        with interpreter.interpret():
            for problem in SUITE:
                if found := problem():
                    return found
    except interpreter.InterpreterError as error:
        return [str(error)]
    finally:
        forward._plans.clear()
    return []


def test_whole_kernels_pass_the_suite() -> None:
    assert failures() == []


def test_a_mutant_that_changes_nothing_passes_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    before = forward._out.compute_out
    same = ("decay", "LOG2E = 1.4426950408889634", "LOG2E = 1.4426950408889634  # the same")
    mutate(monkeypatch, forward, MODULES, HOST_NAMES, same)
    assert forward._out.compute_out is not before
    assert failures() == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_kernels_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate(monkeypatch, forward, MODULES, HOST_NAMES, MUTATIONS[name])
    assert failures()

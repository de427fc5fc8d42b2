"""Kernels of the forward broken on purpose: a small problem through the interpreter has to notice each."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from tests.mutating import mutate
from tilegym_mamba2 import interpreter, registry
from tilegym_mamba2.backends.cutile import forward, tuning
from tilegym_mamba2.budgets import check
from tilegym_mamba2.spec import SPECS

OP = "mamba2_chunk_forward"
ARGUMENTS = ("x", "a", "b", "c", "d", "dt", "init_state")
# Segments of three and two tiles of 32 tokens, the last one short; two groups of two heads; P = N, or a state
# that is transposed would not fit its product and be caught by its shape alone.
SPEC = replace(
    SPECS["fp32-slow"],
    batch_size=1,
    num_tokens=150,
    num_groups=2,
    num_heads=4,
    head_size=64,
    state_size=64,
)
# Once with a pass between the segments, once with the entry states summed up by compute_out.
CONFIGS = [
    tuning.ForwardConfig(tile_tokens=32, min_segment_tiles=2, segment_blocks=10**4, fold_segments=folds)
    for folds in (1, 8)
]

# name: (module of the kernel, what its source says, what it says instead)
MUTATIONS = {
    "the causal mask is off by one": (
        "decay",
        "tokens[None, :] >= tokens[:, None]",
        "tokens[None, :] > tokens[:, None]",
    ),
    "a tile decays as up to its last token but one": (
        "tiles",
        "(which, rows_tile.shape[1] - 1)",
        "(which, rows_tile.shape[1] - 2)",
    ),
    "heads take groups in turns": (
        "compute_out",
        "group = head // heads_per_group",
        "group = head % (x.shape[2] // heads_per_group)",
    ),
    "heads take groups in turns in the states": (
        "fwd_pass_state",
        "group = head // heads_per_group",
        "group = head % (x.shape[2] // heads_per_group)",
    ),
    "dt is missing": ("decay", "_MASKED)) * dt[:, None]", "_MASKED))"),
    "the state does not decay": ("compute_out", "states[n] * decay, precision", "states[n], precision"),
    "later tiles of a segment do not decay it": (
        "fwd_pass_state",
        "row(rows_tile, ROW_STATE_WEIGHT) * later_decay",
        "row(rows_tile, ROW_STATE_WEIGHT)",
    ),
    "segments do not decay the states before them": (
        "fwd_pass_state",
        "state = state * decay + local",
        "state = state + local",
    ),
    "segments summed up by compute_out do not decay": (
        "compute_out",
        "state = state * load_segment_decay(segment_decay, (batch, head, before)) + local",
        "state = state + local",
    ),
    "the last segment counts as full": (
        "compute_out",
        "ct.minimum(segment_tokens, num_tokens - segment * segment_tokens)",
        "segment_tokens",
    ),
    "d is dropped": ("compute_out", "y = y + d_skip * x_t", "y = y + 0.0 * x_t"),
    "init_state is dropped": ("compute_out", "if entries == 1:", "if entries == -1:"),
    "init_state is dropped by the pass": ("fwd_pass_state", "if HAS_INIT:", "if False:"),
    "the state is transposed": (
        "compute_out",
        "product(states[n], c_t",
        "product(states[n].transpose(), c_t",
    ),
    "the running sum is bf16": (
        "decay",
        "ct.cumsum(rate_log2, axis=axis)",
        "ct.cumsum(rate_log2.astype(ct.bfloat16), axis=axis).astype(ct.float32)",
    ),
    "b and c change places": (
        "compute_out",
        "product_of_loaded(b_parts[n], c_t,",
        "product_of_loaded(c_parts[n], b_parts[n].transpose(),",
    ),
}
MODULES = ("decay", "products", "tiles", "chunk_cumsum", "fwd_pass_state", "compute_out")
HOST_NAMES = {"chunk_cumsum": "_cumsum", "fwd_pass_state": "_states", "compute_out": "_out"}


@lru_cache(maxsize=1)
def problem() -> dict[str, Any]:
    return SPEC.get_sample_inputs(with_backward=False, device="cpu")


def broken_outputs() -> list[str]:
    """The outputs that miss their budget; an error of the interpreter counts as all."""
    inputs, broken = problem(), []
    entry = registry.ops()[OP]
    for config in CONFIGS:
        forward._plans.clear()
        try:
            with interpreter.interpret(), tuning.override(config):
                results = forward.mamba2_chunk_forward(*(inputs[name] for name in ARGUMENTS))
        except interpreter.InterpreterError:
            return list(entry.outputs)
        finally:
            forward._plans.clear()
        named = dict(zip(entry.outputs, results, strict=True))
        verdicts = check(entry, named, inputs, dtype=SPEC.dtype, decay=SPEC.decay)
        broken += [verdict.output for verdict in verdicts if not verdict.ok]
    return broken


def test_whole_kernels_keep_their_budgets() -> None:
    assert broken_outputs() == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_kernels_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate(monkeypatch, forward, MODULES, HOST_NAMES, MUTATIONS[name])
    assert broken_outputs()

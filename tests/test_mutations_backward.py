"""Kernels of the backward broken on purpose: a small problem through the interpreter has to notice each."""

import contextlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.mutating import mutate
from tilegym_mamba2 import interpreter, registry
from tilegym_mamba2.backends.cutile import backward, backward_plan
from tilegym_mamba2.backends.cutile.backward_config import BackwardConfig
from tilegym_mamba2.budgets import check, relative_error
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

OP = "mamba2_chunk_backward"
ARGUMENTS = ("x", "a", "b", "c", "d", "dt", "init_state", "dout", "dfinal_state")
# Segments of three and two tiles of 32 tokens, the last one short; two groups of two heads; P ≠ N.
SPEC = replace(SPECS["fp32-slow"], batch_size=1, num_tokens=150, head_size=16, state_size=32)
SPEC_OF_ONE_KERNEL = replace(SPEC, dtype=torch.bfloat16)
# Short memory: the tokens next to saved states decide how exact da is, 3.2e-4 without them, 5e-6 with.
SPEC_OF_NEAREST = replace(SPEC_OF_ONE_KERNEL, num_tokens=192, decay="published", seed=8)
NEAREST_BUDGET = 3e-5
# A segment of four tiles of 64 tokens, and a fifth alone.
SPEC_OF_PAIRS = replace(SPEC_OF_ONE_KERNEL, num_tokens=318, seed=1)
CONFIG_OF_PAIRS = BackwardConfig(min_segment_tiles=4, segment_blocks=10**4, piece_blocks=1)
CONFIG = BackwardConfig(tile_tokens=32, min_segment_tiles=2, segment_blocks=10**4, piece_blocks=1)

# name: (module of the kernel, what its source says, what it says instead, in which module)
MUTATIONS = {
    "heads take groups in turns": (
        "bwd_tiles",
        "group * heads_per_group + offset",
        "num_groups * offset + group",
    ),
    "the causal mask is off by one": ("bwd_tiles", "ct.float32), tokens)", "ct.float32), tokens // 2)"),
    "dx forgets dt": ("bwd_tokens", "du * dt + dy_wide * skip", "du + dy_wide * skip"),
    "dx forgets the skip term": ("bwd_tokens", "du * dt + dy_wide * skip", "du * dt"),
    "the decay feels the diagonal once": (
        "bwd_tokens",
        "earlier + ct.sum(moved_t, axis=1, keepdims=True)",
        "earlier + ct.sum(dweights_t * weights_t * dt, axis=1, keepdims=True)",
    ),
    "v decays from the tile's start": ("bwd_tokens", "v = v * until_exit", "v = v * across"),
    "states do not decay": (
        "bwd_states",
        "state = state * last_of_row(rows_tile, ROW_EXP_G)",
        "state = state",
    ),
    "the walk back goes forwards": ("bwd_states", "number = num_saved - 1 - k", "number = k"),
    "dfinal_state is dropped": (
        "bwd_states",
        "if HAS_DFINAL:\n            border",
        "if False:\n            border",
    ),
    "local gradients decay with the whole segment": (
        "bwd_states",
        "row(rows_tile, ROW_EXP_G) * earlier_decay",
        "row(rows_tile, ROW_EXP_G)",
    ),
    "every segment writes dinit_state": ("bwd_states", "if position == 0:", "if position >= 0:"),
    "the last segment counts as full": (
        "bwd_states",
        "ct.minimum(tiles_per_segment, num_tiles - first)",
        "tiles_per_segment + 0 * num_tiles",
    ),
    "dc weighs with the way to the exit": (
        "bwd_groups",
        "since_entry = row(rows_tile, ROW_EXP_G)",
        "since_entry = row(rows_tile, ROW_STATE_WEIGHT)",
    ),
    "dc takes dS transposed": ("bwd_groups", "dscores_t.transpose()", "dscores_t"),
    "the last head of a group is left out": (
        "bwd_groups",
        "for k in range(count):",
        "for k in range(count - 1):",
    ),
    "the decay's sum runs forwards": ("bwd_decay", "reverse=True", "reverse=False"),
    "a token carries itself": ("bwd_decay", "ct.maximum(tokens - 1, 0)", "tokens"),
    "the states' overlap is dropped": (
        "bwd_decay",
        "ct.cumsum(before, axis=1) + across",
        "ct.cumsum(before, axis=1)",
    ),
    "da forgets dt": ("bwd_decay", "ct.sum(moved * dt_used, axis=1)", "ct.sum(moved, axis=1)"),
}
# Of the kernel that bfloat16 inputs get.
MUTATIONS_OF_ONE_KERNEL = {
    "dx forgets dt": ("bwd_gradients", "du * dt + dy_wide * skip", "du + dy_wide * skip"),
    "v decays from the tile's start": ("bwd_gradients", "* until_exit", "* since_entry"),
    "dc forgets the way from the entry": (
        "bwd_gradients",
        "product(dy_since_entry, entry, dc_tile, PRECISION)",
        "product(dy_wide, entry, dc_tile, PRECISION)",
    ),
    "db forgets the way to the exit": (
        "bwd_gradients",
        "row(rows_tile, ROW_STATE_WEIGHT)[:, None]",
        "dt",
    ),
    "dS forgets dt": ("bwd_gradients", "dweights_t * decay * dt", "dweights_t * decay"),
    "db takes dS transposed": (
        "bwd_gradients",
        "product(dscores_t, c_tile",
        "product(dscores_t.transpose(), c_tile",
    ),
    "the skip term's gradient takes all pairs": (
        "bwd_gradients",
        "ct.where(diagonal, dweights_t, 0.0)",
        "dweights_t",
    ),
    "the states' overlap does not decay": (
        "bwd_gradients",
        "0.0)) * last_of_row(rows_tile, ROW_EXP_G)",
        "0.0)) * 1.0",
    ),
    "the last head of a group is left out": (
        "bwd_gradients",
        "for k in range(count):",
        "for k in range(count - 1):",
    ),
}
# Of that kernel's tiles in pairs.
MUTATIONS_OF_PAIRS = {
    "a pair's second tile is not taken up": ("bwd_states", "ct.minimum(EVERY, count - tile)", "1"),
    "the last of the saved gradients is left out": ("bwd_states", "ct.cdiv(count, EVERY)", "count // EVERY"),
    "a pair's tiles are taken up in order": ("bwd_states", "here = last - j", "here = number * EVERY + j"),
    "a tile without a partner has one": ("bwd_pairs", "ct.where(exists, 1.0, 0.0)", "1.0"),
    "the partner is the next tile": ("bwd_pairs", "ct.where(exists, other, number)", "number + 1"),
    "the partner's decay is forgotten": (
        "bwd_pairs",
        "far_decay = last_of_row(far_rows, ROW_EXP_G)",
        "far_decay = 1.0",
    ),
    "a decay without a partner": ("bwd_pairs", "ct.where(exists > 0.0, far_decay, 1.0)", "far_decay"),
    "v forgets the partner's tokens": (
        "bwd_pairs",
        "v = product(far_weight * far_scores, far_head, v, PRECISION)",
        "v = v",
    ),
    "db forgets the partner's tokens": (
        "bwd_pairs",
        "product(dfar_scores, far_tile, db_tile, PRECISION)",
        "db_tile",
    ),
    "dc forgets the partner's tokens": (
        "bwd_pairs",
        "product(dfar_scores, far_tile, dc_tile, PRECISION)",
        "dc_tile",
    ),
    "the second tile's tokens feel no pairs": (
        "bwd_pairs",
        "earlier = earlier + halves(felt * far_scores)",
        "earlier = earlier",
    ),
    "the partner's states do not overlap": ("bwd_pairs", "shares(carried * exists)", "shares(carried * 0.0)"),
    "only one of a pair knows the overlap": (
        "bwd_pairs",
        "store_overlap(overlap, far_index, OVERLAP_OF_PAIR, both)",
        "store_overlap(overlap, far_index, OVERLAP_OF_PAIR, both * 0.0)",
    ),
    "half of the overlap is summed": ("bwd_decay", "range(OVERLAP_PARTS)", "range(1)"),
    "one share of a sum is left out": (
        "bwd_decay",
        "ct.static_iter(range(count))",
        "ct.static_iter(range(count - 1))",
    ),
    "a sum's shares are those of other sums": ("bwd_decay", "count * which + share", "which + share"),
    "half of what is carried is left out": ("bwd_decay", "row + shape[1] + late", "row + late"),
}
# Of what makes up for the rounding of saved states.
MUTATIONS_OF_NEAREST = {
    "no token meets an entry state": ("bwd_states", "ROW_EXP_G) * g", "ROW_EXP_G) * 0.0"),
    "tokens before an exit count from the entry": ("bwd_states", "(last_of_row(rows_tile, ROW_G) - g)", "g"),
    "the first tokens stand for the last": ("bwd_states", "L // NEAREST - 1\n", "0\n"),
    "one share takes another's place": ("bwd_states", "segment * parts + part", "segment * parts"),
    "only every second column counts": ("bwd_states", "ct.sum(felt, axis=1)", "0.5 * ct.sum(felt, axis=1)"),
    "the share of one direction is left out": ("bwd_decay", "< cut_off_count", "< cut_off_count - 1"),
    "shares are taken away": ("bwd_decay", "total + ct.sum(cut_off)", "total - ct.sum(cut_off)"),
    "the rate is that of exp": ("bwd_decay", ".item() * LOG2E", ".item()"),
}
# Importers come after what they import, to see its mutant.
MODULES = ("bwd_tiles", "bwd_states", "bwd_tokens", "bwd_groups", "bwd_pairs", "bwd_gradients", "bwd_decay")
HOST_NAMES = {
    "bwd_states": "_states",
    "bwd_tokens": "_tokens",
    "bwd_groups": "_groups",
    "bwd_tiles": "_tiles",
    "bwd_gradients": "_gradients",
    "bwd_decay": "_decay",
}


@lru_cache(maxsize=2)
def problem(spec: Mamba2ProblemSpec) -> dict[str, Any]:
    return spec.get_sample_inputs(device="cpu")


def broken_outputs(spec: Mamba2ProblemSpec = SPEC, config: BackwardConfig = CONFIG) -> list[str]:
    """The gradients that miss their budget; an error of the interpreter counts as all."""
    inputs = problem(spec)
    backward._plans.clear()
    entry = registry.ops()[OP]
    try:
        with interpreter.interpret(), BackwardConfig.override(config):
            results = backward.mamba2_chunk_backward(*(inputs[name] for name in ARGUMENTS))
    except interpreter.InterpreterError:
        return list(entry.outputs)
    finally:
        backward._plans.clear()
    named = dict(zip(entry.outputs, results, strict=True))
    verdicts = check(entry, named, inputs, dtype=spec.dtype, decay=spec.decay)
    return [verdict.output for verdict in verdicts if not verdict.ok]


@pytest.mark.parametrize("spec", [SPEC, SPEC_OF_ONE_KERNEL], ids=["fp32", "bf16"])
def test_whole_kernels_keep_their_budgets(spec: Mamba2ProblemSpec) -> None:
    assert broken_outputs(spec) == []


def test_whole_kernels_keep_their_budgets_in_pairs() -> None:
    assert broken_outputs(SPEC_OF_PAIRS, CONFIG_OF_PAIRS) == []


@pytest.mark.parametrize("name", MUTATIONS_OF_PAIRS)
def test_broken_pairs_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate(monkeypatch, backward_plan, MODULES, HOST_NAMES, MUTATIONS_OF_PAIRS[name])
    assert broken_outputs(SPEC_OF_PAIRS, CONFIG_OF_PAIRS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_kernels_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate(monkeypatch, backward_plan, MODULES, HOST_NAMES, MUTATIONS[name])
    assert broken_outputs()


@pytest.mark.parametrize("name", MUTATIONS_OF_ONE_KERNEL)
def test_broken_kernels_of_bfloat16_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate(monkeypatch, backward_plan, MODULES, HOST_NAMES, MUTATIONS_OF_ONE_KERNEL[name])
    assert broken_outputs(SPEC_OF_ONE_KERNEL)


def da_by(nearest_tokens: int = 16, decay: str = "published") -> torch.Tensor:
    inputs = problem(replace(SPEC_OF_NEAREST, decay=decay))
    config = replace(CONFIG_OF_PAIRS, nearest_tokens=nearest_tokens)
    backward._plans.clear()
    try:
        with interpreter.interpret(), BackwardConfig.override(config):
            return backward.mamba2_chunk_backward(*(inputs[name] for name in ARGUMENTS))[1]
    finally:
        backward._plans.clear()


def test_nearest_tokens_make_up_for_rounding() -> None:
    exact = problem(SPEC_OF_NEAREST)["da"]
    assert relative_error(da_by(16), exact) < NEAREST_BUDGET
    assert relative_error(da_by(0), exact) > 5 * NEAREST_BUDGET


@pytest.mark.parametrize("name", MUTATIONS_OF_NEAREST)
def test_broken_nearest_tokens_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutate(monkeypatch, backward_plan, MODULES, HOST_NAMES, MUTATIONS_OF_NEAREST[name])
    with contextlib.suppress(interpreter.InterpreterError):
        assert relative_error(da_by(), problem(SPEC_OF_NEAREST)["da"]) > NEAREST_BUDGET


def test_long_memory_needs_no_nearest_tokens() -> None:
    assert torch.equal(da_by(16, "slow"), da_by(0, "slow"))

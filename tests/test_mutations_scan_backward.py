"""What only the full scan's backward has, broken on purpose: one packed problem has to notice each."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests import scan_oracle
from tests.mutating import mutate
from tests.scanning import Shape, cotangents, scales
from tilegym_mamba2 import interpreter
from tilegym_mamba2.backends.cutile import backward_plan, scan_backward
from tilegym_mamba2.backends.cutile.backward_config import BackwardConfig
from tilegym_mamba2.options import ScanOptions

LENGTHS = (0, 17, 53, 1, 40)
SHAPE = Shape(
    tokens=sum(LENGTHS) + 45,
    batch=1,
    heads=2,
    groups=1,
    lengths=LENGTHS,
    d="HP",
    dt_bias=True,
    dt_softplus=True,
    dt_limit=(0.1, 1.0),
    init_state=True,
)
# Segments of two tiles of 16 tokens, some of them at a time.
CONFIG = replace(
    BackwardConfig(),
    tile_tokens=16,
    min_segment_tiles=2,
    max_segment_tiles=2,
    piece_blocks=4,
    skip_tiles=2,
    token_occupancy=1,
)

# name: (module of the kernel, what its source says, what it says instead)
MUTATIONS = {
    "what is clamped has a slope": ("steps", "(v < low) | (v > high), 0.0,", "v < low - 1e9, 0.0,"),
    "softplus has the slope 1": ("steps", "steep, v = sigmoid(v), softplus(v)", "v = softplus(v)"),
    "tokens that do not exist count": (
        "bwd_decay",
        "ct.where(tokens < count, ddt",
        "ct.where(tokens < L, ddt",
    ),
    "the slope is that without the bias": ("bwd_decay", "slope(given + bias,", "slope(given,"),
    "a tile without tokens has a share": ("bwd_decay", "if count <= 0:", "if count < 0:"),
    "tiles of other pieces are done too": ("bwd_tiles", "ct.where(asked_for,", "ct.where(slot >= 0,"),
    "all pieces are the first": ("bwd_tiles", "entry(table, first_slot, TILE) +", "0 * first_slot +"),
    "borders keep what arrives": ("bwd_states", "(*options, True))", "(*options, False))"),
    "a sequence ends without dfinal_state": (
        "bwd_states",
        "if HAS_DFINAL:\n                    dstate",
        "if False:\n                    dstate",
    ),
    "dfinal_state stops at the last border": (
        "bwd_states",
        "if HAS_DFINAL:\n            border",
        "if False:\n            border",
    ),
    "a sequence begins without init_state": (
        "bwd_states",
        "if HAS_INIT:\n                        state",
        "if False:\n                        state",
    ),
    "a segment starts from the border behind it": (
        "bwd_states",
        "segment - sequence - 1",
        "ct.minimum(segment - sequence, 3)",
    ),
    "empty segments have a state": ("bwd_states", "if count > 0:", "if count >= 0:"),
    "borders are those of the segment before": (
        "bwd_states",
        "(carried, (segment,), (1,)).item() + 1",
        "(carried, (segment,), (1,)).item()",
    ),
    "tiles are a token short": ("bwd_ragged", "ct.minimum(start + L,", "ct.minimum(start + L - 1,"),
    "the last padding of db stays": (
        "bwd_ragged",
        "window(db, *span), (group, n_tile), (L, TILE_N), count",
        "window(db, *span), (group, n_tile), (L, TILE_N), count - 1",
    ),
    "the last padding of ddt stays": ("bwd_ragged", "for k in range(count):", "for k in range(count - 1):"),
    "the last tile of a part is left out": (
        "bwd_skip",
        "ct.minimum(tiles_of_part, num_tiles - first)",
        "ct.minimum(tiles_of_part, num_tiles - first) - 1",
    ),
    "parts of dd are left out": (
        "bwd_skip",
        "range(ct.num_tiles(partial, axis=0, shape=(TILE, 1, TILE_P)))",
        "range(ct.num_tiles(partial, axis=0, shape=(TILE, 1, TILE_P)) - 1)",
    ),
}
# Importers come after what they import, to see its mutant.
MODULES = (
    "steps",
    "bwd_tiles",
    "bwd_ragged",
    "bwd_skip",
    "bwd_states",
    "bwd_tokens",
    "bwd_groups",
    "bwd_decay",
)
HOSTS = {
    scan_backward: {"bwd_ragged": "_ragged", "bwd_skip": "_skip"},
    backward_plan: {
        "bwd_states": "_states",
        "bwd_tokens": "_tokens",
        "bwd_groups": "_groups",
        "bwd_decay": "_decay",
    },
}


@lru_cache(maxsize=1)
def problem() -> tuple[Any, ...]:
    values = SHAPE.values(torch.float32, seed=4)
    dout, dfinal = cotangents(values)
    return values, dout, dfinal, scan_oracle.gradients(values, dout, dfinal)


def broken_outputs() -> list[str]:
    """The gradients that are wrong; an error of the interpreter counts as all."""
    values, dout, dfinal, expected = problem()
    tensors = [values.get(name) for name in (*scan_oracle.GRADIENTS, "cu_seqlens", "seq_lens")]
    options = ScanOptions(True, values["dt_limit"], 16, torch.float32)
    scan_backward._plans.clear()
    try:
        with interpreter.interpret(), BackwardConfig.override(CONFIG):
            found = scan_backward.mamba2_chunk_scan_backward(*tensors, dout, dfinal, options)
    except interpreter.InterpreterError:
        return list(scan_oracle.GRADIENTS)
    finally:
        scan_backward._plans.clear()
    scale = scales(values, expected)
    return [
        name
        for name, gradient in zip(scan_oracle.GRADIENTS, found, strict=True)
        if gradient is not None and not (gradient - expected[name]).norm() <= 2e-5 * scale[name]
    ]


def test_whole_kernels_are_right() -> None:
    assert broken_outputs() == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_kernels_are_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = MUTATIONS[name][0]
    host = scan_backward if module in HOSTS[scan_backward] else backward_plan
    mutate(monkeypatch, host, MODULES, HOSTS[host], MUTATIONS[name])
    assert broken_outputs()

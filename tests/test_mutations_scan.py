"""The full scan's kernels broken on purpose: a small suite through the interpreter has to notice each."""

import importlib
import math
from dataclasses import replace

import pytest
import torch

from tests import scan_oracle
from tests.mutating import KERNELS, mutate
from tests.scanning import Shape, call, error
from tilegym_mamba2 import interpreter
from tilegym_mamba2.backends.cutile import ragged, scan, scan_config, tuning
from tilegym_mamba2.backends.cutile.scan_config import ScanConfig
from tilegym_mamba2.backends.cutile.tuning import ForwardConfig

# Importers come after what they import, to see its mutant.
MODULES = ("gate", "steps", "scan_table", "scan_rows", "scan_states", "scan_out")
HOST_NAMES = {"scan_rows": "_rows", "scan_states": "_states", "scan_out": "_out"}

# What is broken: (module, what its source says, what it says instead).
MUTATIONS = {
    "gate without its sigmoid": ("gate", "return _over(v, 1.0 +", "return _over(v, 1.0 + 0.0 *"),
    "softplus is relu": ("steps", "+ log1p_up_to_one(ct.exp(-ct.abs(v)))", "+ 0.0"),
    "clamp before softplus": (
        "scan_rows",
        "    if is_softplus:",
        "    dt = clamp(dt, limits[0], limits[1])\n    if is_softplus:",
    ),
    "bias of the first heads": ("scan_rows", "ct.load(dt_bias, (head_tile,)", "ct.load(dt_bias, (0,)"),
    "rows in another tile": (
        "scan_rows",
        "entry(table, slot, TILE) + tile), g",
        "entry(table, slot, TILE)), g",
    ),
    "an empty sequence without a slot": ("scan_table", "count = ct.maximum(count, 1)", "pass"),
    "a segment too long": (
        "scan_table",
        "stop = ct.minimum(start + segment_tokens, end)",
        "stop = ct.minimum(start + segment_tokens + 1, end)",
    ),
    "segments across sequences": (
        "scan_table",
        "stop = ct.minimum(start + segment_tokens, end)",
        "stop = ct.minimum(start + segment_tokens, num_tokens)",
    ),
    "tiles counted without gaps": (
        "scan_table",
        "whole * ct.cdiv(segment_tokens, L) + ct.cdiv(length - whole * segment_tokens, L)",
        "length // L",
    ),
    "padding not cleared": (
        "scan_table",
        "ct.where(used, stop, zero_stop)",
        "ct.where(used, stop, zero_start)",
    ),
    "a row's padding not cleared": (
        "scan_table",
        "        window_stop,\n        row,",
        "        stop,\n        row,",
    ),
    "every segment the last": (
        "scan_table",
        "left = segments_of(end - begin, segment_tokens, KEEP_EMPTY) - 1 - position",
        "left = position - position",
    ),
    "a row's length unread": ("scan_table", "length = border(seq_lens, row, num_tokens)", "pass"),
    "state of the segment before not decayed": (
        "scan_states",
        "state = state * load_segment_decay(segment_decay, place_i[:3]) + local",
        "state = state + local",
    ),
    "initial state not passed on": (
        "scan_states",
        "                state = load_single_state(init_state, at, shape, LATENCY)",
        "                pass",
    ),
    "initial state of another sequence": ("scan_states", "at = (entry(table, slot, SEQUENCE),", "at = (0,"),
    "unused chunks not cleared": ("scan_states", "if entry(table, slot, SEQUENCE) < 0:", "if slot < 0:"),
    "chunks past a row's length not written": (
        "scan_states",
        "for slot in range(first + 1 + left, first + count):",
        "for slot in range(first + 2 + left, first + count):",
    ),
    "group by tiling, in the states": (
        "scan_states",
        "group, count = head // heads_per_group,",
        "group, count = head % (x.shape[2] // heads_per_group),",
    ),
    "group by tiling, in the outputs": (
        "scan_out",
        "group = head // heads_per_group",
        "group = head % (x.shape[2] // heads_per_group)",
    ),
    "state of the wrong border": ("scan_out", "border = slot - sequence - 1", "border = slot - sequence"),
    "gate of another head": (
        "scan_out",
        "z_t = load_transposed(z, (batch, tile, head,",
        "z_t = load_transposed(z, (batch, tile, 0,",
    ),
    "skip past the gate": (
        "scan_out",
        "y = y * silu(gate)",
        "y = (y - skip * x_tile.transpose()) * silu(gate) + skip * x_tile.transpose()",
    ),
    "skip of the first channels": (
        "scan_out",
        "ct.load(d_skip, (head, p_tile)",
        "ct.load(d_skip, (0, p_tile)",
    ),
    "state from no segment": ("scan_out", "        if left < 0:", "        if left < -1:"),
    "final state of another sequence": (
        "scan_out",
        "store_single_state(final_state, (sequence, head, p_tile, n), states[n])",
        "store_single_state(final_state, (batch, head, p_tile, n), states[n])",
    ),
}
EVERYTHING = Shape(
    d="HP", z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.1, 1.2), init_state=True, chunk_size=64,
    heads=12, groups=2, head_size=2, state_size=3,
)  # fmt: skip
PACKED = replace(EVERYTHING, batch=1, tokens=390, lengths=(130, 0, 64, 1, 140))
# With the tiles of a segment.
PROBLEMS = [
    (replace(EVERYTHING, tokens=150, batch=1), 1),
    (PACKED, 1),
    (PACKED, 2),
    (replace(EVERYTHING, batch=2, tokens=200, row_lengths=(200, 70)), 1),
]


def suite() -> None:
    for shape, tiles in PROBLEMS:
        config = ScanConfig(min_segment_tiles=tiles, max_segment_tiles=tiles)
        with scan_config.override(config), tuning.override(ForwardConfig()), interpreter.interpret():
            values = shape.values(torch.float32)
            ends = [sum(shape.lengths)] if shape.lengths else shape.row_lengths or ()
            for row, end in enumerate(ends):
                for name in ("x", "dt", "b", "c", "z"):
                    values[name][row, end:] = math.nan
            with torch.no_grad():
                results = call(values, return_chunk_states=True, backend="cutile")
            expected = scan_oracle.scan(**values)
            for got, ref in zip(results[:3], expected[:3], strict=True):
                assert error(got, ref) <= 2e-6
            assert (results[3].tolist() if shape.lengths else None) == expected[3]


def test_the_suite_passes_as_it_stands() -> None:
    suite()


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_kernel_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, scan, MODULES, HOST_NAMES, MUTATIONS[name])
    monkeypatch.setattr(ragged, "_table", importlib.import_module(f"{KERNELS}.scan_table"))
    # Plans hold on to the kernels that they were made with.
    monkeypatch.setattr(scan, "_plans", {})
    with pytest.raises((AssertionError, interpreter.InterpreterError)):
        suite()

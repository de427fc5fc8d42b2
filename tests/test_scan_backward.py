"""The backward of the full scan on the cutile backend, whatever tiles, segments and pieces there are.

Through the tile interpreter on the CPU, and on the device with `-m gpu`. What must hold of every backend is
in `tests/test_scan.py`.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import scan_oracle
from tests.scanning import Shape, cotangents, scales, shapes
from tilegym_mamba2 import interpreter
from tilegym_mamba2.backends.cutile import aligned, scan_backward
from tilegym_mamba2.backends.cutile.backward_config import BackwardConfig
from tilegym_mamba2.backends.cutile.kernels.bwd_ragged import tiles_of_slots
from tilegym_mamba2.backends.cutile.launch import run
from tilegym_mamba2.backends.cutile.ragged import Ragged
from tilegym_mamba2.options import ScanOptions

NAMES = scan_oracle.GRADIENTS
PER_TOKEN = ("x", "dt", "b", "c", "z")
PLACES = [pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]
every_place = pytest.mark.parametrize("device", PLACES)
ALL = Shape(
    tokens=150,
    heads=4,
    head_size=20,
    groups=2,
    state_size=24,
    d="HP",
    z=True,
    dt_bias=True,
    dt_softplus=True,
    dt_limit=(0.1, 1.0),
    init_state=True,
)
# With tiles of 32 tokens: nothing, one token, a tile but for one, a tile, one more, and four tiles.
LENGTHS = (0, 1, 31, 32, 33, 3 * 32 + 5)
PACKED = replace(ALL, batch=1, tokens=sum(LENGTHS) + 40, lengths=LENGTHS)
PADDED = replace(ALL, batch=6, tokens=3 * 32 + 5, row_lengths=LENGTHS)
SHAPES = {"plain": ALL, "packed": PACKED, "padded": PADDED}
# The same with tiles of 16, for what compares bits of many runs.
FEW = (0, 1, 15, 16, 17, 53)
_SMALL = {"heads": 2, "head_size": 3, "state_size": 5}
SMALL = {
    "plain": replace(ALL, tokens=53, **_SMALL),
    "packed": replace(PACKED, tokens=sum(FEW) + 20, lengths=FEW, **_SMALL),
    "padded": replace(PADDED, tokens=53, row_lengths=FEW, **_SMALL),
}
every_layout = pytest.mark.parametrize("layout", SHAPES)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
CONFIGS = {
    "as it comes": {},
    "tiles of 32": {"tile_tokens": 32, "min_segment_tiles": 1},
    "a segment a tile": {"tile_tokens": 32, "min_segment_tiles": 1, "max_segment_tiles": 1},
    "short segments": {"tile_tokens": 16, "min_segment_tiles": 2, "max_segment_tiles": 2},
    "in pieces": {
        "tile_tokens": 16,
        "min_segment_tiles": 2,
        "max_segment_tiles": 2,
        "piece_blocks": 8,
        "skip_tiles": 3,
    },
    "a segment at a time": {
        "tile_tokens": 32,
        "min_segment_tiles": 1,
        "max_segment_tiles": 1,
        "piece_blocks": 1,
        "skip_tiles": 1,
    },
    "a part a head": {"tile_tokens": 32, "part_blocks": 10**4},
    "heads one by one": {"rows_heads": 1, "sum_tile": 16, "state_tile_n": 16, "token_tile_n_max": 16},
}


@contextlib.contextmanager
def configured(**changes: Any) -> Iterator[None]:
    with BackwardConfig.override(replace(BackwardConfig(), token_occupancy=1, **changes)):
        yield


def gradients(
    values: dict[str, Any],
    dout: torch.Tensor | None,
    dfinal_state: torch.Tensor | None,
    needed: tuple[bool, ...] = (True,) * 9,
) -> dict[str, torch.Tensor | None]:
    tensors = [values.get(name) for name in (*NAMES, "cu_seqlens", "seq_lens")]
    options = ScanOptions(values["dt_softplus"], values["dt_limit"], values["chunk_size"], torch.float32)
    on_cpu = values["x"].device.type == "cpu"
    with interpreter.interpret() if on_cpu else contextlib.nullcontext():
        found = scan_backward.mamba2_chunk_scan_backward(*tensors, dout, dfinal_state, options, needed)
    return dict(zip(NAMES, found, strict=True))


def on(device: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(device) if torch.is_tensor(v) else v for name, v in values.items()}


@lru_cache(maxsize=32)
def problem(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[Any, ...]:
    """Arguments, the gradients of the results, and the token loop's gradients."""
    values = shape.values(dtype, seed)
    dout, dfinal = cotangents(values)
    expected = scan_oracle.gradients(values, dout, dfinal)
    return on(device, values), dout.to(device), dfinal.to(device), expected


def assert_right(
    got: dict[str, Any], values: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    scale = scales(values, expected)
    for name, gradient in got.items():
        if gradient is None:
            assert values.get(name) is None
            continue
        assert gradient.dtype == values[name].dtype and gradient.shape == values[name].shape
        wrong = (gradient.cpu().double() - expected[name]).norm().item()
        assert wrong <= TOLERANCE[dtype] * scale[name], f"{name}: {wrong / scale[name]:.2e}"


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        first[k] is second[k] or torch.equal(first[k], second[k]) for k in first if first[k] is not None
    )


# ---- against the token loop


# On a GPU each compiles kernels of its own.
CASES = [pytest.param("cpu", name, id=f"{name}-interpreter") for name in CONFIGS]
CASES += [
    pytest.param("cuda", name, id=f"{name}-gpu", marks=pytest.mark.gpu)
    for name in ("as it comes", "short segments", "a part a head")
]


@every_layout
@pytest.mark.parametrize(("device", "config"), CASES)
def test_every_configuration(device: str, layout: str, config: str) -> None:
    values, dout, dfinal, expected = problem(SHAPES[layout], torch.float32, device)
    with configured(**CONFIGS[config]):
        assert_right(gradients(values, dout, dfinal), values, expected)


@every_place
@every_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", ["H", "HP"])
def test_16_bit_inputs(device: str, layout: str, dtype: torch.dtype, d: str) -> None:
    values, dout, dfinal, expected = problem(replace(SHAPES[layout], d=d), dtype, device)
    with configured(tile_tokens=32, min_segment_tiles=1):
        assert_right(gradients(values, dout, dfinal), values, expected, dtype)


# With tiles of 64 tokens, of which two share states: one to six in a sequence.
LONG = (0, 1, 64, 65, 0, 130, 200, 321)
IN_PAIRS = {
    "plain": replace(ALL, batch=2, tokens=321),
    "packed": replace(PACKED, tokens=sum(LONG) + 40, lengths=LONG),
    "padded": replace(PADDED, batch=len(LONG), tokens=330, row_lengths=LONG),
}


@every_place
@every_layout
@pytest.mark.parametrize("tiles", [2, 4])
def test_pairs_of_tiles(device: str, layout: str, tiles: int) -> None:
    values, dout, dfinal, expected = problem(IN_PAIRS[layout], torch.bfloat16, device)
    segments = {"min_segment_tiles": tiles, "max_segment_tiles": tiles}
    with configured(**segments):
        whole = gradients(values, dout, dfinal)
    assert_right(whole, values, expected, torch.bfloat16)
    for lanes in (1, 2):
        with configured(**segments, piece_blocks=8, lanes=lanes):
            assert same(gradients(values, dout, dfinal), whole)


@every_place
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_pair_is_of_one_sequence(device: str, layout: str) -> None:
    values, dout, dfinal, _ = problem(IN_PAIRS[layout], torch.bfloat16, device)
    with configured():
        whole = gradients(values, dout, dfinal)
        for sequence in (3, 7):
            length, start = LONG[sequence], sum(LONG[:sequence])
            index = (0, slice(start, start + length)) if layout == "packed" else (sequence, slice(0, length))
            broken = {name: values[name].clone() for name in PER_TOKEN}
            for tensor in broken.values():
                tensor[index] = float("nan")
            found = gradients(values | broken, dout, dfinal)
            for name in PER_TOKEN:
                others = torch.ones(whole[name].shape[:2], dtype=torch.bool, device=device)
                others[index] = False
                assert torch.equal(found[name][others], whole[name][others])


@settings(max_examples=50, derandomize=True, database=None)
@given(shapes(90), st.sampled_from(["tiles of 32", "short segments", "in pieces"]), st.integers(0, 2**20))
def test_random_problems(shape: Shape, config: str, seed: int) -> None:
    values = shape.values(torch.float32, seed)
    dout, dfinal = cotangents(values)
    with configured(**CONFIGS[config]):
        got = gradients(values, dout, dfinal)
    assert_right(got, values, scan_oracle.gradients(values, dout, dfinal))


@settings(max_examples=25, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from([0, 1, 15, 16, 17, 53]), min_size=1, max_size=6),
    st.integers(0, 20),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_random_lengths(lengths: list[int], spare: int, index: torch.dtype) -> None:
    shape = replace(SMALL["packed"], tokens=sum(lengths) + spare, lengths=tuple(lengths))
    values = shape.values(torch.float32, sum(lengths))
    values["cu_seqlens"] = values["cu_seqlens"].to(index)
    dout, dfinal = cotangents(values)
    with configured(**CONFIGS["in pieces"]):
        got = gradients(values, dout, dfinal)
    assert_right(got, values, scan_oracle.gradients(values, dout, dfinal))


def test_tiles_are_those_of_the_table() -> None:
    lengths, segment, tile = [0, 70, 1, 32, 0, 200], 64, 16
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ragged = Ragged(1, 400, len(lengths), False, segment, tile)
    # What nobody writes is no length: the table has a few rows more than slots.
    tables = tuple(torch.randint_like(t, -(2**30), 2**30) for t in ragged.tables(torch.device("cpu")))
    found = torch.full((ragged.tiles, 4), -9, dtype=torch.int32)
    with interpreter.interpret():
        run([ragged.launch(cu_seqlens, tables)], torch.device("cpu"))
        interpreter.launch((2,), tiles_of_slots, (tables[0], found, ragged.slots, tile, 16, 4))
    expected = []
    for start, stop in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False):
        expected += [[0, at, min(at + tile, stop)] for at in range(start, stop, tile)]
    assert found[: len(expected), :3].tolist() == expected
    slots = found[: len(expected), 3].long()
    starts, stops = tables[0][slots, 1], tables[0][slots, 2]
    assert ((starts <= found[: len(expected), 1]) & (found[: len(expected), 2] <= stops)).all()
    assert (found[len(expected) :, 3] == -1).all()
    assert torch.equal(found[len(expected) :, 1], found[len(expected) :, 2])


# ---- bit for bit


@every_layout
@pytest.mark.parametrize(("d", "z"), [("H", False), ("HP", True)])
def test_only_what_is_needed(layout: str, d: str, z: bool) -> None:
    values, dout, dfinal, _ = problem(replace(SMALL[layout], d=d, z=z), torch.float32, "cpu")
    with configured(**CONFIGS["short segments"]):
        whole = gradients(values, dout, dfinal)
        for wanted in (*[(name,) for name in NAMES if name in values], ("d", "init_state"), ("b", "d"), ()):
            some = gradients(values, dout, dfinal, tuple(name in wanted for name in NAMES))
            for name in NAMES:
                if name not in wanted:
                    assert some[name] is None
                else:
                    assert torch.equal(some[name], whole[name]), (name, wanted)


@every_layout
@pytest.mark.parametrize("silent", [(0,), (1,), (0, 1)])
def test_none_is_zero(layout: str, silent: tuple[int, ...]) -> None:
    values, *cotangent, _ = problem(SMALL[layout], torch.float32, "cpu")
    none, zero = list(cotangent), list(cotangent)
    for which in silent:
        none[which], zero[which] = None, torch.zeros_like(cotangent[which])
    assert same(gradients(values, *none), gradients(values, *zero))


@every_place
@every_layout
def test_the_same_bits_every_time(device: str, layout: str) -> None:
    # The interpreter shuffles the blocks, the GPU does so by itself.
    values, dout, dfinal, _ = problem(SMALL[layout], torch.float32, device)
    with configured(**CONFIGS["in pieces"]):
        first = gradients(values, dout, dfinal)
        for _ in range(2 if device == "cpu" else 10):
            assert same(first, gradients(values, dout, dfinal))


@every_place
@pytest.mark.parametrize("config", ["as it comes", "in pieces"])
@pytest.mark.parametrize("bad", [1e3, float("nan")])
def test_a_sequence_changes_no_bit_of_another(device: str, config: str, bad: float) -> None:
    values, dout, dfinal, _ = problem(SMALL["packed"], torch.float32, device)
    borders = values["cu_seqlens"].tolist()
    with configured(**CONFIGS[config]):
        clean = gradients(values, dout, dfinal)
        for changed in (2, 5):
            begin, end = borders[changed : changed + 2]
            moved = values | {name: values[name].clone() for name in (*PER_TOKEN, "init_state")}
            moved_dout, moved_dfinal = dout.clone(), dfinal.clone()
            for tensor in (*[moved[name] for name in PER_TOKEN], moved_dout):
                tensor[:, begin:end] = bad
            moved["init_state"][changed] = moved_dfinal[changed] = bad
            other = gradients(moved, moved_dout, moved_dfinal)
            for name in PER_TOKEN:
                assert torch.equal(other[name][:, :begin], clean[name][:, :begin]), name
                assert torch.equal(other[name][:, end:], clean[name][:, end:]), name
            rows = [s for s in range(len(FEW)) if s != changed]
            assert torch.equal(other["init_state"][rows], clean["init_state"][rows])


@every_place
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_in_padding_has_no_influence(device: str, layout: str, dtype: torch.dtype) -> None:
    values, dout, dfinal, _ = problem(SMALL[layout], dtype, device)
    ends = [sum(FEW)] if layout == "packed" else FEW
    spoilt, spoilt_dout = values | {name: values[name].clone() for name in PER_TOKEN}, dout.clone()
    for row, end in enumerate(ends):
        for tensor in (*[spoilt[name] for name in PER_TOKEN], spoilt_dout):
            tensor[row, end:] = torch.nan
    with configured(**CONFIGS["in pieces"]):
        clean, dirty = gradients(values, dout, dfinal), gradients(spoilt, spoilt_dout, dfinal)
    assert same(clean, dirty)
    for row, end in enumerate(ends):
        assert not any(clean[name][row, end:].any() for name in PER_TOKEN)


def test_gradients_of_any_layout() -> None:
    values, dout, dfinal, _ = problem(PACKED, torch.float32, "cpu")
    one = torch.ones((), dtype=torch.float32)
    plain = gradients(values, torch.ones_like(dout), dfinal)
    assert same(gradients(values, one.expand(dout.shape), dfinal), plain)
    moved = {n: values[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("x", "z", "b", "c", "dt")}
    turned = dfinal.mT.contiguous().mT
    found = gradients(values | moved, dout.mT.contiguous().mT, turned)
    assert same(found, gradients(values, dout, dfinal))


@every_layout
def test_copies_with_whole_rows_change_no_bit(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPES[layout], head_size=3, state_size=5)
    values, dout, dfinal, _ = problem(shape, torch.float32, "cpu")
    as_they_are = gradients(values, dout, dfinal)
    silent = gradients(values, None, dfinal)
    monkeypatch.setattr(scan_backward, "must_copy", lambda ts: not all(map(aligned.has_whole_rows, ts)))
    monkeypatch.setattr(scan_backward, "_plans", {})
    found = gradients(values, dout, dfinal)
    assert any(plan.copies for plan in scan_backward._plans.values())
    assert same(found, as_they_are) and all(v.shape == as_they_are[n].shape for n, v in found.items())
    assert same(gradients(values, None, dfinal), silent)


def test_empty_sequences_pass_their_gradient_on() -> None:
    shape = replace(PACKED, tokens=70, lengths=(0, 70, 0, 0))
    values, dout, dfinal, _ = problem(shape, torch.float32, "cpu")
    found = gradients(values, dout, dfinal)
    assert torch.equal(found["init_state"][[0, 2, 3]], dfinal[[0, 2, 3]])
    nobody = values | {"cu_seqlens": torch.zeros(5, dtype=torch.int32)}
    found = gradients(nobody, dout, dfinal)
    assert torch.equal(found["init_state"], dfinal)
    assert not any(found[name].any() for name in NAMES[:-1])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_tiles_of_64_on_the_device(dtype: torch.dtype, layout: str) -> None:
    lengths = (0, 1, 63, 64, 65, 3 * 64 + 5)
    sizes = {"head_size": 64, "state_size": 128}
    shape = replace(PACKED, tokens=sum(lengths) + 70, lengths=lengths, **sizes)
    if layout == "padded":
        shape = replace(PADDED, tokens=lengths[-1], row_lengths=lengths, **sizes)
    values, dout, dfinal, expected = problem(shape, dtype, "cuda")
    for changes in ({}, {"min_segment_tiles": 1, "max_segment_tiles": 1, "piece_blocks": 1}):
        with BackwardConfig.override(replace(BackwardConfig(), **changes)):
            assert_right(gradients(values, dout, dfinal), values, expected, dtype)


@pytest.mark.gpu
@every_layout
def test_nothing_waits_and_a_replayed_graph_follows_new_lengths(layout: str) -> None:
    values, dout, dfinal, _ = problem(SHAPES[layout], torch.bfloat16, "cuda")
    values = {name: v.clone() if torch.is_tensor(v) else v for name, v in values.items()}
    gradients(values, dout, dfinal)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(values, dout, dfinal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(values, dout, dfinal)
    for lengths in ((101, 33, 0, 32, 1, 31), (0, 0, 3, 0, 64, 0), LENGTHS):
        for name, value in ALL_LENGTHS[layout](lengths).values(torch.bfloat16, seed=sum(lengths)).items():
            if torch.is_tensor(value):
                values[name].copy_(value)
        graph.replay()
        assert same(captured, gradients(values, dout, dfinal))


ALL_LENGTHS = {
    "plain": lambda lengths: ALL,
    "packed": lambda lengths: replace(PACKED, lengths=lengths),
    "padded": lambda lengths: replace(PADDED, row_lengths=lengths),
}

"""The full scan's kernels through the tile interpreter, in sequences of many segments, and on a GPU.

Every option alone and all together, on every backend, is in `test_scan.py`; there most problems are a tile.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import scan_oracle
from tests.scanning import Shape, call, cotangents, error, shapes, with_gradients
from tilegym_mamba2 import interpreter
from tilegym_mamba2.backends.cutile import ragged, scan, scan_config, tuning
from tilegym_mamba2.backends.cutile.kernels import scan_out
from tilegym_mamba2.backends.cutile.launch import run
from tilegym_mamba2.backends.cutile.scan_config import ScanConfig
from tilegym_mamba2.backends.cutile.tuning import ForwardConfig
from tilegym_mamba2.options import ScanOptions

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# A segment of one tile: every border of a tile is one of segments too.
SHORT = ScanConfig(min_segment_tiles=1, max_segment_tiles=1)
SHORT_FORWARD = ForwardConfig(segment_blocks=10**6, min_segment_tiles=1)
EVERYTHING = Shape(
    d="HP", z=True, dt_bias=True, dt_softplus=True, dt_limit=(0.3, 1.2), init_state=True, heads=2, groups=1
)
PLAIN = replace(EVERYTHING, tokens=200)
PACKED = replace(EVERYTHING, batch=1, tokens=420, lengths=(130, 0, 64, 1, 195))
PADDED = replace(EVERYTHING, batch=3, tokens=200, row_lengths=(200, 0, 129))
LAYOUTS = pytest.mark.parametrize("shape", [PLAIN, PACKED, PADDED], ids=["plain", "packed", "padded"])
PER_TOKEN = ("x", "dt", "b", "c", "z")


@pytest.fixture
def short() -> Iterator[None]:
    with scan_config.override(SHORT), tuning.override(SHORT_FORWARD):
        yield


def scanned(values: dict[str, Any], **options: Any) -> tuple[torch.Tensor, ...]:
    with torch.no_grad(), interpreter.interpret():
        return call(values, return_chunk_states=True, backend="cutile", **options)


def assert_like_the_token_loop(values: dict[str, Any], tolerance: float = 2e-6) -> None:
    results = scanned(values)
    expected = scan_oracle.scan(**values)
    for name, got, ref in zip(("out", "final_state", "chunk_states"), results, expected, strict=False):
        assert error(got, ref) <= tolerance, name
    assert (results[3].tolist() if len(results) == 4 else None) == expected[3]


# ---- many segments


@pytest.mark.usefixtures("short")
@settings(max_examples=40, derandomize=True, database=None)
@given(shapes(300, (5, 64, 70, 128)), st.integers(0, 2**20))
def test_random_problems_in_segments_of_a_tile(shape: Shape, seed: int) -> None:
    assert_like_the_token_loop(shape.values(FP32, seed))


@LAYOUTS
@pytest.mark.parametrize("segment_tiles", [1, 2, 16])
@pytest.mark.parametrize("chained", [0, 1])
def test_any_segment(shape: Shape, segment_tiles: int, chained: int) -> None:
    config = ScanConfig(min_segment_tiles=segment_tiles, max_segment_tiles=segment_tiles)
    forward = replace(SHORT_FORWARD, min_segment_tiles=segment_tiles, chained=chained)
    with scan_config.override(config), tuning.override(forward):
        assert_like_the_token_loop(shape.values(FP32))


@pytest.mark.usefixtures("short")
def test_more_borders_than_are_passed_at_once() -> None:
    shape = replace(PACKED, tokens=700, lengths=(3, 64 * 9 + 5, 70), heads=1)
    assert_like_the_token_loop(shape.values(FP32))


@pytest.mark.parametrize("layout", ["plain", "packed"])
@pytest.mark.parametrize("head_size", [8, 16, 20, 24, 64, 72, 100, 144])
def test_the_gate_reads_any_width(layout: str, head_size: int) -> None:
    # z and its gradient are read in strips of 16 or 8 channels, or whole, and in tiles of 64 channels.
    shape = replace(PLAIN, tokens=70, heads=1, head_size=head_size, batch=1)
    if layout == "packed":
        shape = replace(shape, lengths=(3, 0, 65))
    values = shape.values(BF16)
    assert scan.strip_of(values["x"]) == {8: 8, 20: 0, 24: 8, 72: 8, 100: 0}.get(head_size, 16)
    dout, _ = cotangents(values)
    with interpreter.interpret():
        (out, _), gradients = with_gradients(values, dout, None, backend="cutile")
    assert error(out, scan_oracle.scan(**values)[0]) <= 4e-3
    expected = scan_oracle.gradients(values, dout, None)
    assert error(gradients["z"], expected["z"]) <= 4e-3
    # Through the gate, too.
    assert error(gradients["x"], expected["x"]) <= 6e-3


@pytest.mark.usefixtures("short")
@LAYOUTS
@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 4e-3), (FP16, 6e-4)])
@pytest.mark.parametrize("state_dtype", [FP32, BF16])
def test_16_bit_inputs(shape: Shape, dtype: torch.dtype, tolerance: float, state_dtype: torch.dtype) -> None:
    values = replace(shape, head_size=80, state_size=24).values(dtype)
    out, final_state, chunk_states, *_ = scanned(values, state_dtype=state_dtype)
    expected = scan_oracle.scan(**values)
    assert error(out, expected[0]) <= tolerance
    # One rounding to bf16 is 1.7e-3.
    tolerance = max(tolerance, 2e-3) if state_dtype == BF16 else tolerance
    for got, ref in ((final_state, expected[1]), (chunk_states, expected[2])):
        assert got.dtype == state_dtype
        assert error(got, ref) <= tolerance


def test_many_more_sequences_than_tiles() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(0, 3, (700,), generator=generator).tolist())
    shape = replace(EVERYTHING, batch=1, tokens=sum(lengths) + 70, lengths=lengths, heads=1, head_size=2)
    assert_like_the_token_loop(replace(shape, state_size=2).values(FP32))


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_call_of_the_same_shape_follows_other_lengths(kind: str) -> None:
    shapes_ = {
        "packed": [replace(PACKED, lengths=lengths) for lengths in ((130, 0, 64, 1, 195), (0, 0, 420, 0, 0))],
        "padded": [replace(PADDED, row_lengths=lengths) for lengths in ((200, 0, 129), (5, 200, 64))],
    }
    for shape in shapes_[kind]:
        assert_like_the_token_loop(shape.values(FP32))


# ---- what has no influence


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("shape", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_padding_has_no_influence(shape: Shape, bad: float) -> None:
    values = shape.values(FP32)
    spoilt = {name: values[name].clone() for name in PER_TOKEN}
    for row, end in enumerate([390] if shape.lengths else shape.row_lengths):
        for tensor in spoilt.values():
            tensor[row, end:] = bad
    clean, dirty = scanned(values), scanned(values | spoilt)
    assert all(torch.equal(got, ref) for got, ref in zip(dirty, clean, strict=True))
    assert not clean[0][0, 390:].any()


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("changed", [0, 2, 4])
def test_a_sequence_of_many_segments_changes_no_bit_of_another(changed: int) -> None:
    values = PACKED.values(FP32)
    begin, end = values["cu_seqlens"][changed : changed + 2].tolist()
    moved = {name: values[name].clone() for name in (*PER_TOKEN, "init_state")}
    for name in PER_TOKEN:
        moved[name][:, begin:end] = math.nan
    moved["init_state"][changed] = math.nan
    results, other = scanned(values), scanned(values | moved)
    tokens = torch.ones(420, dtype=torch.bool)
    tokens[begin:end] = False
    rows = [s for s in range(5) if s != changed]
    assert torch.equal(other[0][:, tokens], results[0][:, tokens])
    assert torch.equal(other[1][rows], results[1][rows])
    assert other[0][:, ~tokens].isnan().all()


@pytest.mark.usefixtures("short")
def test_lengths_out_of_range_read_and_write_nothing_else() -> None:
    values = PACKED.values(FP32)
    borders = values["cu_seqlens"].to(torch.int64)
    borders[-1] += 2**40
    options = ScanOptions(state_dtype=FP32)
    arguments = [values.get(name) for name in (*scan_oracle.GRADIENTS, "cu_seqlens", "seq_lens")]
    arguments[9] = borders
    with interpreter.interpret():
        out, final_state, *_ = scan.mamba2_chunk_scan(*arguments, options)
    arguments[9] = borders.clamp(max=420)
    with interpreter.interpret():
        expected, expected_state, *_ = scan.mamba2_chunk_scan(*arguments, options)
    assert torch.equal(out, expected) and torch.equal(final_state, expected_state)


# ---- the gate's gradients


@pytest.mark.parametrize("lengths", [None, (64, 0, 50)])
@pytest.mark.parametrize("d", ["H", "HP", None])
def test_gradients_through_the_gate(lengths: tuple[int, ...] | None, d: str | None) -> None:
    shape = Shape(batch=1, tokens=130, heads=2, groups=1, d=d, z=True, lengths=lengths)
    values = shape.values(FP32)
    x, z = values["x"], values["z"]
    dout = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    if lengths:
        # Past the sequences nothing counts.
        for tensor in (x, z, dout):
            tensor[:, sum(lengths) :] = math.nan
    tensors = [values.get(name) for name in (*scan_oracle.GRADIENTS, "cu_seqlens", "seq_lens")]
    steps = scan.ScanSteps(
        tuple(tensors), ScanOptions(state_dtype=FP32), ForwardConfig(), ScanConfig(), False
    )
    dy, dz, final = torch.empty_like(x), torch.empty_like(x), torch.empty(3, 2, 3, 5)
    sizes = ragged.Ragged(1, 130, lengths and len(lengths), False, 192, 64)
    tables = sizes.tables(x.device)
    rows = torch.empty(4, 1, 2, 8, 64)
    count = sizes.slots if lengths else 1
    states = torch.empty(1, 2, 4, 3, 5)
    d_skip = values["a"] if d is None else values["d"]
    gates = [scan.in_strips(tensor, scan.strip_of(x)) for tensor in (z, dout)]
    arrays = (x, values["b"], values["c"], *gates, rows, d_skip, final, states, tables[0], dy, dz, final)
    launches = [
        sizes.launch(values.get("cu_seqlens"), tables),
        steps.rows_step(count, 3, lengths is not None).launch(
            (values["a"], values["dt"], values["a"], tables[0], rows)
        ),
        steps.out_step(count, (192, 1, 2), lengths is not None, scan_out.GATE_GRADIENTS).launch(
            arrays, {"out": dy, "dz": dz}
        ),
    ]
    with interpreter.interpret():
        run(launches, x.device)
    y, *_ = scan_oracle.scan(**values | {"z": None})
    gate = z.double().nan_to_num().requires_grad_()
    silu = torch.nn.functional.silu(gate)
    (expected,) = torch.autograd.grad((silu * y * dout.double().nan_to_num()).sum(), gate)
    assert error(dz, expected) <= 2e-6
    assert error(dy, (silu * dout.double().nan_to_num()).detach()) <= 2e-6
    assert final.isnan().all()


# ---- refusals


@pytest.mark.parametrize("where", ["dt", "init_state", "state_dtype"])
def test_float64_is_refused(where: str) -> None:
    values = EVERYTHING.values(FP32)
    if where == "state_dtype":
        values[where] = torch.float64
    else:
        values[where] = values[where].double()
    with pytest.raises(TypeError, match="backend 'cutile' takes bfloat16, float16 and float32"):
        scanned(values)


# ---- on a GPU


def on_gpu(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in values.items()}


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
@LAYOUTS
@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 4e-3), (FP16, 6e-4), (FP32, 1e-5)])
def test_all_options_on_a_gpu(shape: Shape, dtype: torch.dtype, tolerance: float) -> None:
    sizes = {"heads": 4, "groups": 2, "head_size": 64, "state_size": 128}
    values = replace(shape, **sizes, chunk_size=50).values(dtype)
    with torch.no_grad():
        results = call(on_gpu(values), return_chunk_states=True, state_dtype=FP32, backend="cutile")
    expected = scan_oracle.scan(**values)
    for name, got, ref in zip(("out", "final_state", "chunk_states"), results, expected, strict=False):
        assert error(got.cpu(), ref) <= tolerance, name
    assert (results[3].tolist() if len(results) == 4 else None) == expected[3]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(80, 96), (64, 256), (16, 16), (72, 16), (20, 16)], ids=str)
@pytest.mark.parametrize("d", ["H", "HP"])
def test_other_sizes_on_a_gpu(sizes: tuple[int, int], d: str) -> None:
    shape = replace(PACKED, head_size=sizes[0], state_size=sizes[1], d=d, init_state=False)
    values = shape.values(BF16)
    with torch.no_grad():
        out, final_state = call(on_gpu(values), backend="cutile")
    expected = scan_oracle.scan(**values)
    assert error(out.cpu(), expected[0]) <= 4e-3
    assert error(final_state.cpu(), expected[1]) <= 4e-3


@pytest.mark.gpu
def test_thousands_of_sequences_on_a_gpu() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(0, 9, (5000,), generator=generator).tolist())
    shape = replace(PACKED, tokens=sum(lengths) + 300, lengths=lengths, head_size=16, state_size=16)
    values = on_gpu(shape.values(FP32))
    with torch.no_grad():
        results = call(values, return_chunk_states=True, backend="cutile")
        expected = call(values, return_chunk_states=True, backend="torch")
    for got, ref in zip(results, expected, strict=True):
        assert error(got, ref) <= 1e-5


@pytest.mark.gpu
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_replayed_graph_follows_other_lengths(kind: str) -> None:
    shape, other = {
        "packed": (PACKED, replace(PACKED, lengths=(0, 300, 5, 64, 20))),
        "padded": (PADDED, replace(PADDED, row_lengths=(3, 128, 200))),
    }[kind]
    sizes = {"head_size": 64, "state_size": 64}
    values = on_gpu(replace(shape, **sizes).values(BF16))

    def compute() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return call(values, return_chunk_states=True, backend="cutile")

    compute()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compute()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, value in replace(other, **sizes).values(BF16, seed=5).items():
        if torch.is_tensor(value):
            values[name].copy_(value)
    graph.replay()
    assert all(torch.equal(c, r) for c, r in zip(captured, compute(), strict=True))

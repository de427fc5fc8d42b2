"""The backward of the cutile backend: any configuration, any subset of gradients, and the same bits always.

Runs through the tile interpreter on the CPU, and on the device with `-m gpu`. Parity with float64 over all
specs is in `tests/ops/test_mamba2.py`.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym_mamba2 import interpreter, mamba2_chunk_backward, registry
from tilegym_mamba2.backends.cutile import aligned, backward
from tilegym_mamba2.backends.cutile.backward_config import BackwardConfig, default_config
from tilegym_mamba2.backends.cutile.forward import pad_count
from tilegym_mamba2.backends.cutile.kernels.products import BF16
from tilegym_mamba2.budgets import check, relative_error
from tilegym_mamba2.spec import SPECS, Mamba2ProblemSpec

OP = "mamba2_chunk_backward"
NAMES = ("x", "a", "b", "c", "d", "dt", "init_state")
ARGUMENTS = (*NAMES, "dout", "dfinal_state")
PLACES = [pytest.param("cpu", id="interpreter"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]
every_place = pytest.mark.parametrize("device", PLACES)
BASE = replace(SPECS["fp32-slow"], batch_size=1, num_tokens=150, num_heads=6, head_size=16, state_size=32)


@lru_cache(maxsize=16)
def sample(spec: Mamba2ProblemSpec, device: str) -> dict[str, Any]:
    return spec.get_sample_inputs(device=device)


@contextlib.contextmanager
def running(device: str) -> Iterator[None]:
    with interpreter.interpret() if device == "cpu" else contextlib.nullcontext():
        yield


def gradients(
    inputs: dict[str, Any], needed: tuple[bool, ...] = (True,) * 7, **changes: Any
) -> dict[str, Any]:
    arguments = inputs | changes
    with running(inputs["x"].device.type):
        results = backward.gradients(*(arguments[name] for name in ARGUMENTS), needed)
    return dict(zip(registry.ops()[OP].outputs, results, strict=True))


def assert_right(spec: Mamba2ProblemSpec, results: dict[str, Any], references: dict[str, Any]) -> None:
    verdicts = check(registry.ops()[OP], results, references, dtype=spec.dtype, decay=spec.decay)
    broken = [f"{v.output}: {v.error:.3e} > {v.budget:.3e}" for v in verdicts if not v.ok]
    assert not broken, "; ".join(broken)


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        first[k] is second[k] or torch.equal(first[k], second[k]) for k in first if first[k] is not None
    )


CONFIGS = {
    "one segment": {"min_segment_tiles": 10**6},
    "a segment a tile": {"max_segment_tiles": 1, "min_segment_tiles": 1},
    "a segment a tile, one at a time": {"max_segment_tiles": 1, "min_segment_tiles": 1, "piece_blocks": 1},
    "short last segment": {"max_segment_tiles": 2, "min_segment_tiles": 2},
    "short last segment, alone": {"max_segment_tiles": 2, "min_segment_tiles": 2, "piece_blocks": 10},
    "tiles of 32 tokens": {"tile_tokens": 32, "max_segment_tiles": 2, "min_segment_tiles": 2},
    "tiles of 128 tokens": {"tile_tokens": 128},
    "a part a head": {"part_blocks": 10**4},
    "two parts of a group": {"part_blocks": 18},
    "apart": {"fused_tile_n_max": 0},
    "apart, operands weighted": {"fused_tile_n_max": 0, "weigh_last": False},
    "three lanes": {"max_segment_tiles": 1, "min_segment_tiles": 1, "piece_blocks": 1, "lanes": 3},
    "narrow tiles of N": {
        "fused_tile_n_max": 0,
        "token_tile_n_max": 16,
        "group_tile_n_max": 16,
        "state_tile_n": 16,
    },
    "heads one by one": {"rows_heads": 1, "sum_tile": 16},
}


@every_place
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration(device: str, name: str) -> None:
    inputs = sample(BASE, device)
    with BackwardConfig.override(replace(BackwardConfig(), token_occupancy=1, **CONFIGS[name])):
        assert_right(BASE, gradients(inputs), inputs)


def test_parts_and_segments_depend_on_no_batch_row(device: str = "cpu") -> None:
    spec = replace(BASE, batch_size=3)
    inputs = spec.get_sample_inputs(with_reference=False, device=device)
    whole = gradients(inputs)
    row = {n: v[1:2] if isinstance(v, torch.Tensor) and n not in ("a", "d") else v for n, v in inputs.items()}
    alone = gradients(row)
    for output in ("dx", "db", "dc", "ddt", "dinit_state"):
        assert torch.equal(whole[output][1:2], alone[output])


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_80"])
@pytest.mark.parametrize("heads", [1, 8, 15, 16, 80, 128, 256, 1024])
@pytest.mark.parametrize("state_size", [64, 128, 256, 512])
def test_pieces_fill_the_memory_that_there_is_and_no_more(arch: str, heads: int, state_size: int) -> None:
    config = default_config(arch, BF16, (heads, 64), state_size)
    blocks = heads * math.ceil(state_size / 128)
    for tiles in (1, 4, 32, 33, 128, 1024, 4096):
        per_segment = config.tiles_per_segment(tiles, blocks)
        segments = math.ceil(tiles / per_segment)
        for batch in (1, 2, 17, 51, 52, 256):
            rows, some = config.piece(batch, segments, blocks, per_segment)
            states = rows * some * blocks * per_segment
            fits = config.most_states * max(1.0, config.at_once)
            assert states <= fits or (rows, some, per_segment) == (1, 1, config.min_segment_tiles)
            pieces = math.ceil(batch / rows) * math.ceil(segments / some)
            # Halves of what does not fit, in the worst case, or what fits in two pieces.
            least = 0.25 * min(config.most_states, blocks * per_segment * batch * segments)
            assert pieces == 1 or states >= least or (rows, some) == (1, 1)


@every_place
@pytest.mark.parametrize("name", ["bf16-slow", "heads-50"])
def test_the_same_bits_every_time(device: str, name: str) -> None:
    # The interpreter shuffles the blocks, the GPU does so by itself.
    inputs = sample(SPECS[name], device)
    first = gradients(inputs)
    for _ in range(2 if device == "cpu" else 10):
        assert same(first, gradients(inputs))


@every_place
def test_only_what_is_needed(device: str) -> None:
    inputs = sample(BASE, device)
    whole = gradients(inputs)
    for wanted in (("x",), ("a",), ("b",), ("c", "init_state"), ("d", "dt"), ("init_state",), ()):
        some = gradients(inputs, tuple(name in wanted for name in NAMES))
        for name in NAMES:
            if name in wanted:
                assert torch.equal(some[f"d{name}"], whole[f"d{name}"])
            else:
                assert some[f"d{name}"] is None


@pytest.mark.parametrize("silent", ["dout", "dfinal_state"])
def test_none_is_zero(silent: str) -> None:
    inputs = sample(BASE, "cpu")
    zero = torch.zeros_like(inputs[silent])
    assert same(gradients(inputs, **{silent: None}), gradients(inputs, **{silent: zero}))


def test_gradients_of_any_layout() -> None:
    inputs = sample(BASE, "cpu")
    one = torch.ones((), dtype=inputs["x"].dtype)
    plain = gradients(inputs, dout=torch.ones_like(inputs["x"]))
    assert same(gradients(inputs, dout=one.expand(inputs["x"].shape)), plain)
    row = torch.ones(inputs["x"].shape[-1])
    assert same(gradients(inputs, dout=row.expand(inputs["x"].shape)), plain)
    moved = inputs["dout"].transpose(1, 3).contiguous().transpose(1, 3)
    turned = inputs["dfinal_state"].transpose(2, 3).contiguous().transpose(2, 3)
    assert same(gradients(inputs, dout=moved, dfinal_state=turned), gradients(inputs))


def test_unwritten_scratch_is_never_read() -> None:
    assert_reads_what_it_wrote(sample(SPECS["ragged"], "cpu"))


def assert_reads_what_it_wrote(inputs: dict[str, Any]) -> None:
    # In deterministic mode torch.empty is full of NaN.
    torch.use_deterministic_algorithms(True)
    try:
        results = gradients(inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(result.isnan().any() for result in results.values())
    assert same(results, gradients(inputs))


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_torch_computes_nothing() -> None:
    inputs = sample(SPECS["bf16-slow"], "cpu")
    with _Seen() as seen:
        gradients(inputs)
    # Fresh memory is filled with NaN in tests; the interpreter makes tensors of float arguments.
    allowed = {"empty", "empty_like", "fill_", "unsqueeze", "detach", "view", "alias", "lift_fresh", "expand"}
    assert seen.names <= allowed


@every_place
def test_no_tokens(device: str) -> None:
    inputs = sample(SPECS["no-tokens"], device)
    results = gradients(inputs)
    assert torch.equal(results["dinit_state"], inputs["dfinal_state"])
    assert not any(results[f"d{name}"].any() for name in NAMES[:-1])
    silent = gradients(inputs, dfinal_state=None)
    assert not silent["dinit_state"].any()


def test_float64_states_are_refused() -> None:
    inputs = sample(BASE, "cpu")
    arguments = [inputs[name] for name in ARGUMENTS]
    with interpreter.interpret(), pytest.raises(TypeError, match="no float64 states"):
        mamba2_chunk_backward(*arguments, state_dtype=torch.float64, backend="cutile")


@pytest.mark.gpu
def test_inside_a_cuda_graph() -> None:
    inputs = sample(SPECS["bf16-slow"], "cuda")
    expected = gradients(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(inputs)
    for result in captured.values():
        result.zero_()
    graph.replay()
    assert same(captured, expected)


@pytest.mark.gpu
def test_flat_memory_over_steps() -> None:
    inputs = sample(SPECS["bf16-slow"], "cuda")
    gradients(inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        gradients(inputs)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@every_place
@pytest.mark.parametrize("step", [5.0, 50.0, 1e4])
def test_rate_after_tokens_that_forget_everything(device: str, step: float) -> None:
    # What is left of sums that cancel must not be multiplied by these steps.
    generator = torch.Generator().manual_seed(1)
    x, b, c = (torch.randn(1, 64, 1, 16, generator=generator).to(device) for _ in range(3))
    dt = torch.full((1, 64, 1), 0.002, device=device)
    dt[:, 5::8] = step
    a = torch.tensor([-16.0], device=device)
    inputs = dict(zip(ARGUMENTS, (x, a, b, c, None, dt, None, torch.ones_like(x), None), strict=True))
    with torch.no_grad():
        expected = mamba2_chunk_backward(*inputs.values(), backend="torch")
    got = gradients(inputs, needed=(True,) * 4 + (False, True, False))
    for name, index in (("da", 1), ("ddt", 5)):
        assert (got[name] - expected[index]).norm() <= 2e-5 * expected[index].norm()


# ---- states saved for pairs of tiles

PAIRS = replace(SPECS["bf16-slow"], num_heads=8, num_groups=1, head_size=16, state_size=32)
TWO_TILES = {"max_segment_tiles": 2, "min_segment_tiles": 2}
# Several tiles of N in both kernels of `bwd_sides`.
SIDES = {"fused_tile_n_max": 0, "sides": True, "side_token_tile_n": 16, "side_group_tile_n": 16}


@every_place
@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 190, 320])
@pytest.mark.parametrize("sizes", [{}, {"batch_size": 1, "num_heads": 16, "num_groups": 2}], ids=["", "16"])
def test_pairs_of_tiles(device: str, tokens: int, sizes: dict[str, int]) -> None:
    spec = replace(PAIRS, num_tokens=tokens, **sizes)
    inputs = sample(spec, device)
    for config in (BackwardConfig(), replace(BackwardConfig(), **TWO_TILES)):
        with BackwardConfig.override(config):
            assert_right(spec, gradients(inputs), inputs)
            silent = {"init_state": None, "dfinal_state": None}
            some = gradients(inputs, (True,) * 6 + (False,), **silent)
        with BackwardConfig.override(replace(config, paired=False)):
            expected = gradients(inputs, (True,) * 6 + (False,), **silent)
        for name in ("dx", "db", "dc", "ddt", "da"):
            off = (some[name].float() - expected[name].float()).norm()
            assert off <= 0.02 * expected[name].float().norm(), name


@every_place
def test_remainders_of_weighted_x_make_db_more_exact(device: str) -> None:
    # Nothing decays, so db is made of states, and half of its error is the rounding of weighted x.
    spec = replace(PAIRS, num_tokens=512, head_size=64, decay="none")
    inputs = sample(spec, device)
    errors = []
    for remainders in (0, 3, 1):
        with BackwardConfig.override(replace(BackwardConfig(), remainders=remainders, part_blocks=1)):
            results = gradients(inputs)
        if remainders:
            assert_right(spec, results, inputs)
        errors.append(relative_error(results["db"], inputs["db"]))
    none, some, all_heads = errors
    assert some < 0.98 * none and all_heads < 0.98 * some


def test_pairs_keep_half_of_the_states() -> None:
    inputs = sample(replace(PAIRS, num_tokens=640), "cpu")
    tiles = {}
    for paired in (True, False):
        backward._plans.clear()
        with BackwardConfig.override(replace(BackwardConfig(), paired=paired)):
            gradients(inputs)
        (plan,) = backward._plans.values()
        tiles[paired] = plan.shapes["tiles"][2]
    assert tiles == {True: pad_count(5), False: pad_count(10)}


@every_place
@pytest.mark.parametrize("changes", [{}, {"side_pairs": False}], ids=["pairs", "alone"])
@pytest.mark.parametrize("tokens", [1, 64, 129, 190, 320])
@pytest.mark.parametrize(
    "sizes", [{}, {"batch_size": 1, "num_heads": 16, "num_groups": 2}, {"state_size": 40}], ids=str
)
def test_sides(device: str, tokens: int, sizes: dict[str, int], changes: dict[str, bool]) -> None:
    spec = replace(PAIRS, num_tokens=tokens, **sizes)
    inputs = sample(spec, device)
    for more in ({}, TWO_TILES | {"piece_blocks": 1}):
        with BackwardConfig.override(replace(BackwardConfig(), **SIDES, **changes, **more)):
            assert_right(spec, gradients(inputs), inputs)


@every_place
def test_pieces_of_pairs_change_no_bit(device: str) -> None:
    # Five tiles: the last piece has one alone.
    inputs = sample(replace(PAIRS, num_tokens=290), device)
    with BackwardConfig.override(replace(BackwardConfig(), **TWO_TILES)):
        expected = gradients(inputs)
    for lanes in (1, 2):
        with BackwardConfig.override(replace(BackwardConfig(), **TWO_TILES, piece_blocks=1, lanes=lanes)):
            assert same(gradients(inputs), expected)


@every_place
@pytest.mark.parametrize("tokens", [64, 150, 192, 300])
def test_a_tile_alone_takes_up_nothing_of_another_row(device: str, tokens: int) -> None:
    inputs = sample(replace(PAIRS, num_tokens=tokens), device)
    expected = gradients(inputs)
    for row in (0, 1):
        changes = {name: inputs[name].clone() for name in ("x", "b", "c", "dt", "dout", "init_state")}
        for tensor in changes.values():
            tensor[row] = float("nan")
        found = gradients(inputs, **changes)
        for name in ("dx", "db", "dc", "ddt", "dinit_state"):
            assert torch.equal(found[name][1 - row], expected[name][1 - row])


@every_place
def test_what_no_earlier_tile_feels_is_felt_by_none(device: str) -> None:
    # Causality: a gradient dout that is not a number reaches its own tile and those before it, x those after.
    inputs = sample(replace(PAIRS, num_tokens=310), device)
    expected = gradients(inputs)
    dout, x = inputs["dout"].clone(), inputs["x"].clone()
    dout[:, 130] = float("nan")
    x[:, 130] = float("nan")
    found = gradients(inputs, dout=dout)
    assert torch.equal(found["dx"][:, 192:], expected["dx"][:, 192:])
    assert torch.equal(found["db"][:, 192:], expected["db"][:, 192:])
    assert torch.equal(gradients(inputs, x=x)["dc"][:, :128], expected["dc"][:, :128])


@every_place
@pytest.mark.parametrize("tokens", [100, 180, 330])
def test_pairs_read_no_unwritten_scratch(device: str, tokens: int) -> None:
    assert_reads_what_it_wrote(sample(replace(PAIRS, num_tokens=tokens), device))


# ---- rows that the copy engine cannot load


def odd_rows(tensors: Any) -> bool:
    return not all(map(aligned.has_whole_rows, tensors))


@pytest.mark.parametrize("name", ["p40", "p80-n96", "sliced-published", "sliced-fp32", "three-heads"])
def test_copies_with_whole_rows_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SPECS[name], num_tokens=70, head_size=SPECS[name].head_size - 3, state_size=13)
    inputs = sample(spec, "cpu")
    assert odd_rows([inputs["x"]]) and odd_rows([inputs["b"]])
    as_they_are = gradients(inputs)
    copied = []
    monkeypatch.setattr(backward, "must_copy", lambda tensors: copied.append(odd_rows(tensors)) or copied[-1])
    monkeypatch.setattr(backward, "_plans", {})
    assert same(gradients(inputs), as_they_are)
    assert copied == [True, False]


def test_which_rows_are_whole() -> None:
    whole = aligned.has_whole_rows
    x = torch.zeros(2, 5, 3, 64, dtype=torch.bfloat16)
    assert whole(x) and whole(x[..., 8:]) and whole(x[:, :, 1:2]) and whole(x[:1, :1, :1, :8])
    assert not whole(x[..., 4:]) and not whole(x[..., :60]) and not whole(torch.zeros(2, 5, 3, 3))
    assert not whole(torch.zeros(2, 5, 3, 9)[..., :8])
    # Where there is one of something, its stride says nothing.
    assert whole(torch.zeros(1, 1, 1, 9)[..., :8])
    assert not aligned.must_copy([torch.zeros(2, 5, 3, 3)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(3, 5), (1, 1), (33, 20), (20, 33), (7, 128)], ids=str)
def test_odd_rows_on_a_gpu(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    spec = replace(SPECS["fp32-slow"], num_tokens=150, head_size=sizes[0], state_size=sizes[1], dtype=dtype)
    inputs = sample(spec, "cuda")
    first = gradients(inputs)
    assert_right(spec, first, inputs)
    assert all(same(gradients(inputs), first) for _ in range(3))


@pytest.mark.gpu
def test_pieces_side_by_side_follow_the_callers_stream_and_graph() -> None:
    inputs = sample(BASE, "cuda")
    one = {"max_segment_tiles": 1, "min_segment_tiles": 1, "piece_blocks": 1, "lanes": 1}
    with BackwardConfig.override(replace(BackwardConfig(), **one)):
        expected = gradients(inputs)
    with BackwardConfig.override(replace(BackwardConfig(), **one | {"lanes": 3})):
        assert same(gradients(inputs), expected)
        stream = torch.cuda.Stream()
        late = inputs | {"dout": torch.zeros_like(inputs["dout"])}
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            # What the lanes read is written late, and what they wrote is read at once.
            torch.cuda._sleep(10**7)
            late["dout"].copy_(inputs["dout"])
            found = {name: v if v is None else v.clone() for name, v in gradients(late).items()}
        stream.synchronize()
        assert same(found, expected)
        graph = torch.cuda.CUDAGraph()
        late["dout"].zero_()
        with torch.cuda.graph(graph):
            captured = gradients(late)
        late["dout"].copy_(inputs["dout"])
        graph.replay()
        assert same(captured, expected)

"""The backward op of the cutile backend: allocates, lays out the launches, runs them. No maths.

`mamba2_chunk_backward` launches, with S tiles of L tokens a segment:

    chunk_rows                         what the decay contributes, per token
    segment_borders, pass_borders      the state H at the entry of every segment, the gradient dH' at its exit
    then, for some segments at a time:
        tile_states                    H at the entry and dH' at the exit of every tile
        compute_dx                     dx, and sums per token
        compute_dbc                    db, dc, summed over the heads of a group
        compute_gradients              instead of the two, where a head's state is one tile
    finish_dt, sum_heads               ddt; da, dd
    sum_parts                          db, dc, where a group's heads were cut in parts

States are computed again, not saved, and C Bᵀ never reaches memory. Every sum has a fixed order: the
gradients are the same bits in every run. Copies that are made: x, b, c or dout whose last dimension is not
contiguous, and a dout that repeats elements. Scratch: two states (P, N) for every tile and head of the
segments at hand, in bfloat16 for bfloat16 inputs, else float32 (at most 268 MB at P 64, N 128, however long
the sequence); 36 bytes a token and head; two float32 states a segment and head; and where a group of many
heads is cut in parts, db and dc in float32 for each part.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import tuning
from .backward_config import BackwardConfig, config_for
from .forward import (
    PASS_AT_ONCE,
    TILE_P,
    last_contiguous,
    pad_count,
    precision_of,
    rows_step,
    supports,
    tile_of,
)
from .kernels import bwd_decay as _decay
from .kernels import bwd_gradients as _gradients
from .kernels import bwd_groups as _groups
from .kernels import bwd_states as _states
from .kernels import bwd_tokens as _tokens
from .launch import INT32_REACH, Launch, Step, hinted, needs_wide, run_plan

__all__ = ["DIFFERENTIABLE", "gradients", "mamba2_chunk_backward", "supports"]

OP = "mamba2_chunk_backward"
# Its results carry no graph: a second derivative is an error, which autograd.py raises.
DIFFERENTIABLE = False

Optional = torch.Tensor | None
_INPUTS = ("x", "a", "b", "c", "d", "dt", "init_state")


def mamba2_chunk_backward(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    dt: torch.Tensor,
    init_state: Optional,
    dout: Optional,
    dfinal_state: Optional,
    chunk_size: int = 64,
    state_dtype: torch.dtype = torch.float32,
) -> tuple[Optional, ...]:
    """As `tilegym_mamba2.mamba2_chunk_backward`, by the kernels.

    `chunk_size` is a hint, and not followed. States are computed in float32 whatever `state_dtype` says, and
    enter products as the inputs' dtype allows; float64 is refused with a TypeError.
    """
    if state_dtype is torch.float64:
        raise TypeError(f"{OP}: backend 'cutile' computes no float64 states; use backend='torch'")
    return gradients(x, a, b, c, d, dt, init_state, dout, dfinal_state, (True,) * len(_INPUTS))


def gradients(
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: Optional,
    dt: torch.Tensor,
    init_state: Optional,
    dout: Optional,
    dfinal_state: Optional,
    needed: tuple[bool, ...],
) -> tuple[Optional, ...]:
    """dx, da, db, dc, dd, ddt, dinit_state; None for those that are not `needed` and for a None input."""
    needed = tuple(n and t is not None for n, t in zip(needed, (x, a, b, c, d, dt, init_state), strict=True))
    if not any(needed):
        return (None,) * len(_INPUTS)
    dout = torch.zeros_like(x) if dout is None else dout
    x, b, c, dout = (last_contiguous(t) for t in (x, b, c, dout))
    if any(stride == 0 and size > 1 for stride, size in zip(dout.stride(), dout.shape, strict=True)):
        dout = dout.contiguous()
    plan = _plan_of(x, a, b, c, d, dt, init_state, dout, dfinal_state, needed)
    if plan.empty:
        return _without_tokens(needed, (x, a, b, c, d, dt, init_state), dfinal_state)
    scratch = _Scratch(plan, x)
    run = _Run(plan, scratch, needed, (x, a, b, c, d, dt, init_state), dout, dfinal_state)
    plan.run(run.launches(), x.device)
    return tuple(run.results.get(name) if n else None for name, n in zip(_INPUTS, needed, strict=True))


@dataclass
class _Piece:
    """What is done for some segments of some batch rows, whose tiles' states are in memory at a time.

    `batch`: those rows; None: all, and no tensor needs to be sliced. `tokens`: those of the segments.
    """

    batch: slice | None
    tokens: slice
    tile_states: Step
    compute_dx: Step | None = None
    compute_dbc: Step | None = None
    compute_gradients: Step | None = None

    def of(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """The piece's rows of a tensor with the batch as its `axis`."""
        if self.batch is None:
            return tensor
        return tensor[(slice(None),) * axis + (self.batch,)]

    def written(self, outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The part of the outputs (batch, tokens, …) that the piece writes: the interpreter looks."""
        if not outputs or next(iter(outputs.values())).device.type == "cuda":
            return {}
        return {name: tensor[:, self.tokens] for name, tensor in outputs.items()}


@dataclass
class _Plan:
    """All that a call needs and that shapes, strides and dtypes decide."""

    empty: bool
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    saved_dtype: torch.dtype = torch.float32
    rows: Step | None = None
    # Whether states are wanted beside their gradients, and whether db and dc are.
    entries: bool = False
    for_groups: bool = False
    segment_borders: Step | None = None
    pass_borders: Step | None = None
    pieces: list[_Piece] = dataclasses.field(default_factory=list)
    finish_dt: Step | None = None
    sum_heads: Step | None = None
    sum_parts: Step | None = None
    compiled: bool = False

    def run(self, launches: list[Launch], device: torch.device) -> None:
        run_plan(launches, device, OP, self.compiled)
        self.compiled = True


class _Scratch:
    """The tensors between the kernels."""

    def __init__(self, plan: _Plan, x: torch.Tensor) -> None:
        self._shapes, self._device = plan.shapes, x.device
        self.rows = self.empty("rows")
        self.exits = self.empty("segments")
        self.dexit_states = self.empty("tiles", plan.saved_dtype)
        self.entries = self.empty("segments") if plan.entries else self.exits
        self.entry_states = self.empty("tiles", plan.saved_dtype) if plan.entries else self.dexit_states

    def empty(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=dtype, device=self._device)


class _Run:
    """One call: its tensors, and its launches in order."""

    def __init__(
        self,
        plan: _Plan,
        scratch: _Scratch,
        needed: tuple[bool, ...],
        inputs: tuple[Optional, ...],
        dout: torch.Tensor,
        dfinal_state: Optional,
    ) -> None:
        self.plan, self.scratch = plan, scratch
        self.x, self.a, self.b, self.c, self.d, self.dt, self.init_state = inputs
        self.dout, self.dfinal_state = dout, dfinal_state
        self.results: dict[str, torch.Tensor] = {}
        tensors = dict(zip(_INPUTS, inputs, strict=True))
        names = {name for name, need in zip(_INPUTS, needed, strict=True) if need}
        if plan.finish_dt is not None:
            names |= {"x", "a", "dt"} | ({"d"} if self.d is not None else set())
            self.drows, self.overlap = scratch.empty("drows"), scratch.empty("overlap")
        if plan.for_groups:
            names |= {"b", "c"}
        if self.init_state is not None:
            names.add("init_state")
        for name in _INPUTS:
            if name in names:
                like = tensors[name]
                self.results[name] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self.db, self.dc = self.results.get("b"), self.results.get("c")
        if plan.sum_parts is not None:
            self.db, self.dc = scratch.empty("parts"), scratch.empty("parts")

    def launches(self) -> list[Launch]:
        plan, scratch, results = self.plan, self.scratch, self.results
        launches = [plan.rows.launch((self.a, self.dt, scratch.rows))]
        launches += self._borders()
        for piece in plan.pieces:
            launches += self._piece(piece)
        if plan.finish_dt is not None:
            partial = scratch.empty("partial")
            arrays = (self.a, scratch.rows, self.drows, self.overlap, results["dt"], partial)
            launches.append(plan.finish_dt.launch(arrays, {"ddt": results["dt"]}))
            da = results["a"]
            dd = results.get("d", da)
            launches.append(plan.sum_heads.launch((partial, da, dd), {"da": da, "dd": dd}))
        if plan.sum_parts is not None:
            arrays = (self.db, self.dc, results["b"], results["c"])
            launches.append(plan.sum_parts.launch(arrays, {"db": results["b"], "dc": results["c"]}))
        return launches

    def _borders(self) -> list[Launch]:
        plan, scratch = self.plan, self.scratch
        launches = []
        borders = (scratch.entries, scratch.exits)
        decays = (scratch.empty("segment_decay"), scratch.empty("segment_decay"))
        if plan.segment_borders is not None:
            arrays = (self.x, self.b, self.c, scratch.rows, self.dout, *borders, *decays)
            launches.append(plan.segment_borders.launch(arrays))
        init_view = scratch.entries if self.init_state is None else self.init_state.unsqueeze(2)
        dfinal_view = scratch.exits if self.dfinal_state is None else self.dfinal_state.unsqueeze(2)
        launches.append(plan.pass_borders.launch((*borders, *decays, init_view, dfinal_view)))
        return launches

    def _piece(self, piece: _Piece) -> list[Launch]:
        plan, scratch, results = self.plan, self.scratch, self.results
        x, b, c, dout = (piece.of(t) for t in (self.x, self.b, self.c, self.dout))
        rows = piece.of(scratch.rows, 1)
        saved = (scratch.entry_states, scratch.dexit_states)
        outputs = {}
        dinit_view = scratch.dexit_states
        if "init_state" in results:
            dinit = piece.of(results["init_state"])
            dinit_view = dinit.unsqueeze(2)
            if piece.tokens.start == 0:
                outputs["dinit_state"] = dinit
        borders = (piece.of(scratch.entries), piece.of(scratch.exits))
        arrays = (x, b, c, rows, dout, *borders, *saved, dinit_view)
        launches = [piece.tile_states.launch(arrays, outputs)]
        of_tokens, of_groups, written = (), (), {}
        if plan.finish_dt is not None:
            dx = piece.of(results["x"])
            of_tokens = (dx, piece.of(self.drows, 1), piece.of(self.overlap))
            written["dx"] = dx
        if plan.for_groups:
            of_groups = (piece.of(self.db), piece.of(self.dc))
            if plan.sum_parts is None:
                written |= dict(zip(("db", "dc"), of_groups, strict=True))
        skip = self.a if self.d is None else self.d
        for step, arrays in (
            (piece.compute_gradients, (x, b, c, rows, skip, dout, *saved, *of_tokens, *of_groups)),
            (piece.compute_dx, (x, b, c, rows, skip, dout, *saved, *of_tokens)),
            (piece.compute_dbc, (x, b, c, rows, dout, *saved, *of_groups)),
        ):
            if step is not None:
                mine = {name: t for name, t in written.items() if any(t is array for array in arrays)}
                launches.append(step.launch(arrays, piece.written(mine)))
        return launches


def _without_tokens(
    needed: tuple[bool, ...], inputs: tuple[Optional, ...], dfinal_state: Optional
) -> tuple[Optional, ...]:
    results = [
        torch.zeros(t.shape, dtype=t.dtype, device=t.device) if n else None
        for n, t in zip(needed, inputs, strict=True)
    ]
    if results[-1] is not None and dfinal_state is not None:
        results[-1].copy_(dfinal_state)
    return tuple(results)


_plans: dict[tuple[Any, ...], _Plan] = {}
# Shapes change with every sequence length: keep the plans from growing without end.
_MAX_PLANS = 4096


def _plan_of(*arguments: Any) -> _Plan:
    *tensors, needed = arguments
    x = tensors[0]
    key = (
        tuple(None if t is None else (t.shape, t.stride(), t.dtype, t.data_ptr() & 15) for t in tensors),
        needed,
        x.device,
        precision_of(x.dtype),
        tuning.overridden(),
        BackwardConfig.overridden(),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _make_plan(tensors, needed)
    return plan


def _make_plan(tensors: list[Optional], needed: tuple[bool, ...]) -> _Plan:
    x, a, b, c, d, dt, init_state, dout, dfinal_state = tensors
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    plan = _Plan(empty=batch * tokens == 0)
    if plan.empty:
        return plan
    need = dict(zip(_INPUTS, needed, strict=True))
    dims = (batch, heads, head_size, state_size)
    config = config_for(x, b)
    tile = config.tile_tokens
    tiles = math.ceil(tokens / tile)
    p_tiles = math.ceil(head_size / TILE_P)
    tiles_per_segment = config.tiles_per_segment(tiles, heads * p_tiles)
    segments = math.ceil(tiles / tiles_per_segment)
    forward = dataclasses.replace(tuning.default_config(tuning.problem_key(x, b)), tile_tokens=tile)
    parts = config.parts(
        tiles * groups * math.ceil(state_size / config.group_tile_n(state_size)), heads // groups
    )
    # The heads that one block of compute_dbc takes; the number of parts follows from it.
    group_heads = math.ceil(heads // groups / parts)
    parts = math.ceil(heads // groups / group_heads)
    n_tiles = math.ceil(state_size / min(tile_of(state_size), config.state_tile_n))
    rows_at_once, segments_at_once = config.piece(batch, segments, heads * p_tiles * n_tiles)
    tiles_at_once = min(tiles, segments_at_once * tiles_per_segment)
    plan.shapes = {
        "rows": (4, batch, heads, pad_count(tiles), tile),
        "drows": (_tokens.NUM_DROWS, batch, heads, pad_count(tiles), tile),
        "overlap": (batch, heads, pad_count(tiles), TILE_P),
        "partial": (2, heads, pad_count(batch * tiles)),
        "tiles": (rows_at_once, heads, pad_count(tiles_at_once), head_size, state_size),
        "segments": (batch, heads, pad_count(segments), head_size, state_size),
        "segment_decay": (batch, heads, pad_count(segments)),
        # Never a multiple of 16, which would be another compilation.
        "parts": (batch, tokens, groups * parts + (groups * parts % 16 == 0), state_size),
    }
    plan.saved_dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    wide = needs_wide(tensors) or max(math.prod(shape) for shape in plan.shapes.values()) >= INT32_REACH
    precision = precision_of(x.dtype)
    plan.rows = rows_step(batch, heads, tiles, forward, wide)

    builder = _Builder(dims, (tiles_per_segment, heads // groups, tiles), precision, config, wide)
    for_tokens = need["x"] or need["a"] or need["d"] or need["dt"]
    for_groups = need["b"] or need["c"]
    has_init = init_state is not None
    plan.entries, plan.for_groups = for_tokens or for_groups, for_groups
    if segments > 1:
        plan.segment_borders = builder.segment_borders(segments, plan.entries)
    # Also where there is one segment: the walks then read the same form of array, and compile once.
    plan.pass_borders = builder.pass_borders(segments, (plan.entries, has_init, dfinal_state is not None))
    for first_row in range(0, batch, rows_at_once):
        count = min(rows_at_once, batch - first_row)
        rows = None if count == batch else slice(first_row, first_row + count)
        for first in range(0, segments, segments_at_once):
            part = _Part(count, first, min(segments_at_once, segments - first))
            window = tiles_per_segment * tile
            span = slice(first * window, min((first + part.segments) * window, tokens))
            walk = builder.tile_states(part, plan.entries, has_init)
            piece = _Piece(rows, span, walk)
            if for_tokens and for_groups and config.fused(precision, head_size, state_size):
                piece.compute_gradients = builder.compute_gradients(part, groups, group_heads, d is not None)
            else:
                if for_tokens:
                    piece.compute_dx = builder.compute_dx(part, groups, d is not None)
                if for_groups:
                    piece.compute_dbc = builder.compute_dbc(part, groups, group_heads)
            plan.pieces.append(piece)
    if for_tokens:
        plan.finish_dt = builder.finish_dt(d is not None)
        plan.sum_heads = builder.sum_heads(d is not None)
    if for_groups and parts > 1:
        plan.sum_parts = builder.sum_parts(groups, parts)
    return plan


class _Part(NamedTuple):
    """Some batch rows (how many), some segments (the first, how many)."""

    rows: int
    first: int
    segments: int


class _Builder:
    """The backward's own steps for one problem.

    dims: (B, H, P, N); sizes: (tiles a segment, heads a group, tiles).
    """

    def __init__(
        self,
        dims: tuple[int, int, int, int],
        sizes: tuple[int, int, int],
        precision: int,
        config: BackwardConfig,
        wide: bool,
    ) -> None:
        self.batch, self.heads, self.head_size, self.state_size = dims
        self.tiles_per_segment, self.heads_per_group, self.tiles = self.sizes = sizes
        self.precision, self.config, self.wide = precision, config, wide
        self.p_tiles = math.ceil(self.head_size / TILE_P)
        self.tile_n = min(tile_of(self.state_size), config.state_tile_n)
        self.n_tiles = math.ceil(self.state_size / self.tile_n)

    def _state_step(
        self, kernel: Any, part: _Part, hints: tuple[int, int], entries: bool, flags: Any
    ) -> Step:
        config = self.config
        occupancy, latency = hints
        compiler = (("occupancy", occupancy), ("num_worker_warps", config.state_warps))
        blocks = part.rows * part.segments * self.p_tiles * self.heads
        sizes = (*self.sizes, part.first, part.segments)
        return Step(
            hinted(kernel, self.wide, compiler),
            (blocks, self.n_tiles, 2 if entries else 1),
            (sizes, config.tile_tokens, TILE_P, self.tile_n, self.precision, flags, latency),
        )

    def segment_borders(self, segments: int, entries: bool) -> Step:
        part = _Part(self.batch, 1, segments - 1)
        hints = (self.config.segment_occupancy, self.config.segment_latency)
        return self._state_step(_states.segment_borders, part, hints, entries, entries)

    def tile_states(self, part: _Part, entries: bool, write_dinit: bool) -> Step:
        flags = (entries, write_dinit)
        hints = (self.config.state_occupancy, self.config.state_latency)
        return self._state_step(_states.tile_states, part, hints, entries, flags)

    def pass_borders(self, segments: int, flags: tuple[bool, bool, bool]) -> Step:
        config = self.config
        blocks = self.batch * math.ceil(self.head_size / config.pass_tile_p) * self.heads
        return Step(
            hinted(_states.pass_borders, self.wide, (("occupancy", config.pass_occupancy),)),
            (blocks, self.n_tiles, 2 if flags[0] else 1),
            (segments, config.pass_tile_p, self.tile_n, flags, PASS_AT_ONCE, config.pass_latency),
        )

    def _part_sizes(self, part: _Part, heads: int) -> tuple[int, int, int, int]:
        first_tile = part.first * self.tiles_per_segment
        tiles = min(part.segments * self.tiles_per_segment, self.tiles - first_tile)
        return tiles, self.heads_per_group, heads, first_tile

    def compute_dx(self, part: _Part, groups: int, has_d: bool) -> Step:
        config, heads_per_group = self.config, self.heads_per_group
        tiles = self._part_sizes(part, 1)[0]
        # Nothing is summed over heads here, so the cut may follow the batch.
        parts = config.parts(part.rows * tiles * groups, heads_per_group)
        heads = math.ceil(heads_per_group / parts)
        tile_n = config.token_tile_n(self.state_size)
        hints = (("occupancy", config.token_occupancy), ("num_worker_warps", config.token_warps))
        return Step(
            hinted(_tokens.compute_dx, self.wide, hints),
            (part.rows * tiles * groups * math.ceil(heads_per_group / heads),),
            (
                self._part_sizes(part, heads),
                config.tile_tokens,
                TILE_P,
                tile_n,
                (self.p_tiles, math.ceil(self.state_size / tile_n)),
                self.precision,
                has_d,
                config.token_latency,
            ),
        )

    def compute_dbc(self, part: _Part, groups: int, heads: int) -> Step:
        config = self.config
        sizes = self._part_sizes(part, heads)
        tile_n = config.group_tile_n(self.state_size)
        hints = (("occupancy", config.group_occupancy), ("num_worker_warps", config.group_warps))
        return Step(
            hinted(_groups.compute_dbc, self.wide, hints),
            (
                part.rows * sizes[0] * groups * math.ceil(self.heads_per_group / heads),
                math.ceil(self.state_size / tile_n),
            ),
            (
                sizes,
                config.tile_tokens,
                TILE_P,
                tile_n,
                self.p_tiles,
                self.precision,
                config.group_latency,
            ),
        )

    def compute_gradients(self, part: _Part, groups: int, heads: int, has_d: bool) -> Step:
        config = self.config
        sizes = self._part_sizes(part, heads)
        hints = (("occupancy", 1), ("num_worker_warps", 8))
        tile_n = tile_of(self.state_size)
        return Step(
            hinted(_gradients.compute_gradients, self.wide, hints),
            (part.rows * sizes[0] * groups * math.ceil(self.heads_per_group / heads),),
            (sizes, config.tile_tokens, TILE_P, tile_n, self.precision, has_d, config.fused_latency),
        )

    def sum_parts(self, groups: int, parts: int) -> Step:
        config = self.config
        grid = (self.batch * self.tiles * groups, self.n_tiles, 2)
        constants = (self.tiles, parts, config.tile_tokens, self.tile_n, config.pass_latency)
        return Step(hinted(_groups.sum_parts, self.wide), grid, constants)

    def finish_dt(self, has_d: bool) -> Step:
        config = self.config
        grid = (self.batch * self.tiles * math.ceil(self.heads / config.rows_heads),)
        constants = (self.tiles, config.tile_tokens, TILE_P, config.rows_heads, has_d)
        kernel = hinted(_decay.finish_dt, self.wide, (("occupancy", config.finish_occupancy),))
        return Step(kernel, grid, constants)

    def sum_heads(self, has_d: bool) -> Step:
        constants = (self.batch * self.tiles, self.config.sum_tile, has_d)
        return Step(hinted(_decay.sum_heads, self.wide), (self.heads,), constants)

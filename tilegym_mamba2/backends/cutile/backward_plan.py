"""What a backward launches for one form of its tensors, laid out once: shapes of scratch, grids, constants.

The bare backward and that of the whole scan share it; what only the scan has is in `scan_backward`.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import tuning
from .backward_config import BackwardConfig, config_for
from .forward import PASS_AT_ONCE, TILE_P, pad_count, precision_of, rows_step, tile_of
from .kernels import bwd_decay as _decay
from .kernels import bwd_gradients as _gradients
from .kernels import bwd_groups as _groups
from .kernels import bwd_sides as _sides
from .kernels import bwd_states as _states
from .kernels import bwd_tiles as _tiles
from .kernels import bwd_tokens as _tokens
from .kernels.products import BF16
from .kernels.scan_out import NO_SKIP, SKIP_PER_CHANNEL, SKIP_PER_HEAD
from .launch import INT32_REACH, Lanes, Launch, Seen, Step, hinted, needs_wide, run_plan
from .ragged import Ragged

__all__ = ["NO_SKIP", "SKIP_PER_CHANNEL", "SKIP_PER_HEAD", "Builder", "Piece", "Plan", "Problem", "make_plan"]


@dataclass(frozen=True)
class Problem:
    """What a backward has to do, beside its tensors' forms.

    Args:
        needed: the inputs whose gradients are wanted.
        skip: what d is: NO_SKIP, SKIP_PER_HEAD or SKIP_PER_CHANNEL.
        has_init, has_dfinal: whether there is an initial state, and a gradient of the final one.
        steps: (has_bias, softplus, dt_min, dt_max), of what dt goes through first. None: nothing.
        sequences: S of packed sequences, else None.
        lengths: whether the device knows lengths of rows (seq_lens).
        given_entries: the states at the segments' entries come from the forward's kernels. Ragged: always.
    """

    needed: frozenset[str]
    skip: int
    has_init: bool
    has_dfinal: bool
    steps: tuple[bool, bool, float, float] | None = None
    sequences: int | None = None
    lengths: bool = False
    given_entries: bool = False

    @property
    def ragged(self) -> bool:
        return self.sequences is not None or self.lengths

    @property
    def for_tokens(self) -> bool:
        """Whether a gradient is wanted that `compute_dx` leads to."""
        wanted = {"x", "a", "dt", "dt_bias"} | ({"d"} if self.skip == SKIP_PER_HEAD else set())
        return not wanted.isdisjoint(self.needed)

    @property
    def for_groups(self) -> bool:
        return not {"b", "c"}.isdisjoint(self.needed)

    @property
    def walks(self) -> bool:
        """Whether any of the backward's kernels but the last sums is wanted."""
        return self.for_tokens or self.for_groups or "init_state" in self.needed


@dataclass
class Piece:
    """What is done for some segments of some batch rows, whose tiles' states are in memory at a time.

    `batch`: those rows; None: all, and no tensor needs to be sliced. `tokens`: those of the segments.
    """

    batch: slice | None
    tokens: slice
    tile_states: Step
    compute_dx: Step | None = None
    compute_dbc: Step | None = None
    compute_gradients: Step | None = None
    compute_dx_side: Step | None = None
    compute_dbc_side: Step | None = None

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
class Plan:
    """All that a call needs and that shapes, strides and dtypes decide."""

    empty: bool
    # x, b, c or dout must be copied first, see `aligned`; nothing else is set then.
    copies: bool = False
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    saved_dtype: torch.dtype = torch.float32
    # Of those shapes, once they were needed; see `forward.memory_form`.
    forms: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    rows: Step | None = None
    # Whether states are wanted beside their gradients, and whether db and dc are.
    entries: bool = False
    for_groups: bool = False
    # Whether the sums per token are those of `compute_gradients`, see `halves`.
    in_shares: bool = False
    # Whether the kernels are those of `bwd_sides`.
    in_sides: bool = False
    # Whether the states at the segments' entries are kept.
    keeps_entries: bool = False
    # Whether da is given what the rounding of saved states takes from it.
    cuts_off: bool = False
    # Whether finish_dt and sum_heads give dd as well.
    writes_dd: bool = False
    segment_borders: Step | None = None
    pass_borders: Step | None = None
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    # How many pieces run side by side, each with memory of its own.
    lanes: int = 1
    finish_dt: Step | None = None
    sum_heads: Step | None = None
    sum_parts: Step | None = None
    ragged: Ragged | None = None
    seen: Seen = dataclasses.field(default_factory=lambda: Seen(repeats=True))

    def run(self, launches: list[Launch | Lanes], device: torch.device, op: str) -> None:
        run_plan(launches, device, op, self.seen)


def make_plan(problem: Problem, tensors: dict[str, torch.Tensor | None], plan: Plan) -> "Builder":
    """Fills in the plan for tensors (by name) with at least one token; returns what laid it out."""
    x, b = tensors["x"], tensors["b"]
    batch, tokens, heads, head_size = x.shape
    groups, state_size = b.shape[2:]
    config, precision = config_for(x, b), precision_of(x.dtype)
    tile = config.tile_tokens
    tiles_of_row = math.ceil(tokens / tile)
    p_tiles = math.ceil(head_size / TILE_P)
    n_tiles = math.ceil(state_size / min(tile_of(state_size), config.state_tile_n))
    blocks = heads * p_tiles * n_tiles
    tiles_per_segment = config.tiles_per_segment(tiles_of_row, blocks)
    forward = dataclasses.replace(tuning.default_config(tuning.problem_key(x, b)), tile_tokens=tile)
    if problem.given_entries:
        # The gate's gradients are computed first, by the forward's kernel, which has no other blocks.
        wanted, _ = forward.segments(tokens, heads * p_tiles)
        tiles_per_segment = min(tiles_per_segment, max(wanted, config.min_segment_tiles))
    if problem.sequences is not None:
        tiles_per_segment = config.tiles_per_packed_segment(
            tiles_per_segment, tiles_of_row, problem.sequences
        )
    fused = problem.for_tokens and problem.for_groups and config.fused(precision, head_size, state_size)
    in_sides = problem.for_tokens and problem.for_groups and not fused
    in_sides = in_sides and config.in_sides(precision, head_size)
    in_shares = fused or in_sides
    # Of what `compute_dbc_side` sums over the columns of N.
    n_parts = math.ceil(state_size / min(tile_of(state_size), config.side_group_tile_n)) if in_sides else 0
    paired = in_shares and config.in_pairs(fused, state_size)
    # A pair of tiles lies in one segment.
    tiles_per_segment += paired and tiles_per_segment % 2
    # Of the scratch arrays: batch, tiles, segments, and what crosses their borders.
    rows, tiles, segments = batch, tiles_of_row, math.ceil(tiles_of_row / tiles_per_segment)
    borders = segments
    if problem.ragged:
        plan.ragged = Ragged(
            batch, tokens, problem.sequences, problem.lengths, tiles_per_segment * tile, tile
        )
        rows, tiles, segments = 1, plan.ragged.tiles, plan.ragged.slots
        borders = plan.ragged.carried
    parts = config.parts(
        tiles_of_row * groups * math.ceil(state_size / config.group_tile_n(state_size)), heads // groups
    )
    # The heads that one block of compute_dbc takes; the number of parts follows from it.
    group_heads = math.ceil(heads // groups / parts)
    parts = math.ceil(heads // groups / group_heads)
    if problem.ragged:
        rows_at_once = 1
        segments_at_once = config.slots_at_once(segments, tiles, tiles_per_segment, blocks)
    else:
        rows_at_once, segments_at_once = config.piece(rows, segments, blocks, tiles_per_segment)
    states_at_once = min(tiles, segments_at_once * tiles_per_segment)
    tiles_at_once = states_at_once
    if paired:
        # Ragged: a slot may take half a state more than its tiles, see `first_saved`.
        states_at_once = math.ceil((states_at_once + (problem.ragged and segments_at_once)) / 2)
    overlap_parts = max(n_parts, 1) * (_tiles.OVERLAP_PARTS if paired else 1)
    has_bias = problem.steps is not None and problem.steps[0]
    if in_shares:
        drows = (rows, heads, pad_count(tiles), _tiles.NUM_SHARES * tile)
        if in_sides:
            drows = (*drows[:3], 2 * (_tiles.SHARES_OF_PARTS + n_parts) * tile)
    else:
        drows = (_tokens.NUM_DROWS, rows, heads, pad_count(tiles), tile)
    score_tiles = _sides.SCORES_OF_PAIR if paired else _sides.SCORES_ALONE
    # Of each batch row and head, one for each block that walks. Four times an odd number of them are kept:
    # times B that is a multiple of 16 whatever T is, or never.
    cut_offs = segments * 2 * p_tiles * n_tiles
    plan.shapes = {
        "rows": (4, rows, heads, pad_count(tiles), tile),
        "drows": drows,
        "overlap": (rows, heads, pad_count(tiles), TILE_P * overlap_parts),
        "partial": (3 if has_bias else 2, heads, pad_count(rows * tiles)),
        "tiles": (rows_at_once, heads, pad_count(states_at_once), head_size, state_size),
        # Columns in one axis with rows of tiles: one of size 1 would be another compilation.
        "dscores": (rows_at_once, pad_count(tiles_at_once), groups * parts * score_tiles * tile, tile),
        "segments": (rows, heads, pad_count(borders), head_size, state_size),
        "cut_offs": (heads, rows, 4 * (math.ceil(cut_offs / 4) | 1)),
        "segment_decay": (rows, heads, pad_count(borders)),
        # Never a multiple of 16, which would be another compilation.
        "parts": (batch, tokens, groups * parts + (groups * parts % 16 == 0), state_size),
    }
    plan.saved_dtype = torch.bfloat16 if x.dtype is torch.bfloat16 else torch.float32
    largest = max(math.prod(shape) for shape in plan.shapes.values())
    wide = needs_wide(tuple(tensors.values())) or largest >= INT32_REACH
    dims = (rows, heads, head_size, state_size)
    builder = Builder(problem, dims, (tiles_per_segment, heads // groups, tiles), precision, config, wide)
    builder.forward, builder.segments = forward, segments
    builder.fused, builder.paired, builder.in_shares = fused, paired, in_shares
    builder.nearest = config.nearest_tokens if "a" in problem.needed and precision == BF16 else 0
    plan.cuts_off = builder.nearest > 0
    builder.cut_offs = (cut_offs, plan.shapes["cut_offs"][2])
    builder.n_parts, builder.overlap_parts = n_parts, overlap_parts
    plan.in_shares, plan.in_sides = in_shares, in_sides
    if problem.steps is None:
        plan.rows = rows_step(batch, heads, tiles, forward, wide)
    for_tokens, for_groups = problem.for_tokens, problem.for_groups
    plan.entries, plan.for_groups = for_tokens or for_groups, for_groups
    plan.keeps_entries = plan.entries or problem.given_entries
    if not problem.walks:
        return builder
    entries = plan.entries and not (problem.given_entries or problem.ragged)
    if problem.ragged:
        if borders:
            plan.segment_borders = builder.carried_borders(borders)
            plan.pass_borders = builder.pass_borders(0, borders, entries)
    else:
        if segments > 1:
            plan.segment_borders = builder.segment_borders(segments, entries)
        # Also where there is one segment: the walks then read the same form of array, and compile once.
        plan.pass_borders = builder.pass_borders(segments, batch, entries)
    for first_row in range(0, rows, rows_at_once):
        count = min(rows_at_once, rows - first_row)
        some_rows = None if count == rows else slice(first_row, first_row + count)
        for first in range(0, segments, segments_at_once):
            part = _Part(count, first, min(segments_at_once, segments - first))
            window = tiles_per_segment * tile
            span = slice(first * window, min((first + part.segments) * window, tokens))
            piece = Piece(some_rows, span, builder.tile_states(part, plan.entries))
            if fused:
                piece.compute_gradients = builder.compute_gradients(part, groups, group_heads)
            elif in_sides:
                piece.compute_dx_side = builder.compute_dx_side(part, groups, group_heads)
                piece.compute_dbc_side = builder.compute_dbc_side(part, groups, group_heads)
            else:
                if for_tokens:
                    piece.compute_dx = builder.compute_dx(part, groups)
                if for_groups:
                    piece.compute_dbc = builder.compute_dbc(part, groups, group_heads)
            plan.pieces.append(piece)
    plan.lanes = min(config.lanes, len(plan.pieces))
    if for_tokens:
        plan.finish_dt = builder.finish_dt()
        plan.sum_heads = builder.sum_heads()
        plan.writes_dd = builder.has_d
    if for_groups and parts > 1:
        plan.sum_parts = builder.sum_parts(batch * tiles_of_row, tiles_of_row, groups, parts)
    return builder


class _Part(NamedTuple):
    """Some batch rows (how many), some segments (the first, how many)."""

    rows: int
    first: int
    segments: int


class Builder:
    """The backward's own steps for one problem.

    dims: (batch of the scratch arrays, H, P, N); sizes: (tiles a segment, heads a group, tiles).
    """

    # The forward's configuration for the same sizes, how many segments there are, whether one kernel computes
    # all gradients, and whether states are saved for pairs of tiles.
    forward: tuning.ForwardConfig
    segments: int
    fused: bool
    paired: bool
    in_shares: bool
    n_parts: int
    overlap_parts: int
    nearest: int
    cut_offs: tuple[int, int]

    def __init__(
        self,
        problem: Problem,
        dims: tuple[int, int, int, int],
        sizes: tuple[int, int, int],
        precision: int,
        config: BackwardConfig,
        wide: bool,
    ) -> None:
        self.batch, self.heads, self.head_size, self.state_size = self.dims = dims
        self.tiles_per_segment, self.heads_per_group, self.tiles = self.sizes = sizes
        self.problem, self.ragged, self.has_d = problem, problem.ragged, problem.skip == SKIP_PER_HEAD
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
        return self._borders(part, entries, False)

    def carried_borders(self, borders: int) -> Step:
        """`segment_borders` for ragged sequences: of all segments that others follow."""
        return self._borders(_Part(1, 0, borders), False, True)

    def _borders(self, part: _Part, entries: bool, ragged: bool) -> Step:
        config = self.config
        hints = (config.segment_occupancy, config.segment_latency)
        return self._state_step(
            _states.segment_borders, part, hints, entries, (entries, ragged, config.border_parts)
        )

    def tile_states(self, part: _Part, entries: bool) -> Step:
        problem, config = self.problem, self.config
        states = (problem.has_init, problem.has_dfinal) if self.ragged else (False, False)
        every = 2 if self.paired else 1
        flags = (entries, problem.has_init, self.ragged, *states, every, config.uptake_parts, self.nearest)
        hints = (config.state_occupancy, config.state_latency)
        return self._state_step(_states.tile_states, part, hints, entries, flags)

    def pass_borders(self, segments: int, passes: int, entries: bool) -> Step:
        config, problem = self.config, self.problem
        flags = (entries, problem.has_init and not self.ragged, problem.has_dfinal, self.ragged)
        blocks = passes * math.ceil(self.head_size / config.pass_tile_p) * self.heads
        return Step(
            hinted(_states.pass_borders, self.wide, (("occupancy", config.pass_occupancy),)),
            (blocks, self.n_tiles, 2 if entries else 1),
            (segments, config.pass_tile_p, self.tile_n, flags, PASS_AT_ONCE, config.pass_latency),
        )

    def _part_sizes(self, part: _Part, heads: int) -> tuple[int, int, int, int, int]:
        first, tiles = part.first, part.segments * self.tiles_per_segment
        if self.ragged:
            return min(tiles, self.tiles), self.heads_per_group, heads, first, part.segments
        first_tile = first * self.tiles_per_segment
        return min(tiles, self.tiles - first_tile), self.heads_per_group, heads, first_tile, part.segments

    def compute_dx(self, part: _Part, groups: int) -> Step:
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
                (self.problem.skip, self.ragged),
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
                (self.ragged, config.weigh_last),
                config.group_latency,
            ),
        )

    def compute_gradients(self, part: _Part, groups: int, heads: int) -> Step:
        config = self.config
        sizes = self._part_sizes(part, heads)
        hints = (("occupancy", 1), ("num_worker_warps", 8))
        tile_n = tile_of(self.state_size)
        return Step(
            hinted(_gradients.compute_gradients, self.wide, hints),
            (part.rows * sizes[0] * groups * math.ceil(self.heads_per_group / heads),),
            (
                sizes,
                config.tile_tokens,
                TILE_P,
                tile_n,
                self.precision,
                (self.problem.skip, self.ragged, self.paired, config.remainders if self.paired else 0),
                config.fused_latency,
            ),
        )

    def compute_dx_side(self, part: _Part, groups: int, heads: int) -> Step:
        config = self.config
        tile_n = min(tile_of(self.state_size), config.side_token_tile_n)
        flags = (self.problem.skip, self.ragged, self.paired, self.n_parts)
        constants = (tile_n, math.ceil(self.state_size / tile_n), self.precision, flags)
        return self._side_step(_sides.compute_dx_side, part, (groups, heads, 1), constants)

    def compute_dbc_side(self, part: _Part, groups: int, heads: int) -> Step:
        tile_n = min(tile_of(self.state_size), self.config.side_group_tile_n)
        constants = (tile_n, self.precision, (self.ragged, self.paired))
        return self._side_step(_sides.compute_dbc_side, part, (groups, heads, self.n_parts), constants)

    def _side_step(
        self, kernel: Any, part: _Part, cut: tuple[int, int, int], constants: tuple[Any, ...]
    ) -> Step:
        """cut: (groups, heads a block, parts of N)."""
        config, (groups, heads, n_parts) = self.config, cut
        sizes = self._part_sizes(part, heads)
        return Step(
            hinted(kernel, self.wide, (("occupancy", 1), ("num_worker_warps", 8))),
            (part.rows * sizes[0] * groups * math.ceil(self.heads_per_group / heads), n_parts),
            (sizes, config.tile_tokens, TILE_P, *constants, config.side_latency),
        )

    def sum_parts(self, tiles: int, tiles_of_row: int, groups: int, parts: int) -> Step:
        """For `tiles` tiles of the token arrays, those of padding too."""
        config = self.config
        grid = (tiles * groups, self.n_tiles, 2)
        constants = (tiles_of_row, parts, config.tile_tokens, self.tile_n, config.pass_latency)
        return Step(hinted(_groups.sum_parts, self.wide), grid, constants)

    def finish_dt(self) -> Step:
        config, steps = self.config, self.problem.steps
        has_bias, softplus, dt_min, dt_max = steps or (False, False, 0.0, 0.0)
        flags = (
            self.has_d,
            self.ragged,
            steps is not None,
            has_bias,
            softplus,
            self.in_shares,
            self.overlap_parts,
            self.n_parts,
        )
        grid = (self.batch * self.tiles * math.ceil(self.heads / config.rows_heads),)
        constants = (self.tiles, dt_min, dt_max, config.tile_tokens, TILE_P, config.rows_heads, flags)
        kernel = hinted(_decay.finish_dt, self.wide, (("occupancy", config.finish_occupancy),))
        return Step(kernel, grid, constants)

    def sum_heads(self) -> Step:
        has_bias = self.problem.steps is not None and self.problem.steps[0]
        flags = (self.has_d, has_bias, self.nearest > 0)
        counts = (self.batch * self.tiles, *self.cut_offs)
        constants = (*counts, self.config.sum_tile, flags)
        return Step(hinted(_decay.sum_heads, self.wide), (self.heads,), constants)

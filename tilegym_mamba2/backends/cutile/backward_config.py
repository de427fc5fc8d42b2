"""Configurations of the backward pipeline: what fixes its rounding, and compiler hints.

As in the forward's, the batch size is not asked for anything that changes a result.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Optional

import torch

from .forward import TILE_P, precision_of, tile_of
from .kernels.products import BF16, TF32X3
from .tuning import arch_of


@dataclass(frozen=True)
class BackwardConfig:
    """One configuration of the backward's kernels.

    The result depends on `tile_tokens`, the segments, `part_blocks`, `group_tile_n_max`, `weigh_last`,
    `paired`, the choice and pairs of `sides`, `remainders`, `nearest_tokens` and the numbers of parts, and in
    its last bits on `token_tile_n_max`, `side_token_tile_n`, `skip_tiles` and `sum_tile`; the rest only moves
    time and memory.
    """

    tile_tokens: int = 64
    # Into how many blocks a batch row is cut for a walk in one direction, H, P and N included, as far as
    # these bounds on a segment's tiles allow.
    segment_blocks: int = 64
    min_segment_tiles: int = 4
    max_segment_tiles: int = 32
    # How many blocks walk at a time if their segments are as long as they may be. With max_segment_tiles it
    # bounds the states in memory of each lane, to 134 MB at P 64, N 128 in bfloat16, twice that unless
    # `paired`. Every launch costs some 5 us of blocks that end and begin.
    piece_blocks: int = 256
    # Where it takes at most so many times that memory, all walk at once, else in two pieces or more.
    at_once: float = 1.5
    # The same for ragged sequences. Memory must be there for pieces whose segments are all full, and they are
    # not: two pieces take as much as one, and of four each costs some 40 us of idle multiprocessors.
    ragged_at_once: float = 1.5
    # How many pieces run side by side, so that one fills the multiprocessors that another leaves idle: N 512
    # 1763 to 1650 us, N 256 921 to 890; three lanes are no faster.
    lanes: int = 2
    # Heads of a group go to several blocks until a batch row has this many blocks.
    part_blocks: int = 132
    rows_heads: int = 8
    finish_occupancy: int = 8
    state_tile_n: int = 128
    segment_occupancy: int = 2
    segment_latency: int = 1
    state_occupancy: int = 2
    state_warps: int = 4
    state_latency: int = 3
    pass_tile_p: int = 8
    pass_occupancy: int = 4
    pass_latency: int = 5
    token_tile_n_max: int = 128
    token_occupancy: int = 2
    token_warps: int = 4
    token_latency: int = 3
    group_tile_n_max: int = 128
    group_occupancy: int = 2
    group_warps: int = 4
    group_latency: int = 3
    # `compute_dbc` weighs the products with the states, not their operands: one rounding less.
    weigh_last: bool = True
    # Up to this N, and P 64, one kernel computes all gradients in bfloat16. 0: never.
    fused_tile_n_max: int = 128
    fused_latency: int = 3
    # Beyond it, for P 64 in bfloat16, the two kernels of `bwd_sides`, in so many columns of N.
    sides: bool = False
    side_token_tile_n: int = 128
    side_group_tile_n: int = 256
    side_latency: int = 3
    # They are given the states of pairs of tiles: half the memory.
    side_pairs: bool = True
    # `compute_gradients` is given the states of pairs of tiles: half the memory. See `bwd_pairs`.
    paired: bool = True
    # In how many bfloat16 parts states take up weighted tokens, in `tile_states` and, next to the borders,
    # in `segment_borders`; of two their rounding is gone. da of the publication's inputs at T 4096, root
    # mean square over eight seeds: 9.2e-4 to 2.6e-4, the worst 2.5e-3 to 6.1e-4 (interpreted).
    uptake_parts: int = 2
    border_parts: int = 2
    # In the second tile of a pair one head of so many has its weighted x enter db in two parts: where nothing
    # decays 2.86e-3 to 2.74e-3. Of the published benchmark `compute_gradients` 298 us, one head of four 299,
    # of two 303. 0: none has.
    remainders: int = 3
    # So many tokens next to a saved state make up, in da, for its rounding to bfloat16 where memory is short:
    # of the publication's inputs 2.4e-4 to 1.4e-5, of violent decay 1.2e-3 to 8.4e-4. 0: none do.
    nearest_tokens: int = 16
    sum_tile: int = 1024
    # dd (H, P): tiles of tokens that a block sums up, and how many of those sums at a time.
    skip_tiles: int = 16
    skip_latency: int = 3
    skip_sum_tile: int = 16

    _override: ClassVar[Optional["BackwardConfig"]] = None

    @property
    def most_states(self) -> int:
        """How many tiles' states are in memory at a time, in each lane."""
        return self.piece_blocks * self.max_segment_tiles

    def tiles_per_segment(self, tiles: int, blocks: int) -> int:
        """For a batch row of that many tiles of tokens, and of heads (times the tiles of P and of N)."""
        wanted = min(self.max_segment_tiles, math.ceil(tiles * blocks / self.segment_blocks))
        # A piece is at least a segment of all blocks.
        wanted = max(self.min_segment_tiles, min(wanted, self.most_states // blocks))
        # Segments of equal size, as far as possible.
        return max(self.min_segment_tiles, math.ceil(tiles / math.ceil(tiles / wanted)))

    def tiles_per_packed_segment(self, wanted: int, tiles: int, sequences: int) -> int:
        """The same for that many packed sequences: segments much longer than those would mostly be empty."""
        return min(wanted, max(self.min_segment_tiles, 2 * math.ceil(tiles / sequences)))

    def piece(self, batch: int, segments: int, blocks: int, tiles: int) -> tuple[int, int]:
        """(batch rows, segments) whose tiles' states are in memory at a time.

        blocks: those that walk one segment of one batch row, of so many tiles. Moves time and memory only.
        """
        wanted = batch * segments * blocks
        if wanted * tiles <= self.most_states * self.at_once:
            return batch, segments
        most = self._most(wanted, self.most_states // tiles)
        rows = max(1, min(batch, most // blocks))
        wanted = max(1, most // (rows * blocks))
        # Pieces of equal size, as far as possible.
        rows = math.ceil(batch / math.ceil(batch / rows))
        return rows, math.ceil(segments / math.ceil(segments / wanted))

    def slots_at_once(self, slots: int, tiles: int, tiles_per_segment: int, blocks: int) -> int:
        """How many segments of ragged sequences have their tiles' states in memory at a time.

        A segment may be full, so that memory for it is; all of them together have no more than `tiles`.
        blocks: those that walk one segment.
        """
        most = self.most_states
        if tiles * blocks <= most * self.ragged_at_once:
            return slots
        most = self._most(tiles * blocks, most)
        wanted = max(1, most // (tiles_per_segment * blocks))
        return math.ceil(slots / math.ceil(slots / wanted))

    @staticmethod
    def _most(wanted: int, bound: int) -> int:
        """How many of `wanted`, which are too many to be at hand at once, may be."""
        return bound if wanted > bound else math.ceil(wanted / 2)

    def token_tile_n(self, state_size: int) -> int:
        """Columns of N that `compute_dx` takes at once."""
        return min(tile_of(state_size), self.token_tile_n_max)

    def group_tile_n(self, state_size: int) -> int:
        """Columns of N that a block of `compute_dbc` takes."""
        return min(tile_of(state_size), self.group_tile_n_max)

    def fused(self, precision: int, head_size: int, state_size: int) -> bool:
        """Whether `compute_gradients` serves these sizes."""
        one_tile = head_size <= TILE_P and tile_of(state_size) <= self.fused_tile_n_max
        return precision == BF16 and one_tile

    def in_sides(self, precision: int, head_size: int) -> bool:
        """Whether `compute_dx_side` and `compute_dbc_side` serve these sizes."""
        return self.sides and precision == BF16 and head_size <= TILE_P

    def in_pairs(self, fused: bool, state_size: int) -> bool:
        """Whether one state serves two tiles: in `compute_gradients`, if `fused`, or in `bwd_sides`."""
        # Beyond 128 columns there are no registers for it in one kernel.
        wanted = self.paired and tile_of(state_size) <= 128 if fused else self.side_pairs
        return wanted and self.tile_tokens == TILE_P

    def parts(self, blocks: int, heads_per_group: int) -> int:
        """In how many parts a group's heads are cut, when a part each would make `blocks` blocks."""
        return max(1, min(heads_per_group, self.part_blocks // blocks))

    @staticmethod
    def overridden() -> Optional["BackwardConfig"]:
        return BackwardConfig._override

    @staticmethod
    @contextlib.contextmanager
    def override(config: "BackwardConfig") -> Iterator[None]:
        """Within it every backward uses `config`, in all threads: for tests and sweeps."""
        before, BackwardConfig._override = BackwardConfig._override, config
        try:
            yield
        finally:
            BackwardConfig._override = before


def config_for(x: torch.Tensor, b: torch.Tensor) -> BackwardConfig:
    """The configuration for x (B, T, H, P) and b (B, T, G, N)."""
    if BackwardConfig._override is not None:
        return BackwardConfig._override
    return default_config(arch_of(x.device), precision_of(x.dtype), x.shape[2:], b.shape[3])


def default_config(arch: str, precision: int, head_shape: tuple[int, int], state_size: int) -> BackwardConfig:
    """What compiles everywhere, and on sm_90 spills little where anything; the compile tests say where.

    precision: how inputs enter products; head_shape: (H, P).
    """
    heads, head_size = head_shape
    config = BackwardConfig()
    if heads >= 16:
        # Models of this size run at B 1 too: fill the GPU from one row. From 80 heads on a row in one segment
        # has enough blocks, and no borders to pass: 8192 tokens, 80 heads 614 us in seven segments, 591 in
        # two or four, 568 in one; 128 heads 914, 840 in two, 790 in one.
        config = dataclasses.replace(config, segment_blocks=80, max_segment_tiles=128, part_blocks=264)
        config = dataclasses.replace(config, piece_blocks=128, lanes=1)
    if arch != "sm_90":
        # They would cost the walk 90 to 120 bytes of spills or, on sm_100, the copy engine's warp.
        config = dataclasses.replace(config, nearest_tokens=0)
    if arch in ("sm_100", "sm_103"):
        # tileiras 13.4 does not compile the walk over pairs of tiles there.
        config = dataclasses.replace(config, paired=False, side_pairs=False)
    if arch not in ("sm_90", "sm_100", "sm_103"):
        # Where products take their sums from ordinary registers, all gradients at once spill.
        config = dataclasses.replace(config, fused_tile_n_max=0)
    if precision == BF16:
        # tileiras 13.4 fails on sm_100 with all 128 columns at once.
        if state_size > 128 or arch != "sm_90":
            config = dataclasses.replace(config, token_tile_n_max=64)
        if head_size > 64:
            return dataclasses.replace(config, token_occupancy=1, token_warps=8, group_tile_n_max=64)
        if heads >= 16 and config.fused_tile_n_max:
            # Also for 65536 tokens, in 2.1 GB of states: 80 heads 5441 to 4042 us, 128 heads 7500 to 5935.
            most = 1024 if state_size <= 128 else 512
            config = dataclasses.replace(config, max_segment_tiles=most, at_once=1.0, ragged_at_once=1.0)
            if arch == "sm_90" and state_size <= 64:
                # Of 80 heads `tile_states` takes 152 us with hint 3 and 127 with 2, of 65536 tokens 1171 and
                # 958; of the published benchmark's eight 102 and 107.
                config = dataclasses.replace(config, state_latency=2)
        if arch == "sm_90" and state_size > 128 and heads < 16:
            # Longer segments, as the tiles of N are blocks too, and all at once: N 512 1462 us in eight
            # segments and four pieces on two lanes, 1281 in two segments (1221 in one, which leaves half of
            # the GPU idle at B 1); N 256 806 in eight and two, 783 in four.
            most = 64 if state_size <= 256 else 128
            config = dataclasses.replace(config, max_segment_tiles=most, lanes=1)
        if arch == "sm_90" and state_size > 256:
            config = dataclasses.replace(config, sides=True)
            # N 512 in tiles of 256, eight warps: compute_dx 660 to 560 us, compute_dbc 479 to 411.
            config = dataclasses.replace(config, token_tile_n_max=256, token_occupancy=1, token_warps=8)
            # No room for another sum of (L, 256).
            config = dataclasses.replace(config, weigh_last=False)
            return dataclasses.replace(config, group_tile_n_max=256, group_occupancy=1, group_warps=8)
        if arch == "sm_90" and state_size > 128:
            # 176 bytes of spills, and still 476 us against 310 + 237 in two kernels (N 256).
            config = dataclasses.replace(config, fused_tile_n_max=256)
        if heads < 16 and state_size <= 128 and config.fused_tile_n_max:
            # Published benchmark: at once 469 to 481 us and 295 MB; in two pieces 498 to 508 us and 227 MB;
            # in three on two lanes 503 us and 265 MB.
            config = dataclasses.replace(config, at_once=0.75, lanes=1)
        if state_size > 64:
            # Two sums of (L, 128) leave no room for a second block.
            config = dataclasses.replace(config, group_occupancy=1)
        return config
    # tf32 operands take twice the shared memory, and pass through it to be transposed.
    split = precision == TF32X3
    return dataclasses.replace(
        config,
        state_occupancy=1,
        state_latency=1,
        token_tile_n_max=64,
        token_occupancy=1,
        token_warps=8 if split or head_size > 64 else 4,
        token_latency=1,
        group_tile_n_max=64 if split else 128,
        group_occupancy=1,
        group_warps=8 if split else 4,
        group_latency=1,
        # With one tf32 product it spills.
        weigh_last=split,
    )

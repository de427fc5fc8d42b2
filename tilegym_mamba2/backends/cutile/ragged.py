"""Ragged sequences on the host: how large the table of their segments is, and the launch that makes it.

Sizes follow from shapes alone, so that lengths stay on the device; see `kernels.scan_table`.
"""

import math
from dataclasses import dataclass

import torch

from .forward import pad_count
from .kernels import scan_table as _table
from .launch import Launch, Step, hinted

# What a small block compares in registers: 97 a thread and a microsecond a round; 64 × 256 spill.
TILE_SLOTS, TILE_SEQUENCES = 16, 128


@dataclass(frozen=True)
class Ragged:
    """The segments of a batch of sequences, as far as the host knows them.

    Args:
        batch, tokens: of the token arrays.
        sequences: S of packed sequences, else None: each row is a sequence, and may be padded.
        lengths: whether the device knows the rows' lengths (seq_lens); else they have all tokens. False where
            sequences are packed.
        segment_tokens: tokens a segment, at least 1.
        tile: L, tokens of a tile of the scratch arrays.
        keep_empty: whether an empty packed sequence has a slot. An empty row always has.
    """

    batch: int
    tokens: int
    sequences: int | None
    lengths: bool
    segment_tokens: int
    tile: int
    keep_empty: bool = True

    @property
    def slots(self) -> int:
        """Rows of the table."""
        if self.sequences is None:
            return self.batch * math.ceil(self.tokens / self.segment_tokens)
        # One segment of every sequence may be short, and one of the padding after them.
        return self.tokens // self.segment_tokens + self.sequences + self.keep_empty

    @property
    def carried(self) -> int:
        """Segments that others follow, at most."""
        if self.sequences is None:
            return self.batch * max(0, math.ceil(self.tokens / self.segment_tokens) - 1)
        return self.tokens // self.segment_tokens

    @property
    def tiles_per_segment(self) -> int:
        return math.ceil(self.segment_tokens / self.tile)

    @property
    def tiles(self) -> int:
        """Tiles of L tokens in scratch arrays."""
        if self.sequences is None:
            return self.batch * self._tiles_per_row
        if self.segment_tokens % self.tile == 0:
            return self.tokens // self.tile + self.sequences
        return (self.tokens // self.segment_tokens + self.sequences) * self.tiles_per_segment

    @property
    def _tiles_per_row(self) -> int:
        if self.segment_tokens % self.tile == 0:
            return math.ceil(self.tokens / self.tile)
        return math.ceil(self.tokens / self.segment_tokens) * self.tiles_per_segment

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory for table (≥ slots, 8), sequences (≥ S + 1 or B, 2) and carried (≥ carried,), int32."""
        rows = self.batch if self.sequences is None else self.sequences + 1
        shapes = (
            (pad_count(self.slots), _table.COLUMNS),
            (pad_count(rows), 2),
            (pad_count(max(1, self.carried)),),
        )
        return tuple(torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)

    def step(self, chained: bool = False) -> Step:
        """The kernel that fills them; `chained`: the next kernel's blocks may come before it has ended."""
        sizes = (self.tokens, self.segment_tokens)
        if self.sequences is None:
            kernel = hinted(_table.padded_table)
            constants = (*sizes, self._tiles_per_row, self.tile, TILE_SLOTS, self.lengths, chained)
        else:
            kernel = hinted(_table.packed_table)
            constants = (*sizes, self.tile, TILE_SLOTS, TILE_SEQUENCES, self.keep_empty, chained)
        return Step(kernel, (math.ceil(self.slots / TILE_SLOTS),), constants)

    def launch(
        self, lengths: torch.Tensor | None, tables: tuple[torch.Tensor, ...], chained: bool = False
    ) -> Launch:
        """Fills the tables from cu_seqlens (S + 1,) or seq_lens (B,), int32 or int64, or None."""
        return self.step(chained).launch(table_arrays(lengths, tables))


def table_arrays(lengths: torch.Tensor | None, tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What `Ragged.step` is launched with; a row of the table stands for lengths that are not there."""
    return (tables[0][0] if lengths is None else lengths, *tables)

"""How the full scan is cut into blocks, beside what `tuning.ForwardConfig` says, and compiler hints."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ScanConfig", "override", "overridden"]


@dataclass(frozen=True)
class ScanConfig:
    """The result depends on the sizes of ragged segments by rounding; the rest only moves time."""

    # Ragged segments are of so many blocks in all, within limits: their lengths differ, and a long one that
    # comes last has the GPU wait for it.
    ragged_blocks: int = 528
    min_segment_tiles: int = 4
    max_segment_tiles: int = 16
    rows_occupancy: int = 16
    # Of the tiles of z: they share a block's memory with the double-buffered ones.
    gate_latency: int = 3
    pass_tile_p: int = 8

    def segment_tiles(self, tiles: int, blocks_per_segment: int) -> int:
        """Tiles of a ragged segment, a power of two, for so many tiles in a row."""
        wanted = max(1, tiles * blocks_per_segment // self.ragged_blocks)
        return min(max(1 << round(math.log2(wanted)), self.min_segment_tiles), self.max_segment_tiles)


_override: ScanConfig | None = None


@contextlib.contextmanager
def override(config: ScanConfig) -> Iterator[None]:
    """Within it every scan uses `config`, in all threads: for tests and sweeps."""
    global _override
    before, _override = _override, config
    try:
        yield
    finally:
        _override = before


def overridden() -> ScanConfig | None:
    return _override

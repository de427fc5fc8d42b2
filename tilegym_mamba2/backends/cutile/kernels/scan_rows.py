"""The decay's rows of `chunk_cumsum.chunk_rows`, from dt as given: bias, softplus and limits on the way.

    dt_used = clamp(softplus(dt + dt_bias), dt_min, dt_max)        softplus only where asked for

Tokens that do not exist have dt_used 0, whatever the bias makes of nothing: they neither decay nor add to a
state. In the ragged form a block finds its tokens through the table of `scan_table`.
"""

import cuda.tile as ct

from .chunk_cumsum import decode, hold_after, load_heads_first, load_rate, store_rows
from .decay import at_most_forgotten, cumulative_decay
from .scan_table import ROW, START, STOP, TILE, entry, window
from .steps import clamp, softplus
from .tiles import ConstInt, ConstTuple

_ZERO = ct.PaddingMode.ZERO


def load_bias(dt_bias, head_tile, heads):
    """(TILE_H, 1) float32."""
    bias = ct.load(dt_bias, (head_tile,), (heads,), padding_mode=_ZERO, allow_tma=False)
    return bias.astype(ct.float32)[:, None]


def used_steps(dt, bias, limits, is_softplus):
    """dt as used: dt (TILE_H, L), bias (TILE_H, 1) or 0, limits (dt_min, dt_max)."""
    dt = dt + bias
    if is_softplus:
        dt = softplus(dt)
    return clamp(dt, limits[0], limits[1])


def rows_of_steps(steps, rate, count):
    """(g, dt) of a tile as `store_rows` takes them, of which the first `count` tokens exist."""
    steps = ct.where((ct.arange(steps.shape[1], dtype=ct.int32) < count)[None, :], steps, 0.0)
    return hold_after(cumulative_decay(at_most_forgotten(steps * rate), axis=1), count), steps


@ct.kernel
def scan_rows(
    a,
    dt,
    dt_bias,
    table,
    rows,
    dt_min: float,
    dt_max: float,
    num_tiles: int,
    L: ConstInt,
    TILE_H: ConstInt,
    FLAGS: ConstTuple,
):
    """Grid: (B · tiles · ceil(H / TILE_H),); ragged (slots · tiles of a segment · ceil(H / TILE_H),).

    FLAGS: (RAGGED, HAS_BIAS, SOFTPLUS, CHAINED). a, dt_bias (H,), dt (B, T, H); table (slots, 8), read if
    RAGGED. num_tiles: of a row, ragged of a segment. Writes rows (4, B, H, tiles, L) float32 whole; ragged
    (4, 1, H, tiles, L), the tiles that hold tokens.
    """
    RAGGED, HAS_BIAS, SOFTPLUS, CHAINED = FLAGS
    if CHAINED:
        ct.grid_dependency_control_launch_dependents()
        if RAGGED:
            ct.grid_dependency_control_wait()
    batch, head_tile, tile = decode(num_tiles, ct.num_tiles(a, axis=0, shape=(TILE_H,)))
    rate = load_rate(a, head_tile, TILE_H)
    bias = 0.0
    if HAS_BIAS:
        bias = load_bias(dt_bias, head_tile, TILE_H)
    if RAGGED:
        slot = batch
        start, stop = entry(table, slot, START), entry(table, slot, STOP)
        count = stop - start - tile * L
        if count > 0:
            dt = window(dt, entry(table, slot, ROW), start, stop)
            # As in `rows_of_decay`: here tileiras 13.4 crashes on the copy engine and a sliced array.
            dt_tile = load_heads_first(dt, (0, tile, head_tile), (L, TILE_H), False)
            steps = used_steps(dt_tile, bias, (dt_min, dt_max), SOFTPLUS)
            g, steps = rows_of_steps(steps, rate, count)
            store_rows(rows, (0, head_tile, entry(table, slot, TILE) + tile), g, steps, False)
    else:
        dt_tile = load_heads_first(dt, (batch, tile, head_tile), (L, TILE_H))
        steps = used_steps(dt_tile, bias, (dt_min, dt_max), SOFTPLUS)
        g, steps = rows_of_steps(steps, rate, dt.shape[1] - tile * L)
        store_rows(rows, (batch, head_tile, tile), g, steps, True)

"""The gradients of dt, a and d, from the sums per token that `compute_dx` wrote.

    r_k = Σ_{i≥k} (later_i + earlier_i) + Σ_{j<k} carried_j + overlap     the gradient of a·dt_k
    ddt = direct + a∘r,   da = Σ r∘dt,   dd = Σ skip

Row and column sums of M share all terms but those that straddle k, which are what is left; nothing else
cancels.
"""

import cuda.tile as ct

from .bwd_tokens import DROW_CARRIED, DROW_DIRECT, DROW_EARLIER, DROW_LATER, DROW_SKIP
from .chunk_cumsum import decode
from .tiles import ROW_DT, ConstBool, ConstInt

_ZERO = ct.PaddingMode.ZERO


def load_row_of_heads(rows, which, index, shape):
    """(TILE_H, L) of one row of a (rows, B, H, tiles, L) array; `index` is (batch, tile of heads, tile)."""
    batch, head_tile, tile = index
    heads, tile_tokens = shape
    whole = (1, 1, heads, 1, tile_tokens)
    return ct.load(rows, (which, batch, head_tile, tile, 0), whole, padding_mode=_ZERO).reshape(shape)


@ct.kernel
def finish_dt(
    a,
    rows,
    drows,
    overlap,
    ddt,
    partial,
    num_tiles: int,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_H: ConstInt,
    HAS_D: ConstBool,
):
    """Grid: (B · tiles · ceil(H / TILE_H),).

    a (H,), rows (4, B, H, ≥ tiles, L), drows (5, B, H, ≥ tiles, L), overlap (B, H, ≥ tiles, TILE_P); writes
    ddt (B, T, H) and partial (2, H, ≥ B · tiles), a tile's share of da and, if HAS_D, of dd.
    """
    batch, head_tile, tile = decode(num_tiles, ct.num_tiles(a, axis=0, shape=(TILE_H,)))
    index, shape = (batch, head_tile, tile), (TILE_H, L)
    rate = ct.load(a, (head_tile,), (TILE_H,), padding_mode=_ZERO).astype(ct.float32)[:, None]
    later = load_row_of_heads(drows, DROW_LATER, index, shape)
    earlier = load_row_of_heads(drows, DROW_EARLIER, index, shape)
    direct = load_row_of_heads(drows, DROW_DIRECT, index, shape)
    dt = load_row_of_heads(rows, ROW_DT, index, shape)
    heads = (head_tile * TILE_H + ct.arange(TILE_H, dtype=ct.int32))[:, None]
    tokens = ct.arange(L, dtype=ct.int32)[None, :]
    # Read one token late, so that nothing has to be taken off the sum again.
    before = ct.gather(drows, (DROW_CARRIED, batch, heads, tile, ct.maximum(tokens - 1, 0)), padding_value=0)
    before = ct.where(tokens > 0, before, 0.0)
    states = ct.load(overlap, (batch, head_tile, tile, 0), (1, TILE_H, 1, TILE_P), padding_mode=_ZERO)
    across = ct.sum(states.reshape((TILE_H, TILE_P)), axis=1, keepdims=True)
    moved = ct.cumsum(later + earlier, axis=1, reverse=True) + ct.cumsum(before, axis=1) + across
    ddt_tile = (direct + rate * moved).transpose().astype(ddt.dtype)
    ct.store(ddt, (batch, tile, head_tile), ddt_tile.reshape((1, L, TILE_H)))

    column = batch * num_tiles + tile
    da = ct.sum(moved * dt, axis=1)
    ct.store(partial, (0, head_tile, column), da.reshape((1, TILE_H, 1)))
    if HAS_D:
        dd = ct.sum(load_row_of_heads(drows, DROW_SKIP, index, shape), axis=1)
        ct.store(partial, (1, head_tile, column), dd.reshape((1, TILE_H, 1)))


@ct.kernel
def sum_heads(partial, da, dd, count: int, TILE: ConstInt, HAS_D: ConstBool):
    """Grid: (H,). partial (2, H, ≥ count) float32; writes da (H,) and, if HAS_D, dd (H,)."""
    head = ct.bid(0)
    columns = ct.arange(TILE, dtype=ct.int32)
    total = ct.zeros((TILE,), ct.float32)
    skip = ct.zeros((TILE,), ct.float32)
    for k in range(ct.cdiv(count, TILE)):
        inside = k * TILE + columns < count
        part = ct.load(partial, (0, head, k), (1, 1, TILE), padding_mode=_ZERO).reshape((TILE,))
        total = total + ct.where(inside, part, 0.0)
        if HAS_D:
            more = ct.load(partial, (1, head, k), (1, 1, TILE), padding_mode=_ZERO).reshape((TILE,))
            skip = skip + ct.where(inside, more, 0.0)
    ct.store(da, (head,), ct.sum(total).astype(da.dtype))
    if HAS_D:
        ct.store(dd, (head,), ct.sum(skip).astype(dd.dtype))

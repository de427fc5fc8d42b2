"""The gradients of dt, a, d and dt_bias, from the sums per token that `compute_dx` wrote.

    r_k = Σ_{i≥k} (later_i + earlier_i) + Σ_{j<k} carried_j + overlap     the gradient of a·dt_k
    ddt = direct + a∘r,   da = Σ r∘dt,   dd = Σ skip

Row and column sums of M share all terms but those that straddle k, which are what is left; nothing else
cancels. Where dt goes through a bias, softplus and limits first, ddt is multiplied by the slope of those, and
ddt_bias = Σ ddt.
"""

import math

import cuda.tile as ct

from .bwd_tiles import (
    SHARES_CARRIED,
    SHARES_DIRECT,
    SHARES_EARLIER,
    SHARES_LATER,
    SHARES_OF_PARTS,
    SHARES_SKIP,
    tokens_of_tile,
)
from .bwd_tokens import DROW_CARRIED, DROW_DIRECT, DROW_EARLIER, DROW_LATER, DROW_SKIP
from .chunk_cumsum import decode, load_heads_first
from .decay import LOG2E
from .scan_rows import load_bias
from .scan_table import window
from .steps import slope
from .tiles import ROW_DT, ConstInt, ConstTuple

# Rows of the `partial` array: a tile's shares.
PART_DA, PART_DD, PART_DBIAS = 0, 1, 2

_ZERO = ct.PaddingMode.ZERO
# exp(-22) is 3e-10: of terms that all have this factor, float32 sums in which others cancel leave rounding
# alone, which da would multiply by a large dt.
_LEAST_FELT = -22.0


def load_row_of_heads(rows, which, index, shape):
    """(TILE_H, L) of one row of a (rows, B, H, tiles, L) array; `index` is (batch, tile of heads, tile)."""
    batch, head_tile, tile = index
    heads, tile_tokens = shape
    whole = (1, 1, heads, 1, tile_tokens)
    return ct.load(rows, (which, batch, head_tile, tile, 0), whole, padding_mode=_ZERO).reshape(shape)


def load_share(drows, row, index, shape):
    """(TILE_H, L) of one row of a (B, H, tiles, rows · L) array; see `load_row_of_heads`."""
    batch, head_tile, tile = index
    heads, tile_tokens = shape
    whole = (1, heads, 1, tile_tokens)
    return ct.load(drows, (batch, head_tile, tile, row), whole, padding_mode=_ZERO).reshape(shape)


def load_sum(drows, which, count, index, shape):
    """(TILE_H, L): the sum of `count` rows, the first of which is count·which."""
    total = ct.zeros(shape, ct.float32)
    for share in ct.static_iter(range(count)):
        total = total + load_share(drows, count * which + share, index, shape)
    return total


def load_before(drows, SHARES, index, shape):
    """(TILE_H, L) of CARRIED, read one token late, so that nothing has to be taken off the sum again."""
    batch, head_tile, tile = index
    heads = (head_tile * shape[0] + ct.arange(shape[0], dtype=ct.int32))[:, None]
    tokens = ct.arange(shape[1], dtype=ct.int32)[None, :]
    late = ct.maximum(tokens - 1, 0)
    if SHARES:
        row = 2 * SHARES_CARRIED * shape[1]
        values = ct.gather(drows, (batch, heads, tile, row + late), padding_value=0)
        values = values + ct.gather(drows, (batch, heads, tile, row + shape[1] + late), padding_value=0)
    else:
        values = ct.gather(drows, (DROW_CARRIED, batch, heads, tile, late), padding_value=0)
    return ct.where(tokens > 0, values, 0.0)


def store_part(partial, which, head_tile, column, values):
    """A tile's share (TILE_H,) of a sum over all tokens."""
    ct.store(partial, (which, head_tile, column), values.reshape((1, values.shape[0], 1)))


def load_parts(partial, index, inside):
    """Some tiles' shares of one head; `inside` says which of them exist."""
    # Of so few numbers the copy engine takes 5.6 us, not 2.8.
    part = ct.load(partial, index, (1, 1, inside.shape[0]), padding_mode=_ZERO, allow_tma=False)
    return ct.where(inside, part.reshape(inside.shape), 0.0)


@ct.kernel
def finish_dt(
    a,
    dt,
    dt_bias,
    tiles,
    rows,
    drows,
    overlap,
    ddt,
    partial,
    num_tiles: int,
    dt_min: float,
    dt_max: float,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_H: ConstInt,
    FLAGS: ConstTuple,
):
    """Grid: (B · tiles · ceil(H / TILE_H),).

    FLAGS: (HAS_D, RAGGED, STEPS, HAS_BIAS, SOFTPLUS, SHARES, OVERLAP_PARTS, EARLIER_PARTS). a (H,), rows
    (4, B, H, ≥ tiles, L), drows (5, B, H, ≥ tiles, L), overlap (B, H, ≥ tiles, OVERLAP_PARTS · TILE_P);
    writes ddt (B, T, H) and partial (2 or 3, H, ≥ B · tiles), a tile's share of da, if HAS_D of dd, and if
    HAS_BIAS of ddt_bias.

    STEPS: rows have dt as used, made of dt (B, T, H) by dt_bias (H,), if HAS_BIAS, softplus, if SOFTPLUS, and
    limits. RAGGED: `tiles` (tiles, 4) says which tokens a tile has; scratch arrays have a batch of 1. SHARES:
    drows (B, H, ≥ tiles, NUM_SHARES · L) is that of `compute_gradients`, with as many
    more rows of EARLIER from SHARES_OF_PARTS on as EARLIER_PARTS says.
    """
    HAS_D, RAGGED, STEPS, HAS_BIAS, SOFTPLUS, SHARES, OVERLAP_PARTS, EARLIER_PARTS = FLAGS
    batch, head_tile, tile = decode(num_tiles, ct.num_tiles(a, axis=0, shape=(TILE_H,)))
    index, shape = (batch, head_tile, tile), (TILE_H, L)
    at, count = tile, ddt.shape[1] - tile * L
    column = batch * num_tiles + tile
    if RAGGED:
        token_row, start, stop = tokens_of_tile(tiles, tile)
        at, count = 0, stop - start
        if count <= 0:
            nothing = ct.zeros((TILE_H,), ct.float32)
            store_part(partial, PART_DA, head_tile, column, nothing)
            if HAS_D:
                store_part(partial, PART_DD, head_tile, column, nothing)
            if HAS_BIAS:
                store_part(partial, PART_DBIAS, head_tile, column, nothing)
            return
        dt, ddt = window(dt, token_row, start, stop), window(ddt, token_row, start, stop)
    # First, and part by part: nothing spills.
    across = ct.zeros((TILE_H, 1), ct.float32)
    for part in range(OVERLAP_PARTS):
        states = ct.load(overlap, (batch, head_tile, tile, part), (1, TILE_H, 1, TILE_P), padding_mode=_ZERO)
        across = across + ct.sum(states.reshape((TILE_H, TILE_P)), axis=1, keepdims=True)
    rate = ct.load(a, (head_tile,), (TILE_H,), padding_mode=_ZERO).astype(ct.float32)[:, None]
    if SHARES:
        felt = load_sum(drows, SHARES_LATER, 4, index, shape)
        felt = felt + load_sum(drows, SHARES_EARLIER, 2, index, shape)
        for part in range(EARLIER_PARTS):
            felt = felt + load_sum(drows, SHARES_OF_PARTS + part, 2, index, shape)
        direct = load_sum(drows, SHARES_DIRECT, 2, index, shape)
    else:
        felt = load_row_of_heads(drows, DROW_LATER, index, shape)
        felt = felt + load_row_of_heads(drows, DROW_EARLIER, index, shape)
        direct = load_row_of_heads(drows, DROW_DIRECT, index, shape)
    before = load_before(drows, SHARES, index, shape)
    dt_used = load_row_of_heads(rows, ROW_DT, index, shape)
    tokens = ct.arange(L, dtype=ct.int32)[None, :]
    moved = ct.cumsum(felt, axis=1, reverse=True) + ct.cumsum(before, axis=1) + across
    forgets = rate * dt_used < _LEAST_FELT
    moved = ct.where(forgets, 0.0, moved)
    # Of a = −inf exp(a·dt) does not depend on dt.
    ddt_tile = direct + ct.where(forgets | (rate == -math.inf), 0.0, rate * moved)
    if STEPS:
        bias = 0.0
        if HAS_BIAS:
            bias = load_bias(dt_bias, head_tile, TILE_H)
        # tileiras 13.4 crashes if the copy engine loads a sliced array here.
        given = load_heads_first(dt, (batch, at, head_tile), (L, TILE_H), False if RAGGED else None)
        # Tokens that do not exist feel the states too.
        ddt_tile = ct.where(tokens < count, ddt_tile * slope(given + bias, dt_min, dt_max, SOFTPLUS), 0.0)
        if HAS_BIAS:
            store_part(partial, PART_DBIAS, head_tile, column, ct.sum(ddt_tile, axis=1))
    ddt_tile = ddt_tile.transpose().astype(ddt.dtype).reshape((1, L, TILE_H))
    ct.store(ddt, (batch, at, head_tile), ddt_tile, allow_tma=False if RAGGED else None)
    store_part(partial, PART_DA, head_tile, column, ct.sum(moved * dt_used, axis=1))
    if HAS_D:
        if SHARES:
            skip = load_share(drows, SHARES_SKIP, index, shape)
        else:
            skip = load_row_of_heads(drows, DROW_SKIP, index, shape)
        store_part(partial, PART_DD, head_tile, column, ct.sum(skip, axis=1))


@ct.kernel
def sum_heads(
    a,
    partial,
    cut_offs,
    da,
    dd,
    ddt_bias,
    count: int,
    cut_off_count: int,
    cut_off_stride: int,
    TILE: ConstInt,
    FLAGS: ConstTuple,
):
    """Grid: (H,). FLAGS: (HAS_D, HAS_BIAS, CUT_OFFS). a (H,), partial (2 or 3, H, ≥ count) float32, and if
    CUT_OFFS cut_offs (1, H, B · cut_off_stride) float32, of which `tile_states` wrote the first cut_off_count
    of each stride; writes da (H,), if HAS_D dd (H,), and if HAS_BIAS ddt_bias (H,)."""
    HAS_D, HAS_BIAS, CUT_OFFS = FLAGS
    head = ct.bid(0)
    columns = ct.arange(TILE, dtype=ct.int32)
    total = ct.zeros((TILE,), ct.float32)
    skip = ct.zeros((TILE,), ct.float32)
    bias = ct.zeros((TILE,), ct.float32)
    for k in range(ct.cdiv(count, TILE)):
        inside = k * TILE + columns < count
        total = total + load_parts(partial, (PART_DA, head, k), inside)
        if HAS_D:
            skip = skip + load_parts(partial, (PART_DD, head, k), inside)
        if HAS_BIAS:
            bias = bias + load_parts(partial, (PART_DBIAS, head, k), inside)
    total = ct.sum(total)
    if CUT_OFFS:
        cut_off = ct.zeros((TILE,), ct.float32)
        for k in range(ct.cdiv(cut_offs.shape[2], TILE)):
            inside = (k * TILE + columns) % cut_off_stride < cut_off_count
            cut_off = cut_off + load_parts(cut_offs, (0, head, k), inside)
        rate_log2 = ct.load(a, (head,), (1,)).astype(ct.float32).item() * LOG2E
        # Without decay there is nothing to make up for: g is 0.
        rate_log2 = ct.where(rate_log2 == 0.0, 1.0, rate_log2)
        total = total + ct.sum(cut_off) / rate_log2
    ct.store(da, (head,), total.astype(da.dtype))
    if HAS_D:
        ct.store(dd, (head,), ct.sum(skip).astype(dd.dtype))
    if HAS_BIAS:
        ct.store(ddt_bias, (head,), ct.sum(bias).astype(ddt_bias.dtype))

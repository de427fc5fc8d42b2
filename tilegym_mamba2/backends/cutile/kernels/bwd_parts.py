"""`compute_gradients` where a head's state is several tiles: one launch for each TILE_N columns of N.

All but the products of L × L tokens is linear in the columns of N, so a launch reads its columns of both
states once, for db and dc of these columns and their share of everything else. What the launches hand on is v
(L, P), and dS (L, L) of a group, in float32; the first computes what comes from x dYᵀ, the last dx.
"""

import cuda.tile as ct

from .bwd_tiles import (
    SHARES_CARRIED,
    SHARES_DIRECT,
    SHARES_EARLIER,
    SHARES_LATER,
    SHARES_OF_PARTS,
    SHARES_SKIP,
    decay_t,
    decode_heads,
    halves,
    load_saved_state,
    load_skip_row,
    quarters,
    ragged_tile,
    shares,
    store_overlap,
    store_shares,
)
from .decay import exp2
from .products import product, product_of_loaded
from .scan_out import SKIP_PER_HEAD
from .scan_table import window
from .tiles import (
    ROW_DT,
    ROW_EXP_G,
    ROW_G,
    ROW_STATE_WEIGHT,
    ConstInt,
    ConstTuple,
    last_of_row,
    load_rows,
    load_tokens,
    row,
    store_tokens,
)

_ZERO = ct.PaddingMode.ZERO


def load_handed(array, index, shape, latency):
    """Tile of a five-dimensional float32 array; `index`: (batch, head or column, tile)."""
    return ct.load(array, (*index, 0, 0), (1, 1, 1, *shape), latency=latency).reshape(shape)


def store_handed(array, index, tile):
    """See `load_handed`."""
    ct.store(array, (*index, 0, 0), tile.reshape((1, 1, 1, *tile.shape)))


def all_scores_t(b, c, place, options):
    """B Cᵀ (L, L) over all columns of N; place: (batch, token tile, group)."""
    L, TILE_N, N_TILES, PRECISION, LATENCY = options
    scores_t = ct.zeros((L, L), ct.float32)
    for n_tile in range(N_TILES):
        b_tile = load_tokens(b, (*place, n_tile), (L, TILE_N), LATENCY)
        c_tile = load_tokens(c, (*place, n_tile), (L, TILE_N), LATENCY)
        scores_t = product_of_loaded(b_tile, c_tile.transpose(), scores_t, PRECISION)
    return scores_t


@ct.kernel
def compute_part(
    x,
    b,
    c,
    rows,
    d_skip,
    dout,
    entry_states,
    dexit_states,
    tiles,
    table,
    dx,
    drows,
    overlap,
    db,
    dc,
    handed_v,
    handed_dscores,
    sizes: tuple,
    n_tile: int,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    N_TILES: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """Some heads of one group at one tile of tokens, columns n_tile of N.

    Grid: (B · tiles · G · parts,). FLAGS: (SKIP, RAGGED, FIRST, LAST): whether it is the first or the last
    of N_TILES launches. sizes: see `decode_heads`; the arrays are those of `compute_gradients`, but drows
    (B, H, ≥ tiles, 2 · (SHARES_OF_PARTS + N_TILES − 1) · L), where all launches but the last have
    rows of their own for EARLIER, and overlap (B, H, ≥ tiles, N_TILES · TILE_P). handed_v (B, H, ≥ tiles asked for, L, TILE_P) and
    handed_dscores (B, G · parts, ≥ tiles asked for, L, L): float32.
    """
    SKIP, RAGGED, FIRST, LAST = FLAGS
    heads_per_group, heads_per_block = sizes[1], sizes[2]
    batch, group, part, tile, saved, first, count = decode_heads(b.shape[2], sizes)
    column = group * ct.cdiv(heads_per_group, heads_per_block) + part
    at = tile
    if RAGGED:
        tile, span = ragged_tile(tiles, table, saved, sizes)
        if span[1] >= span[2]:
            return
        at = 0
        x, b, c = window(x, *span), window(b, *span), window(c, *span)
        dout, dx = window(dout, *span), window(dx, *span)
        db, dc = window(db, *span), window(dc, *span)
    tokens = ct.arange(L, dtype=ct.int32)
    zeros = ct.zeros((L, L), ct.float32)
    diagonal = tokens[None, :] == tokens[:, None]
    channels = ct.arange(TILE_P, dtype=ct.int32)
    on_trace = channels[None, :] == channels[:, None]

    scores_t = zeros
    if FIRST or LAST:
        options = (L, TILE_N, N_TILES, PRECISION, LATENCY)
        scores_t = all_scores_t(b, c, (batch, at, group), options)
    b_tile = load_tokens(b, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    c_tile = load_tokens(c, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    db_tile = ct.zeros((L, TILE_N), ct.float32)
    dc_tile = ct.zeros((L, TILE_N), ct.float32)
    dscores_t = zeros
    for k in range(count):
        head = first + k
        rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
        x_tile = load_tokens(x, (batch, at, head, 0), (L, TILE_P), LATENCY)
        dy_tile = load_tokens(dout, (batch, at, head, 0), (L, TILE_P), LATENCY)
        place = (batch, head, saved, 0, n_tile)
        entry = load_saved_state(entry_states, place, (TILE_P, TILE_N), LATENCY)
        dexit = load_saved_state(dexit_states, place, (TILE_P, TILE_N), LATENCY)
        v = ct.zeros((L, TILE_P), ct.float32)
        if not FIRST:
            v = load_handed(handed_v, (batch, head, saved), (L, TILE_P), LATENCY)

        index = (batch, head, tile)
        x_wide, dy_wide = x_tile.astype(ct.float32), dy_tile.astype(ct.float32)
        from_entry = product(c_tile, entry.transpose(), ct.zeros((L, TILE_P), ct.float32), PRECISION)
        dy_since_entry = dy_wide * row(rows_tile, ROW_EXP_G)[:, None]
        earlier = halves(dy_since_entry * from_entry)
        dc_tile = product(dy_since_entry, entry, dc_tile, PRECISION)
        db_tile = product(x_wide * row(rows_tile, ROW_STATE_WEIGHT)[:, None], dexit, db_tile, PRECISION)
        both = product_of_loaded(entry, dexit.transpose(), ct.zeros((TILE_P, TILE_P), ct.float32), PRECISION)
        both = halves(ct.where(on_trace, both, 0.0)) * last_of_row(rows_tile, ROW_EXP_G)
        store_overlap(overlap, index, n_tile, shares(both))
        v = product(b_tile, dexit.transpose(), v, PRECISION)
        if FIRST:
            dt = row(rows_tile, ROW_DT)[:, None]
            decay = decay_t(row(rows_tile, ROW_G), tokens)
            dweights_t = product_of_loaded(x_tile, dy_tile.transpose(), zeros, PRECISION)
            felt_t = dweights_t * decay * dt
            dscores_t = dscores_t + felt_t
            moved_t = ct.where(diagonal, 0.0, felt_t * scores_t)
            store_shares(drows, SHARES_LATER, index, quarters(moved_t))
            if SKIP == SKIP_PER_HEAD:
                on_diagonal = ct.where(diagonal, dweights_t, 0.0)
                store_shares(drows, SHARES_SKIP, index, shares(halves(on_diagonal)))
            earlier = earlier - halves(moved_t)
        if LAST:
            store_shares(drows, SHARES_EARLIER, index, earlier)
            g, dt = row(rows_tile, ROW_G), row(rows_tile, ROW_DT)[:, None]
            v = v * exp2(last_of_row(rows_tile, ROW_G) - g)[:, None]
            store_shares(drows, SHARES_CARRIED, index, halves(x_wide * v * dt))
            du = product(decay_t(g, tokens) * scores_t, dy_tile, v, PRECISION)
            skip = load_skip_row(d_skip, head, 0, SKIP, TILE_P)
            store_tokens(dx, (batch, at, head, 0), du * dt + dy_wide * skip, LATENCY)
            store_shares(drows, SHARES_DIRECT, index, halves(x_wide * du))
        else:
            store_shares(drows, SHARES_OF_PARTS + n_tile, index, earlier)
            store_handed(handed_v, (batch, head, saved), v)

    if FIRST:
        store_handed(handed_dscores, (batch, column, saved), dscores_t)
    else:
        dscores_t = load_handed(handed_dscores, (batch, column, saved), (L, L), LATENCY)
    db_tile = product(dscores_t, c_tile, db_tile, PRECISION)
    dc_tile = product(dscores_t.transpose(), b_tile, dc_tile, PRECISION)
    store_tokens(db, (batch, at, column, n_tile), db_tile, LATENCY)
    store_tokens(dc, (batch, at, column, n_tile), dc_tile, LATENCY)

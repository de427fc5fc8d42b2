"""The gradients of b and c, tile by tile of L tokens, summed over the heads of a group.

    dS = [i ≥ j] Σ_heads (dY uᵀ) ∘ exp2(g_i − g_j)                 the gradient of C Bᵀ, u = dt∘x
    dC = dS B  + Σ_heads (exp2(g) ∘ dY) H
    dB = dSᵀ C + Σ_heads (exp2(g_last − g) ∘ u) dH'

One block takes the heads one after the other, in a fixed order, so the sums are the same bits in every run. A
group of many heads is cut in parts, where there would be too few blocks otherwise; `sum_parts` adds them up.
"""

import cuda.tile as ct

from .bwd_tiles import decode_heads, load_saved_state, ragged_tile
from .decay import causal_weights_t
from .products import add_weighted, product, product_of_loaded
from .scan_table import window
from .tiles import (
    ROW_DT,
    ROW_EXP_G,
    ROW_G,
    ROW_STATE_WEIGHT,
    ConstInt,
    ConstTuple,
    load_rows,
    load_tokens,
    row,
    store_tokens,
)


@ct.kernel
def compute_dbc(
    x,
    b,
    c,
    rows,
    dout,
    entry_states,
    dexit_states,
    tiles,
    table,
    db,
    dc,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    P_TILES: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """Some heads of one group at one tile of tokens, TILE_N of the N columns.

    Grid: (B · tiles · G · parts, ceil(N / TILE_N)). FLAGS: (RAGGED, WEIGH_LAST). sizes: see `decode_heads`;
    RAGGED, tiles and table: as in `compute_dx`. x, dout (B, T, H, P), b, c (B, T, G, N), rows
    (4, B, H, ≥ tiles, L), entry_states and dexit_states (B, H, ≥ tiles asked for, P, N); writes db, dc
    (B, T, G · parts, N).

    WEIGH_LAST: the decay joins after the products with the states; see `add_weighted`.
    """
    RAGGED, WEIGH_LAST = FLAGS
    heads_per_group, heads_per_block = sizes[1], sizes[2]
    batch, group, part, tile, saved, first, count = decode_heads(b.shape[2], sizes)
    n_tile = ct.bid(1)
    at = tile
    if RAGGED:
        tile, span = ragged_tile(tiles, table, saved, sizes)
        if span[1] >= span[2]:
            return
        at = 0
        x, b, c = window(x, *span), window(b, *span), window(c, *span)
        dout, db, dc = window(dout, *span), window(db, *span), window(dc, *span)
    tokens = ct.arange(L, dtype=ct.int32)
    db_tile = ct.zeros((L, TILE_N), ct.float32)
    dc_tile = ct.zeros((L, TILE_N), ct.float32)
    dscores_t = ct.zeros((L, L), ct.float32)
    zeros = ct.zeros((L, L), ct.float32)
    for k in range(count):
        head = first + k
        rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
        g, dt = row(rows_tile, ROW_G), row(rows_tile, ROW_DT)
        weight = row(rows_tile, ROW_STATE_WEIGHT)[:, None]
        since_entry = row(rows_tile, ROW_EXP_G)[:, None]
        for p_tile in range(P_TILES):
            x_tile = load_tokens(x, (batch, at, head, p_tile), (L, TILE_P), LATENCY)
            dy_tile = load_tokens(dout, (batch, at, head, p_tile), (L, TILE_P), LATENCY)
            index = (batch, head, saved, p_tile, n_tile)
            entry = load_saved_state(entry_states, index, (TILE_P, TILE_N), LATENCY)
            dexit = load_saved_state(dexit_states, index, (TILE_P, TILE_N), LATENCY)
            if WEIGH_LAST:
                # In this order: 1984 instructions, not 2456.
                db_tile = add_weighted(db_tile, x_tile, dexit, weight, PRECISION)
                dc_tile = add_weighted(dc_tile, dy_tile, entry, since_entry, PRECISION)
            else:
                dc_tile = product(dy_tile.astype(ct.float32) * since_entry, entry, dc_tile, PRECISION)
                db_tile = product(x_tile.astype(ct.float32) * weight, dexit, db_tile, PRECISION)
            # Last: ahead of the two sums it would keep their operands waiting in registers.
            dweights_t = product_of_loaded(x_tile, dy_tile.transpose(), zeros, PRECISION)
            dscores_t = dscores_t + dweights_t * causal_weights_t(g, dt, tokens)
    b_tile = load_tokens(b, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    c_tile = load_tokens(c, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    column = group * ct.cdiv(heads_per_group, heads_per_block) + part
    db_tile = product(dscores_t, c_tile, db_tile, PRECISION)
    dc_tile = product(dscores_t.transpose(), b_tile, dc_tile, PRECISION)
    store_tokens(db, (batch, at, column, n_tile), db_tile, LATENCY)
    store_tokens(dc, (batch, at, column, n_tile), dc_tile, LATENCY)


@ct.kernel
def sum_parts(
    db_parts, dc_parts, db, dc, num_tiles: int, parts: int, L: ConstInt, TILE_N: ConstInt, LATENCY: ConstInt
):
    """db and dc from the sums over parts of a group's heads.

    Grid: (B · tiles · G, ceil(N / TILE_N), 2): db, then dc. db_parts, dc_parts (B, T, G · parts, N) float32;
    writes db, dc (B, T, G, N).
    """
    block = ct.bid(0)
    group = block % db.shape[2]
    block = block // db.shape[2]
    batch, tile, n_tile = block // num_tiles, block % num_tiles, ct.bid(1)
    total = ct.zeros((L, TILE_N), ct.float32)
    if ct.bid(2) == 0:
        for part in range(parts):
            total = total + load_tokens(
                db_parts, (batch, tile, group * parts + part, n_tile), (L, TILE_N), LATENCY
            )
        store_tokens(db, (batch, tile, group, n_tile), total, LATENCY)
    else:
        for part in range(parts):
            total = total + load_tokens(
                dc_parts, (batch, tile, group * parts + part, n_tile), (L, TILE_N), LATENCY
            )
        store_tokens(dc, (batch, tile, group, n_tile), total, LATENCY)

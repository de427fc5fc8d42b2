"""`compute_dx` and `compute_dbc` where a head's state is several tiles, so that dH' is read twice and H once.

The formulas are theirs, see `bwd_tokens` and `bwd_groups`. `compute_dx_side` takes what needs dH' over all of N
at once (v, and so dx) and all that comes from x dYᵀ, dS too; `compute_dbc_side` takes for some columns of N
what is linear in them: db, dc, and of inter and ⟨H, dH'⟩ a share each, which `finish_dt` adds up.
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


@ct.kernel
def compute_dx_side(
    x,
    b,
    c,
    rows,
    d_skip,
    dout,
    dexit_states,
    tiles,
    table,
    dx,
    drows,
    dscores,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    N_TILES: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """Some heads of one group at one tile of tokens.

    Grid: (B · tiles · G · parts,). FLAGS: (SKIP, RAGGED). sizes: see `decode_heads`; SKIP, RAGGED, tiles and
    table: as in `compute_dx`.
    x, dout (B, T, H, P ≤ TILE_P), b, c (B, T, G, N), rows (4, B, H, ≥ tiles, L), d_skip (H,) or (H, P),
    dexit_states (B, H, ≥ tiles asked for, P, N); writes dx (B, T, H, P), drows (B, H, ≥ tiles, rows · L) as
    `compute_gradients` does, but for inter, and dSᵀ of the block's heads, dscores
    (B, G · parts, ≥ tiles asked for, L, L).
    """
    SKIP, RAGGED = FLAGS
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
    tokens = ct.arange(L, dtype=ct.int32)
    zeros = ct.zeros((L, L), ct.float32)
    diagonal = tokens[None, :] == tokens[:, None]

    # b stays on the chip from head to head.
    scores_t, b_tiles = zeros, ()
    for n_tile in ct.static_iter(range(N_TILES)):
        b_tile = load_tokens(b, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
        c_tile = load_tokens(c, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
        scores_t = product_of_loaded(b_tile, c_tile.transpose(), scores_t, PRECISION)
        b_tiles = b_tiles + (b_tile,)
    dscores_t = zeros
    for k in range(count):
        head = first + k
        index = (batch, head, tile)
        rows_tile = load_rows(rows, index, L, LATENCY)
        g, dt = row(rows_tile, ROW_G), row(rows_tile, ROW_DT)[:, None]
        skip = load_skip_row(d_skip, head, 0, SKIP, TILE_P)
        x_tile = load_tokens(x, (batch, at, head, 0), (L, TILE_P), LATENCY)
        dy_tile = load_tokens(dout, (batch, at, head, 0), (L, TILE_P), LATENCY)
        v = ct.zeros((L, TILE_P), ct.float32)
        for n_tile in ct.static_iter(range(N_TILES)):
            dexit = load_saved_state(
                dexit_states, (batch, head, saved, 0, n_tile), (TILE_P, TILE_N), LATENCY
            )
            v = product(b_tiles[n_tile], dexit.transpose(), v, PRECISION)
        x_wide, dy_wide = x_tile.astype(ct.float32), dy_tile.astype(ct.float32)
        decay = decay_t(g, tokens)
        v = v * exp2(last_of_row(rows_tile, ROW_G) - g)[:, None]
        store_shares(drows, SHARES_CARRIED, index, halves(x_wide * v * dt))
        du = product(decay * scores_t, dy_tile, v, PRECISION)
        store_tokens(dx, (batch, at, head, 0), du * dt + dy_wide * skip, LATENCY)
        store_shares(drows, SHARES_DIRECT, index, halves(x_wide * du))
        dweights_t = product_of_loaded(x_tile, dy_tile.transpose(), zeros, PRECISION)
        felt_t = dweights_t * decay * dt
        dscores_t = dscores_t + felt_t
        moved_t = ct.where(diagonal, 0.0, felt_t * scores_t)
        store_shares(drows, SHARES_LATER, index, quarters(moved_t))
        if SKIP == SKIP_PER_HEAD:
            on_diagonal = ct.where(diagonal, dweights_t, 0.0)
            store_shares(drows, SHARES_SKIP, index, shares(halves(on_diagonal)))
        store_shares(drows, SHARES_EARLIER, index, -halves(moved_t))
    ct.store(dscores, (batch, column, saved, 0, 0), dscores_t.reshape((1, 1, 1, L, L)))


@ct.kernel
def compute_dbc_side(
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
    drows,
    overlap,
    dscores,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """Some heads of one group at one tile of tokens, TILE_N of the N columns.

    Grid: (B · tiles · G · parts, ceil(N / TILE_N)). FLAGS: (RAGGED,). sizes, tiles, table and the arrays: as
    in `compute_dx_side`, whose dscores it reads, and entry_states as dexit_states; writes db, dc
    (B, T, G · parts, N), of drows two rows from SHARES_OF_PARTS on for each of the columns' tiles, and
    overlap (B, H, ≥ tiles, ceil(N / TILE_N) · TILE_P).
    """
    (RAGGED,) = FLAGS
    heads_per_group, heads_per_block = sizes[1], sizes[2]
    batch, group, part, tile, saved, first, count = decode_heads(b.shape[2], sizes)
    column = group * ct.cdiv(heads_per_group, heads_per_block) + part
    n_tile = ct.bid(1)
    at = tile
    if RAGGED:
        tile, span = ragged_tile(tiles, table, saved, sizes)
        if span[1] >= span[2]:
            return
        at = 0
        x, b, c = window(x, *span), window(b, *span), window(c, *span)
        dout, db, dc = window(dout, *span), window(db, *span), window(dc, *span)
    channels = ct.arange(TILE_P, dtype=ct.int32)
    on_trace = channels[None, :] == channels[:, None]
    c_tile = load_tokens(c, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    db_tile = ct.zeros((L, TILE_N), ct.float32)
    dc_tile = ct.zeros((L, TILE_N), ct.float32)
    for k in range(count):
        head = first + k
        index = (batch, head, tile)
        rows_tile = load_rows(rows, index, L, LATENCY)
        x_tile = load_tokens(x, (batch, at, head, 0), (L, TILE_P), LATENCY)
        dy_tile = load_tokens(dout, (batch, at, head, 0), (L, TILE_P), LATENCY)
        place = (batch, head, saved, 0, n_tile)
        entry = load_saved_state(entry_states, place, (TILE_P, TILE_N), LATENCY)
        dexit = load_saved_state(dexit_states, place, (TILE_P, TILE_N), LATENCY)
        from_entry = product(c_tile, entry.transpose(), ct.zeros((L, TILE_P), ct.float32), PRECISION)
        dy_since_entry = dy_tile.astype(ct.float32) * row(rows_tile, ROW_EXP_G)[:, None]
        store_shares(drows, SHARES_OF_PARTS + n_tile, index, halves(dy_since_entry * from_entry))
        dc_tile = product(dy_since_entry, entry, dc_tile, PRECISION)
        both = product_of_loaded(entry, dexit.transpose(), ct.zeros((TILE_P, TILE_P), ct.float32), PRECISION)
        both = halves(ct.where(on_trace, both, 0.0)) * last_of_row(rows_tile, ROW_EXP_G)
        store_overlap(overlap, index, n_tile, shares(both))
        weighted = x_tile.astype(ct.float32) * row(rows_tile, ROW_STATE_WEIGHT)[:, None]
        db_tile = product(weighted, dexit, db_tile, PRECISION)
    b_tile = load_tokens(b, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    dscores_t = ct.load(dscores, (batch, column, saved, 0, 0), (1, 1, 1, L, L), latency=LATENCY)
    dscores_t = dscores_t.reshape((L, L))
    db_tile = product(dscores_t, c_tile, db_tile, PRECISION)
    dc_tile = product(dscores_t.transpose(), b_tile, dc_tile, PRECISION)
    store_tokens(db, (batch, at, column, n_tile), db_tile, LATENCY)
    store_tokens(dc, (batch, at, column, n_tile), dc_tile, LATENCY)

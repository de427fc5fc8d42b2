"""`compute_dx` and `compute_dbc` where a head's state is several tiles, so that dH' is read twice and H once.

The formulas are theirs, see `bwd_tokens` and `bwd_groups`. `compute_dx_side` takes what needs dH' over all of
N at once (v, and so dx) and all that comes from x dYᵀ, dS too; `compute_dbc_side` takes for some columns of N
what is linear in them: db, dc, and of inter and ⟨H, dH'⟩ a share each, which `finish_dt` adds up.

In pairs, as in `bwd_pairs`: the partner's tokens are met in `compute_dx_side`, products of L × L all of them.
"""

import cuda.tile as ct

from .bwd_pairs import partner_of, slot_of_tile
from .bwd_tiles import (
    SHARES_CARRIED,
    SHARES_DIRECT,
    SHARES_EARLIER,
    SHARES_LATER,
    SHARES_OF_PARTS,
    SHARES_SKIP,
    decay_t,
    decode_heads,
    first_saved,
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
from .scan_table import tokens_of_slot, window
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

# Which tile it is: of no pair, the first, the second.
ALONE, FIRST, SECOND = 0, 1, 2
# Tiles of a column of `dscores`: of a tile's own tokens, and of its tokens and the partner's.
OWN_SCORES, FAR_SCORES = 0, 1
SCORES_ALONE, SCORES_OF_PAIR = 1, 2


def scores_of(rows_of, columns_of, place, far_place, options):
    """(L, L): b or c of a tile times the other one of a tile, over all columns of N.

    place, far_place: (batch, token tile, group).
    """
    L, TILE_N, N_TILES, PRECISION, LATENCY = options
    scores = ct.zeros((L, L), ct.float32)
    for n_tile in range(N_TILES):
        near = load_tokens(rows_of, (*place, n_tile), (L, TILE_N), LATENCY)
        far = load_tokens(columns_of, (*far_place, n_tile), (L, TILE_N), LATENCY)
        scores = product_of_loaded(near, far.transpose(), scores, PRECISION)
    return scores


def store_scores(dscores, index, which, values):
    """`index`: (batch, tile at hand, column, tiles of a column)."""
    batch, tile, column, count = index
    ct.store(dscores, (batch, tile, column * count + which, 0), values.reshape((1, 1, *values.shape)))


def load_scores(dscores, index, which, tile_tokens, latency):
    """See `store_scores`."""
    batch, tile, column, count = index
    shape = (tile_tokens, tile_tokens)
    place = (batch, tile, column * count + which, 0)
    return ct.load(dscores, place, (1, 1, *shape), latency=latency).reshape(shape)


def dx_side(arrays, place, heads, options, KIND):
    """What a block of `compute_dx_side` does for a tile.

    place: (batch, saved state, tile, its number in the token arrays, partner, its number there, whether it
    exists: 1.0 or 0.0, tile at hand); heads: (group, column of dscores, first head, heads).
    """
    x, b, c, rows, d_skip, dout, dexit_states, dx, drows, overlap, dscores = arrays
    batch, saved, tile, at, partner, far_at, exists, at_hand = place
    group, column, first, count = heads
    L, TILE_P, TILE_N, N_TILES, N_PARTS, PRECISION, SKIP, LATENCY = options
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
    far_scores = zeros
    if KIND != ALONE:
        near, far = (b, c) if KIND == FIRST else (c, b)
        sizes = (L, TILE_N, N_TILES, PRECISION, LATENCY)
        far_scores = scores_of(near, far, (batch, at, group), (batch, far_at, group), sizes)
    dscores_t = zeros
    dfar_scores = zeros
    for k in range(count):
        head = first + k
        index, far_index = (batch, head, tile), (batch, head, partner)
        rows_tile = load_rows(rows, index, L, LATENCY)
        g = row(rows_tile, ROW_G)
        skip = load_skip_row(d_skip, head, 0, SKIP, TILE_P)
        x_tile = load_tokens(x, (batch, at, head, 0), (L, TILE_P), LATENCY)
        dy_tile = load_tokens(dout, (batch, at, head, 0), (L, TILE_P), LATENCY)
        v = ct.zeros((L, TILE_P), ct.float32)
        for n_tile in ct.static_iter(range(N_TILES)):
            of_state = (batch, head, saved, 0, n_tile)
            dexit = load_saved_state(dexit_states, of_state, (TILE_P, TILE_N), LATENCY)
            v = product(b_tiles[n_tile], dexit.transpose(), v, PRECISION)
        x_wide, dy_wide = x_tile.astype(ct.float32), dy_tile.astype(ct.float32)
        if KIND == FIRST:
            far_rows = load_rows(rows, far_index, L, LATENCY)
            far_dy = load_tokens(dout, (batch, far_at, head, 0), (L, TILE_P), LATENCY)
            weight = row(rows_tile, ROW_STATE_WEIGHT)[:, None]
            v = v * ct.where(exists > 0.0, last_of_row(far_rows, ROW_EXP_G), 1.0)
            of_pair = shares(halves(x_wide * v * weight) * exists)
            store_overlap(overlap, far_index, N_PARTS, of_pair)
            for n_part in range(1, N_PARTS):
                store_overlap(overlap, far_index, N_PARTS + n_part, ct.zeros((L, 1), ct.float32))
            far_weight = (row(far_rows, ROW_EXP_G) * exists)[None, :]
            felt = product_of_loaded(x_tile, far_dy.transpose(), zeros, PRECISION) * weight * far_weight
            dfar_scores = dfar_scores + felt
            v = product(far_weight * far_scores, far_dy, v, PRECISION)
        v = v * exp2(last_of_row(rows_tile, ROW_G) - g)[:, None]
        dt = row(rows_tile, ROW_DT)[:, None]
        store_shares(drows, SHARES_CARRIED, index, halves(x_wide * v * dt))
        decay = decay_t(g, tokens)
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
        earlier = -halves(moved_t)
        if KIND == SECOND:
            far_rows = load_rows(rows, far_index, L, LATENCY)
            far_x = load_tokens(x, (batch, far_at, head, 0), (L, TILE_P), LATENCY)
            felt = product_of_loaded(dy_tile, far_x.transpose(), zeros, PRECISION)
            felt = felt * row(rows_tile, ROW_EXP_G)[:, None] * row(far_rows, ROW_STATE_WEIGHT)[None, :]
            dfar_scores = dfar_scores + felt
            earlier = earlier + halves(felt * far_scores)
        store_shares(drows, SHARES_EARLIER, index, earlier)
    of_scores = (batch, at_hand, column, SCORES_ALONE if KIND == ALONE else SCORES_OF_PAIR)
    store_scores(dscores, of_scores, OWN_SCORES, dscores_t)
    if KIND != ALONE:
        store_scores(dscores, of_scores, FAR_SCORES, dfar_scores)


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
    overlap,
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

    Grid: (B · tiles · G · parts,). FLAGS: (SKIP, RAGGED, PAIRED, N_PARTS). sizes: see `decode_heads`; SKIP,
    RAGGED, tiles and table: as in `compute_dx`.
    x, dout (B, T, H, P ≤ TILE_P), b, c (B, T, G, N), rows (4, B, H, ≥ tiles, L), d_skip (H,) or (H, P),
    dexit_states (B, H, ≥ tiles asked for, P, N); writes dx (B, T, H, P), drows (B, H, ≥ tiles, rows · L) as
    `compute_gradients` does, but for inter, and dSᵀ of the block's heads, dscores
    (B, ≥ tiles asked for, G · parts · L, L).

    PAIRED: see `compute_gradients`; dscores (…, G · parts · 2 · L, L), and writes of overlap the N_PARTS rows
    that `compute_dbc_side`, in so many parts, leaves.
    """
    SKIP, RAGGED, PAIRED, N_PARTS = FLAGS
    heads_per_group, heads_per_block = sizes[1], sizes[2]
    batch, group, part, tile, saved, first, count = decode_heads(b.shape[2], sizes)
    column = group * ct.cdiv(heads_per_group, heads_per_block) + part
    heads = (group, column, first, count)
    options = (L, TILE_P, TILE_N, N_TILES, N_PARTS, PRECISION, SKIP, LATENCY)
    at_hand = saved
    if PAIRED:
        number, at, num_tiles = saved, tile, sizes[0]
        saved = saved // 2
        if RAGGED:
            slot, tile, number = slot_of_tile(tiles, table, number, sizes)
            if slot < 0:
                return
            span = tokens_of_slot(table, slot)
            at = number
            num_tiles = ct.cdiv(span[2] - span[1], L)
            saved = first_saved(table, slot, sizes[3], 2) + number // 2
            x, b, c = window(x, *span), window(b, *span), window(c, *span)
            dout, dx = window(dout, *span), window(dx, *span)
        partner, exists = partner_of(number, num_tiles)
        away = partner - number
        place = (batch, saved, tile, at, tile + away, at + away, exists, at_hand)
        arrays = (x, b, c, rows, d_skip, dout, dexit_states, dx, drows, overlap, dscores)
        if number % 2 == 0:
            dx_side(arrays, place, heads, options, FIRST)
        else:
            dx_side(arrays, place, heads, options, SECOND)
        return
    at = tile
    if RAGGED:
        tile, span = ragged_tile(tiles, table, saved, sizes)
        if span[1] >= span[2]:
            return
        at = 0
        x, b, c = window(x, *span), window(b, *span), window(c, *span)
        dout, dx = window(dout, *span), window(dx, *span)
    arrays = (x, b, c, rows, d_skip, dout, dexit_states, dx, drows, overlap, dscores)
    dx_side(arrays, (batch, saved, tile, at, tile, at, 0.0, at_hand), heads, options, ALONE)


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

    Grid: (B · tiles · G · parts, ceil(N / TILE_N)). FLAGS: (RAGGED, PAIRED). sizes, tiles, table and the
    arrays: as in `compute_dx_side`, whose dscores it reads, and entry_states as dexit_states; writes db, dc
    (B, T, G · parts, N), of drows two rows from SHARES_OF_PARTS on for each of the columns' tiles, and
    overlap (B, H, ≥ tiles, ceil(N / TILE_N) · TILE_P).

    PAIRED: see `compute_dx_side`; a row of overlap has twice as many numbers, the second half for what the
    partner's tokens feel of the pair's states.
    """
    RAGGED, PAIRED = FLAGS
    heads_per_group, heads_per_block = sizes[1], sizes[2]
    batch, group, part, tile, saved, first, count = decode_heads(b.shape[2], sizes)
    column = group * ct.cdiv(heads_per_group, heads_per_block) + part
    n_tile = ct.bid(1)
    at, at_hand, partner, exists, is_second = tile, saved, tile, 0.0, False
    if PAIRED:
        number, num_tiles = saved, sizes[0]
        saved = saved // 2
        if RAGGED:
            slot, tile, number = slot_of_tile(tiles, table, number, sizes)
            if slot < 0:
                return
            span = tokens_of_slot(table, slot)
            at = number
            num_tiles = ct.cdiv(span[2] - span[1], L)
            saved = first_saved(table, slot, sizes[3], 2) + number // 2
        other, exists = partner_of(number, num_tiles)
        far_at = at + other - number
        partner = tile + other - number
        is_second = number % 2 == 1
    elif RAGGED:
        tile, span = ragged_tile(tiles, table, saved, sizes)
        if span[1] >= span[2]:
            return
        at = 0
    if RAGGED:
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
        until_entry, until_exit = 1.0, 1.0
        if PAIRED:
            far_decay = last_of_row(load_rows(rows, (batch, head, partner), L, LATENCY), ROW_EXP_G)
            far_decay = ct.where(exists > 0.0, far_decay, 1.0)
            until_entry = ct.where(is_second, far_decay, 1.0)
            until_exit = ct.where(is_second, 1.0, far_decay)
        from_entry = product(c_tile, entry.transpose(), ct.zeros((L, TILE_P), ct.float32), PRECISION)
        dy_since_entry = dy_tile.astype(ct.float32) * (row(rows_tile, ROW_EXP_G) * until_entry)[:, None]
        inter = halves(dy_since_entry * from_entry)
        store_shares(drows, SHARES_OF_PARTS + n_tile, index, inter)
        if PAIRED:
            if is_second:
                store_overlap(overlap, (batch, head, partner), ct.num_blocks(1) + n_tile, shares(inter))
        dc_tile = product(dy_since_entry, entry, dc_tile, PRECISION)
        across = last_of_row(rows_tile, ROW_EXP_G) * until_entry * until_exit
        both = product_of_loaded(entry, dexit.transpose(), ct.zeros((TILE_P, TILE_P), ct.float32), PRECISION)
        both = halves(ct.where(on_trace, both, 0.0)) * across
        store_overlap(overlap, index, n_tile, shares(both))
        weighted = x_tile.astype(ct.float32) * (row(rows_tile, ROW_STATE_WEIGHT) * until_exit)[:, None]
        db_tile = product(weighted, dexit, db_tile, PRECISION)
    b_tile = load_tokens(b, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    of_scores = (batch, at_hand, column, SCORES_OF_PAIR if PAIRED else SCORES_ALONE)
    dscores_t = load_scores(dscores, of_scores, OWN_SCORES, L, LATENCY)
    db_tile = product(dscores_t, c_tile, db_tile, PRECISION)
    dc_tile = product(dscores_t.transpose(), b_tile, dc_tile, PRECISION)
    if PAIRED:
        dfar_scores = load_scores(dscores, of_scores, FAR_SCORES, L, LATENCY)
        if is_second:
            far_tile = load_tokens(b, (batch, far_at, group, n_tile), (L, TILE_N), LATENCY)
            dc_tile = product(dfar_scores, far_tile, dc_tile, PRECISION)
        else:
            far_tile = load_tokens(c, (batch, far_at, group, n_tile), (L, TILE_N), LATENCY)
            db_tile = product(dfar_scores, far_tile, db_tile, PRECISION)
    store_tokens(db, (batch, at, column, n_tile), db_tile, LATENCY)
    store_tokens(dc, (batch, at, column, n_tile), dc_tile, LATENCY)

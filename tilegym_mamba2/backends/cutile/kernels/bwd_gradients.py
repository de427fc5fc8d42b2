"""`compute_dx` and `compute_dbc` in one, where a head's state is one tile: both states are read once.

The formulas are theirs, see `bwd_tokens` and `bwd_groups`. A block takes the heads of a group one after the
other; the sums of dB, dC and dS stay in registers, which takes 8 warps, so one block fills a multiprocessor:
259 µs against 161 + 120 for the published benchmark on an H200, when sums per token still took 18 barriers a
head, not 2, see `halves`. Each product comes where its result is used: at N 256 176 bytes spill, and 528 with
the products first.
"""

import cuda.tile as ct

from .bwd_pairs import paired_gradients, partner_of, slot_of_tile
from .bwd_tiles import (
    OVERLAP_OF_PAIR,
    SHARES_CARRIED,
    SHARES_DIRECT,
    SHARES_EARLIER,
    SHARES_LATER,
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


@ct.kernel
def compute_gradients(
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
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """Some heads of one group at one tile of tokens.

    Grid: (B · tiles · G · parts,). FLAGS: (SKIP, RAGGED, PAIRED, REMAINDERS). sizes: see `decode_heads`;
    SKIP, RAGGED, tiles and table: as in `compute_dx`.
    x, dout (B, T, H, P ≤ TILE_P), b, c (B, T, G, N ≤ TILE_N), rows (4, B, H, ≥ tiles, L), d_skip (H,) or
    (H, P), entry_states and dexit_states (B, H, ≥ tiles asked for, P, N); writes dx (B, T, H, P), drows
    (B, H, ≥ tiles, NUM_SHARES · L) and overlap (B, H, ≥ tiles, TILE_P), which add up to what `compute_dx`
    writes, and db, dc (B, T, G · parts, N).

    PAIRED: states are saved for pairs of tiles, the first tile asked for (RAGGED: of a slot) begins one, and
    a row of overlap has OVERLAP_PARTS times as many numbers; see `bwd_pairs`, also
    of REMAINDERS.
    """
    SKIP, RAGGED, PAIRED, REMAINDERS = FLAGS
    heads_per_group, heads_per_block = sizes[1], sizes[2]
    batch, group, part, tile, saved, first, count = decode_heads(b.shape[2], sizes)
    column = group * ct.cdiv(heads_per_group, heads_per_block) + part
    if PAIRED:
        # Which it is of the tiles in pairs, and of those in the token arrays.
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
            db, dc = window(db, *span), window(dc, *span)
        partner, exists = partner_of(number, num_tiles)
        away = partner - number
        place = (batch, saved, tile, at, tile + away, at + away, exists)
        arrays = (x, b, c, rows, d_skip, dout, entry_states, dexit_states, dx, drows, overlap, db, dc)
        heads = (group, column, first, count)
        options = (L, TILE_P, TILE_N, PRECISION, SKIP, REMAINDERS, LATENCY)
        if number % 2 == 0:
            paired_gradients(arrays, place, heads, options, True)
        else:
            paired_gradients(arrays, place, heads, options, False)
        return
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

    b_tile = load_tokens(b, (batch, at, group, 0), (L, TILE_N), LATENCY)
    c_tile = load_tokens(c, (batch, at, group, 0), (L, TILE_N), LATENCY)
    scores_t = product_of_loaded(b_tile, c_tile.transpose(), zeros, PRECISION)
    db_tile = ct.zeros((L, TILE_N), ct.float32)
    dc_tile = ct.zeros((L, TILE_N), ct.float32)
    dscores_t = ct.zeros((L, L), ct.float32)
    for k in range(count):
        head = first + k
        rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
        g, dt = row(rows_tile, ROW_G), row(rows_tile, ROW_DT)[:, None]
        since_entry = row(rows_tile, ROW_EXP_G)[:, None]
        until_exit = exp2(last_of_row(rows_tile, ROW_G) - g)[:, None]
        skip = load_skip_row(d_skip, head, 0, SKIP, TILE_P)
        x_tile = load_tokens(x, (batch, at, head, 0), (L, TILE_P), LATENCY)
        dy_tile = load_tokens(dout, (batch, at, head, 0), (L, TILE_P), LATENCY)
        entry = load_saved_state(entry_states, (batch, head, saved, 0, 0), (TILE_P, TILE_N), LATENCY)
        dexit = load_saved_state(dexit_states, (batch, head, saved, 0, 0), (TILE_P, TILE_N), LATENCY)

        index = (batch, head, tile)
        none = ct.zeros((L, TILE_P), ct.float32)
        x_wide, dy_wide = x_tile.astype(ct.float32), dy_tile.astype(ct.float32)
        from_entry = product(c_tile, entry.transpose(), none, PRECISION)
        dy_since_entry = dy_wide * since_entry
        decay = decay_t(g, tokens)
        inter = halves(dy_since_entry * from_entry)
        dc_tile = product(dy_since_entry, entry, dc_tile, PRECISION)
        db_tile = product(x_wide * row(rows_tile, ROW_STATE_WEIGHT)[:, None], dexit, db_tile, PRECISION)
        overlap_t = product_of_loaded(
            entry, dexit.transpose(), ct.zeros((TILE_P, TILE_P), ct.float32), PRECISION
        )
        both = halves(ct.where(on_trace, overlap_t, 0.0)) * last_of_row(rows_tile, ROW_EXP_G)
        store_overlap(overlap, index, OVERLAP_OF_PAIR, shares(both))
        v = product(b_tile, dexit.transpose(), none, PRECISION) * until_exit
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
        store_shares(drows, SHARES_EARLIER, index, inter - halves(moved_t))

    db_tile = product(dscores_t, c_tile, db_tile, PRECISION)
    dc_tile = product(dscores_t.transpose(), b_tile, dc_tile, PRECISION)
    store_tokens(db, (batch, at, column, 0), db_tile, LATENCY)
    store_tokens(dc, (batch, at, column, 0), dc_tile, LATENCY)

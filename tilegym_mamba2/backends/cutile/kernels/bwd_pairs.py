"""All gradients at one tile of tokens, where states are saved for pairs of tiles: H at a pair's entry, dH' at
its exit.

What a tile lacks is what its partner takes up. That is made from the partner's tokens, not from a state: with
w = exp2(g_last − g)·dt, for i in the second tile and j in the first,

    felt_ij = (dY_i · x_j) exp2(g_i) w_j                how the two tiles' tokens feel each other
    second tile:  inter_i   = exp2(g_last of the first) inter_i of the pair's H + Σ_j felt_ij (C_i · B_j)
                  dC_i      = the same of the pair's H + Σ_j felt_ij B_j
    first tile:   carried_j = exp2(g_last of the second) carried_j of the pair's dH' + Σ_i felt_ij (C_i · B_j)
                  dB_j      = the same of the pair's dH' + Σ_i felt_ij C_i
                  v_j       = the same of the pair's dH' + exp2(g_last − g_j) Σ_i exp2(g_i) (C_i · B_j) dY_i

The rest is as in `bwd_tokens` and `bwd_groups`. ⟨H, dH'⟩ of a tile is that of the pair's states and what the
partner's tokens feel of these: inter or carried without the sums above, which the partner therefore stores.
No state is rounded but the saved ones.
"""

import cuda.tile as ct

from .bwd_tiles import (
    OVERLAP_OF_PAIR,
    OVERLAP_OF_PARTNER,
    SHARES_CARRIED,
    SHARES_DIRECT,
    SHARES_EARLIER,
    SHARES_LATER,
    SHARES_SKIP,
    TILE_SLOT,
    decay_t,
    halves,
    load_saved_state,
    load_skip_row,
    quarters,
    shares,
    store_overlap,
    store_shares,
)
from .decay import exp2
from .products import product, product_of_loaded, rounded_off
from .scan_out import SKIP_PER_HEAD
from .scan_table import TILE, entry
from .tiles import (
    ROW_DT,
    ROW_EXP_G,
    ROW_G,
    ROW_STATE_WEIGHT,
    last_of_row,
    load_rows,
    load_tokens,
    row,
    store_tokens,
)


def partner_of(number, count):
    """(number of the other one of a pair, 1.0), or (the number itself, 0.0) where there is none."""
    other = number ^ 1
    exists = other < count
    return ct.where(exists, other, number), ct.where(exists, 1.0, 0.0)


def slot_of_tile(tiles, table, saved, sizes):
    """(slot, tile, its number in the slot) of the `saved` one of the tiles at hand.

    Slot −1: no tokens, or not asked for. sizes: see `ragged_tile`.
    """
    first_slot, num_slots = sizes[3], sizes[4]
    tile = entry(table, first_slot, TILE) + saved
    slot = ct.gather(tiles, (tile, TILE_SLOT), padding_value=-1).item()
    asked_for = (slot >= first_slot) & (slot < first_slot + num_slots)
    number = tile - entry(table, ct.where(asked_for, slot, first_slot), TILE)
    return ct.where(asked_for, slot, -1), tile, number


def paired_gradients(arrays, place, heads, options, FIRST):
    """What a block of `compute_gradients` does for a tile, the FIRST or the second of its pair.

    place: (batch, saved state, tile, its number in the token arrays, partner, its number there, whether it
    exists: 1.0 or 0.0); heads: (group, column of db and dc, first head, heads). L = TILE_P. REMAINDERS: of so
    many heads one has its weighted x enter db in two bf16 parts in the second tile; 0: none has.

    In this order, with rows read where they are used, 8 bytes spill, which only a wait that times out reads
    (d per channel: 40 bytes), and a head takes 1477 and 1270 instructions and 4 barriers (1186 and 2 for a
    tile with states of its own); else up to 400 bytes spill.
    ⟨H, dH'⟩ is the trace of a product: 150 instructions less than multiplied out.
    """
    x, b, c, rows, d_skip, dout, entry_states, dexit_states, dx, drows, overlap, db, dc = arrays
    batch, saved, tile, at, partner, far_at, exists = place
    group, column, first, count = heads
    L, TILE_P, TILE_N, PRECISION, SKIP, REMAINDERS, LATENCY = options
    tokens = ct.arange(L, dtype=ct.int32)
    zeros = ct.zeros((L, L), ct.float32)
    diagonal = tokens[None, :] == tokens[:, None]

    b_tile = load_tokens(b, (batch, at, group, 0), (L, TILE_N), LATENCY)
    c_tile = load_tokens(c, (batch, at, group, 0), (L, TILE_N), LATENCY)
    scores_t = product_of_loaded(b_tile, c_tile.transpose(), zeros, PRECISION)
    # Of this tile's tokens (rows) and the partner's.
    if FIRST:
        far_tile = load_tokens(c, (batch, far_at, group, 0), (L, TILE_N), LATENCY)
        far_scores = product_of_loaded(b_tile, far_tile.transpose(), zeros, PRECISION)
    else:
        far_tile = load_tokens(b, (batch, far_at, group, 0), (L, TILE_N), LATENCY)
        far_scores = product_of_loaded(c_tile, far_tile.transpose(), zeros, PRECISION)
    db_tile = ct.zeros((L, TILE_N), ct.float32)
    dc_tile = ct.zeros((L, TILE_N), ct.float32)
    dscores_t = ct.zeros((L, L), ct.float32)
    dfar_scores = ct.zeros((L, L), ct.float32)
    for k in range(count):
        head = first + k
        index, far_index = (batch, head, tile), (batch, head, partner)
        rows_tile = load_rows(rows, index, L, LATENCY)
        far_rows = load_rows(rows, far_index, L, LATENCY)
        g = row(rows_tile, ROW_G)
        since_entry = row(rows_tile, ROW_EXP_G)[:, None]
        far_decay = last_of_row(far_rows, ROW_EXP_G)
        skip = load_skip_row(d_skip, head, 0, SKIP, TILE_P)
        x_tile = load_tokens(x, (batch, at, head, 0), (L, TILE_P), LATENCY)
        dy_tile = load_tokens(dout, (batch, at, head, 0), (L, TILE_P), LATENCY)
        entry = load_saved_state(entry_states, (batch, head, saved, 0, 0), (TILE_P, TILE_N), LATENCY)
        dexit = load_saved_state(dexit_states, (batch, head, saved, 0, 0), (TILE_P, TILE_N), LATENCY)
        none = ct.zeros((L, TILE_P), ct.float32)
        x_wide, dy_wide = x_tile.astype(ct.float32), dy_tile.astype(ct.float32)

        if FIRST:
            far_decay = ct.where(exists > 0.0, far_decay, 1.0)
            far_head = load_tokens(dout, (batch, far_at, head, 0), (L, TILE_P), LATENCY)
            dy_since_pair = dy_wide * since_entry
        else:
            far_weight = row(far_rows, ROW_STATE_WEIGHT)[None, :]
            far_head = load_tokens(x, (batch, far_at, head, 0), (L, TILE_P), LATENCY)
            dy_since_pair = dy_wide * (since_entry * far_decay)
        from_entry = product(c_tile, entry.transpose(), none, PRECISION)
        earlier = halves(dy_since_pair * from_entry)
        if not FIRST:
            store_overlap(overlap, far_index, OVERLAP_OF_PARTNER, shares(earlier))
        dc_tile = product(dy_since_pair, entry, dc_tile, PRECISION)
        if FIRST:
            x_weighted = x_wide * (row(rows_tile, ROW_STATE_WEIGHT)[:, None] * far_decay)
        else:
            felt = product_of_loaded(dy_tile, far_head.transpose(), zeros, PRECISION)
            felt = felt * since_entry * far_weight
            dfar_scores = dfar_scores + felt
            earlier = earlier + halves(felt * far_scores)
            x_weighted = x_wide * row(rows_tile, ROW_STATE_WEIGHT)[:, None]
        decay = decay_t(g, tokens)
        if FIRST:
            both = product_of_loaded(entry, dexit.transpose(), zeros, PRECISION)
            across = last_of_row(rows_tile, ROW_EXP_G) * far_decay
            both = shares(halves(ct.where(diagonal, both, 0.0)) * across)
            store_overlap(overlap, index, OVERLAP_OF_PAIR, both)
            store_overlap(overlap, far_index, OVERLAP_OF_PAIR, both)
        v = product(b_tile, dexit.transpose(), none, PRECISION)
        carried = halves(x_weighted * v)
        if FIRST:
            store_overlap(overlap, far_index, OVERLAP_OF_PARTNER, shares(carried * exists))
            v = v * far_decay
            db_tile = product(x_weighted, dexit, db_tile, PRECISION)
            far_weight = (row(far_rows, ROW_EXP_G) * exists)[None, :]
            felt = product_of_loaded(x_tile, far_head.transpose(), zeros, PRECISION)
            felt = felt * row(rows_tile, ROW_STATE_WEIGHT)[:, None] * far_weight
            dfar_scores = dfar_scores + felt
            carried = carried + halves(felt * far_scores)
            v = product(far_weight * far_scores, far_head, v, PRECISION)
        else:
            db_tile = product(x_weighted, dexit, db_tile, PRECISION)
        store_shares(drows, SHARES_CARRIED, index, carried)
        v = v * exp2(last_of_row(rows_tile, ROW_G) - g)[:, None]
        du = product(decay * scores_t, dy_tile, v, PRECISION)
        dweights_t = product_of_loaded(x_tile, dy_tile.transpose(), zeros, PRECISION)
        felt_t = dweights_t * decay * row(rows_tile, ROW_DT)[:, None]
        dscores_t = dscores_t + felt_t
        moved_t = ct.where(diagonal, 0.0, felt_t * scores_t)
        store_shares(drows, SHARES_EARLIER, index, earlier - halves(moved_t))
        store_shares(drows, SHARES_LATER, index, quarters(moved_t))
        store_shares(drows, SHARES_DIRECT, index, halves(x_wide * du))
        store_tokens(dx, (batch, at, head, 0), du * row(rows_tile, ROW_DT)[:, None] + dy_wide * skip, LATENCY)
        if SKIP == SKIP_PER_HEAD:
            on_diagonal = ct.where(diagonal, dweights_t, 0.0)
            store_shares(drows, SHARES_SKIP, index, shares(halves(on_diagonal)))

    if REMAINDERS > 0 and not FIRST:
        # A loop of its own: in the one above it would spill 100 to 230 bytes.
        for k in range(ct.cdiv(count, REMAINDERS)):
            head = first + k * REMAINDERS
            rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
            x_tile = load_tokens(x, (batch, at, head, 0), (L, TILE_P), LATENCY)
            dexit = load_saved_state(dexit_states, (batch, head, saved, 0, 0), (TILE_P, TILE_N), LATENCY)
            x_weighted = x_tile.astype(ct.float32) * row(rows_tile, ROW_STATE_WEIGHT)[:, None]
            db_tile = product(rounded_off(x_weighted), dexit, db_tile, PRECISION)
    db_tile = product(dscores_t, c_tile, db_tile, PRECISION)
    dc_tile = product(dscores_t.transpose(), b_tile, dc_tile, PRECISION)
    if FIRST:
        db_tile = product(dfar_scores, far_tile, db_tile, PRECISION)
    else:
        dc_tile = product(dfar_scores, far_tile, dc_tile, PRECISION)
    store_tokens(db, (batch, at, column, 0), db_tile, LATENCY)
    store_tokens(dc, (batch, at, column, 0), dc_tile, LATENCY)

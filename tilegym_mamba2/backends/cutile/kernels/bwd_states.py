"""The states that the backward needs: H at the entry of every tile, and the gradient dH' of that at its exit.

    H' = exp2(g_last) H  + ((exp2(g_last − g)·dt) ∘ X)ᵀ B        forwards in time, from init_state
    dH = exp2(g_last) dH' + (exp2(g) ∘ dY)ᵀ C                    backwards in time, from dfinal_state

The two walks are one form: a (P, N) state decays and takes up weighted tokens (L, P) times (L, N). As in the
forward, segments start from zero, all at once, and a pass gives each its true start; then each is walked
again, now storing its state at every tile, in the dtype in which products take it: that halves the traffic.
Both directions go in one launch, side by side. What they do forwards in time is the forward's own code.

Ragged sequences: a segment is a slot of `scan_table`, and scratch arrays have a batch of 1. What crosses the
border behind a slot that others follow is kept under the index slot − sequence, in both directions; the first
and the last segment of a sequence take init_state and dfinal_state as they are.
"""

import cuda.tile as ct

from .bwd_tiles import first_saved
from .fwd_pass_state import local_state, pass_forwards
from .products import BF16, product, product_of_parts, rounded_off
from .scan_table import LEFT, POSITION, SEQUENCE, TILE, entry, tokens_of_slot, window
from .tiles import (
    ROW_EXP_G,
    ROW_G,
    ROW_STATE_WEIGHT,
    ConstInt,
    ConstTuple,
    decode_block,
    last_of_row,
    load_rows,
    load_segment_decay,
    load_single_state,
    load_state,
    load_tokens,
    row,
    store_state,
)

# How much of a state is left after a tile of tokens, for one that lives some 46 of them.
_REMEMBERED = 0.25


def taken_up(tokens, weight):
    """(P, L): tokens (L, P) in float32, weighted, ready as first operand."""
    return tokens.transpose().astype(ct.float32) * weight[None, :]


def decode_segment(per_head, tile_p, sizes):
    """(batch, head, p_tile, segment, group, first tile, tiles) of a block.

    sizes: (tiles a segment, heads a group, tiles of the sequence, first segment, segments); the last two say
    which segments are asked for. Ragged: slots, and what follows from one is in the table.
    """
    tiles_per_segment, heads_per_group, num_tiles, first_segment, num_segments = sizes
    num_p_tiles = ct.num_tiles(per_head, axis=3, shape=(1, 1, 1, tile_p))
    batch, head, p_tile, segment = decode_block(per_head.shape[2], num_p_tiles, num_segments)
    segment = first_segment + segment
    first = segment * tiles_per_segment
    count = ct.minimum(tiles_per_segment, num_tiles - first)
    return batch, head, p_tile, segment, head // heads_per_group, first, count


def local_dstate(per_head, per_group, rows, place, options, PARTS):
    """What a segment's own outputs add to the gradient of its entry state.

    per_head dout, per_group c; place, options and PARTS, here for the first tile, as in `local_state`. Walks
    forwards: then the sum needs no rescaling, as the decay of earlier tiles goes into the L weights.
    """
    batch, head, p_tile, n_tile, group, first, at, count = place
    L, TILE_P, TILE_N, PRECISION, LATENCY = options
    dstate = ct.zeros((TILE_P, TILE_N), ct.float32)
    earlier_decay = 1.0
    if PRECISION == BF16 and PARTS == 2:
        c_tile = load_tokens(per_group, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
        dy_tile = load_tokens(per_head, (batch, at, head, p_tile), (L, TILE_P), LATENCY)
        rows_tile = load_rows(rows, (batch, head, first), L, LATENCY)
        weighted = taken_up(dy_tile, row(rows_tile, ROW_EXP_G))
        dstate = product(rounded_off(weighted), c_tile, dstate, PRECISION)
    for k in range(count):
        c_tile = load_tokens(per_group, (batch, at + k, group, n_tile), (L, TILE_N), LATENCY)
        dy_tile = load_tokens(per_head, (batch, at + k, head, p_tile), (L, TILE_P), LATENCY)
        rows_tile = load_rows(rows, (batch, head, first + k), L, LATENCY)
        weight = row(rows_tile, ROW_EXP_G) * earlier_decay
        earlier_decay = earlier_decay * last_of_row(rows_tile, ROW_EXP_G)
        dstate = product(taken_up(dy_tile, weight), c_tile, dstate, PRECISION)
    return dstate, earlier_decay


@ct.kernel
def segment_borders(
    x,
    b,
    c,
    rows,
    dout,
    table,
    carried,
    local_states,
    local_dstates,
    state_decay,
    dstate_decay,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """Each segment from zero: the gradient of its entry state, for all but the first, and, if ENTRIES, the
    state at its exit, for all but the last.

    Grid: (B · (segments − 1) · ceil(P / TILE_P) · H, ceil(N / TILE_N), 2 if ENTRIES, else 1). FLAGS:
    (ENTRIES, RAGGED, PARTS). sizes: see `decode_segment`, from the second segment on, and
    `local_state`. x, dout (B, T, H, P), b, c (B, T, G, N), rows (4, B, H, ≥ tiles, L); writes local_states
    and local_dstates (B, H, ≥ segments, P, N) and, by how much the same segments decay, state_decay and
    dstate_decay (B, H, ≥ segments).

    RAGGED: a block for each entry of `carried` instead of each segment, and no ENTRIES; writes what the
    segment after that slot gives, and how much it decays, under the entry's index.
    """
    ENTRIES, RAGGED, PARTS = FLAGS
    batch, head, p_tile, segment, group, first, count = decode_segment(dout, TILE_P, sizes)
    n_tile = ct.bid(1)
    options = (L, TILE_P, TILE_N, PRECISION, LATENCY)
    if ct.bid(2) == 0:
        at = first
        if RAGGED:
            slot = ct.load(carried, (segment,), (1,)).item() + 1
            if slot <= 0:
                return
            span = tokens_of_slot(table, slot)
            first, at, count = entry(table, slot, TILE), 0, ct.cdiv(span[2] - span[1], L)
            dout, c = window(dout, *span), window(c, *span)
        place = (batch, head, p_tile, n_tile, group, first, at, count)
        dstate, dstate_left = local_dstate(dout, c, rows, place, options, PARTS)
        store_state(local_dstates, (batch, head, segment, p_tile, n_tile), dstate)
        if p_tile + n_tile == 0:
            ct.store(dstate_decay, (batch, head, segment), dstate_left)
    else:
        if ENTRIES:
            # Whole segments: only the last, which is not asked for here, may be short.
            tiles = sizes[0]
            before = (batch, head, p_tile, n_tile, group, first - tiles, first - tiles, tiles)
            state, state_left = local_state(x, b, rows, before, options, PARTS)
            store_state(local_states, (batch, head, segment - 1, p_tile, n_tile), state)
            if p_tile + n_tile == 0:
                ct.store(state_decay, (batch, head, segment - 1), state_left)


def pass_backwards(dstates, segment_decay, dstate, place, options):
    """As `pass_forwards`, from the last of some segments to the first; returns the gradient that is left.

    place: (batch, head, p_tile, n_tile, last, segments). Where a local part was, there is then the gradient
    that arrives, or, with AFTER, the one that is passed on.
    """
    batch, head, p_tile, n_tile, last, num_local = place
    AT_ONCE, LATENCY, AFTER = options
    ahead = num_local // AT_ONCE
    for k in range(ahead):
        locals_, decays, segment = (), (), last - k * AT_ONCE
        for i in ct.static_iter(range(AT_ONCE)):
            index = (batch, head, segment - i, p_tile, n_tile)
            locals_ = locals_ + (load_state(dstates, index, dstate.shape, LATENCY),)
            decays = decays + (load_segment_decay(segment_decay, index[:3]),)
        for i in ct.static_iter(range(AT_ONCE)):
            index = (batch, head, segment - i, p_tile, n_tile)
            dstate = passed_on(dstates, index, dstate, decays[i], locals_[i], AFTER)
    for k in range(ahead * AT_ONCE, num_local):
        index = (batch, head, last - k, p_tile, n_tile)
        local = load_state(dstates, index, dstate.shape, LATENCY)
        decay = load_segment_decay(segment_decay, index[:3])
        dstate = passed_on(dstates, index, dstate, decay, local, AFTER)
    return dstate


def passed_on(dstates, index, dstate, decay, local, after):
    """The gradient before a segment, from the one after it; one of them is stored."""
    if after:
        dstate = dstate * decay + local
        store_state(dstates, index, dstate)
        return dstate
    store_state(dstates, index, dstate)
    return dstate * decay + local


@ct.kernel
def pass_borders(
    states,
    dstates,
    state_decay,
    dstate_decay,
    init_state,
    dfinal_state,
    table,
    carried,
    num_segments: int,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    FLAGS: ConstTuple,
    AT_ONCE: ConstInt,
    LATENCY: ConstInt,
):
    """From each segment's own part to the gradient of the state at its exit and the state at its entry, in
    place.

    Grid: (B · ceil(P / TILE_P) · H, ceil(N / TILE_N), 2 if ENTRIES, else 1). FLAGS: (ENTRIES, HAS_INIT,
    HAS_DFINAL, RAGGED). states and dstates (B, H, ≥ segments, P, N) float32 with what `segment_borders`
    wrote, as are state_decay and dstate_decay (B, H, ≥ segments); init_state and dfinal_state
    (B, H, 1, P, N), read if HAS_INIT and HAS_DFINAL.

    RAGGED: a block for each entry of `carried` instead of each batch row, and no ENTRIES; that of a
    sequence's first segment does the whole sequence.
    """
    ENTRIES, HAS_INIT, HAS_DFINAL, RAGGED = FLAGS
    num_p_tiles = ct.num_tiles(dstates, axis=3, shape=(1, 1, 1, TILE_P, TILE_N))
    batch, head, p_tile, _ = decode_block(dstates.shape[1], num_p_tiles, 1)
    n_tile = ct.bid(1)
    shape = (TILE_P, TILE_N)
    options = (AT_ONCE, LATENCY)
    border = ct.zeros(shape, ct.float32)
    if ct.bid(2) == 0:
        sequence = batch
        if RAGGED:
            slot = ct.load(carried, (batch,), (1,)).item()
            if slot < 0:
                return
            if entry(table, slot, POSITION) > 0:
                return
            sequence = entry(table, slot, SEQUENCE)
        if HAS_DFINAL:
            border = load_state(dfinal_state, (sequence, head, 0, p_tile, n_tile), shape, LATENCY)
        if RAGGED:
            count = entry(table, slot, LEFT)
            place = (0, head, p_tile, n_tile, batch + count - 1, count)
            pass_backwards(dstates, dstate_decay, border, place, (*options, True))
        else:
            place = (batch, head, p_tile, n_tile, num_segments - 1, num_segments - 1)
            border = pass_backwards(dstates, dstate_decay, border, place, (*options, False))
            store_state(dstates, (batch, head, 0, p_tile, n_tile), border)
    else:
        if ENTRIES:
            if HAS_INIT:
                border = load_state(init_state, (batch, head, 0, p_tile, n_tile), shape, LATENCY)
            local = (batch, head, p_tile, n_tile, num_segments - 1)
            border = pass_forwards(states, state_decay, border, local, options)
            store_state(states, (batch, head, num_segments - 1, p_tile, n_tile), border)


def take_up(state, arrays, which, tile, at, place, options):
    """A state after it decayed over a tile of tokens and took them up, weighted by the row `which`.

    arrays: (per_head, per_group, rows); tile: its number in rows, at: in the other two; place: (batch, head,
    p_tile, n_tile, group); options: (L, TILE_P, TILE_N, precision, latency, EVERY, PARTS, NEAREST).
    """
    batch, head, p_tile, n_tile, group = place
    L, TILE_P, TILE_N, PRECISION, LATENCY, EVERY, PARTS, NEAREST = options
    per_head, per_group, rows = arrays
    group_tile = load_tokens(per_group, (batch, at, group, n_tile), (L, TILE_N), LATENCY)
    head_tile = load_tokens(per_head, (batch, at, head, p_tile), (L, TILE_P), LATENCY)
    rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
    weighted = taken_up(head_tile, row(rows_tile, which))
    state = state * last_of_row(rows_tile, ROW_EXP_G)
    return product_of_parts(weighted, group_tile, state, PRECISION, PARTS)


def add_cut_off(cut_off, state, arrays, FORWARDS, tile, at, place, options):
    """cut_off (P, 4) + what a state loses when it is saved in bf16, as the NEAREST tokens of `tile` feel it
    in da:

        Σ_i exp2(g_i) g_i  dY_i · (C_i δᵀ)                            H: the first tokens of the tile
        Σ_j exp2(g_last − g_j) dt_j (g_last − g_j)  x_j · (B_j δᵀ)     dH': the last tokens of the tile

    These are a·log2(e) times too large, as g is made of a. Four columns: of every eight of a product a thread
    has two, so that none waits for another.
    """
    batch, head, p_tile, n_tile, group = place
    L, TILE_P, TILE_N, PRECISION, LATENCY, EVERY, PARTS, NEAREST = options
    per_head, per_group, rows = arrays
    part = 0 if FORWARDS else L // NEAREST - 1
    # Tokens that do not exist weigh nothing, so any may stand in for them.
    at = ct.minimum(at * (L // NEAREST) + part, ct.cdiv(per_group.shape[1], NEAREST) - 1)
    group_tile = load_tokens(per_group, (batch, at, group, n_tile), (NEAREST, TILE_N), LATENCY)
    head_tile = load_tokens(per_head, (batch, at, head, p_tile), (NEAREST, TILE_P), LATENCY)
    rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
    g = row(rows_tile, ROW_G)
    if FORWARDS:
        weight = row(rows_tile, ROW_EXP_G) * g
    else:
        weight = row(rows_tile, ROW_STATE_WEIGHT) * (last_of_row(rows_tile, ROW_G) - g)
    weight = ct.extract(weight, (part,), (NEAREST,))
    none = ct.zeros((TILE_P, NEAREST), ct.float32)
    felt = product(rounded_off(state), group_tile.transpose(), none, PRECISION)
    felt = felt * taken_up(head_tile, weight)
    felt = ct.sum(felt.reshape((TILE_P, NEAREST // 8, 4, 2)), axis=3)
    return cut_off + ct.sum(felt, axis=1)


def store_entries(arrays, meeting, state, entry_states, place, span, options):
    """Stores the state at the entry of every EVERY-th tile of a segment, first tile first, from that of the
    segment; returns what these lose, see `add_cut_off`.

    arrays: (x, b, rows); meeting: (dout, c, rows), whose tokens meet the states; span: (first tile, first
    tile in x and b, first saved state, tiles); place and options: as in `take_up`. Loads are never under a
    condition in a loop: on sm_90 (tileiras 13.4) the copy engine's warp then waits for ever.
    """
    batch, head, p_tile, n_tile, _ = place
    first, at, saved, count = span
    EVERY, NEAREST = options[5], options[7]
    cut_off = ct.zeros((options[1], 4), ct.float32)
    store_state(entry_states, (batch, head, saved, p_tile, n_tile), state)
    if NEAREST:
        cut_off = add_cut_off(cut_off, state, meeting, True, first, at, place, options)
    # Past the last that is stored, none is asked for.
    for k in range((count - 1) // EVERY):
        tile = k * EVERY
        if EVERY == 1 and NEAREST == 0:
            state = take_up(state, arrays, ROW_STATE_WEIGHT, first + tile, at + tile, place, options)
        else:
            # All EVERY are there. A loop of known length costs the copy engine's warp, or does not compile.
            for j in range(ct.minimum(EVERY, count - tile)):
                here = tile + j
                state = take_up(state, arrays, ROW_STATE_WEIGHT, first + here, at + here, place, options)
        tile = tile + EVERY
        store_state(entry_states, (batch, head, saved + k + 1, p_tile, n_tile), state)
        if NEAREST:
            cut_off = add_cut_off(cut_off, state, meeting, True, first + tile, at + tile, place, options)
    return cut_off


def store_exits(arrays, meeting, dstate, dexit_states, place, span, options):
    """Stores the gradient of the state at the exit of every EVERY-th tile and of the last, last tile first,
    from that of the segment; returns that of the entry, and what the stored lose.

    arrays: (dout, c, rows); meeting: (x, b, rows); the rest as in `store_entries`.
    """
    batch, head, p_tile, n_tile, _ = place
    first, at, saved, count = span
    EVERY, NEAREST = options[5], options[7]
    cut_off = ct.zeros((options[1], 4), ct.float32)
    num_saved = ct.cdiv(count, EVERY)
    for k in range(num_saved):
        number = num_saved - 1 - k
        tiles = ct.minimum(EVERY, count - number * EVERY)
        last = number * EVERY + tiles - 1
        store_state(dexit_states, (batch, head, saved + number, p_tile, n_tile), dstate)
        if NEAREST:
            cut_off = add_cut_off(cut_off, dstate, meeting, False, first + last, at + last, place, options)
        if EVERY == 1 and NEAREST == 0:
            dstate = take_up(dstate, arrays, ROW_EXP_G, first + last, at + last, place, options)
        else:
            # tileiras 13.4 does not compile this loop for sm_100.
            for j in range(tiles):
                here = last - j
                dstate = take_up(dstate, arrays, ROW_EXP_G, first + here, at + here, place, options)
    return dstate, cut_off


def remembers(arrays, place, span, options):
    """Whether a state outlives its first tile of tokens: what the nearest feel of its rounding is then little
    of what all feel."""
    rows = arrays[2]
    tile = ct.minimum(span[0], rows.shape[3] - 1)
    rows_tile = load_rows(rows, (place[0], place[1], tile), options[0], 1)
    return last_of_row(rows_tile, ROW_EXP_G) > _REMEMBERED


def walk_forwards(arrays, meeting, state, entry_states, place, span, options):
    """`store_entries`, with no more work than pays: 5 % of the backward of a layer are saved.

    Not where every tile has a state of its own: there the choice costs the copy engine's warp.
    """
    if options[7] == 0 or options[5] == 1:
        return store_entries(arrays, meeting, state, entry_states, place, span, options)
    if remembers(arrays, place, span, options):
        without = (*options[:7], 0)
        cut_off = store_entries(arrays, meeting, state, entry_states, place, span, without)
    else:
        cut_off = store_entries(arrays, meeting, state, entry_states, place, span, options)
    return cut_off


def walk_backwards(arrays, meeting, dstate, dexit_states, place, span, options):
    """`store_exits`, as `walk_forwards`."""
    if options[7] == 0 or options[5] == 1:
        return store_exits(arrays, meeting, dstate, dexit_states, place, span, options)
    if remembers(arrays, place, span, options):
        without = (*options[:7], 0)
        dstate, cut_off = store_exits(arrays, meeting, dstate, dexit_states, place, span, without)
    else:
        dstate, cut_off = store_exits(arrays, meeting, dstate, dexit_states, place, span, options)
    return dstate, cut_off


def store_cut_off(cut_offs, place, p_tiles, segment, direction, cut_off):
    """A block's share of a head's da in a (H, B, ≥ segments · parts) array."""
    batch, head, p_tile, n_tile, _ = place
    part = 2 * (n_tile * p_tiles + p_tile) + direction
    parts = 2 * p_tiles * ct.num_blocks(1)
    ct.store(cut_offs, (head, batch, segment * parts + part), ct.sum(cut_off).reshape((1, 1, 1)))


@ct.kernel
def tile_states(
    x,
    b,
    c,
    rows,
    dout,
    segment_entries,
    segment_exits,
    init_state,
    dfinal_state,
    table,
    entry_states,
    dexit_states,
    dinit_state,
    cut_offs,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """The state at the entry of every tile of some segments, and the gradient of the one at its exit.

    Grid: (B · segments · ceil(P / TILE_P) · H, ceil(N / TILE_N), 2): the walk backwards, then, if ENTRIES,
    the one forwards. FLAGS: (ENTRIES, WRITE_DINIT, RAGGED, HAS_INIT, HAS_DFINAL, EVERY, PARTS, NEAREST).
    sizes: see `decode_segment`. EVERY: how many tiles of a segment share one pair of states, that at the
    entry of the first and that at the exit of the last; a segment that others follow has a multiple of it.
    PARTS: in how many bf16 parts a state takes up weighted tokens. NEAREST: so many tokens next to a saved
    state make up, in da, for its rounding; 0: none do.
    x, dout (B, T, H, P), b, c (B, T, G, N), rows (4, B, H, ≥ tiles, L), segment_entries and segment_exits
    (B, H, ≥ segments, P, N) float32; writes entry_states and dexit_states (B, H, ≥ tiles / EVERY, P, N),
    where tile 0 is the first asked for, in the sequence's first segment if WRITE_DINIT dinit_state
    (B, H, 1, P, N), and if NEAREST cut_offs (H, B, ≥ segments · 2 · tiles of P and N), see `add_cut_off`.

    RAGGED: a slot's states are where `first_saved` says; reads init_state and dfinal_state (S, H, P, N), if
    HAS_INIT and HAS_DFINAL, where a sequence begins and ends, and the borders only between.
    """
    ENTRIES, WRITE_DINIT, RAGGED, HAS_INIT, HAS_DFINAL, EVERY, PARTS, NEAREST = FLAGS
    batch, head, p_tile, segment, group, first, count = decode_segment(dout, TILE_P, sizes)
    n_tile = ct.bid(1)
    shape = (TILE_P, TILE_N)
    options = (L, TILE_P, TILE_N, PRECISION, LATENCY, EVERY, PARTS, NEAREST)
    p_tiles = ct.num_tiles(dout, axis=3, shape=(1, 1, 1, TILE_P))
    place = (batch, head, p_tile, n_tile, group)
    at, saved = first, (first - sizes[3] * sizes[0]) // EVERY
    sequence, position, left = batch, segment, 0
    if RAGGED:
        sequence, position = entry(table, segment, SEQUENCE), entry(table, segment, POSITION)
        left = entry(table, segment, LEFT)
        # A segment of padding, or unused. An empty sequence has work: its gradient goes straight through.
        if left < 0:
            if NEAREST:
                none = ct.zeros((1, 1), ct.float32)
                store_cut_off(cut_offs, place, p_tiles, segment, ct.bid(2), none)
            return
        span = tokens_of_slot(table, segment)
        first, at, count = entry(table, segment, TILE), 0, ct.cdiv(span[2] - span[1], L)
        saved = first_saved(table, segment, sizes[3], EVERY)
        x, b, c, dout = window(x, *span), window(b, *span), window(c, *span), window(dout, *span)
    span = (first, at, saved, count)
    if ct.bid(2) == 0:
        if RAGGED:
            dstate = ct.zeros(shape, ct.float32)
            if left > 0:
                index = (0, head, segment - sequence, p_tile, n_tile)
                dstate = load_state(segment_exits, index, shape, 1)
            else:
                if HAS_DFINAL:
                    dstate = load_single_state(dfinal_state, (sequence, head, p_tile, n_tile), shape, 1)
        else:
            dstate = load_state(segment_exits, (batch, head, segment, p_tile, n_tile), shape, 1)
        arrays, meeting = (dout, c, rows), (x, b, rows)
        dstate, cut_off = walk_backwards(arrays, meeting, dstate, dexit_states, place, span, options)
        if NEAREST:
            store_cut_off(cut_offs, place, p_tiles, segment, 0, cut_off)
        if WRITE_DINIT:
            if position == 0:
                store_state(dinit_state, (sequence, head, 0, p_tile, n_tile), dstate)
    else:
        if ENTRIES:
            arrays, meeting = (x, b, rows), (dout, c, rows)
            cut_off = ct.zeros((TILE_P, 4), ct.float32)
            if RAGGED:
                state = ct.zeros(shape, ct.float32)
                if position > 0:
                    index = (0, head, segment - sequence - 1, p_tile, n_tile)
                    state = load_state(segment_entries, index, shape, 1)
                else:
                    if HAS_INIT:
                        state = load_single_state(init_state, (sequence, head, p_tile, n_tile), shape, 1)
                if count > 0:
                    cut_off = walk_forwards(arrays, meeting, state, entry_states, place, span, options)
            else:
                state = load_state(segment_entries, (batch, head, segment, p_tile, n_tile), shape, 1)
                cut_off = walk_forwards(arrays, meeting, state, entry_states, place, span, options)
            if NEAREST:
                store_cut_off(cut_offs, place, p_tiles, segment, 1, cut_off)

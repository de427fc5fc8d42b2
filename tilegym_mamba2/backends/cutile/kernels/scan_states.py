"""The states at segment borders of ragged sequences, as `fwd_pass_state` has them of equal segments.

    carried_states   each segment that another follows, from zero, all at once
    pass_carried     sequence by sequence, from those and the initial state to entry states, in place

Only borders within a sequence have a state: what is kept grows with the tokens, not with the number of
sequences, see `scan_table` for its index. With CHUNKS every slot has an entry state, at the slot's own index:
these are the chunk states that a caller asks for.
"""

import cuda.tile as ct

from .fwd_pass_state import local_state
from .scan_table import LEFT, POSITION, ROW, SEQUENCE, START, STOP, TILE, entry, window
from .tiles import (
    ConstInt,
    ConstTuple,
    decode_block,
    load_segment_decay,
    load_single_state,
    load_state,
    store_state,
    wait_for_previous_kernel,
)


def pass_on(states, segment_decay, state, place, options):
    """From local states to the entry states of the segments after them, in place; `state` is that before.

    place: (head, p_tile, n_tile, index of the first local state, how many); options: (how many are loaded at
    once, latency).
    """
    head, p_tile, n_tile, first, count = place
    AT_ONCE, LATENCY = options
    # Several loads at once: one after the other, their latencies would be all the time this takes.
    ahead = count // AT_ONCE
    for k in range(ahead):
        locals_, decays, index = (), (), first + k * AT_ONCE
        for i in ct.static_iter(range(AT_ONCE)):
            place_i = (0, head, index + i, p_tile, n_tile)
            locals_ = locals_ + (load_state(states, place_i, state.shape, LATENCY),)
            decays = decays + (load_segment_decay(segment_decay, place_i[:3]),)
        for i in ct.static_iter(range(AT_ONCE)):
            state = state * decays[i] + locals_[i]
            store_state(states, (0, head, index + i, p_tile, n_tile), state)
    for index in range(first + ahead * AT_ONCE, first + count):
        place_i = (0, head, index, p_tile, n_tile)
        local = load_state(states, place_i, state.shape, LATENCY)
        state = state * load_segment_decay(segment_decay, place_i[:3]) + local
        store_state(states, place_i, state)


@ct.kernel
def carried_states(
    x,
    b,
    rows,
    table,
    carried,
    local_states,
    segment_decay,
    heads_per_group: int,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """One segment of one head from zero, if another follows it.

    Grid: (entries of `carried` · ceil(P / TILE_P) · H, ceil(N / TILE_N)); with CHUNKS slots, not entries.
    FLAGS: (CHUNKS, CHAINED). x (B, T, H, P), b (B, T, G, N), rows (4, 1, H, tiles, L), table (slots, 8),
    carried, not read with CHUNKS; writes local_states (1, H, ·, P, N) and segment_decay (1, H, ·), at the
    index of the entry of `carried`; with CHUNKS at that of the slot that follows, and zeros at an unused one.
    """
    CHUNKS, CHAINED = FLAGS
    if CHAINED:
        wait_for_previous_kernel()
    num_p_tiles = ct.num_tiles(x, axis=3, shape=(1, 1, 1, TILE_P))
    index, head, p_tile, _ = decode_block(x.shape[2], num_p_tiles, 1)
    n_tile = ct.bid(1)
    slot = index
    if CHUNKS:
        index = slot + 1
        follows = entry(table, slot, LEFT) > 0
        if entry(table, slot, SEQUENCE) < 0:
            store_state(local_states, (0, head, slot, p_tile, n_tile), ct.zeros((TILE_P, TILE_N), ct.float32))
    else:
        slot = ct.load(carried, (index,), (1,)).item()
        follows = slot >= 0
    if follows:
        row, start, stop = entry(table, slot, ROW), entry(table, slot, START), entry(table, slot, STOP)
        x, b = window(x, row, start, stop), window(b, row, start, stop)
        group, count = head // heads_per_group, ct.cdiv(stop - start, L)
        place = (0, head, p_tile, n_tile, group, entry(table, slot, TILE), 0, count)
        state, decay = local_state(x, b, rows, place, (L, TILE_P, TILE_N, PRECISION, LATENCY))
        store_state(local_states, (0, head, index, p_tile, n_tile), state)
        if p_tile + n_tile == 0:
            ct.store(segment_decay, (0, head, index), decay)


@ct.kernel
def pass_carried(
    states,
    segment_decay,
    table,
    carried,
    init_state,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    FLAGS: ConstTuple,
    AT_ONCE: ConstInt,
    LATENCY: ConstInt,
):
    """Grid: (entries of `carried` · ceil(P / TILE_P) · H, ceil(N / TILE_N)). FLAGS: (HAS_INIT, CHAINED).

    The entry of a sequence's first segment does the whole sequence: states (1, H, ·, P, N) float32 become the
    entry states of the segments after it. segment_decay (1, H, ·), table (slots, 8), init_state (S, H, P, N),
    read if HAS_INIT.
    """
    HAS_INIT, CHAINED = FLAGS
    if CHAINED:
        wait_for_previous_kernel()
    num_p_tiles = ct.num_tiles(states, axis=3, shape=(1, 1, 1, TILE_P, TILE_N))
    index, head, p_tile, _ = decode_block(states.shape[1], num_p_tiles, 1)
    n_tile = ct.bid(1)
    slot = ct.load(carried, (index,), (1,)).item()
    if slot >= 0:
        if entry(table, slot, POSITION) == 0:
            shape = (TILE_P, TILE_N)
            state = ct.zeros(shape, ct.float32)
            if HAS_INIT:
                at = (entry(table, slot, SEQUENCE), head, p_tile, n_tile)
                state = load_single_state(init_state, at, shape, LATENCY)
            place = (head, p_tile, n_tile, index, entry(table, slot, LEFT))
            pass_on(states, segment_decay, state, place, (AT_ONCE, LATENCY))


@ct.kernel
def pass_chunks(
    states,
    segment_decay,
    table,
    sequences,
    init_state,
    final_state,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    HAS_INIT: ct.Constant[bool],
    AT_ONCE: ConstInt,
    LATENCY: ConstInt,
):
    """Grid: (sequences · ceil(P / TILE_P) · H, ceil(N / TILE_N)).

    All of a sequence's slots: states (1, H, slots, P, N) float32, in which each local state is at the index
    of the slot that follows, become entry states. Slots past a row's length get its final_state (B, H, P, N).
    sequences (≥ S, 2), the rest as in `pass_carried`.
    """
    num_p_tiles = ct.num_tiles(states, axis=3, shape=(1, 1, 1, TILE_P, TILE_N))
    sequence, head, p_tile, _ = decode_block(states.shape[1], num_p_tiles, 1)
    n_tile = ct.bid(1)
    first, count = entry(sequences, sequence, 0), entry(sequences, sequence, 1)
    if count > 0:
        shape = (TILE_P, TILE_N)
        state = ct.zeros(shape, ct.float32)
        if HAS_INIT:
            state = load_single_state(init_state, (sequence, head, p_tile, n_tile), shape, LATENCY)
        store_state(states, (0, head, first, p_tile, n_tile), state)
        left = entry(table, first, LEFT)
        place = (head, p_tile, n_tile, first + 1, left)
        pass_on(states, segment_decay, state, place, (AT_ONCE, LATENCY))
        if first + 1 + left < first + count:
            state = load_single_state(final_state, (sequence, head, p_tile, n_tile), shape, LATENCY)
            for slot in range(first + 1 + left, first + count):
                store_state(states, (0, head, slot, p_tile, n_tile), state)

"""The states at segment borders: h_t = exp(a·dt_t) h_{t−1} + dt_t x_t b_tᵀ, from border to border.

A segment is S tiles of L tokens. `segment_states` lets each segment start from zero, all at once;
`pass_states` then walks the segments, turning local states into entry states. With one tile a segment this is
the published kernel, with a state per chunk; with more, the states take 1/S of the bytes.

    H' = exp2(g_last) H + ((exp2(g_last − g)·dt) ∘ X)ᵀ B        one tile of L tokens
"""

import cuda.tile as ct

from .products import BF16, product, rounded_off
from .tiles import (
    ROW_EXP_G,
    ROW_STATE_WEIGHT,
    ConstInt,
    ConstTuple,
    decode_block,
    last_of_row,
    load_rows,
    load_segment_decay,
    load_state,
    load_tokens,
    row,
    segment_window,
    store_state,
    wait_for_previous_kernel,
)


def local_state(per_head, per_group, rows, place, options, PARTS=1):
    """(state of a segment that starts from zero, the factor by which the segment decays).

    place: (batch, head, p_tile, n_tile, group, first tile, first tile in per_head and per_group, tiles);
    options: (L, TILE_P, TILE_N, precision, latency). PARTS: in how many bf16 parts the state takes up the
    weighted tokens of the last tile, which are all that is felt where memory is short.

    Walks the tiles backwards: then the sum needs no rescaling, as the decay of later tiles goes into the
    L weights, and `compute_out`, which starts at a segment's front, finds the last-read tiles in the L2
    cache.
    """
    batch, head, p_tile, n_tile, group, first, offset, count = place
    L, TILE_P, TILE_N, PRECISION, LATENCY = options
    state = ct.zeros((TILE_P, TILE_N), ct.float32)
    later_decay = 1.0
    if PRECISION == BF16 and PARTS == 2:
        tile = count - 1
        b_tile = load_tokens(per_group, (batch, offset + tile, group, n_tile), (L, TILE_N), LATENCY)
        x_tile = load_tokens(per_head, (batch, offset + tile, head, p_tile), (L, TILE_P), LATENCY)
        rows_tile = load_rows(rows, (batch, head, first + tile), L, LATENCY)
        weighted_x = x_tile.transpose().astype(ct.float32) * row(rows_tile, ROW_STATE_WEIGHT)[None, :]
        state = product(rounded_off(weighted_x), b_tile, state, PRECISION)
    for k in range(count):
        tile = count - 1 - k
        b_tile = load_tokens(per_group, (batch, offset + tile, group, n_tile), (L, TILE_N), LATENCY)
        x_tile = load_tokens(per_head, (batch, offset + tile, head, p_tile), (L, TILE_P), LATENCY)
        rows_tile = load_rows(rows, (batch, head, first + tile), L, LATENCY)
        weight = row(rows_tile, ROW_STATE_WEIGHT) * later_decay
        later_decay = later_decay * last_of_row(rows_tile, ROW_EXP_G)
        weighted_x = x_tile.transpose().astype(ct.float32) * weight[None, :]
        state = product(weighted_x, b_tile, state, PRECISION)
    return state, later_decay


def pass_forwards(states, segment_decay, state, place, options):
    """Entry states from local ones, in place, from `state`; returns the state after the last of them.

    place: (batch, head, p_tile, n_tile, local states); options: (how many are loaded at once, latency).
    """
    batch, head, p_tile, n_tile, num_local = place
    AT_ONCE, LATENCY = options
    # Several loads at once: one after the other, their latencies would be all the time this takes.
    ahead = num_local // AT_ONCE
    for k in range(ahead):
        locals_, decays, segment = (), (), k * AT_ONCE
        for i in ct.static_iter(range(AT_ONCE)):
            index = (batch, head, segment + i, p_tile, n_tile)
            locals_ = locals_ + (load_state(states, index, state.shape, LATENCY),)
            decays = decays + (load_segment_decay(segment_decay, index[:3]),)
        for i in ct.static_iter(range(AT_ONCE)):
            store_state(states, (batch, head, segment + i, p_tile, n_tile), state)
            state = state * decays[i] + locals_[i]
    for segment in range(ahead * AT_ONCE, num_local):
        index = (batch, head, segment, p_tile, n_tile)
        local = load_state(states, index, state.shape, LATENCY)
        decay = load_segment_decay(segment_decay, index[:3])
        store_state(states, index, state)
        state = state * decay + local
    return state


@ct.kernel
def segment_states(
    x,
    b,
    rows,
    local_states,
    segment_decay,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
):
    """One segment of one head from zero, a TILE_P × TILE_N part of the state in registers.

    Grid: (B · segments · ceil(P / TILE_P) · H, ceil(N / TILE_N)); `segments` are the ones asked for, the
    first of the sequence.
    sizes: (tokens a segment, segments, heads a group). FLAGS: (SLICED, CHAINED).
    x (B, T, H, P), b (B, T, G, N), rows (4, B, H, tiles, L); writes local_states (B, H, ≥ segments, P, N) and
    segment_decay (B, H, ≥ segments), the factor by which a whole segment decays.
    """
    SLICED, CHAINED = FLAGS
    if CHAINED:
        wait_for_previous_kernel()
    segment_tokens, num_segments, heads_per_group = sizes
    num_p_tiles = ct.num_tiles(x, axis=3, shape=(1, 1, 1, TILE_P))
    batch, head, p_tile, segment = decode_block(x.shape[2], num_p_tiles, num_segments)
    n_tile = ct.bid(1)
    group = head // heads_per_group
    num_tokens = x.shape[1]
    tiles_per_segment = ct.cdiv(segment_tokens, L)
    first = segment * tiles_per_segment
    count = ct.cdiv(ct.minimum(segment_tokens, num_tokens - segment * segment_tokens), L)
    offset = first
    if SLICED:
        x = segment_window(x, segment, segment_tokens, num_tokens)
        b = segment_window(b, segment, segment_tokens, num_tokens)
        offset = 0

    place = (batch, head, p_tile, n_tile, group, first, offset, count)
    state, later_decay = local_state(x, b, rows, place, (L, TILE_P, TILE_N, PRECISION, LATENCY))
    store_state(local_states, (batch, head, segment, p_tile, n_tile), state)
    if p_tile + n_tile == 0:
        ct.store(segment_decay, (batch, head, segment), later_decay)


@ct.kernel
def pass_states(
    states,
    segment_decay,
    init_state,
    final_state,
    num_local: int,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    FLAGS: ConstTuple,
    AT_ONCE: ConstInt,
    LATENCY: ConstInt,
):
    """From each segment's own state to the state at its entry, in place; where ranks would exchange states.

    Grid: (B · ceil(P / TILE_P) · H, ceil(N / TILE_N)). FLAGS: (HAS_INIT, TO_FINAL). states
    (B, H, ≥ segments, P, N) float32 holds `num_local` local states and becomes entry states; segment_decay
    (B, H, ≥ num_local); init_state (B, H, 1, P, N), read if HAS_INIT. The state after the last local one goes
    to final_state (B, H, 1, P, N) if TO_FINAL, else it is one more entry state.
    """
    HAS_INIT, TO_FINAL = FLAGS
    num_heads = states.shape[1]
    num_p_tiles = ct.num_tiles(states, axis=3, shape=(1, 1, 1, TILE_P, TILE_N))
    batch, head, p_tile, _ = decode_block(num_heads, num_p_tiles, 1)
    n_tile = ct.bid(1)
    shape = (TILE_P, TILE_N)
    state = ct.zeros(shape, ct.float32)
    if HAS_INIT:
        state = load_state(init_state, (batch, head, 0, p_tile, n_tile), shape, LATENCY)
    place = (batch, head, p_tile, n_tile, num_local)
    state = pass_forwards(states, segment_decay, state, place, (AT_ONCE, LATENCY))
    if TO_FINAL:
        store_state(final_state, (batch, head, 0, p_tile, n_tile), state)
    else:
        store_state(states, (batch, head, num_local, p_tile, n_tile), state)

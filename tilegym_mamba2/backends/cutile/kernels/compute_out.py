"""The outputs: y_t = h_t c_t + d·x_t, tile by tile of L tokens.

    Yᵀ = exp2(g) ∘ (H Cᵀ) + Xᵀ ([i ≥ j] exp2(g_i − g_j) dt_j ∘ (B Cᵀ)) + d·Xᵀ
    H' = exp2(g_last) H + ((exp2(g_last − g)·dt) ∘ X)ᵀ B

One block walks one segment of one head with the state (P, N) in registers; the L×L form never reaches memory.
Everything is transposed, outputs (P, L) and weights (j, i), because then the two computed operands, the state
and the weighted x, are first operands and stay in registers: 110 µs against 117 for outputs as (L, P) in
prototypes of the published benchmark on an H200.
"""

import cuda.tile as ct

from .decay import causal_weights_t
from .products import product, product_of_loaded
from .tiles import (
    ROW_DT,
    ROW_EXP_G,
    ROW_G,
    ROW_STATE_WEIGHT,
    ConstInt,
    ConstTuple,
    decode_block,
    last_of_row,
    load_rows,
    load_scalar,
    load_segment_decay,
    load_single_state,
    load_state,
    load_tokens,
    row,
    segment_window,
    store_single_state,
    store_tokens,
    wait_for_previous_kernel,
)


def advance(states, tiles, d_skip, tokens, precision):
    """One tile of L tokens: (states after it, outputs (P, L)).

    `tiles` are x (L, P), b and c as tuples of (L, TILE_N) parts, and rows (4, L); `states` are the (P,
    TILE_N) parts of the state. Products add up over the parts.
    """
    x, b_parts, c_parts, rows = tiles
    y = ct.zeros((x.shape[1], x.shape[0]), ct.float32)
    scores_t = ct.zeros((x.shape[0], x.shape[0]), ct.float32)
    for n in ct.static_iter(range(len(states))):
        c_t = c_parts[n].transpose()
        y = product(states[n], c_t, y, precision)
        scores_t = product_of_loaded(b_parts[n], c_t, scores_t, precision)
    y = y * row(rows, ROW_EXP_G)[None, :]
    weights_t = causal_weights_t(row(rows, ROW_G), row(rows, ROW_DT), tokens) * scores_t
    y = product(x.transpose(), weights_t, y, precision)
    # x in float32 serves the skip term and the state: unpacked once, 64 instructions a thread less.
    x_t = x.transpose().astype(ct.float32)
    y = y + d_skip * x_t
    weighted_x = x_t * row(rows, ROW_STATE_WEIGHT)[None, :]
    decay = last_of_row(rows, ROW_EXP_G)
    advanced = ()
    for n in ct.static_iter(range(len(states))):
        advanced = advanced + (product(weighted_x, b_parts[n], states[n] * decay, precision),)
    return advanced, y


@ct.kernel
def compute_out(
    x,
    b,
    c,
    rows,
    d_skip,
    init_state,
    border_states,
    segment_decay,
    out,
    final_state,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PARTS: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCY: ConstInt,
    STORE_LATENCY: ConstInt,
):
    """Outputs of one segment of one head, TILE_P of its channels, with the state as PARTS tiles of TILE_N.

    Grid: (B · segments · ceil(P / TILE_P) · H,). sizes: (tokens a segment, segments, heads a group, entries):
    `entries` says where a segment's entry state comes from. More than 1: border_states are the entry states,
    that many. Else they are local states, summed up here from init_state (1) or from zero (0).
    FLAGS: (SLICED, HAS_D, WRITE_FINAL, FOLDS, CHAINED), FOLDS: there may be local states to sum up.
    x (B, T, H, P), b, c (B, T, G, N), rows (4, B, H, tiles, L), d_skip (H,), init_state (B, H, P, N),
    border_states (B, H, ≥ segments, P, N), segment_decay (B, H, ≥ segments); writes out (B, T, H, P) and, in
    the last segment, final_state (B, H, P, N).
    """
    SLICED, HAS_D, WRITE_FINAL, FOLDS, CHAINED = FLAGS
    if CHAINED:
        wait_for_previous_kernel()
    segment_tokens, num_segments, heads_per_group, entries = sizes
    num_p_tiles = ct.num_tiles(x, axis=3, shape=(1, 1, 1, TILE_P))
    batch, head, p_tile, segment = decode_block(x.shape[2], num_p_tiles, num_segments)
    group = head // heads_per_group
    num_tokens = x.shape[1]
    first = segment * ct.cdiv(segment_tokens, L)
    count = ct.cdiv(ct.minimum(segment_tokens, num_tokens - segment * segment_tokens), L)
    offset = first
    if SLICED:
        x = segment_window(x, segment, segment_tokens, num_tokens)
        b = segment_window(b, segment, segment_tokens, num_tokens)
        c = segment_window(c, segment, segment_tokens, num_tokens)
        out = segment_window(out, segment, segment_tokens, num_tokens)
        offset = 0

    skip = 0.0
    if HAS_D:
        skip = load_scalar(d_skip, head)
    shape = (TILE_P, TILE_N)
    states = ()
    for n in ct.static_iter(range(PARTS)):
        state = ct.zeros(shape, ct.float32)
        start = segment
        if FOLDS:
            start = ct.minimum(segment, ct.maximum(entries, 1) - 1)
        # At run time, so that short sequences, which start from nothing, need no code of their own.
        if entries == 1:
            state = load_single_state(init_state, (batch, head, p_tile, n), shape, 1)
        if entries > 1:
            state = load_state(border_states, (batch, head, start, p_tile, n), shape, 1)
        # Not compiled where it never runs: at N 512 it cost the loop below its layout, 853 us against 388.
        if FOLDS:
            for before in range(start, segment):
                local = load_state(border_states, (batch, head, before, p_tile, n), shape, 1)
                state = state * load_segment_decay(segment_decay, (batch, head, before)) + local
        states = states + (state,)
    tokens = ct.arange(L, dtype=ct.int32)
    for k in range(count):
        tile = offset + k
        rows_tile = load_rows(rows, (batch, head, first + k), L, LATENCY)
        x_tile = load_tokens(x, (batch, tile, head, p_tile), (L, TILE_P), LATENCY)
        b_parts, c_parts = (), ()
        for n in ct.static_iter(range(PARTS)):
            c_parts = c_parts + (load_tokens(c, (batch, tile, group, n), (L, TILE_N), LATENCY),)
            b_parts = b_parts + (load_tokens(b, (batch, tile, group, n), (L, TILE_N), LATENCY),)
        states, y = advance(states, (x_tile, b_parts, c_parts, rows_tile), skip, tokens, PRECISION)
        store_tokens(out, (batch, tile, head, p_tile), y.transpose(), STORE_LATENCY)
    if WRITE_FINAL:
        if segment == num_segments - 1:
            for n in ct.static_iter(range(PARTS)):
                store_single_state(final_state, (batch, head, p_tile, n), states[n])

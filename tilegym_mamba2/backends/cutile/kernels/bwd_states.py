"""The states that the backward needs: H at the entry of every tile, and the gradient dH' of that at its exit.

    H' = exp2(g_last) H  + ((exp2(g_last − g)·dt) ∘ X)ᵀ B        forwards in time, from init_state
    dH = exp2(g_last) dH' + (exp2(g) ∘ dY)ᵀ C                    backwards in time, from dfinal_state

The two walks are one form: a (P, N) state decays and takes up weighted tokens (L, P) times (L, N). As in the
forward, segments start from zero, all at once, and a pass gives each its true start; then each is walked
again, now storing its state at every tile, in the dtype in which products take it: that halves the traffic.
`segment_states` and `pass_states` of the forward serve the first walk; their mirror images are here.
"""

import cuda.tile as ct

from .products import product
from .tiles import (
    ROW_EXP_G,
    ROW_STATE_WEIGHT,
    ConstBool,
    ConstInt,
    decode_block,
    last_of_row,
    load_rows,
    load_state,
    load_tokens,
    row,
    store_state,
)


def taken_up(tokens, weight):
    """(P, L): tokens (L, P) in float32, weighted, ready as first operand."""
    return tokens.transpose().astype(ct.float32) * weight[None, :]


def decode_segment(per_head, tile_p, sizes, skipped):
    """(batch, head, p_tile, segment, group, first tile, tiles) of a block; `skipped` segments have none.

    sizes: (tiles a segment, segments, heads a group, tiles).
    """
    tiles_per_segment, num_segments, heads_per_group, num_tiles = sizes
    num_p_tiles = ct.num_tiles(per_head, axis=3, shape=(1, 1, 1, tile_p))
    batch, head, p_tile, segment = decode_block(per_head.shape[2], num_p_tiles, num_segments - skipped)
    segment = segment + skipped
    first = segment * tiles_per_segment
    count = ct.minimum(tiles_per_segment, num_tiles - first)
    return batch, head, p_tile, segment, head // heads_per_group, first, count


@ct.kernel
def segment_dstates(
    dout,
    c,
    rows,
    local_dstates,
    segment_decay,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    LATENCY: ConstInt,
):
    """What a segment's own outputs add to the gradient of its entry state; for all segments but the first.

    Grid: (B · (segments − 1) · ceil(P / TILE_P) · H, ceil(N / TILE_N)). sizes: (tiles a segment, segments,
    heads a group, tiles). dout (B, T, H, P), c (B, T, G, N), rows (4, B, H, ≥ tiles, L); writes local_dstates
    (B, H, ≥ segments, P, N) and segment_decay (B, H, ≥ segments), by how much a segment decays.

    Walks forwards: then the sum needs no rescaling, as the decay of earlier tiles goes into the L weights.
    """
    batch, head, p_tile, segment, group, first, count = decode_segment(dout, TILE_P, sizes, 1)
    n_tile = ct.bid(1)
    dstate = ct.zeros((TILE_P, TILE_N), ct.float32)
    earlier_decay = 1.0
    for k in range(count):
        tile = first + k
        c_tile = load_tokens(c, (batch, tile, group, n_tile), (L, TILE_N), LATENCY)
        dy_tile = load_tokens(dout, (batch, tile, head, p_tile), (L, TILE_P), LATENCY)
        rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
        weight = row(rows_tile, ROW_EXP_G) * earlier_decay
        earlier_decay = earlier_decay * last_of_row(rows_tile, ROW_EXP_G)
        dstate = product(taken_up(dy_tile, weight), c_tile, dstate, PRECISION)
    store_state(local_dstates, (batch, head, segment, p_tile, n_tile), dstate)
    if p_tile + n_tile == 0:
        ct.store(segment_decay, (batch, head, segment), earlier_decay)


@ct.kernel
def pass_dstates(
    dstates,
    segment_decay,
    dfinal_state,
    num_segments: int,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    HAS_DFINAL: ConstBool,
    LATENCY: ConstInt,
):
    """From each segment's own gradient to that of the state at its exit, in place, last segment first.

    Grid: (B · ceil(P / TILE_P) · H, ceil(N / TILE_N)). dstates (B, H, ≥ segments, P, N) float32 and
    segment_decay (B, H, ≥ segments), both unread for the first segment; dfinal_state (B, H, 1, P, N), read
    if HAS_DFINAL.
    """
    num_heads = dstates.shape[1]
    num_p_tiles = ct.num_tiles(dstates, axis=3, shape=(1, 1, 1, TILE_P, TILE_N))
    batch, head, p_tile, _ = decode_block(num_heads, num_p_tiles, 1)
    n_tile = ct.bid(1)
    shape = (TILE_P, TILE_N)
    dstate = ct.zeros(shape, ct.float32)
    if HAS_DFINAL:
        dstate = load_state(dfinal_state, (batch, head, 0, p_tile, n_tile), shape, LATENCY)
    for k in range(num_segments - 1):
        segment = num_segments - 1 - k
        index = (batch, head, segment, p_tile, n_tile)
        local = load_state(dstates, index, shape, LATENCY)
        decay = ct.load(segment_decay, index[:3], (1, 1, 1)).item()
        store_state(dstates, index, dstate)
        dstate = dstate * decay + local
    store_state(dstates, (batch, head, 0, p_tile, n_tile), dstate)


@ct.kernel
def tile_states(
    x,
    b,
    rows,
    segment_entries,
    entry_states,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    LATENCY: ConstInt,
):
    """The state at the entry of every tile of one segment.

    Grid: (B · segments · ceil(P / TILE_P) · H, ceil(N / TILE_N)). sizes as in `segment_dstates`.
    x (B, T, H, P), b (B, T, G, N), rows (4, B, H, ≥ tiles, L), segment_entries (B, H, ≥ segments, P, N)
    float32; writes entry_states (B, H, ≥ tiles, P, N).
    """
    batch, head, p_tile, segment, group, first, count = decode_segment(x, TILE_P, sizes, 0)
    n_tile = ct.bid(1)
    index = (batch, head, segment, p_tile, n_tile)
    state = load_state(segment_entries, index, (TILE_P, TILE_N), 1)
    store_state(entry_states, (batch, head, first, p_tile, n_tile), state)
    for k in range(count - 1):
        tile = first + k
        b_tile = load_tokens(b, (batch, tile, group, n_tile), (L, TILE_N), LATENCY)
        x_tile = load_tokens(x, (batch, tile, head, p_tile), (L, TILE_P), LATENCY)
        rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
        weighted = taken_up(x_tile, row(rows_tile, ROW_STATE_WEIGHT))
        state = product(weighted, b_tile, state * last_of_row(rows_tile, ROW_EXP_G), PRECISION)
        store_state(entry_states, (batch, head, tile + 1, p_tile, n_tile), state)


@ct.kernel
def tile_dstates(
    dout,
    c,
    rows,
    segment_exits,
    dexit_states,
    dinit_state,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PRECISION: ConstInt,
    WRITE_DINIT: ConstBool,
    LATENCY: ConstInt,
):
    """The gradient of the state at the exit of every tile of one segment, last tile first.

    Grid: (B · segments · ceil(P / TILE_P) · H, ceil(N / TILE_N)). sizes as in `segment_dstates`.
    dout (B, T, H, P), c (B, T, G, N), rows (4, B, H, ≥ tiles, L), segment_exits (B, H, ≥ segments, P, N)
    float32; writes dexit_states (B, H, ≥ tiles, P, N) and, in the first segment if WRITE_DINIT,
    dinit_state (B, H, 1, P, N).
    """
    batch, head, p_tile, segment, group, first, count = decode_segment(dout, TILE_P, sizes, 0)
    n_tile = ct.bid(1)
    index = (batch, head, segment, p_tile, n_tile)
    dstate = load_state(segment_exits, index, (TILE_P, TILE_N), 1)
    for k in range(count):
        tile = first + count - 1 - k
        store_state(dexit_states, (batch, head, tile, p_tile, n_tile), dstate)
        c_tile = load_tokens(c, (batch, tile, group, n_tile), (L, TILE_N), LATENCY)
        dy_tile = load_tokens(dout, (batch, tile, head, p_tile), (L, TILE_P), LATENCY)
        rows_tile = load_rows(rows, (batch, head, tile), L, LATENCY)
        weighted = taken_up(dy_tile, row(rows_tile, ROW_EXP_G))
        dstate = product(weighted, c_tile, dstate * last_of_row(rows_tile, ROW_EXP_G), PRECISION)
    if WRITE_DINIT:
        if segment == 0:
            store_state(dinit_state, (batch, head, 0, p_tile, n_tile), dstate)

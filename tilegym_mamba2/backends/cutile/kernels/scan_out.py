"""The outputs of the full scan: what `compute_out` computes, with a skip weight for each channel and a gate.

    out = y ∘ silu(z),    y_t = h_t c_t + d ∘ x_t

A block walks one segment as there. In the ragged form it finds its tokens through the table of `scan_table`,
and writes the zeros of the padding that its slot looks after. A sequence's first segment starts from its
initial state or from nothing, the others from the entry states of `pass_states` or `pass_carried`.

For the backward the gate takes the gradients of what it gave: dy = dout ∘ silu(z), dz = dout ∘ y ∘ silu'(z).
"""

import cuda.tile as ct

from .compute_out import advance
from .gate import silu, silu_slope
from .scan_table import LEFT, POSITION, ROW, SEQUENCE, START, STOP, TILE, ZERO_STOP, entry, window
from .tiles import (
    ConstInt,
    ConstTuple,
    decode_block,
    load_rows,
    load_scalar,
    load_single_state,
    load_state,
    load_tokens,
    load_transposed,
    store_single_state,
    store_tokens,
    wait_for_previous_kernel,
)

# What d_skip is: nothing, a number for each head, or one for each of its channels.
NO_SKIP, SKIP_PER_HEAD, SKIP_PER_CHANNEL = 0, 1, 2
# What the gate makes: nothing, the outputs, or the gradients.
NO_GATE, GATE, GATE_GRADIENTS = 0, 1, 2

_ZERO = ct.PaddingMode.ZERO


def load_skip(d_skip, head, p_tile, kind, width):
    """The skip weight of a head, a scalar or (TILE_P, 1)."""
    if kind == SKIP_PER_CHANNEL:
        tile = ct.load(d_skip, (head, p_tile), (1, width), padding_mode=_ZERO)
        return tile.reshape((width, 1)).astype(ct.float32)
    if kind == SKIP_PER_HEAD:
        return load_scalar(d_skip, head)
    return 0.0


def store_zeros(array, index, shape, count):
    """Zeros to the first `count` tiles (L, W) of a (1, T, H, W) array; `index` is (head, tile of W)."""
    tile_tokens, width = shape
    head, w_tile = index
    for k in range(count):
        # Not by the copy engine: what it stores lies in shared memory, which the loads need.
        zeros = ct.zeros((1, tile_tokens, 1, width), array.dtype)
        ct.store(array, (0, k, head, w_tile), zeros, allow_tma=False)


@ct.kernel
def scan_out(
    x,
    b,
    c,
    z,
    dout,
    rows,
    d_skip,
    init_state,
    border_states,
    table,
    out,
    dz,
    final_state,
    sizes: tuple,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    PARTS: ConstInt,
    PRECISION: ConstInt,
    FLAGS: ConstTuple,
    LATENCIES: ConstTuple,
):
    """Outputs of one segment of one head, TILE_P of its channels, with the state as PARTS tiles of TILE_N.

    Grid: (B · segments · ceil(P / TILE_P) · H,); ragged (slots · ceil(P / TILE_P) · H,).
    sizes: (tokens a segment, segments, heads a group), segments is 1 if ragged. FLAGS: (RAGGED, what d_skip
    is, what the gate makes, HAS_INIT, CHAINED, STRIP). LATENCIES: of loads, of the gate's loads, of stores.
    x (B, T, H, P), z, dout (B, T, H, P / STRIP, STRIP), see `load_transposed`, b, c (B, T, G, N), d_skip
    (H,) or (H, P), init_state (B or S, H, P, N), table (slots, 8); rows (4, B, H, tiles, L) and border_states
    (B, H, ≥ segments, P, N), the entry states; ragged rows (4, 1, H, tiles, L) and border_states
    (1, H, ·, P, N). Writes out (B, T, H, P) and final_state like init_state; GATE_GRADIENTS writes dy to out,
    and dz, and no final_state.
    """
    RAGGED, SKIP, GATING, HAS_INIT, CHAINED, STRIP = FLAGS
    LATENCY, Z_LATENCY, STORE_LATENCY = LATENCIES
    if CHAINED:
        wait_for_previous_kernel()
    segment_tokens, num_segments, heads_per_group = sizes
    num_p_tiles = ct.num_tiles(x, axis=3, shape=(1, 1, 1, TILE_P))
    batch, head, p_tile, segment = decode_block(x.shape[2], num_p_tiles, num_segments)
    group = head // heads_per_group
    sequence, position, border, left = batch, segment, segment, num_segments - 1 - segment
    first = segment * ct.cdiv(segment_tokens, L)
    offset = first
    count = ct.cdiv(ct.minimum(segment_tokens, x.shape[1] - segment * segment_tokens), L)
    if RAGGED:
        slot, batch, offset = batch, 0, 0
        row, start, stop = entry(table, slot, ROW), entry(table, slot, START), entry(table, slot, STOP)
        sequence, first = entry(table, slot, SEQUENCE), entry(table, slot, TILE)
        position, left = entry(table, slot, POSITION), entry(table, slot, LEFT)
        border = slot - sequence - 1
        if left < 0:
            # No segment: no state to start from.
            position = -1
        count = ct.cdiv(stop - start, L)
        zero_stop = entry(table, slot, ZERO_STOP)
        zero_tiles = ct.cdiv(zero_stop - stop, L)
        store_zeros(window(out, row, stop, zero_stop), (head, p_tile), (L, TILE_P), zero_tiles)
        if GATING == GATE_GRADIENTS:
            store_zeros(window(dz, row, stop, zero_stop), (head, p_tile), (L, TILE_P), zero_tiles)
            dz, dout = window(dz, row, start, stop), window(dout, row, start, stop)
        if GATING != NO_GATE:
            z = window(z, row, start, stop)
        x, b, c = window(x, row, start, stop), window(b, row, start, stop), window(c, row, start, stop)
        out = window(out, row, start, stop)

    skip = load_skip(d_skip, head, p_tile, SKIP, TILE_P)
    states = ()
    for n in ct.static_iter(range(PARTS)):
        state = ct.zeros((TILE_P, TILE_N), ct.float32)
        if position > 0:
            state = load_state(border_states, (batch, head, border, p_tile, n), (TILE_P, TILE_N), 1)
        if HAS_INIT:
            if position == 0:
                state = load_single_state(init_state, (sequence, head, p_tile, n), (TILE_P, TILE_N), 1)
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
        if GATING != NO_GATE:
            z_t = load_transposed(z, (batch, tile, head, p_tile), (L, TILE_P), STRIP, Z_LATENCY)
        if GATING == GATE_GRADIENTS:
            dout_t = load_transposed(dout, (batch, tile, head, p_tile), (L, TILE_P), STRIP, Z_LATENCY)
        states, y = advance(states, (x_tile, b_parts, c_parts, rows_tile), skip, tokens, PRECISION)
        if GATING != NO_GATE:
            gate = z_t.astype(ct.float32)
        if GATING == GATE:
            y = y * silu(gate)
        if GATING == GATE_GRADIENTS:
            dout_t = dout_t.astype(ct.float32)
            dgate = dout_t * y * silu_slope(gate)
            store_tokens(dz, (batch, tile, head, p_tile), dgate.transpose(), STORE_LATENCY)
            y = dout_t * silu(gate)
        store_tokens(out, (batch, tile, head, p_tile), y.transpose(), STORE_LATENCY)
    if GATING != GATE_GRADIENTS:
        if left == 0:
            for n in ct.static_iter(range(PARTS)):
                store_single_state(final_state, (sequence, head, p_tile, n), states[n])

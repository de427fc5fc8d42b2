"""The decoding step: K tokens update a state in place.

    h' = exp(a·dt) h + dt x bᵀ,   out = (h' c + d∘x) · silu(z)

A block takes TILE_P rows of one head's state with all their N columns, so that an output is one block's sum.
The state goes from memory to registers and back, once, whatever K is: at K = 1 it is nearly all the traffic.
Nothing goes through the copy engine: with any of its loads the compiler adds warps of its own to the block,
and 255 registers a thread leave one block to a multiprocessor. Plain loads of 16 bytes are all issued ahead
of the first use, which keeps the 32 KB of each of four blocks in flight.
"""

import cuda.tile as ct

from .decay import LOG2E, exp2
from .steps import clamp, softplus
from .tiles import ConstInt, ConstTuple

# What d_skip is: nothing, a number for each head, or one for each row of its state.
NO_SKIP, SKIP_PER_HEAD, SKIP_PER_ROW = 0, 1, 2

_ZERO = ct.PaddingMode.ZERO


def number(array, index):
    """One element of an array, as float32."""
    return ct.gather(array, index, check_bounds=False).astype(ct.float32)


def load_row(array, index, width):
    """(width,) float32 tile of a (B, K, H or G, W) array; `index` is (row, token, head, tile of W).

    The array of a single token may come without K.
    """
    row, token, head, part = index
    if array.ndim == 3:
        tile = ct.load(array, (row, head, part), (1, 1, width), padding_mode=_ZERO, allow_tma=False)
    else:
        tile = ct.load(array, index, (1, 1, 1, width), padding_mode=_ZERO, allow_tma=False)
    return tile.reshape((width,)).astype(ct.float32)


def store_row(array, index, tile):
    """Stores a (W,) tile into a (B, K, H, P) array, in the array's dtype; see `load_row`."""
    row, token, head, part = index
    tile, width = tile.astype(array.dtype), tile.shape[0]
    if array.ndim == 3:
        ct.store(array, (row, head, part), tile.reshape((1, 1, width)), allow_tma=False)
    else:
        ct.store(array, index, tile.reshape((1, 1, 1, width)), allow_tma=False)


def load_step(dt, row, token, head):
    """One element of (B, K, H), or of (B, H), as float32."""
    if dt.ndim == 2:
        return number(dt, (row, head))
    return number(dt, (row, token, head))


def load_slot(state, index, shape):
    """Float32 tile of the pool (slots, H, P, N); `index` is (slot, head, p_tile)."""
    tile = ct.load(state, (*index, 0), (1, 1, *shape), padding_mode=_ZERO, allow_tma=False)
    return tile.reshape(shape).astype(ct.float32)


def store_slot(state, index, tile):
    """Stores a tile into the pool, in its dtype; see `load_slot`."""
    ct.store(state, (*index, 0), tile.astype(state.dtype).reshape((1, 1, *tile.shape)), allow_tma=False)


def load_skip(d_skip, head, p_tile, kind, width):
    """(width,) float32: what a head's rows take of x itself."""
    if kind == SKIP_PER_ROW:
        tile = ct.load(d_skip, (head, p_tile), (1, width), padding_mode=_ZERO, allow_tma=False)
        return tile.reshape((width,)).astype(ct.float32)
    if kind == SKIP_PER_HEAD:
        return ct.zeros((width,), ct.float32) + number(d_skip, (head,))
    return ct.zeros((width,), ct.float32)


def silu(v):
    """v · sigmoid(v)."""
    return ct.truediv(v, 1.0 + exp2(-LOG2E * v), rounding_mode=ct.RoundingMode.APPROX)


@ct.kernel
def state_update(
    state,
    x,
    dt,
    a,
    b,
    c,
    d_skip,
    z,
    dt_bias,
    state_indices,
    out,
    dt_min: float,
    dt_max: float,
    SIZES: ConstTuple,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    OPTIONS: ConstTuple,
):
    """Grid: (B · H · ceil(P / TILE_P),), the parts of a head's state next to each other; TILE_N ≥ N.

    state (slots, H, P, N), updated in place; x, z (B, K, H, P), dt (B, K, H), a, dt_bias (H,), b and c
    (B, K, G, N), d_skip (H,) or (H, P), state_indices (B,); writes out (B, K, H, P). K is 1 and missing in
    all of them, or in none. What OPTIONS says is not there may be any number instead of an array.
    SIZES: (H, H / G, ceil(P / TILE_P)). OPTIONS: (what d_skip is, HAS_Z, HAS_BIAS, HAS_INDICES, SOFTPLUS).

    A row whose slot is -1 reads nothing and gets zeros.
    """
    NUM_HEADS, HEADS_PER_GROUP, P_TILES = SIZES
    SKIP, HAS_Z, HAS_BIAS, HAS_INDICES, SOFTPLUS = OPTIONS
    block = ct.bid(0)
    p_tile = block % P_TILES
    block = block // P_TILES
    head, row = block % NUM_HEADS, block // NUM_HEADS
    group = head // HEADS_PER_GROUP
    num_tokens = 1
    if x.ndim == 4:
        num_tokens = x.shape[1]
    slot = row
    if HAS_INDICES:
        slot = ct.gather(state_indices, row, check_bounds=False).astype(ct.int32)
    if slot >= 0:
        # First, so that its bytes are under way while the rest is read.
        h = load_slot(state, (slot, head, p_tile), (TILE_P, TILE_N))
        rate = number(a, (head,)) * LOG2E
        bias = 0.0
        if HAS_BIAS:
            bias = number(dt_bias, (head,))
        skip = load_skip(d_skip, head, p_tile, SKIP, TILE_P)
        for k in range(num_tokens):
            step = load_step(dt, row, k, head) + bias
            if SOFTPLUS:
                step = softplus(step)
            step = clamp(step, dt_min, dt_max)
            b_tile = load_row(b, (row, k, group, 0), TILE_N)
            c_tile = load_row(c, (row, k, group, 0), TILE_N)
            x_tile = load_row(x, (row, k, head, p_tile), TILE_P)
            h = h * exp2(rate * step) + (step * x_tile)[:, None] * b_tile[None, :]
            y = ct.sum(h * c_tile[None, :], axis=1) + skip * x_tile
            if HAS_Z:
                y = y * silu(load_row(z, (row, k, head, p_tile), TILE_P))
            store_row(out, (row, k, head, p_tile), y)
        store_slot(state, (slot, head, p_tile), h)
    else:
        for k in range(num_tokens):
            store_row(out, (row, k, head, p_tile), ct.zeros((TILE_P,), ct.float32))

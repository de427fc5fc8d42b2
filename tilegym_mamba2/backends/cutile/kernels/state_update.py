"""The decoding step: K tokens update a state in place.

    h' = exp(a·dt) h + dt x bᵀ,   out = (h' c + d∘x) · silu(z)

A block takes rows of one head's state with all their N columns, so that an output is one block's sum. The
state goes from memory to registers and back, once, whatever K is: at K = 1 it is nearly all the traffic.

What counts is how soon a block has asked for all it reads. A load with a bounds check is a branch, and the
conversion to float32 sits in it: x waits for c, c for b, five times the latency of memory one after the
other, which 16 KB of a 16-bit state a block do not hide. So nothing is checked where all tiles fit. A block's
rows may be cut into tiles of their own: then the compiler does not put off the second half's x and z.
Nothing goes through the copy engine: with any of its loads the compiler adds warps of its own to the block,
and 255 registers a thread leave one block to a multiprocessor.
"""

import cuda.tile as ct

from .decay import LOG2E, exp2, finite
from .gate import silu
from .steps import clamp, softplus
from .tiles import ConstInt, ConstTuple

# What d_skip is: nothing, a number for each head, or one for each row of its state.
NO_SKIP, SKIP_PER_HEAD, SKIP_PER_ROW = 0, 1, 2

_ZERO = ct.PaddingMode.ZERO


def number(array, index):
    """One element of an array, as float32."""
    return ct.gather(array, index, check_bounds=False).astype(ct.float32)


def load_tile(array, index, shape, fits):
    """`fits`: the tile lies inside the array. Then no load is a branch, and none waits for the one before."""
    if fits:
        return ct.load(array, index, shape, check_bounds=False, allow_tma=False)
    return ct.load(array, index, shape, padding_mode=_ZERO, allow_tma=False)


def store_tile(array, index, tile, fits):
    """See `load_tile`."""
    if fits:
        ct.store(array, index, tile, check_bounds=False, allow_tma=False)
    else:
        ct.store(array, index, tile, allow_tma=False)


def load_row(array, index, width, fits):
    """(width,) float32 tile of a (B, K, H or G, W) array; `index` is (row, token, head, tile of W).

    The array of a single token may come without K.
    """
    shape = (1, 1, 1, width)
    if array.ndim == 3:
        row, token, head, part = index
        index, shape = (row, head, part), (1, 1, width)
    return load_tile(array, index, shape, fits).reshape((width,)).astype(ct.float32)


def load_rows(array, index, parts, width, fits):
    """`parts` tiles that follow each other, as a tuple; see `load_row`."""
    row, token, head, first = index
    tiles = ()
    for i in ct.static_iter(range(parts)):
        tiles = (*tiles, load_row(array, (row, token, head, first + i), width, fits))
    return tiles


def store_row(array, index, tile, fits):
    """Stores a (W,) tile into a (B, K, H, P) array, in the array's dtype; see `load_row`."""
    width = tile.shape[0]
    shape = (1, 1, 1, width)
    if array.ndim == 3:
        row, token, head, part = index
        index, shape = (row, head, part), (1, 1, width)
    store_tile(array, index, tile.astype(array.dtype).reshape(shape), fits)


def load_step(dt, row, token, head):
    """One element of (B, K, H), or of (B, H), as float32."""
    if dt.ndim == 2:
        return number(dt, (row, head))
    return number(dt, (row, token, head))


def load_slot(state, index, parts, shape, fits):
    """`parts` float32 tiles of the pool (slots, H, P, N), as a tuple; `index` is (slot, head, p_tile)."""
    slot, head, first = index
    tiles = ()
    for i in ct.static_iter(range(parts)):
        tile = load_tile(state, (slot, head, first + i, 0), (1, 1, *shape), fits)
        tiles = (*tiles, tile.reshape(shape).astype(ct.float32))
    return tiles


def store_slot(state, index, tiles, parts, fits):
    """Stores tiles into the pool, in its dtype; see `load_slot`."""
    slot, head, first = index
    for i in ct.static_iter(range(parts)):
        tile = tiles[i].astype(state.dtype).reshape((1, 1, *tiles[i].shape))
        store_tile(state, (slot, head, first + i, 0), tile, fits)


def load_skip(d_skip, index, kind, parts, width, fits):
    """What a head's rows take of x itself, for each part (width,) float32; `index` is (head, p_tile)."""
    head, first = index
    tiles = ()
    for i in ct.static_iter(range(parts)):
        if kind == SKIP_PER_ROW:
            tile = load_tile(d_skip, (head, first + i), (1, width), fits)
            tiles = (*tiles, tile.reshape((width,)).astype(ct.float32))
        elif kind == SKIP_PER_HEAD:
            tiles = (*tiles, number(d_skip, (head,)))
        else:
            tiles = (*tiles, 0.0)
    return tiles


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
    """Grid: (B · H · blocks of a head,), the parts of a head's state next to each other; TILE_N ≥ N.

    state (slots, H, P, N), updated in place; x, z (B, K, H, P), dt (B, K, H), a, dt_bias (H,), b and c
    (B, K, G, N), d_skip (H,) or (H, P), state_indices (B,); writes out (B, K, H, P). K is 1 and missing in
    all of them, or in none. What OPTIONS says is not there may be any number instead of an array.
    SIZES: (H, H / G, blocks of a head, PARTS, FITS): a block takes PARTS tiles of TILE_P rows; with FITS all
    tiles lie inside their arrays. OPTIONS: (what d_skip is, HAS_Z, HAS_BIAS, HAS_INDICES, SOFTPLUS).

    A row whose slot is -1 reads nothing and gets zeros.
    """
    NUM_HEADS, HEADS_PER_GROUP, BLOCKS, PARTS, FITS = SIZES
    SKIP, HAS_Z, HAS_BIAS, HAS_INDICES, SOFTPLUS = OPTIONS
    block = ct.bid(0)
    first = block % BLOCKS * PARTS
    block = block // BLOCKS
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
        h = load_slot(state, (slot, head, first), PARTS, (TILE_P, TILE_N), FITS)
        rate = finite(number(a, (head,)) * LOG2E)
        bias = 0.0
        if HAS_BIAS:
            bias = number(dt_bias, (head,))
        skip = load_skip(d_skip, (head, first), SKIP, PARTS, TILE_P, FITS)
        for k in range(num_tokens):
            step = load_step(dt, row, k, head) + bias
            if SOFTPLUS:
                step = softplus(step)
            step = clamp(step, dt_min, dt_max)
            b_tile = load_row(b, (row, k, group, 0), TILE_N, FITS)
            c_tile = load_row(c, (row, k, group, 0), TILE_N, FITS)
            x_tiles = load_rows(x, (row, k, head, first), PARTS, TILE_P, FITS)
            z_tiles = x_tiles
            if HAS_Z:
                z_tiles = load_rows(z, (row, k, head, first), PARTS, TILE_P, FITS)
            h_next = ()
            for i in ct.static_iter(range(PARTS)):
                x_tile = x_tiles[i]
                h_tile = h[i] * exp2(rate * step) + (step * x_tile)[:, None] * b_tile[None, :]
                y = ct.sum(h_tile * c_tile[None, :], axis=1) + skip[i] * x_tile
                if HAS_Z:
                    y = y * silu(z_tiles[i])
                store_row(out, (row, k, head, first + i), y, FITS)
                h_next = (*h_next, h_tile)
            h = h_next
        store_slot(state, (slot, head, first), h, PARTS, FITS)
    else:
        for k in range(num_tokens):
            for i in ct.static_iter(range(PARTS)):
                store_row(out, (row, k, head, first + i), ct.zeros((TILE_P,), ct.float32), FITS)

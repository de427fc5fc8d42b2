"""Loads and stores for the project's layouts, and the decoding of a one-dimensional grid.

Kernels see tiles and indices; padding, reshapes and the order of axes stay here. Everything outside an array
reads as zero, so that a short last chunk, P 80 or N 96 need no code of their own.
"""

import cuda.tile as ct

ConstBool = ct.Constant[bool]
ConstInt = ct.Constant[int]
ConstTuple = ct.Constant[tuple]

# Rows of the `rows` array, per token of a tile: what the decay contributes, ready for use.
ROW_G, ROW_DT, ROW_STATE_WEIGHT, ROW_EXP_G = 0, 1, 2, 3
NUM_ROWS = 4

_ZERO = ct.PaddingMode.ZERO


def wait_for_previous_kernel():
    """For a chained launch: lets the next kernel's blocks come, and waits for the previous kernel's results.

    The blocks of a chained kernel start while the previous one still runs; nothing is read before this.
    """
    ct.grid_dependency_control_launch_dependents()
    ct.grid_dependency_control_wait()


def decode_block(num_heads, num_p_tiles, num_segments):
    """(batch, head, p_tile, segment) of this block; heads vary fastest, so that neighbours share b and c."""
    block = ct.bid(0)
    head = block % num_heads
    block = block // num_heads
    p_tile = block % num_p_tiles
    block = block // num_p_tiles
    return block // num_segments, head, p_tile, block % num_segments


def segment_window(array, segment, seg_tokens, num_tokens):
    """The tokens of one segment of a (B, T, …) array, as an array of its own."""
    start = segment * seg_tokens
    return array.slice(axis=1, start=start, stop=ct.minimum(start + seg_tokens, num_tokens))


def load_tokens(array, index, shape, latency):
    """(L, W) tile of a (B, T, H, W) array; `index` is (batch, token tile, head, tile of W)."""
    tile_tokens, width = shape
    tile = ct.load(array, index, (1, tile_tokens, 1, width), padding_mode=_ZERO, latency=latency)
    return tile.reshape((tile_tokens, width))


def load_transposed(array, index, shape, strip, latency):
    """(W, L) tile of a (B, T, H, W / strip, strip) array, for strip 0 (B, T, H, 1, W); `index` as in
    `load_tokens`, shape (L, W).

    For what is transposed and never an operand of a product as it lies. The copy engine puts the rows of such
    a tile one after the other, 128 bytes each, and the 8 rows that a warp transposes at a time lie in the
    same banks of shared memory: 32 turns a load, not 4. In strips of 16 channels, each with all its tokens,
    there are 8, and the gate of the full scan takes 83 µs instead of 94. Where nothing waits for it, the copy
    engine's 32 bytes at a time cost more than that: `segment_states` 35 µs instead of 30.
    """
    batch, tile, head, w_tile = index
    tile_tokens, width = shape
    place, strips, across = (batch, head, 0, tile, w_tile), 1, width
    if strip > 0:
        place, strips, across = (batch, head, w_tile, tile, 0), width // strip, strip
    shape = (1, 1, strips, tile_tokens, across)
    tile = ct.load(array, place, shape, order=(0, 2, 3, 1, 4), padding_mode=_ZERO, latency=latency)
    tile = ct.permute(tile.reshape((strips, tile_tokens, across)), (0, 2, 1))
    return tile.reshape((width, tile_tokens))


def store_tokens(array, index, tile, latency):
    """Stores an (L, W) tile into a (B, T, H, W) array, in the array's dtype; see `load_tokens`."""
    tile_tokens, width = tile.shape
    ct.store(array, index, tile.astype(array.dtype).reshape((1, tile_tokens, 1, width)), latency=latency)


def load_rows(rows, index, tile_tokens, latency):
    """(NUM_ROWS, L) tile of the rows array (NUM_ROWS, B, H, tiles, L); `index` is (batch, head, tile)."""
    batch, head, tile = index
    shape = (NUM_ROWS, 1, 1, 1, tile_tokens)
    return ct.load(rows, (0, batch, head, tile, 0), shape, latency=latency).reshape((NUM_ROWS, tile_tokens))


def row(rows_tile, which):
    """One row of a `load_rows` tile, (L,)."""
    tile_tokens = rows_tile.shape[1]
    return ct.extract(rows_tile, (which, 0), (1, tile_tokens)).reshape((tile_tokens,))


def last_of_row(rows_tile, which):
    """The row's value at the tile's last token, a scalar."""
    return ct.extract(rows_tile, (which, rows_tile.shape[1] - 1), (1, 1)).item()


def load_state(array, index, shape, latency):
    """Float32 tile of a (B, H, segments, P, N) array; `index` is (batch, head, segment, p_tile, n_tile)."""
    tile = ct.load(array, index, (1, 1, 1, *shape), padding_mode=_ZERO, latency=latency)
    return tile.reshape(shape).astype(ct.float32)


def store_state(array, index, tile):
    """Stores a tile into a (B, H, segments, P, N) array, in the array's dtype; see `load_state`."""
    ct.store(array, index, tile.astype(array.dtype).reshape((1, 1, 1, *tile.shape)))


def load_single_state(array, index, shape, latency):
    """As `load_state`, of a (B, H, P, N) array; `index` is (batch, head, p_tile, n_tile)."""
    tile = ct.load(array, index, (1, 1, *shape), padding_mode=_ZERO, latency=latency)
    return tile.reshape(shape).astype(ct.float32)


def store_single_state(array, index, tile):
    """As `store_state`, into a (B, H, P, N) array."""
    ct.store(array, index, tile.astype(array.dtype).reshape((1, 1, *tile.shape)))


def load_scalar(array, index):
    """One element of a one-dimensional array, as float32."""
    return ct.load(array, (index,), (1,)).item().astype(ct.float32)


def load_segment_decay(segment_decay, index):
    """The factor of one segment, from (B, H, segments); `index` is (batch, head, segment)."""
    return ct.load(segment_decay, index, (1, 1, 1)).item()

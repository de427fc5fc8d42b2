"""The decay of every token: g, the sum of a·dt·log2(e) since the start of its chunk (or tile of L tokens).

`chunk_cumsum` is the published kernel: decay_log2 (B, H, T), from any chunk size. The pipeline uses
`chunk_rows` instead, which goes one step further and writes all that the passes need of the decay: the four
rows g, dt, exp2(g_last − g)·dt and exp2(g) of a tile of L tokens, next to each other, so that they come as
one (4, L) tile by the copy engine. Loaded one by one as they were, waiting for them was half of
`compute_out`. `rows_of_decay` makes the same rows from a decay_log2 that exists.

All are strided reads of dt (B, T, H) and contiguous writes in [batch, head, token] order, TILE_H heads a
block.
"""

import cuda.tile as ct

from .decay import LOG2E, at_most_forgotten, cumulative_decay, exp2, finite
from .tiles import ROW_DT, ROW_EXP_G, ROW_G, ROW_STATE_WEIGHT, ConstBool, ConstInt, segment_window

_ZERO = ct.PaddingMode.ZERO


def decode(num_windows, num_head_tiles):
    """(batch, tile of heads, window of tokens) of this block; windows vary fastest."""
    block = ct.bid(0)
    window = block % num_windows
    block = block // num_windows
    return block // num_head_tiles, block % num_head_tiles, window


def load_heads_first(dt, index, shape, allow_tma=None):
    """(TILE_H, L) float32 tile of dt (B, T, H); `index` is (batch, tile of tokens, tile of heads)."""
    tile_tokens, heads = shape
    tile = ct.load(dt, index, (1, tile_tokens, heads), padding_mode=_ZERO, allow_tma=allow_tma)
    return tile.reshape((tile_tokens, heads)).transpose().astype(ct.float32)


def load_rate(a, head_tile, heads):
    """(TILE_H, 1) decay rates in log2."""
    rate = ct.load(a, (head_tile,), (heads,), padding_mode=_ZERO).astype(ct.float32)
    return finite(rate[:, None] * LOG2E)


def hold_after(g, count):
    """g (TILE_H, L), at every token past the first `count` as at the last of those.

    Padding adds nothing to the sum, but the parallel sum rounds it anew, and a tile must end as its last
    real token does.
    """
    tokens = ct.arange(g.shape[1], dtype=ct.int32)[None, :]
    # g never rises: the smallest one up to `count` is the last.
    last = ct.min(ct.where(tokens < count, g, 0.0), axis=1, keepdims=True)
    return ct.maximum(g, last, propagate_nan=True)


def store_rows(rows, index, g, dt, allow_tma):
    """Stores the four rows of a tile, from g and dt (TILE_H, L); `index` is (batch, tile of heads, tile)."""
    batch, head_tile, tile = index
    shape = (1, 1, g.shape[0], 1, g.shape[1])
    weight = exp2(ct.min(g, axis=1, keepdims=True) - g) * dt
    ct.store(rows, (ROW_G, batch, head_tile, tile, 0), g.reshape(shape), allow_tma=allow_tma)
    ct.store(rows, (ROW_DT, batch, head_tile, tile, 0), dt.reshape(shape), allow_tma=allow_tma)
    ct.store(rows, (ROW_STATE_WEIGHT, batch, head_tile, tile, 0), weight.reshape(shape), allow_tma=allow_tma)
    ct.store(rows, (ROW_EXP_G, batch, head_tile, tile, 0), exp2(g).reshape(shape), allow_tma=allow_tma)


@ct.kernel
def chunk_cumsum(a, dt, decay_log2, num_chunks: int, chunk_size: int, L: ConstInt, TILE_H: ConstInt):
    """Grid: (B · chunks · ceil(H / TILE_H),). A chunk is walked in tiles of L tokens, the sum carried on.

    a (H,), dt (B, T, H); writes decay_log2 (B, H, T) float32.
    """
    batch, head_tile, chunk = decode(num_chunks, ct.num_tiles(a, axis=0, shape=(TILE_H,)))
    num_tokens = dt.shape[1]
    start = chunk * chunk_size
    stop = ct.minimum(start + chunk_size, num_tokens)
    dt = segment_window(dt, chunk, chunk_size, num_tokens)
    decay_log2 = decay_log2.slice(axis=2, start=start, stop=stop)
    rate = load_rate(a, head_tile, TILE_H)
    carried = ct.zeros((TILE_H, 1), ct.float32)
    for tile in range(ct.cdiv(stop - start, L)):
        g = carried + cumulative_decay(
            load_heads_first(dt, (batch, tile, head_tile), (L, TILE_H)) * rate, axis=1
        )
        ct.store(decay_log2, (batch, head_tile, tile), g.reshape((1, TILE_H, L)))
        carried = ct.min(g, axis=1, keepdims=True)


@ct.kernel
def chunk_rows(a, dt, rows, num_tiles: int, L: ConstInt, TILE_H: ConstInt, CHAINED: ConstBool):
    """Grid: (B · tiles · ceil(H / TILE_H),).

    a (H,), dt (B, T, H); writes rows (4, B, H, tiles, L) float32 whole: tokens past T have dt 0.
    """
    if CHAINED:
        ct.grid_dependency_control_launch_dependents()
    batch, head_tile, tile = decode(num_tiles, ct.num_tiles(a, axis=0, shape=(TILE_H,)))
    dt_tile = load_heads_first(dt, (batch, tile, head_tile), (L, TILE_H))
    rate = at_most_forgotten(dt_tile * load_rate(a, head_tile, TILE_H))
    g = cumulative_decay(rate, axis=1)
    store_rows(rows, (batch, head_tile, tile), hold_after(g, dt.shape[1] - tile * L), dt_tile, True)


@ct.kernel
def rows_of_decay(decay_log2, dt, rows, num_tiles: int, chunk_size: int, L: ConstInt, TILE_H: ConstInt):
    """Grid: (B · tiles · ceil(H / TILE_H),). Each chunk has ceil(chunk_size / L) tiles of its own.

    decay_log2 (B, H, T), dt (B, T, H); writes rows (4, B, H, tiles, L) float32, all tiles that hold tokens.
    """
    batch, head_tile, index = decode(num_tiles, ct.cdiv(dt.shape[2], TILE_H))
    num_tokens = dt.shape[1]
    tiles_per_chunk = ct.cdiv(chunk_size, L)
    chunk, tile = index // tiles_per_chunk, index % tiles_per_chunk
    start = chunk * chunk_size
    stop = ct.minimum(start + chunk_size, num_tokens)
    if start + tile * L < stop:
        dt = segment_window(dt, chunk, chunk_size, num_tokens)
        # tileiras 13.4 crashes if the copy engine loads a sliced array here, or stores what came from one.
        dt_tile = load_heads_first(dt, (batch, tile, head_tile), (L, TILE_H), False)
        heads = (head_tile * TILE_H + ct.arange(TILE_H, dtype=ct.int32))[:, None]
        tokens = (start + tile * L + ct.arange(L, dtype=ct.int32))[None, :]
        decay = ct.gather(decay_log2, (batch, heads, tokens))
        # Past the last token the decay stays what it was there.
        last = ct.gather(decay_log2, (batch, heads, stop - 1))
        decay = ct.where(tokens < stop, decay, last)
        before = ct.gather(decay_log2, (batch, heads, ct.maximum(start + tile * L - 1, 0)))
        g = decay - ct.where(tile > 0, before, 0.0)
        store_rows(rows, (batch, head_tile, index), g, dt_tile, False)

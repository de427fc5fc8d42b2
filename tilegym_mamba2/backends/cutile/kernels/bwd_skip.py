"""The gradient of a d for each channel: dd (H, P) = Σ dY ∘ X over all tokens, in a fixed order.

First over some tiles of tokens each, then over those sums. (A d for each head is a row of `compute_dx`.)
"""

import cuda.tile as ct

from .bwd_tiles import tokens_of_tile
from .scan_table import window
from .tiles import ConstBool, ConstInt, decode_block, load_tokens

_ZERO = ct.PaddingMode.ZERO


def product_of_tokens(x, dout, index, shape, latency):
    """(L, TILE_P) float32: dY ∘ X of one tile; `index` as in `load_tokens`."""
    x_tile = load_tokens(x, index, shape, latency).astype(ct.float32)
    return load_tokens(dout, index, shape, latency).astype(ct.float32) * x_tile


@ct.kernel
def skip_parts(
    x,
    dout,
    tiles,
    partial,
    num_tiles: int,
    tiles_of_row: int,
    tiles_of_part: int,
    L: ConstInt,
    TILE_P: ConstInt,
    RAGGED: ConstBool,
    LATENCY: ConstInt,
):
    """Grid: (parts · ceil(P / TILE_P) · H,).

    x, dout (B, T, H, P); writes partial (parts, H, P) float32, the sums over `tiles_of_part` of the
    `num_tiles` tiles each. RAGGED: `tiles` (tiles, 4) says which tokens a tile has.
    """
    num_p_tiles = ct.num_tiles(x, axis=3, shape=(1, 1, 1, TILE_P))
    part, head, p_tile, _ = decode_block(x.shape[2], num_p_tiles, 1)
    first = part * tiles_of_part
    total = ct.zeros((L, TILE_P), ct.float32)
    for k in range(ct.minimum(tiles_of_part, num_tiles - first)):
        tile = first + k
        if RAGGED:
            row, start, stop = tokens_of_tile(tiles, tile)
            if start < stop:
                of_tile = (window(x, row, start, stop), window(dout, row, start, stop))
                total = total + product_of_tokens(*of_tile, (0, 0, head, p_tile), (L, TILE_P), LATENCY)
        else:
            index = (tile // tiles_of_row, tile % tiles_of_row, head, p_tile)
            total = total + product_of_tokens(x, dout, index, (L, TILE_P), LATENCY)
    ct.store(partial, (part, head, p_tile), ct.sum(total, axis=0).reshape((1, 1, TILE_P)))


@ct.kernel
def sum_skip(partial, dd, TILE: ConstInt, TILE_P: ConstInt):
    """Grid: (ceil(P / TILE_P) · H,). partial (parts, H, P) float32; writes dd (H, P)."""
    num_p_tiles = ct.num_tiles(dd, axis=1, shape=(1, TILE_P))
    head, p_tile = ct.bid(0) // num_p_tiles, ct.bid(0) % num_p_tiles
    total = ct.zeros((TILE, TILE_P), ct.float32)
    for k in range(ct.num_tiles(partial, axis=0, shape=(TILE, 1, TILE_P))):
        part = ct.load(partial, (k, head, p_tile), (TILE, 1, TILE_P), padding_mode=_ZERO)
        total = total + part.reshape((TILE, TILE_P))
    dd_tile = ct.sum(total, axis=0).reshape((1, TILE_P))
    ct.store(dd, (head, p_tile), dd_tile.astype(dd.dtype))

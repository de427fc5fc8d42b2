"""What only the backward's kernels share: saved states, rows of sums per token, a block's heads."""

import cuda.tile as ct

from .decay import causal_weights_t

_ZERO = ct.PaddingMode.ZERO


def decay_t(g, tokens):
    """(L, L), transposed: [j, i] = exp2(g_i − g_j) for i ≥ j, else 0."""
    return causal_weights_t(g, ct.full(g.shape, 1.0, ct.float32), tokens)


def load_saved_state(array, index, shape, latency):
    """Tile of a (B, H, tiles, P, N) array, in its dtype; `index`: (batch, head, tile, p_tile, n_tile)."""
    return ct.load(array, index, (1, 1, 1, *shape), padding_mode=_ZERO, latency=latency).reshape(shape)


def store_row(rows, which, index, values):
    """Stores L values as one row of a (rows, B, H, tiles, L) array; `index` is (batch, head, tile)."""
    batch, head, tile = index
    ct.store(rows, (which, batch, head, tile, 0), values.reshape((1, 1, 1, 1, values.shape[0])))


def decode_heads(num_groups, sizes):
    """(batch, group, part, tile, saved tile, first head, heads): some heads of a group at one tile.

    sizes: (tiles asked for, heads a group, heads a block, first tile); the saved states begin with that tile.
    """
    num_tiles, heads_per_group, heads_per_block, first_tile = sizes
    block = ct.bid(0)
    parts = ct.cdiv(heads_per_group, heads_per_block)
    part = block % parts
    block = block // parts
    group = block % num_groups
    block = block // num_groups
    offset = part * heads_per_block
    count = ct.minimum(heads_per_block, heads_per_group - offset)
    saved = block % num_tiles
    first = group * heads_per_group + offset
    return block // num_tiles, group, part, first_tile + saved, saved, first, count

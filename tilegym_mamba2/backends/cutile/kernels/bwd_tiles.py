"""What only the backward's kernels share: saved states, rows of sums per token, a block's heads and tile."""

import cuda.tile as ct

from .decay import causal_weights_t
from .scan_out import SKIP_PER_CHANNEL, SKIP_PER_HEAD
from .scan_table import TILE, entry
from .tiles import load_scalar

# Rows of the `drows` array of `compute_gradients` and `bwd_sides`, which add them up no further than single
# warps can: four for LATER, two each for CARRIED, DIRECT and EARLIER, in units of as many, and one whose sum
# is that of SKIP.
SHARES_LATER, SHARES_CARRIED, SHARES_DIRECT, SHARES_EARLIER, SHARES_SKIP = 0, 2, 3, 4, 10
NUM_SHARES = 11
# More rows for EARLIER, two for each of some columns of N, may follow: in units of two.
SHARES_OF_PARTS = 6

# Parts of a row of `overlap`, TILE_P numbers each.
OVERLAP_PARTS = 2
OVERLAP_OF_PAIR, OVERLAP_OF_PARTNER = 0, 1

# Columns of the `tiles` array of ragged sequences, see `bwd_ragged`.
TILE_ROW, TILE_START, TILE_STOP, TILE_SLOT = 0, 1, 2, 3

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


def halves(values):
    """(rows, 2): sums along the halves of each row of (L, L or TILE_P) values.

    Of a product of 8 warps four hold the left half and four the right one, 16 rows each. So no warp waits for
    another; a sum along the whole row takes three barriers.
    """
    rows, columns = values.shape
    return ct.sum(values.reshape((rows, 2, columns // 2)), axis=2)


def shares(sums):
    """(rows, 1): what adds up to the sum of all `halves`: two that one thread holds make one."""
    rows = sums.shape[0]
    return ct.sum(sums.reshape((rows // 16, 2, 8, 2)), axis=1).reshape((rows, 1))


def store_shares(drows, which, index, sums):
    """Stores (L, count) sums as that many rows of a (B, H, tiles, rows · L) array, from row count·which on.

    `index`: (batch, head, tile). So one address serves all rows of a tile.
    """
    ct.store(drows, (*index, which), sums.transpose().reshape((1, 1, 1, sums.shape[0] * sums.shape[1])))


def quarters(values):
    """(columns, 4): sums along the quarters of each column, see `halves`."""
    rows, columns = values.shape
    return ct.sum(values.reshape((4, rows // 4, columns)), axis=1).transpose()


def store_overlap(overlap, index, part, values):
    """`index`: (batch, head, tile)."""
    ct.store(overlap, (*index, part), values.reshape((1, 1, 1, values.shape[0])))


def load_skip_row(d_skip, head, p_tile, kind, width):
    """What a head's outputs take of x itself: a number, or (1, width)."""
    if kind == SKIP_PER_CHANNEL:
        tile = ct.load(d_skip, (head, p_tile), (1, width), padding_mode=_ZERO)
        return tile.astype(ct.float32)
    if kind == SKIP_PER_HEAD:
        return load_scalar(d_skip, head)
    return 0.0


def decode_heads(num_groups, sizes):
    """(batch, group, part, tile, saved tile, first head, heads): some heads of a group at one tile.

    sizes: (tiles asked for, heads a group, heads a block, first tile, …); the saved states begin with that
    tile. Ragged: see `ragged_tile`.
    """
    num_tiles, heads_per_group, heads_per_block, first_tile, _ = sizes
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


def tokens_of_tile(tiles, tile):
    """(batch row, first token, token after the last) of a tile of ragged sequences; it may be empty."""
    return (
        ct.gather(tiles, (tile, TILE_ROW)),
        ct.gather(tiles, (tile, TILE_START)),
        ct.gather(tiles, (tile, TILE_STOP)),
    )


def ragged_tile(tiles, table, saved, sizes):
    """(tile, its tokens as from `tokens_of_tile`), for the tile whose states are the `saved` ones.

    sizes: (tiles at most, …, first slot, slots): the slots asked for; a tile of others counts as empty.
    """
    first_slot, num_slots = sizes[3], sizes[4]
    tile = entry(table, first_slot, TILE) + saved
    row, start, stop = tokens_of_tile(tiles, tile)
    slot = ct.gather(tiles, (tile, TILE_SLOT), padding_value=-1)
    asked_for = (slot >= first_slot) & (slot < first_slot + num_slots)
    return tile, (row, start, ct.where(asked_for, stop, start))


def first_saved(table, slot, first_slot, every):
    """Where the states of a slot's tiles begin, when `every` tiles share one and those of `first_slot` come
    first: a slot of t tiles takes no more than (t + every − 1) / every."""
    tiles = entry(table, slot, TILE) - entry(table, first_slot, TILE)
    return (tiles + (slot - first_slot) * (every - 1)) // every

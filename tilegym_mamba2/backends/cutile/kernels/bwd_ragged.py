"""What the backward of ragged sequences needs beside the table of their segments.

`tiles_of_slots` turns `scan_table` around: for each tile of the scratch arrays (tiles, 4) int32

    TILE_ROW, TILE_START, TILE_STOP     batch row, first token, and the token after the last; equal: no tokens
    TILE_SLOT                           the slot that it is in; -1: none

so that a block which takes one tile finds its tokens at once, and there are hardly more blocks than tiles
that hold some. `zero_padding` writes the gradients of tokens that are in no sequence.
"""

import cuda.tile as ct

from .bwd_tiles import TILE_ROW, TILE_SLOT, TILE_START, TILE_STOP
from .scan_out import store_zeros
from .scan_table import ROW, START, STOP, TILE, ZERO_STOP, entry, window
from .tiles import ConstInt, ConstTuple, decode_block


@ct.kernel
def tiles_of_slots(table, tiles, num_slots: int, L: ConstInt, TILE_TILES: ConstInt, TILE_SLOTS: ConstInt):
    """Grid: (ceil(tiles / TILE_TILES),). table (≥ slots, 8); writes tiles (tiles, 4), and unused ones too."""
    tile = ct.bid(0) * TILE_TILES + ct.arange(TILE_TILES, dtype=ct.int32)
    found = ct.zeros((TILE_TILES,), ct.int32)
    for k in range(ct.cdiv(num_slots, TILE_SLOTS)):
        slot = k * TILE_SLOTS + ct.arange(TILE_SLOTS, dtype=ct.int32)
        exists = slot < num_slots
        start = ct.gather(table, (slot, START), mask=exists)
        length = ct.gather(table, (slot, STOP), mask=exists) - start
        first = ct.gather(table, (slot, TILE), mask=exists)
        mine = (tile[:, None] >= first[None, :]) & (tile[:, None] < (first + ct.cdiv(length, L))[None, :])
        found = found + ct.sum(ct.where(mine, slot[None, :] + 1, 0), axis=1)
    slot = found - 1
    # Below 0 nothing is read, and 0 comes back.
    start = ct.gather(table, (slot, START)) + (tile - ct.gather(table, (slot, TILE))) * L
    start = ct.where(slot >= 0, start, 0)
    ct.scatter(tiles, (tile, TILE_ROW), ct.gather(table, (slot, ROW)))
    ct.scatter(tiles, (tile, TILE_START), start)
    ct.scatter(tiles, (tile, TILE_STOP), ct.minimum(start + L, ct.gather(table, (slot, STOP))))
    ct.scatter(tiles, (tile, TILE_SLOT), slot)


@ct.kernel
def zero_padding(
    table,
    dx,
    db,
    dc,
    ddt,
    heads_per_group: int,
    L: ConstInt,
    TILE_P: ConstInt,
    TILE_N: ConstInt,
    TILE_H: ConstInt,
    FLAGS: ConstTuple,
):
    """Zeros to what a slot of the table looks after.

    Grid: (slots · ceil(P / TILE_P) · H,). FLAGS: (dx and ddt are there, db and dc are there). Writes dx
    (B, T, H, P), ddt (B, T, H), db and dc (B, T, G, N).
    """
    FOR_TOKENS, FOR_GROUPS = FLAGS
    num_p_tiles = ct.num_tiles(dx, axis=3, shape=(1, 1, 1, TILE_P))
    slot, head, p_tile, _ = decode_block(dx.shape[2], num_p_tiles, 1)
    stop, zero_stop = entry(table, slot, STOP), entry(table, slot, ZERO_STOP)
    count = ct.cdiv(zero_stop - stop, L)
    if count > 0:
        span = (entry(table, slot, ROW), stop, zero_stop)
        if FOR_TOKENS:
            store_zeros(window(dx, *span), (head, p_tile), (L, TILE_P), count)
            if p_tile == 0:
                if head % TILE_H == 0:
                    ddt = window(ddt, *span)
                    for k in range(count):
                        zeros = ct.zeros((1, L, TILE_H), ddt.dtype)
                        ct.store(ddt, (0, k, head // TILE_H), zeros, allow_tma=False)
        if FOR_GROUPS:
            if p_tile == 0:
                if head % heads_per_group == 0:
                    group = head // heads_per_group
                    for n_tile in range(ct.num_tiles(db, axis=3, shape=(1, 1, 1, TILE_N))):
                        store_zeros(window(db, *span), (group, n_tile), (L, TILE_N), count)
                        store_zeros(window(dc, *span), (group, n_tile), (L, TILE_N), count)

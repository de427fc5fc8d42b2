"""Where segments of ragged sequences are, made on the device from lengths that the host never reads.

A sequence is cut into segments of `segment_tokens`, the last one shorter, and no segment crosses a border. A
block of a ragged kernel takes one *slot* of the table. How many slots there are follows from shapes alone, so
that some are empty. Columns of `table` (slots, 8) int32:

    ROW        batch row of the token arrays
    START      the segment's first token
    STOP       the token after its last; STOP = START: the segment is empty
    ZERO_STOP  the tokens from STOP on up to this one are padding, and get zeros
    SEQUENCE   index into init_state and final_state; -1: the slot only writes zeros, or is unused
    TILE       its first tile of L tokens in scratch arrays, where every segment begins with a tile of its own
    POSITION   which segment of its sequence it is
    LEFT       how many segments of its sequence come after it; -1: no segment, but a row's padding

A segment that others follow leaves its state in scratch memory under the index slot − SEQUENCE, and its
successor finds that under its own index minus one: with one segment a sequence there is nothing to keep.
`carried` lists the slots that others follow, in order, and then -1.
"""

import cuda.tile as ct

from .tiles import ConstBool, ConstInt

COLUMNS = 8
ROW, START, STOP, ZERO_STOP, SEQUENCE, TILE, POSITION, LEFT = range(COLUMNS)


def entry(table, slot, column):
    """One number of the table."""
    return ct.load(table, (slot, column), (1, 1)).item()


def tokens_of_slot(table, slot):
    """(batch row, first token, token after the last) of a slot."""
    return entry(table, slot, ROW), entry(table, slot, START), entry(table, slot, STOP)


def window(array, row, start, stop):
    """Tokens start … stop of one row of a (B, T, …) array, as an array (1, stop − start, …)."""
    return array.slice(axis=0, start=row, stop=row + 1).slice(axis=1, start=start, stop=stop)


def border(cu_seqlens, sequence, num_tokens):
    """cu_seqlens at the indices `sequence`, within 0 … T whatever it holds."""
    value = ct.gather(cu_seqlens, sequence)
    return ct.minimum(ct.maximum(value, 0), num_tokens).astype(ct.int32)


def segments_of(length, segment_tokens, keep_empty):
    """How many segments a sequence is cut into; an empty one has one where it needs a slot all the same."""
    count = ct.cdiv(length, segment_tokens)
    if keep_empty:
        count = ct.maximum(count, 1)
    return count


def tiles_of(length, segment_tokens, L):
    """How many tiles of L tokens a sequence has, where every segment begins with a tile of its own."""
    whole = length // segment_tokens
    return whole * ct.cdiv(segment_tokens, L) + ct.cdiv(length - whole * segment_tokens, L)


def store_columns(table, slot, columns):
    """Writes the rows `slot` of the table; what is past its end is dropped."""
    for column in ct.static_iter(range(COLUMNS)):
        ct.scatter(table, (slot, column), columns[column])


@ct.kernel
def packed_table(
    cu_seqlens,
    table,
    sequences,
    carried,
    num_tokens: int,
    segment_tokens: int,
    L: ConstInt,
    TILE_SLOTS: ConstInt,
    TILE_SEQUENCES: ConstInt,
    KEEP_EMPTY: ConstBool,
    CHAINED: ConstBool,
):
    """Sequences that lie after one another in row 0.

    Grid: (ceil(slots / TILE_SLOTS),). cu_seqlens (S + 1,), clamped to 0 … num_tokens; writes
    table (slots, 8), carried, and sequences (S + 1, 2): each one's first slot and number of slots, and in the
    last row how many slots sequences take. KEEP_EMPTY: an empty sequence has a slot; without it `carried`,
    whose index takes every sequence to have one, is not written.

    After the sequences' slots come those that zero the tokens past cu_seqlens[S], then unused ones.
    """
    if CHAINED:
        ct.grid_dependency_control_launch_dependents()
    num_sequences = cu_seqlens.shape[0] - 1
    slot = ct.bid(0) * TILE_SLOTS + ct.arange(TILE_SLOTS, dtype=ct.int32)
    # Of each slot: sequences up to its own, and the first slot and the first tile of its own.
    index = ct.zeros((TILE_SLOTS,), ct.int32)
    first_slot = ct.zeros((TILE_SLOTS,), ct.int32)
    first_tile = ct.zeros((TILE_SLOTS,), ct.int32)
    num_slots, num_tiles = 0, 0
    for k in range(ct.cdiv(num_sequences, TILE_SEQUENCES)):
        sequence = k * TILE_SEQUENCES + ct.arange(TILE_SEQUENCES, dtype=ct.int32)
        begin = border(cu_seqlens, sequence, num_tokens)
        length = ct.maximum(border(cu_seqlens, sequence + 1, num_tokens) - begin, 0)
        exists = sequence < num_sequences
        count = ct.where(exists, segments_of(length, segment_tokens, KEEP_EMPTY), 0)
        tiles = ct.where(exists, tiles_of(length, segment_tokens, L), 0)
        first = num_slots + ct.cumsum(count, axis=0) - count
        tile = num_tiles + ct.cumsum(tiles, axis=0) - tiles
        if ct.bid(0) == 0:
            ct.scatter(sequences, (sequence, 0), first, mask=exists)
            ct.scatter(sequences, (sequence, 1), count, mask=exists)
        before = exists[None, :] & (first[None, :] <= slot[:, None])
        index = index + ct.sum(before.astype(ct.int32), axis=1)
        # Neither falls from sequence to sequence: the largest one is the last one's.
        first_slot = ct.maximum(first_slot, ct.max(ct.where(before, first[None, :], 0), axis=1))
        first_tile = ct.maximum(first_tile, ct.max(ct.where(before, tile[None, :], 0), axis=1))
        num_slots = num_slots + ct.sum(count)
        num_tiles = num_tiles + ct.sum(tiles)
    if ct.bid(0) == 0:
        ct.scatter(sequences, (num_sequences, 0), num_slots)
        ct.scatter(sequences, (num_sequences, 1), 0)

    used = slot < num_slots
    sequence = index - 1
    begin = border(cu_seqlens, sequence, num_tokens)
    end = ct.maximum(border(cu_seqlens, sequence + 1, num_tokens), begin)
    position = slot - first_slot
    left = segments_of(end - begin, segment_tokens, KEEP_EMPTY) - 1 - position
    start = begin + ct.where(used, position, 0) * segment_tokens
    stop = ct.minimum(start + segment_tokens, end)
    # Past the last sequence: windows of padding, and when those are used up empty ones at T.
    last = border(cu_seqlens, num_sequences, num_tokens)
    window = ct.minimum(ct.maximum(slot - num_slots, 0), ct.cdiv(num_tokens - last, segment_tokens))
    zero_start = ct.minimum(last + window * segment_tokens, num_tokens)
    zero_stop = ct.minimum(zero_start + segment_tokens, num_tokens)
    columns = (
        0,
        ct.where(used, start, zero_start),
        ct.where(used, stop, zero_start),
        ct.where(used, stop, zero_stop),
        ct.where(used, sequence, -1),
        ct.where(used, first_tile + position * ct.cdiv(segment_tokens, L), 0),
        ct.where(used, position, 0),
        ct.where(used, left, -1),
    )
    store_columns(table, slot, columns)
    if KEEP_EMPTY:
        ct.scatter(carried, slot - sequence, slot, mask=used & (left > 0))
        ct.scatter(carried, slot, -1, mask=slot >= num_slots - num_sequences)


@ct.kernel
def padded_table(
    seq_lens,
    table,
    sequences,
    carried,
    num_tokens: int,
    segment_tokens: int,
    tiles_per_row: int,
    L: ConstInt,
    TILE_SLOTS: ConstInt,
    HAS_LENGTHS: ConstBool,
    CHAINED: ConstBool,
):
    """Every batch row is a sequence, padded at its end, and has slots for T tokens.

    Grid: (ceil(slots / TILE_SLOTS),), slots = B · ceil(T / segment_tokens). seq_lens (B,), clamped to
    0 … num_tokens, not read without HAS_LENGTHS; writes table (slots, 8), sequences (B, 2) and carried
    (B · (ceil(T / segment_tokens) − 1),).
    """
    if CHAINED:
        ct.grid_dependency_control_launch_dependents()
    slot = ct.bid(0) * TILE_SLOTS + ct.arange(TILE_SLOTS, dtype=ct.int32)
    per_row = ct.cdiv(num_tokens, segment_tokens)
    row, position = slot // per_row, slot % per_row
    length = ct.zeros((TILE_SLOTS,), ct.int32) + num_tokens
    if HAS_LENGTHS:
        length = border(seq_lens, row, num_tokens)
    window = position * segment_tokens
    window_stop = ct.minimum(window + segment_tokens, num_tokens)
    stop = ct.minimum(ct.maximum(length, window), window_stop)
    left = ct.maximum(segments_of(length, segment_tokens, True) - 1 - position, -1)
    columns = (
        row,
        window,
        stop,
        window_stop,
        row,
        row * tiles_per_row + position * ct.cdiv(segment_tokens, L),
        position,
        left,
    )
    store_columns(table, slot, columns)
    ct.scatter(sequences, (row, 0), slot, mask=position == 0)
    ct.scatter(sequences, (row, 1), per_row, mask=position == 0)
    ct.scatter(carried, slot - row, ct.where(left > 0, slot, -1), mask=position < per_row - 1)

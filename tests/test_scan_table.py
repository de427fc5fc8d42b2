"""The table of segments: through the tile interpreter against a walk over the sequences in Python."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilegym_mamba2 import interpreter
from tilegym_mamba2.backends.cutile import ragged
from tilegym_mamba2.backends.cutile.launch import run
from tilegym_mamba2.backends.cutile.ragged import Ragged

CPU = torch.device("cpu")
TILE = 64


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with interpreter.interpret():
        yield


def tables(sizes: Ragged, lengths: torch.Tensor | None) -> tuple[list[list[int]], list[list[int]], list[int]]:
    arrays = sizes.tables(CPU)
    run([sizes.launch(lengths, arrays)], CPU)
    rows = sizes.batch if sizes.sequences is None else sizes.sequences + 1
    counts = (sizes.slots, rows, sizes.carried)
    return tuple(array[:count].tolist() for array, count in zip(arrays, counts, strict=True))


def segments(length: int, segment: int, start: int, keep_empty: bool) -> list[tuple[int, int]]:
    """(first token, token after the last) of each of a sequence's segments."""
    found = [(start + at, start + min(at + segment, length)) for at in range(0, length, segment)]
    return found or [(start, start)] * keep_empty


def expected_packed(borders: list[int], sizes: Ragged) -> tuple[list[list[int]], list[list[int]], list[int]]:
    table, sequences, carried, tile = [], [], [], 0
    for s, (begin, end) in enumerate(zip(borders, borders[1:], strict=False)):
        cut = segments(end - begin, sizes.segment_tokens, begin, sizes.keep_empty)
        sequences.append([len(table), len(cut)])
        for position, (start, stop) in enumerate(cut):
            left = len(cut) - 1 - position
            carried += [len(table)] * (left > 0)
            table.append([0, start, stop, stop, s, tile, position, left])
            tile += math.ceil((stop - start) / sizes.tile)
    assert tile <= sizes.tiles
    sequences.append([len(table), 0])
    for start in range(borders[-1], sizes.tokens, sizes.segment_tokens):
        if sizes.keep_empty:
            table.append([0, start, start, min(start + sizes.segment_tokens, sizes.tokens), -1, 0, 0, -1])
    assert len(table) <= sizes.slots and len(carried) <= sizes.carried
    carried += [-1] * (sizes.carried - len(carried))
    return table, sequences, carried


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@settings(max_examples=60, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 3) | st.sampled_from([63, 64, 65, 128, 200, 500]), max_size=12),
    st.integers(0, 400),
    st.sampled_from([64, 128, 256, 1, 7, 70]),
    st.booleans(),
)
def test_packed(dtype: torch.dtype, lengths: list[int], spare: int, segment: int, keep_empty: bool) -> None:
    tokens = sum(lengths) + spare
    sizes = Ragged(1, tokens, len(lengths), False, segment, TILE, keep_empty)
    if sizes.slots == 0:
        return
    borders = torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)
    table, sequences, carried = tables(sizes, borders)
    expected = expected_packed(borders.tolist(), sizes)
    used = len(expected[0])
    assert table[:used] == expected[0]
    for row, start, stop, zero_stop, sequence, *_, left in table[used:]:
        # Without slots for empty sequences, nothing is zeroed: the table is that of the chunk states.
        assert (row, sequence, left) == (0, -1, -1) and start == stop
        assert start == zero_stop == tokens or not keep_empty
    assert sequences == expected[1]
    if keep_empty:
        assert carried == expected[2]


def test_more_sequences_than_a_block_compares_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 300, (2 * ragged.TILE_SEQUENCES + 9,), generator=generator)
    borders = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    sizes = Ragged(1, int(borders[-1]) + 1000, len(lengths), False, 128, TILE)
    table, sequences, carried = tables(sizes, borders)
    expected = expected_packed(borders.tolist(), sizes)
    assert table[: len(expected[0])] == expected[0]
    assert (sequences, carried) == expected[1:]


@pytest.mark.parametrize("borders", [[5, 3, 900, -7, 200], [0, 400, 0, 400], [2**40, 0], [-(2**40), 2**40]])
def test_borders_out_of_order_or_range_stay_within_the_tokens(borders: list[int]) -> None:
    sizes = Ragged(1, 400, len(borders) - 1, False, 64, TILE)
    table, *_ = tables(sizes, torch.tensor(borders))
    for _, start, stop, zero_stop, sequence, *_ in table:
        assert 0 <= start <= stop <= zero_stop <= 400 and -1 <= sequence < len(borders) - 1


@pytest.mark.parametrize("segment", [64, 128, 50, 1, 1000])
@pytest.mark.parametrize("lengths", [[200, 0, 1, 130], [64, 128, 129, 63], None])
def test_padded(lengths: list[int] | None, segment: int) -> None:
    tokens, batch = 200, 4
    sizes = Ragged(batch, tokens, None, lengths is not None, segment, TILE)
    table, sequences, carried = tables(sizes, None if lengths is None else torch.tensor(lengths))
    per_row = math.ceil(tokens / segment)
    per_segment = math.ceil(segment / TILE)
    tiles_per_row = math.ceil(tokens / TILE) if segment % TILE == 0 else per_row * per_segment
    expected, follows = [], []
    for row, length in enumerate(lengths or [tokens] * batch):
        last = max(1, math.ceil(length / segment)) - 1
        for position in range(per_row):
            start, end = position * segment, min((position + 1) * segment, tokens)
            tile = row * tiles_per_row + position * per_segment
            left = max(-1, last - position)
            if position < per_row - 1:
                follows.append(len(expected) if left > 0 else -1)
            expected.append([row, start, min(max(length, start), end), end, row, tile, position, left])
    assert table == expected
    assert sequences == [[row * per_row, per_row] for row in range(batch)]
    assert carried == follows
    assert sizes.tiles == batch * tiles_per_row


@pytest.mark.parametrize("segment", [64, 1024])
def test_a_slot_finds_what_its_predecessor_left(segment: int) -> None:
    """A segment's state is kept under slot − sequence; its successor looks one index below its own."""
    lengths = [0, 70, 300, 64, 0, 1500]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    sizes = Ragged(1, sum(lengths), len(lengths), False, segment, TILE)
    table, _, carried = tables(sizes, borders)
    kept = {}
    for slot, (*_, sequence, _, position, left) in enumerate(table):
        if left > 0:
            assert carried[slot - sequence] == slot
            kept[slot - sequence] = slot
        if position > 0:
            assert kept[slot - sequence - 1] == slot - 1
    assert max(kept, default=-1) < sizes.carried

"""Lists of tiles against what a walk over a dense mask, tile by tile, finds."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_block_mask import dense_masks

from cuflash import BlockMask
from cuflash.masks.tile_lists import tile_lists


def walked(dense, rows, columns, longest_first):
    """ranges, entries, order and bits (of bool) of a dense mask."""
    lengths = dense.shape[-2:]
    dense = dense.reshape(math.prod(dense.shape[:-2]), *lengths)
    down, across = (-(-n // size) for n, size in zip(lengths, (rows, columns)))
    ranges, entries, orders, bits = [], [], [], []
    for head in dense:
        tiles = [
            [
                head[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                for j in range(across)
            ]
            for i in range(down)
        ]
        order = list(range(down))
        if longest_first:
            order.sort(key=lambda i: -sum(tile.any() for tile in tiles[i]))  # stable
        orders += order
        for i in range(down):
            begin = len(entries)
            for j, tile in enumerate(tiles[i]):
                if not tile.any():
                    continue
                number = -1
                if not tile.all():
                    number = len(bits)
                    bits.append(np.zeros((rows, columns), bool))
                    bits[-1][: tile.shape[0], : tile.shape[1]] = tile
                before = [x for x in order[: order.index(i)] if tiles[x][j].any()]
                entries.append((j, number, before[-1] if before else -1, 0))
            ranges.append((begin, len(entries)))
    return ranges, entries, orders, bits


def assert_lists(mask, dense, rows, columns, longest_first):
    lists = tile_lists(mask, rows, columns, longest_first)
    ranges, entries, order, bits = walked(dense, rows, columns, longest_first)
    assert lists.ranges.dtype == lists.entries.dtype == np.int32
    assert lists.bits.dtype == np.uint32
    assert all(x is None or x.flags.c_contiguous for x in lists)  # copied as they lie
    assert list(map(tuple, lists.ranges.tolist())) == ranges
    assert list(map(tuple, lists.entries.tolist())) == entries
    if longest_first:
        assert lists.order.dtype == np.int32
        assert lists.order.tolist() == order
    else:
        assert lists.order is None
    words = -(-columns // 32)
    assert lists.bits.shape == (len(bits), rows, words)
    column = np.arange(32 * words)
    shown = lists.bits[..., column // 32] >> (column % 32).astype(np.uint32) & 1
    assert not shown[..., columns:].any()
    for got, expected in zip(shown, bits):
        np.testing.assert_array_equal(got[:, :columns], expected)


@given(dense_masks(), st.integers(1, 70), st.integers(1, 70), st.booleans())
def test_lists_of_any_mask(dense, rows, columns, longest_first):
    mask = BlockMask.from_dense(dense, (32, 16))
    assert_lists(mask, dense, rows, columns, longest_first)


@pytest.mark.parametrize("tile", [(16, 64), (64, 16), (128, 64), (64, 128), (16, 8)])
@pytest.mark.parametrize("longest_first", [False, True])
def test_lists_of_kernels(tile, longest_first):
    """Every kind of tile, in lists of their own."""
    rng = np.random.default_rng(1)
    mask = BlockMask(rng.random((2, 3, 5, 4)) < 0.5, 64, (300, 250))
    mask &= BlockMask.causal((300, 250), block_size=32)
    for turned in (mask, mask.T):
        assert_lists(turned, turned.to_dense(), *tile, longest_first)


@pytest.mark.parametrize("packed", [2, 4, 16])
@pytest.mark.parametrize("longest_first", [False, True])
def test_rows_of_heads_side_by_side(packed, longest_first):
    """A tile has fewer queries; each row of bits stands there once for each head."""
    shown = np.random.default_rng(0).random((2, 50, 90)) < 0.5
    shown[:, :, 32:64], shown[1, :7] = True, False
    mask = BlockMask.from_dense(shown, 16)
    *lists, bits = tile_lists(mask, 16, 32, longest_first, packed=packed)
    *expected, rows = tile_lists(mask, 16 // packed, 32, longest_first)
    for got, wanted in zip(lists, expected):
        np.testing.assert_array_equal(got, wanted)
    assert bits.shape == (len(rows), 16, 1)
    for row in range(16):
        np.testing.assert_array_equal(bits[:, row], rows[:, row // packed])


def test_what_longest_first_changes():
    """Rows of 1, 0, 3 and 2 tiles; whoever visits a column waits for who starts before it."""
    blocks = np.array([[1, 0, 0], [0, 0, 0], [1, 1, 1], [1, 0, 1]], bool)
    mask = BlockMask(blocks, 16)
    natural, longest = (tile_lists(mask, 16, 16, choice) for choice in (False, True))
    assert natural.order is None
    assert longest.order.tolist() == [2, 3, 0, 1]
    np.testing.assert_array_equal(natural.ranges, [(0, 1), (1, 1), (1, 4), (4, 6)])
    np.testing.assert_array_equal(longest.ranges, natural.ranges)
    np.testing.assert_array_equal(longest.entries[:, 0], [0, 0, 1, 2, 0, 2])
    assert natural.entries[:, 2].tolist() == [-1, 0, -1, -1, 2, 2]
    assert longest.entries[:, 2].tolist() == [3, -1, -1, -1, 2, 2]
    assert len(longest.bits) == 0


@pytest.mark.parametrize("shape", [(0, 50), (50, 0), (0, 50, 50), (40, 50)], ids=str)
@pytest.mark.parametrize("longest_first", [False, True])
def test_nothing_to_visit(shape, longest_first):
    dense = np.zeros(shape, bool)
    assert_lists(BlockMask.from_dense(dense, 16), dense, 16, 32, longest_first)


def test_a_row_behind_another_list_starts_anew():
    """`previous` knows its own list's rows only."""
    lists = tile_lists(BlockMask(np.ones((3, 2, 2), bool), 16), 16, 16, False)
    assert lists.entries[:, 2].tolist() == 3 * [-1, -1, 0, 0]
    np.testing.assert_array_equal(lists.ranges[:, 0], 2 * np.arange(6))

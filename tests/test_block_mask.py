"""Block masks: every constructor, operation and cut into tiles against the dense definition."""

import copy
import itertools
import math
import operator
import pickle
import subprocess
import sys
import tracemalloc
import types
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import reference
from cuflash.masks.block_mask import BlockMask
from cuflash.masks.patterns import EMPTY, FULL, PARTIAL

BLOCK_SIZES = [16, 48, (32, 16), [16, 64], 128]
SHAPES = [(100, 100), (70, 133), (133, 70), (1, 200), (200, 1), (96, 96)]


def tiles_of(dense, rows, columns):
    """Kinds and words of the tiles of a dense mask, padded to whole tiles and reshaped."""
    lists, (n, m) = math.prod(dense.shape[:-2]), dense.shape[-2:]
    grid = -(-n // rows), -(-m // columns)

    def cut(elements):
        padded = np.zeros((len(elements), grid[0] * rows, grid[1] * columns), bool)
        padded[:, :n, :m] = elements
        return padded.reshape(len(elements), grid[0], rows, grid[1], columns).swapaxes(2, 3)

    tiles, within = cut(dense.reshape(lists, n, m)), cut(np.ones((1, n, m), bool))
    full = (tiles == within).all(axis=(-1, -2))
    kinds = np.where(full, FULL, np.where(tiles.any(axis=(-1, -2)), PARTIAL, EMPTY))
    words = -(-columns // 32)
    bits = np.zeros((np.count_nonzero(kinds == PARTIAL), rows, 32 * words), np.uint64)
    bits[..., :columns] = tiles[kinds == PARTIAL]
    bits = bits.reshape(len(bits), rows, words, 32) << np.arange(32, dtype=np.uint64)
    return kinds.astype(np.uint8), bits.sum(axis=-1).astype(np.uint32)


def assert_tiles(mask, dense, rows, columns):
    kinds, bits = mask.tiles(rows, columns)
    expected_kinds, expected_bits = tiles_of(dense, rows, columns)
    assert (kinds.dtype, bits.dtype) == (np.uint8, np.uint32)
    np.testing.assert_array_equal(kinds, expected_kinds)
    np.testing.assert_array_equal(bits, expected_bits)


def assert_is(mask, dense):
    """`mask` is `dense`: its elements, its kinds, and what it says of itself."""
    assert mask.shape == dense.shape
    assert mask.ndim == dense.ndim
    got = mask.to_dense()
    assert got.dtype == bool
    np.testing.assert_array_equal(got, dense)
    kinds, bits = tiles_of(dense, *mask.block_size)
    np.testing.assert_array_equal(mask.kinds, kinds.reshape(dense.shape[:-2] + kinds.shape[1:]))
    np.testing.assert_array_equal(mask.tiles(*mask.block_size)[1], bits)
    assert mask.density == (dense.mean() if dense.size else 0)
    assert mask.block_density == ((kinds != EMPTY).mean() if kinds.size else 0)
    assert mask == BlockMask.from_dense(dense, mask.block_size)


@st.composite
def dense_masks(draw, leading=None):
    """Masks that have empty, full and partial blocks of 16 and more."""
    if leading is None:
        leading = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    shape = (*leading, draw(st.integers(0, 140)), draw(st.integers(0, 140)))
    return draw_mask(draw, shape)


def draw_mask(draw, shape):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    grain = draw(st.sampled_from([1, 16, 48]))
    grid = *shape[:-2], -(-shape[-2] // grain), -(-shape[-1] // grain)
    cells = rng.random(grid) < draw(st.sampled_from([0, 0.1, 0.5, 0.9, 1]))
    mask = cells.repeat(grain, -2).repeat(grain, -1)[..., : shape[-2], : shape[-1]]
    flips = draw(st.sampled_from([0, 0, 1e-3, 0.5]))
    return mask ^ (rng.random(shape) < flips)


sizes = st.sampled_from([16, 32, 48, 64])
block_sizes = sizes | st.tuples(sizes, sizes)


@given(dense_masks(), block_sizes)
def test_a_dense_mask_comes_back(dense, block_size):
    mask = BlockMask.from_dense(dense, block_size)
    assert mask.block_size == (block_size if isinstance(block_size, tuple) else (block_size,) * 2)
    assert_is(mask, dense)


@given(dense_masks(), block_sizes, st.integers(1, 70), st.integers(1, 70))
def test_tiles_of_any_size(dense, block_size, rows, columns):
    assert_tiles(BlockMask.from_dense(dense, block_size), dense, rows, columns)


@pytest.mark.parametrize("tile", [(128, 64), (64, 128), (16, 8), (200, 400), (5, 3), (96, 32)])
def test_tiles_of_kernels(tile):
    rng = np.random.default_rng(1)
    blocks = rng.random((2, 3, 3, 2)) < 0.5
    mask = BlockMask(blocks, 128, (300, 250)) & BlockMask.causal((300, 250), block_size=32)
    dense = mask.to_dense()
    assert {EMPTY, PARTIAL, FULL} == set(mask.tiles(16, 16)[0].ravel())
    assert_tiles(mask, dense, *tile)
    assert_tiles(mask.T, dense.swapaxes(-1, -2), *tile)


@given(dense_masks(), block_sizes, st.integers(1, 70), st.integers(1, 70))
def test_the_transpose(dense, block_size, rows, columns):
    mask = BlockMask.from_dense(dense, block_size).T
    assert_is(mask, dense.swapaxes(-1, -2))
    assert_tiles(mask, dense.swapaxes(-1, -2), rows, columns)
    assert mask.T == BlockMask.from_dense(dense, block_size)


@given(dense_masks(), block_sizes, block_sizes, st.data())
def test_and_and_or(dense, block_size, other_size, data):
    leading = [data.draw(st.sampled_from([1, n])) for n in dense.shape[:-2]]
    leading = data.draw(st.sampled_from([leading, leading[1:], [2, *leading]]))
    other_dense = draw_mask(data.draw, (*leading, *dense.shape[-2:]))
    mask = BlockMask.from_dense(dense, block_size)
    other = BlockMask.from_dense(other_dense, other_size)
    assert_is(mask & other, dense & other_dense)
    assert_is(mask | other, dense | other_dense)
    assert (mask & other).block_size == tuple(map(math.gcd, mask.block_size, other.block_size))
    assert mask & other == other & mask
    assert mask | other == other | mask


@given(dense_masks(), block_sizes, st.integers(1, 40), st.integers(1, 40))
def test_not(dense, block_size, rows, columns):
    mask = BlockMask.from_dense(dense, block_size)
    assert_is(~mask, ~dense)
    assert_tiles(~mask, ~dense, rows, columns)
    assert (~mask).block_size == mask.block_size
    assert ~mask == BlockMask.from_dense(~dense, block_size)
    assert ~~mask == mask
    assert (mask & ~mask).density == 0


def test_combining_needs_masks_that_fit():
    mask = BlockMask.causal((64, 64), block_size=16)
    for other in (BlockMask.causal((64, 80)), BlockMask.causal((80, 64))):
        with pytest.raises(ValueError, match=r"shapes \(64, 64\) and \((64, 80|80, 64)\)"):
            mask & other
    two, three = (BlockMask(np.ones((n, 1, 1), bool)) for n in (2, 3))
    with pytest.raises(ValueError, match=r"shapes \(2, 128, 128\) and \(3, 128, 128\) .*broadcast"):
        two | three
    for other in (True, None, "mask"):
        with pytest.raises(TypeError, match="unsupported operand"):
            mask & other
        with pytest.raises(TypeError, match="unsupported operand"):
            other | mask
    message = r"BlockMask and a ndarray do not combine: .*with BlockMask.from_dense\(x, block_size"
    for array in (np.ones((64, 64), bool), np.ones((64, 64))):
        for combine in (operator.and_, operator.or_):
            for pair in ((mask, array), (array, mask)):
                with pytest.raises(TypeError, match=message):
                    combine(*pair)
    with pytest.raises(
        TypeError, match=r"and a csr_array do not .*BlockMask.from_scipy\(x, block_s"
    ):
        mask & scipy.sparse.csr_array(np.ones((64, 64)))


def test_what_takes_several_chunks(monkeypatch):
    monkeypatch.setattr("cuflash.masks.patterns._CHUNK_ELEMENTS", 20_000)
    dense = np.random.default_rng(6).random((2, 300, 200)) < 0.5
    mask, causal = BlockMask.from_dense(dense, 32), BlockMask.causal((300, 200), block_size=32)
    assert_is(mask & causal, dense & causal.to_dense())
    assert_is(mask.T, dense.swapaxes(1, 2))
    assert_is(~mask, ~dense)
    assert_tiles(mask, dense, 50, 70)
    assert_is(causal, reference.visible_keys((300, 200), causal=True))
    for block_size in (128, 1024):  # of one of which only some rows are looked at together
        assert_is(BlockMask.from_dense(dense, block_size), dense)
        assert_is(BlockMask.causal((300, 200), block_size=block_size), causal.to_dense())


@settings(max_examples=50)
@given(dense_masks(), block_sizes, st.data())
def test_parts(dense, block_size, data):
    mask = BlockMask.from_dense(dense, block_size)
    lists = dense.reshape(math.prod(dense.shape[:-2]), *dense.shape[-2:])
    for _ in range(5):
        number = data.draw(st.integers(0, len(lists) - 1))
        queries, keys = (
            range(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))))
            for n in lists.shape[1:]
        )
        expected = lists[number, queries.start : queries.stop, keys.start : keys.stop]
        got = mask.part(number, queries, keys)
        if expected.all():
            assert got is None
        else:
            assert got.dtype == bool
            np.testing.assert_array_equal(got, expected)
        bq, bk = mask.block_size
        meets = np.zeros(lists.shape[1:], bool)
        for i, j in itertools.product({q // bq for q in queries}, {k // bk for k in keys}):
            meets[i * bq : (i + 1) * bq, j * bk : (j + 1) * bk] = True
        assert mask.is_empty(number, queries, keys) == (not lists[number][meets].any())


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks(shape, block_size):
    bq, bk = block_size if isinstance(block_size, list | tuple) else (block_size, block_size)
    rng = np.random.default_rng(0)
    blocks = rng.random((3, -(-shape[0] // bq), -(-shape[1] // bk))) < 0.5
    dense = blocks.repeat(bq, -2).repeat(bk, -1)
    assert_is(BlockMask(blocks, block_size), dense)
    mask = BlockMask(blocks, block_size, shape)
    assert_is(mask, dense[:, : shape[0], : shape[1]])
    np.testing.assert_array_equal(mask.kinds, np.where(blocks, FULL, EMPTY))


class OnDevice:
    """What is seen of an array of CuPy: NumPy must not read it."""

    def __init__(self, array):
        self.__cuda_array_interface__ = None
        self.get = lambda: array

    def __array__(self, *args, **kwargs):
        raise TypeError("implicit conversion to a NumPy array")


def test_arrays_of_a_device_are_copied_to_the_host():
    dense = np.tri(40, dtype=bool)
    causal = BlockMask.causal((40, 40), block_size=16)
    assert BlockMask.from_dense(OnDevice(dense), 16) == causal
    assert BlockMask.from_function(lambda b, h, q, k: OnDevice(k <= q), (40, 40), 16) == causal
    blocks = np.eye(3, dtype=bool)
    assert BlockMask(OnDevice(blocks)) == BlockMask(blocks)
    ids = np.arange(40) // 7
    assert BlockMask.documents(OnDevice(ids)) == BlockMask.documents(ids)


def test_a_sparse_matrix_of_a_device_is_copied_to_the_host(monkeypatch):
    class SparseOnDevice:
        format = "csr"
        shape = (40, 40)

        def tocsr(self):
            return self

        def get(self):
            return scipy.sparse.csr_array(np.tri(40))

    cupyx = types.SimpleNamespace(issparse=lambda x: isinstance(x, SparseOnDevice))
    monkeypatch.setitem(sys.modules, "cupyx.scipy.sparse", cupyx)
    assert BlockMask.from_scipy(SparseOnDevice(), 16) == BlockMask.causal((40, 40), block_size=16)


@pytest.mark.filterwarnings("ignore:Constructing a DIA")
@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("form", ["csr", "csc", "coo", "lil", "dok", "dia", "bsr"])
@pytest.mark.parametrize("block_size", [*BLOCK_SIZES[:-1], None])
def test_sparse_matrices(form, kind, block_size):
    rng = np.random.default_rng(2)
    values = np.where(rng.random((96, 80)) < 0.02, rng.standard_normal((96, 80)), 0)
    values[:32, 16:64] = 1
    values[64:, :16] = 0
    matrix = getattr(scipy.sparse, f"{form}_{kind}")(values)
    mask = BlockMask.from_scipy(matrix, block_size)
    assert_is(mask, values != 0)
    assert mask == BlockMask.from_dense(values != 0, mask.block_size)
    if block_size is None:
        assert mask.block_size == (128, 128)


@pytest.mark.parametrize("dtype", [bool, np.float32, np.int8])
def test_bsr_blocks_are_the_masks_blocks(dtype):
    rng = np.random.default_rng(3)
    values = (rng.random((5, 4)) < 0.4).repeat(16, 0).repeat(32, 1).astype(dtype)
    values[40, 70] = 1
    matrix = scipy.sparse.bsr_array(values, blocksize=(16, 32))
    mask = BlockMask.from_scipy(matrix)
    assert mask.block_size == (16, 32)
    assert_is(mask, values != 0)
    assert_is(BlockMask.from_scipy(matrix, 32), values != 0)
    odd = scipy.sparse.bsr_array(values, blocksize=(10, 32))
    assert BlockMask.from_scipy(odd).block_size == (128, 128)
    assert_is(BlockMask.from_scipy(odd), values != 0)


def test_stored_zeros_are_hidden():
    csr = scipy.sparse.csr_array(np.tri(40))
    csr.data[:30] = 0
    assert csr.nnz == 820
    assert_is(BlockMask.from_scipy(csr, 16), csr.toarray() != 0)
    bsr = scipy.sparse.bsr_array(np.ones((64, 64)), blocksize=(16, 16))
    bsr.data[3] = 0
    bsr.data[5, 2, 3] = 0
    assert bsr.nnz == 4096
    assert_is(BlockMask.from_scipy(bsr), bsr.toarray() != 0)


def test_duplicates_are_summed_and_the_matrix_is_left_alone():
    rows, columns, values = [0, 0, 3, 3, 1], [5, 5, 7, 2, 0], [1.0, -1.0, 2.0, 3.0, 0.0]
    csr = scipy.sparse.csr_array((values, columns, [0, 2, 3, 3, 5]), shape=(4, 20))
    before = csr.data.copy(), csr.indices.copy()
    assert_is(BlockMask.from_scipy(csr, 16), csr.toarray() != 0)
    np.testing.assert_array_equal(csr.data, before[0])
    np.testing.assert_array_equal(csr.indices, before[1])
    coo = scipy.sparse.coo_array((values, (rows, columns)), shape=(4, 20))
    assert_is(BlockMask.from_scipy(coo, 16), coo.toarray() != 0)
    ones = np.ones((3, 16, 16))
    bsr = scipy.sparse.bsr_array((ones, [2, 0, 0], [0, 3]), shape=(16, 48))  # neither sorted
    assert_is(BlockMask.from_scipy(bsr), bsr.toarray() != 0)
    assert len(bsr.data) == 3


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", [(96, 192), (70, 133), (33, 48), (0, 32), (32, 0), (0, 0)])
def test_to_scipy_and_back(shape, block_size):
    rng = np.random.default_rng(8)
    dense = rng.random(shape) < 0.02
    dense[:48, 32:96] = True
    dense[64:, :16] = False
    mask = BlockMask.from_dense(dense, block_size)
    matrix = mask.to_scipy()
    assert isinstance(matrix, scipy.sparse.bsr_array)
    assert (matrix.dtype, matrix.shape, matrix.has_sorted_indices) == (bool, shape, True)
    np.testing.assert_array_equal(matrix.toarray(), dense)
    assert BlockMask.from_scipy(matrix, block_size) == mask
    if not any(n % block for n, block in zip(shape, mask.block_size)):
        assert matrix.blocksize == mask.block_size
        assert BlockMask.from_scipy(matrix) == mask
        stored = matrix.nnz / math.prod(mask.block_size)
        assert stored == np.count_nonzero(mask.kinds)  # empty blocks are not stored


def test_to_scipy_of_one_of_several_masks():
    mask = BlockMask.prefix((64, 96), [[1, 20], [33, 64], [70, 96]], block_size=16)
    dense = mask.to_dense()
    for index in np.ndindex(3, 2):
        np.testing.assert_array_equal(mask.to_scipy(index).toarray(), dense[index])
    np.testing.assert_array_equal(mask.T.to_scipy((2, 0)).toarray(), dense[2, 0].T)


@pytest.mark.parametrize(("length", "most"), [(30080, 3), (30001, 20)])
def test_to_scipy_takes_memory_of_the_visible_blocks(length, most):
    mask = BlockMask.sliding_window((length, length), 5)
    tracemalloc.start()
    try:
        matrix = mask.to_scipy()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert matrix.sum() == 11 * length - 30
    assert peak < most * np.count_nonzero(mask.kinds) * 128**2


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_functions(leading, block_size):
    shape = *leading, 70, 133
    b, h = ([0, 0], [0, *leading], list(leading))[len(leading)][-2:] if leading else (0, 0)
    b, h = (np.arange(max(n, 1)) for n in (b, h))
    b, h = b[:, None, None, None], h[:, None, None]
    q, k = np.arange(70)[:, None], np.arange(133)

    def near(b, h, q, k):
        return (abs(q - k) <= 5 + 10 * h) | (k < 20 * b)

    dense = near(b, h, q, k).reshape(shape)
    assert_is(BlockMask.from_function(near, shape, block_size), dense)


def test_functions_get_arrays_that_index_and_may_return_what_broadcasts():
    table = np.random.default_rng(4).random((2, 3, 50, 70)) < 0.5
    shape = table.shape
    assert_is(BlockMask.from_function(lambda b, h, q, k: table[b, h, q, k], shape, 16), table)
    for f, dense in [
        (lambda b, h, q, k: True, np.ones(shape, bool)),
        (lambda b, h, q, k: h == 1, np.broadcast_to(np.arange(3)[:, None, None] == 1, shape)),
        (lambda b, h, q, k: k < 9, np.broadcast_to(np.arange(70) < 9, shape)),
        (lambda b, h, q, k: q < 9, np.broadcast_to(np.arange(50)[:, None] < 9, shape)),
        (lambda b, h, q, k: (k < 9)[0], np.broadcast_to(np.arange(70) < 9, shape)),
    ]:
        assert_is(BlockMask.from_function(f, shape, 16), dense)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_causal(shape, alignment, block_size):
    mask = BlockMask.causal(shape, alignment, block_size=block_size)
    assert_is(mask, reference.visible_keys(shape, causal=alignment))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "window", [None, 0, 3, 40, (20, 0), (0, 70), [None, 5], (17, None), (10**30, 1)]
)
def test_sliding_window(shape, window, block_size):
    mask = BlockMask.sliding_window(shape, window, block_size=block_size)
    assert_is(mask, reference.visible_keys(shape, window=window))
    if isinstance(window, tuple):  # one whose left side is open and right side 0 is causal
        both = BlockMask.sliding_window(shape, window, "top_left", block_size=block_size)
        both &= BlockMask.causal(shape, "top_left", block_size=block_size)
        assert_is(both, reference.visible_keys(shape, causal="top_left", window=window))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "length", [0, 30, 1000, [0, 7, 64, 10**9], [[3], [90]], np.uint64([2**64 - 1, 0])]
)
def test_prefix(shape, length, block_size):
    prefix = np.arange(shape[1], dtype=np.uint64) < np.asarray(length)[..., None, None]
    for alignment in ("bottom_right", "top_left"):
        mask = BlockMask.prefix(shape, length, alignment, block_size=block_size)
        assert_is(mask, prefix | reference.visible_keys(shape, causal=alignment))


def same_document(query_ids, key_ids):
    q, k = np.asarray(query_ids)[..., None], np.asarray(key_ids)[..., None, :]
    return (q == k) & (q >= 0)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_documents(block_size):
    rng = np.random.default_rng(5)
    runs = np.arange(12).repeat(rng.integers(0, 40, 12))
    padded = np.where(np.arange(runs.size) < runs.size - 25, runs, -1)
    holes = np.where(rng.random(runs.size) < 0.05, -3, runs)
    two = np.stack([runs, runs // 3]), np.stack([padded, runs[::-1]])
    one = np.zeros(150, np.int8)
    shuffled = rng.permutation(runs)
    for ids in (runs, padded, holes, two[0], one, shuffled, runs.astype(np.uint64)):
        dense = same_document(ids, ids)
        assert_is(BlockMask.documents(ids, block_size=block_size), dense)
    wide = np.array([2**63 + 1, 5, 2**63], np.uint64).repeat(16)  # not exact as float64
    for query_ids, key_ids in [
        (runs, padded[:40]), two, (two[0][:, None], two[1]), (runs[:5], one), (wide, runs),
        (wide, wide), (-one - 1, -one - 1), (runs.tolist(), padded.tolist()),
    ]:  # fmt: skip
        mask = BlockMask.documents(query_ids, key_ids, block_size=block_size)
        assert_is(mask, same_document(query_ids, key_ids))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "dilation"), [(30, 2), ((50, 0), 7), (None, 40), (20, 1)])
def test_dilated(shape, window, dilation, block_size):
    for alignment in ("bottom_right", "top_left"):
        shift = shape[1] - shape[0] if alignment == "bottom_right" else 0
        distance = np.arange(shape[1]) - np.arange(shape[0])[:, None] - shift
        left, right = window if isinstance(window, tuple) else (window, window)
        dense = distance % dilation == 0
        dense &= (left is None) | (distance >= -(left or 0))
        dense &= (right is None) | (distance <= (right or 0))
        mask = BlockMask.dilated(shape, window, dilation, alignment, block_size=block_size)
        assert_is(mask, dense)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, [], [0, 0], range(0, 70, 23), np.arange(40, 70)])
def test_global_local(shape, tokens, block_size):
    if np.ndim(tokens):
        tokens = [min(token, shape[1] - 1) for token in tokens]
    chosen = range(tokens) if isinstance(tokens, int) else list(tokens)
    dense = reference.visible_keys(shape, window=(12, 3)).copy()
    for token in chosen:
        dense[:, token] = True
        if 0 <= token - (shape[1] - shape[0]) < shape[0]:
            dense[token - (shape[1] - shape[0])] = True
    mask = BlockMask.global_local(shape, (12, 3), tokens, block_size=block_size)
    assert_is(mask, dense)


def test_numbers_of_any_size_and_type():
    """What lies beyond the mask counts as its end."""
    shape, huge = (40, 300), 1 << 70
    assert BlockMask.dilated(shape, None, huge) == BlockMask.sliding_window(shape, 0)
    assert BlockMask.dilated(shape, (huge, huge), huge) == BlockMask.sliding_window(shape, 0)
    assert BlockMask.dilated(shape, huge, 1) == BlockMask.sliding_window(shape, None)
    assert BlockMask.sliding_window(shape, (huge, 0)) == BlockMask.causal(shape)
    assert BlockMask.sliding_window(shape, np.array(7)) == BlockMask.sliding_window(shape, 7)
    everything = BlockMask.sliding_window(shape, None)
    for length in (huge, 1 << 63, np.uint64(1 << 63), np.array(1 << 64 - 1, np.uint64)):
        assert BlockMask.prefix(shape, length) == everything
    assert BlockMask.prefix(shape, np.int8(100)) == BlockMask.prefix(shape, 100)
    assert BlockMask.global_local(shape, huge, 0) == everything
    for dtype in (np.uint8, np.int8, np.uint64):
        tokens = [1, 100]
        for turned in (shape, shape[::-1]):
            some = [token for token in tokens if token < turned[1]]
            assert BlockMask.global_local(turned, 2, np.array(some, dtype)) == (
                BlockMask.global_local(turned, 2, some)
            )
    ids = np.array([1 << 63, (1 << 63) + 1, 0, 1 << 63], np.uint64)
    assert_is(BlockMask.documents(ids), ids[:, None] == ids)
    assert not BlockMask.documents(ids, np.array([-(1 << 63), -1])).density


def test_no_elements():
    for shape in ((0, 5), (5, 0), (0, 0)):
        for mask in (
            BlockMask.causal(shape),
            BlockMask.sliding_window(shape, 3),
            BlockMask.dilated(shape, 3, 2),
            BlockMask.prefix(shape, [1, 2]),
            BlockMask.global_local(shape, 3, 0),
            BlockMask.documents(np.zeros(shape[0], int), np.zeros(shape[1], int)),
            BlockMask.from_scipy(scipy.sparse.csr_array(shape)),
            BlockMask.from_function(lambda b, h, q, k: q < k, shape),
            BlockMask(np.zeros([-(-n // 128) for n in shape], bool), 128, shape),
        ):
            assert_is(mask, np.zeros(mask.shape, bool))
            assert_is(mask.T & mask.T, np.zeros(mask.T.shape, bool))
            assert mask.tiles(20, 30)[1].shape == (0, 20, 1)
            assert str(mask).split("\n")[1:] == [""] * mask.kinds.shape[-2]
    none = BlockMask(np.zeros((0, 2, 2), bool))
    assert_is(none, np.zeros((0, 256, 256), bool))
    assert str(none) == "BlockMask (0, 256, 256), blocks of 128x128, density 0, the first of 0"


def test_masks_are_immutable():
    blocks = np.eye(3, dtype=bool)
    mask = BlockMask(blocks)
    dense = np.tri(40, dtype=bool)
    from_dense = BlockMask.from_dense(dense, 16)
    blocks[:] = True
    dense[:] = False
    assert_is(mask, np.eye(3, dtype=bool).repeat(128, 0).repeat(128, 1))
    assert_is(from_dense, np.tri(40, dtype=bool))
    for name in ("shape", "block_size", "density", "anything"):
        with pytest.raises(AttributeError, match=f"{name} cannot be set: .*immutable"):
            setattr(mask, name, 1)
        with pytest.raises(AttributeError, match=f"{name} cannot be deleted: .*immutable"):
            delattr(mask, name)
    for made in (mask, from_dense, mask.T, mask & mask, pickle.loads(pickle.dumps(from_dense))):
        kinds, bits = made.tiles(*made.block_size)
        for array in (made.kinds, kinds, bits):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_equality_and_hash():
    causal = BlockMask.causal((64, 64), block_size=16)
    again = BlockMask.from_dense(np.tri(64, dtype=bool), 16)
    assert causal == again
    assert hash(causal) == hash(again)
    dense = np.tri(64, dtype=bool)
    dense[3, 4] = True
    for other in (
        BlockMask.from_dense(dense, 16),
        BlockMask.causal((64, 64), block_size=32),
        BlockMask.from_dense(np.tri(64, dtype=bool)[None], 16),
        BlockMask.causal((64, 48), block_size=16),
        np.tri(64, dtype=bool),
        "mask",
    ):
        assert causal != other
        assert not causal == other
    for twin in (copy.copy(causal), copy.deepcopy(causal), pickle.loads(pickle.dumps(causal))):
        assert twin == causal
        assert {twin: 1}[causal] == 1


def test_drawing():
    mask = BlockMask.causal((40, 70), block_size=16) & BlockMask.sliding_window((40, 70), 48)
    assert mask.block_size == (16, 16)
    header, *rows = str(mask).splitlines()
    assert header == f"BlockMask (40, 70), blocks of 16x16, density {mask.density:.3g}"
    assert rows == ["■▨▨··", "▨■▨▨·", "▨▨■▨▨"]
    assert rows == [
        "".join("·▨■"[kind] for kind in row) for row in tiles_of(mask.to_dense(), 16, 16)[0][0]
    ]
    assert repr(mask) == (
        f"BlockMask(shape=(40, 70), block_size=(16, 16), density={mask.density:.3g}, "
        f"block_density={12 / 15:.3g})"
    )


def test_the_first_of_several_is_drawn():
    blocks = np.zeros((2, 3, 1, 2), bool)
    blocks[0, 0, 0, 1] = blocks[1] = True
    assert str(BlockMask(blocks, (16, 32))) == (
        "BlockMask (2, 3, 16, 64), blocks of 16x32, density 0.583, the first of 6\n·■"
    )


@pytest.mark.parametrize("shape", [(1040, 1040), (3000, 2000), (100, 5000)])
def test_large_masks_are_drawn_with_several_blocks_a_square(shape):
    mask = BlockMask.causal(shape, block_size=16)
    scale = -(-max(mask.kinds.shape) // 64)
    header, *rows = str(mask).splitlines()
    assert header.endswith(f", {scale}x{scale} blocks a square")
    assert max(len(rows), len(rows[0])) <= 64
    kinds = tiles_of(mask.to_dense(), 16 * scale, 16 * scale)[0][0]
    assert rows == ["".join("·▨■"[kind] for kind in row) for row in kinds]


@pytest.mark.parametrize("n", [160, 4000])
def test_svg(n):
    mask = BlockMask.global_local((n, n), n // 5, n // 8, block_size=16)
    header, *rows = str(mask).splitlines()
    text = mask._repr_svg_()
    assert len(text) < 100_000
    svg = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    assert svg.find(space + "title").text == header
    assert [int(x) for x in svg.get("viewBox").split()] == [-1, -1, *(2 + 8 * len(rows),) * 2]
    filled, crossed = svg.findall(space + "path")
    for path, square in ((filled, "■"), (crossed, "▨")):
        drawn = {tuple(map(int, start.split("h")[0].split("l")[0].split()))
                 for start in path.get("d").split("M")[1:]}  # fmt: skip
        assert drawn
        assert drawn == {
            (8 * j, 8 * i) for i, row in enumerate(rows) for j, x in enumerate(row) if x == square
        }
    assert filled.get("fill") == crossed.get("stroke")
    assert crossed.get("fill") == "none"


def patterns_of(shape, block_size):
    """One of each kind, and what it shows, from another way to make it."""
    n, m = shape
    q, k = np.arange(n)[:, None], np.arange(m)
    ids = (np.arange(n) // 30, np.arange(m) // 30)
    dense = (q * 7 + k * k) % 5 < 2
    size = {"block_size": block_size}
    shown = {
        "dense": (BlockMask.from_dense(dense, **size), dense),
        "function": (
            BlockMask.from_function(lambda b, h, q, k: (q * 7 + k * k) % 5 < 2, shape, **size),
            dense,
        ),
        "sparse": (BlockMask.from_scipy(scipy.sparse.csr_array(dense), **size), dense),
        "prefix": (BlockMask.prefix(shape, 20, "top_left", **size), (k <= q) | (k < 20)),
        "documents": (BlockMask.documents(*ids, **size), ids[0][:, None] == ids[1]),
        "dilated": (
            BlockMask.dilated(shape, 40, 3, "top_left", **size),
            (abs(q - k) <= 40) & ((q - k) % 3 == 0),
        ),
        "global": (
            BlockMask.global_local(shape, 9, [5, 15], **size),
            (abs(k - q - m + n) <= 9) | np.isin(k, [5, 15]) | np.isin(q + m - n, [5, 15]),
        ),
    }
    for name in ("causal", "sliding_window"):
        window = {"window": (12, 30)} if name == "sliding_window" else {}
        mask = getattr(BlockMask, name)(shape, **window, **size)
        shown[name] = mask, reference.visible_keys(shape, causal=name == "causal", **window)
    return shown


@pytest.mark.parametrize("block_size", [256, (16, 4096), (4096, 48), 1 << 70])
def test_blocks_larger_than_the_mask(block_size):
    for shape in ((100, 130), (1, 20), (33, 16)):
        for mask, dense in patterns_of(shape, block_size).values():
            size = block_size if isinstance(block_size, tuple) else (block_size, block_size)
            assert mask.block_size == size
            np.testing.assert_array_equal(mask.to_dense(), dense)
            np.testing.assert_array_equal(mask.T.to_dense(), dense.T)
            assert mask.T.block_size == size[::-1]
            assert_tiles(mask, dense, 32, 64)
            assert_tiles(mask, dense, 256, 100)
            assert mask.density == dense.mean()
            assert mask == BlockMask.from_dense(dense, block_size)
            small = BlockMask.causal(shape, block_size=48)
            for both in (mask & small, small & mask):
                assert_is(both, dense & small.to_dense())
                assert both.block_size == tuple(math.gcd(n, 48) for n in size)
            assert pickle.loads(pickle.dumps(mask)) == mask


@pytest.mark.parametrize(("n", "block_size"), [(100, 16384), (1500, 1 << 20)])
def test_memory_is_that_of_the_masks_own_elements(n, block_size):
    shape, dense = (n, n), np.tri(n, dtype=bool)
    sparse, ids = scipy.sparse.eye_array(n, format="csr"), np.arange(n) // 7
    size = {"block_size": block_size}
    for make in (
        lambda: BlockMask.causal(shape, **size),
        lambda: BlockMask.sliding_window(shape, 30, **size),
        lambda: BlockMask.prefix(shape, 30, **size),
        lambda: BlockMask.dilated(shape, 90, 3, **size),
        lambda: BlockMask.documents(ids, **size),
        lambda: BlockMask.global_local(shape, 9, [5, 50], **size),
        lambda: BlockMask.from_dense(dense, **size),
        lambda: BlockMask.from_function(lambda b, h, q, k: k <= q, shape, **size),
        lambda: BlockMask.from_scipy(sparse, **size),
        lambda: BlockMask.from_dense(dense, **size).T,
        lambda: BlockMask.from_dense(dense, **size) & BlockMask.causal(shape, **size),
    ):
        tracemalloc.start()
        try:
            made = make()
            held, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < n * n + 20_000  # a byte for each, to start with
        assert peak < 8 * n * n + 500_000
        assert made.block_size == (block_size, block_size)


def test_a_large_mask_takes_little_memory():
    n, block = 32768, 128
    tracemalloc.start()
    try:
        mask = BlockMask.causal((n, n)) | BlockMask.sliding_window((n, n), 500)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        kinds, bits = mask.T.tiles(64, 128)
        tiles_peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    blocks, partial = (n // block) ** 2, np.count_nonzero(mask.kinds == PARTIAL)
    assert 0 < partial < blocks / 50
    assert held < 1.5 * (blocks + partial * block**2 / 8)
    assert peak < 32 << 20
    assert tiles_peak < 32 << 20
    assert len(bits) == np.count_nonzero(kinds == PARTIAL)


def test_a_large_sparse_matrix_is_never_dense():
    n = 30000
    matrix = scipy.sparse.eye_array(n, format="csr", dtype=bool)
    tracemalloc.start()
    try:
        mask = BlockMask.from_scipy(matrix)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mask.density == 1 / n
    assert mask.block_density == 1 / -(-n // 128)
    assert peak < 16 << 20


def printed(code):
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout


def test_importing_the_package_imports_neither_scipy_nor_cupy():
    code = "import sys, cuflash; print({'scipy', 'cupy', 'cupyx'} & set(sys.modules))"
    assert printed(code) == "set()\n"


def test_cupy_is_not_imported():
    code = (
        "import sys, numpy as np, scipy.sparse\n"
        "from cuflash.masks.block_mask import BlockMask\n"
        "BlockMask.from_scipy(scipy.sparse.eye_array(384)).T & BlockMask(np.ones((3, 3), bool))\n"
        "print({'cupy', 'cupyx'} & set(sys.modules))"
    )
    assert printed(code) == "set()\n"


ones = np.ones((2, 2), bool)
converts_to_csr = types.SimpleNamespace(tocsr=lambda: scipy.sparse.csr_array(ones))


def returning(x):
    return lambda b, h, q, k: x


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: BlockMask(np.ones((2, 2))), TypeError, "blocks has dtype float64: give bool"),
        (lambda: BlockMask(ones[0]), ValueError, r"blocks has shape \(2,\): give two axes"),
        (lambda: BlockMask(ones, 8), ValueError, "block_size=8: give a positive multiple of 16"),
        (lambda: BlockMask(ones, 0), ValueError, "block_size=0: give a positive multiple of 16"),
        (lambda: BlockMask(ones, -16), ValueError, "block_size=-16: give a positive multiple"),
        (lambda: BlockMask(ones, (16, 24)), ValueError, r"block_size=\(16, 24\): give a positive"),
        (lambda: BlockMask(ones, (16,)), ValueError, r"block_size=\(16,\): .*a pair"),
        (lambda: BlockMask(ones, 16.0), TypeError, r"block_size=16.0: give a positive multiple"),
        (lambda: BlockMask(ones, None), TypeError, "block_size=None: give a positive multiple"),
        (lambda: BlockMask(ones, 16, (40, 32)), ValueError,
         r"blocks is a grid of 2x2: shape=\(40, 32\) in blocks of 16x16 needs .* = 3x2"),
        (lambda: BlockMask(ones, 16, (32, 16)), ValueError, "grid of 2x2: .* = 2x1"),
        (lambda: BlockMask(ones, 16, 32), TypeError, r"shape=32: give two lengths \(Nq, Nk\)"),
        (lambda: BlockMask(ones, 16, (2, 32, 32)), ValueError, r"shape=\(2, 32, 32\): give two"),
        (lambda: BlockMask(ones, 16, (32, 2.5)), TypeError, r"shape=\(32, 2.5\): give two"),
        (lambda: BlockMask.from_dense(np.ones((2, 2), int)), TypeError, "mask has dtype int64"),
        (lambda: BlockMask.from_dense(ones[0]), ValueError, r"mask has shape \(2,\): give two"),
        (lambda: BlockMask.from_dense(ones, 20), ValueError, "block_size=20: give"),
        (lambda: BlockMask.from_scipy(ones), TypeError, "matrix is a ndarray: give a sparse"),
        (lambda: BlockMask.from_scipy(converts_to_csr), TypeError,
         "matrix is a SimpleNamespace: give a sparse array of SciPy or cupyx"),
        (lambda: BlockMask(np.ones((2, 3, 1, 1), bool)).to_scipy(), ValueError,
         r"index=\(\) of a mask of shape \(2, 3, 128, 128\): give one index of each leading axis, "
         r"of \(2, 3\)"),
        (lambda: BlockMask(np.ones((2, 3, 1, 1), bool)).to_scipy((1, 3)), ValueError,
         r"index=\(1, 3\) of a mask of shape .*, of \(2, 3\)"),
        (lambda: BlockMask(np.ones((2, 1, 1), bool)).to_scipy((-1,)), ValueError, r"\(-1,\) of a"),
        (lambda: BlockMask(np.ones((2, 1, 1), bool)).to_scipy(1), TypeError,
         r"index=1: give one index of each leading axis, of \(2,\)"),
        (lambda: BlockMask(ones).to_scipy((0,)), ValueError, r"index=\(0,\) .*: leave index out"),
        (lambda: BlockMask.from_scipy(scipy.sparse.coo_array(np.ones(3))), ValueError,
         r"matrix has shape \(3,\): give two axes"),
        (lambda: BlockMask.from_scipy(scipy.sparse.eye_array(3), 5), ValueError, "block_size=5"),
        (lambda: BlockMask.from_function(ones, (2, 2)), TypeError, "f is a ndarray: give a func"),
        (lambda: BlockMask.from_function(returning(1), (2, 2)), TypeError, "f returned int64"),
        (lambda: BlockMask.from_function(returning(ones), (2, 3)), ValueError,
         r"f returned shape \(2, 2\): .*\(2, 3\)"),
        (lambda: BlockMask.from_function(returning(ones[None]), (2, 2)), ValueError,
         r"f returned shape \(1, 2, 2\): .*\(2, 2\)"),
        (lambda: BlockMask.from_function(returning(True), (2,)), ValueError,
         r"shape=\(2,\): give \(Nq, Nk\), \(H, Nq, Nk\) or"),
        (lambda: BlockMask.from_function(returning(True), (1, 1, 1, 2, 2)), ValueError,
         r"shape=\(1, 1, 1, 2, 2\): give"),
        (lambda: BlockMask.causal((2, -1)), ValueError, r"shape=\(2, -1\): give two lengths"),
        (lambda: BlockMask.causal((2, 2), "left"), ValueError, "alignment='left': give 'bottom_r"),
        (lambda: BlockMask.causal((2, 2), ones), ValueError, "alignment=array"),
        (lambda: BlockMask.from_dense([[True, True], [True]]), ValueError, "mask=.*equal lengths"),
        (lambda: BlockMask.prefix((2, 2), [[1, 2], [1]]), ValueError, "length=.*equal lengths"),
        (lambda: BlockMask.causal((2, 2), block_size=1), ValueError, "block_size=1: give"),
        (lambda: BlockMask.sliding_window((2, 2), -1), ValueError, "window=-1: widths are not neg"),
        (lambda: BlockMask.sliding_window((2, 2), 1.5), TypeError, "window=1.5: widths are int"),
        (lambda: BlockMask.sliding_window((2, 2), (1, 2, 3)), ValueError, r"window=\(1, 2, 3\): g"),
        (lambda: BlockMask.sliding_window((2, 2), 1, None), ValueError, "alignment=None: give"),
        (lambda: BlockMask.prefix((2, 2), [1, -4]), ValueError, "length=-4: a prefix has 0 keys"),
        (lambda: BlockMask.prefix((2, 2), 1.0), TypeError, "length has dtype float64: give int"),
        (lambda: BlockMask.prefix((2, 2), 1, "up"), ValueError, "alignment='up': give"),
        (lambda: BlockMask.documents([0.5]), TypeError, "query_ids has dtype float64: give int"),
        (lambda: BlockMask.documents([1 << 70]), TypeError, "give integers of at most 64 bits"),
        (lambda: BlockMask.documents(3), ValueError, r"query_ids has shape \(\): give an axis"),
        (lambda: BlockMask.documents([1], [True]), TypeError, "key_ids has dtype bool: give int"),
        (lambda: BlockMask.documents([[1]] * 2, [[1]] * 3), ValueError,
         r"query_ids and key_ids have shapes \(2, 1\) and \(3, 1\): .*broadcast"),
        (lambda: BlockMask.dilated((2, 2), 1, 0), ValueError, "dilation=0: give a positive int"),
        (lambda: BlockMask.dilated((2, 2), 1, True), TypeError, "dilation=True: give a positive"),
        (lambda: BlockMask.dilated((2, 2), 1, 1.5), TypeError, "dilation=1.5: give a positive int"),
        (lambda: BlockMask.global_local((2, 2), 1, 3), ValueError,
         "global_tokens=3: give a number of tokens up to 2"),
        (lambda: BlockMask.global_local((2, 2), 1, [2]), ValueError, r"global_tokens=\[2\]: "),
        (lambda: BlockMask.global_local((2, 2), 1, [-1]), ValueError, r"global_tokens=\[-1\]: "),
        (lambda: BlockMask.global_local((2, 2), 1, 1 << 70), ValueError, "number of tokens up t"),
        (lambda: BlockMask.prefix((2, 2), -1 << 70), ValueError, "length=-.*a prefix has 0 keys"),
        (lambda: BlockMask.global_local((2, 2), 1, -1), ValueError, "global_tokens=-1: give"),
        (lambda: BlockMask.global_local((2, 2), 1, [[1]]), ValueError, r"global_tokens=\[\[1\]\]"),
        (lambda: BlockMask.global_local((2, 2), 1, [0.5]), TypeError, "global_tokens has dtype fl"),
        (lambda: BlockMask.causal((2, 2)).tiles(0, 3), ValueError, "rows=0: give a positive int"),
        (lambda: BlockMask.causal((2, 2)).tiles(3, -2), ValueError, "columns=-2: give a positive"),
        (lambda: BlockMask.causal((2, 2)).tiles(3, "4"), TypeError, "columns='4': give a positive"),
    ],
)  # fmt: skip
def test_errors_say_what_was_given_and_what_would_work(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_masked_arrays_are_refused():
    """Their masks would be lost."""
    masked = np.ma.array(ones, mask=[[0, 1], [0, 0]])
    numbers = masked.astype(int)
    for make, instead in (
        (lambda: BlockMask(masked), r"blocks.filled\(False\)"),
        (lambda: BlockMask.from_dense(masked), r"mask.filled\(False\)"),
        (lambda: BlockMask.documents(numbers), r"query_ids.filled\(...\)"),
        (lambda: BlockMask.documents([1, 2], numbers[0]), r"key_ids.filled\(...\)"),
        (lambda: BlockMask.prefix((2, 2), numbers), r"length.filled\(...\)"),
        (lambda: BlockMask.global_local((2, 2), 1, numbers[0]), r"global_tokens.filled\(...\)"),
    ):
        with pytest.raises(TypeError, match=f"is a MaskedArray, .* ignored: give {instead}"):
            make()


@pytest.mark.parametrize(
    ("f", "kind", "message"),
    [
        (
            lambda q, k: k <= q,
            TypeError,
            r"f takes \(q, k\): give a function f\(b, h, q, k\) of bat",
        ),
        (np.less, TypeError, r"f takes .*: give a function f\(b, h, q, k\)|less\(\) takes from 2"),
        (lambda b, h, q, k: k <= q and q - k < 9, ValueError, "write & | ~ for and, or, not"),
        (lambda b, h, q, k: 0 <= q - k < 9, ValueError, "f asks for one truth value of many el"),
        (lambda b, h, q, k: k < q if h else k > q + b, None, ""),  # one head and batch entry
        (lambda b, h, q, k: k < q if k > 3 else k > q, ValueError, "numpy.where for if"),
        (lambda b, h, q, k: int("q"), ValueError, "invalid literal"),
        (lambda b, h, q, k: q.missing(), AttributeError, "missing"),
        (lambda *positions: positions[3] <= positions[2], None, ""),
        (lambda b, h, q, k, near=9: q - k < near, None, ""),
    ],
)
def test_functions_that_do_not_do(f, kind, message):
    if kind is None:
        BlockMask.from_function(f, (20, 20))
        return
    with pytest.raises(kind, match=message):
        BlockMask.from_function(f, (20, 20))

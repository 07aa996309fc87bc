"""Block-sparse masks: which blocks of keys a block of queries sees, and which of their elements.

`patterns.py` says how a mask is held. `tiles` cuts it into tiles of any size in the same form,
for kernels whose tiles are not its blocks.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arguments, constructions, picture
from .band import Band
from .combining import combined, refuse_array
from .patterns import (
    EMPTY,
    FULL,
    HALF,
    PARTIAL,
    assemble,
    coarsen,
    complement,
    extents_of,
    first_bits,
    grid_of,
    held_size,
    in_chunks,
    pack,
    unpack,
)
from .predicate import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import NoReturn, SupportsIndex

    from numpy.typing import ArrayLike, NDArray

    from ..typing import Alignment, AnyArray, BlockSize, Window
    from .patterns import Blocks, Indices, Kinds, Pair, Words
    from .predicate import Predicate

    Lengths = Sequence[SupportsIndex]  # of queries and keys


class BlockMask:
    """A mask that is known by blocks: empty, full, or partial with an element mask.

    Parameters
    ----------
    blocks : array of bool, shape (..., ceil(Nq / bq), ceil(Nk / bk))
        True for visible blocks. A CuPy array is copied to the host. Leading axes broadcast over
        batch and heads.
    block_size : int or (int, int)
        Queries and keys of a block, (bq, bk): multiples of 16.
    shape : (int, int), optional
        Queries and keys, (Nq, Nk). By default whole blocks.

    Attributes
    ----------
    shape : tuple of int
        (..., Nq, Nk), with the leading axes.
    block_size : (int, int)
        Queries and keys of a block.

    Raises
    ------
    ValueError
        For a grid that is not ceil(N / block), or a block size that is not a multiple of 16.
    TypeError
        For blocks that are not bool, or sizes that are not integers.

    Notes
    -----
    Immutable. Masks are equal if shape, block size and all elements are. `&` and `|` combine masks
    of the same queries and keys, element for element; blocks of the result have the greatest
    common divisors of both sizes. `~` shows what a mask hides, in blocks of the same size. Kinds
    are exact: a full block hides none of its elements within the shape, a partial one hides some
    and shows some.

    Memory is a byte per block and a bit per element of partial blocks, within the shape; on a
    device a bit per element of the kernels' partial tiles, but for masks of functions that kernels
    evaluate (:meth:`from_function`).

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
       IO-Awareness", 2022, arXiv:2205.14135. Section 3.3, block-sparse attention.

    Examples
    --------
    >>> import numpy as np
    >>> near = BlockMask(np.eye(6, dtype=bool), block_size=32)
    >>> mask = near | BlockMask.causal((192, 192), block_size=32)
    >>> mask
    BlockMask(shape=(192, 192), block_size=(32, 32), density=0.583, block_density=0.583)
    >>> print(mask & BlockMask.sliding_window((192, 192), 50, block_size=32))
    BlockMask (192, 192), blocks of 32x32, density 0.312
    ■·····
    ▨■····
    ▨▨■···
    ·▨▨■··
    ··▨▨■·
    ···▨▨■
    """

    if TYPE_CHECKING:
        _kinds: Kinds
        _patterns: Words
        predicate: Predicate | None
        _held: Pair
        _lengths: Pair
        device_lists: dict[tuple[Any, ...], Any]

        @property
        def shape(self) -> tuple[int, ...]: ...  # noqa: D102

        @property
        def block_size(self) -> Pair: ...  # noqa: D102

    __array_ufunc__ = None  # an array & a mask is a TypeError, not an array of objects

    def __init__(
        self, blocks: ArrayLike | AnyArray, block_size: BlockSize = 128,
        shape: Lengths | None = None,
    ):  # fmt: skip
        shown = arguments.bools("blocks", blocks)
        block = arguments.block_pair(block_size)
        *leading, rows, columns = shown.shape
        if shape is None:
            shape = rows * block[0], columns * block[1]
        lengths = arguments.two_lengths(shape)
        grid = grid_of(lengths, block)
        if (rows, columns) != grid:
            raise ValueError(
                f"blocks is a grid of {rows}x{columns}: shape={lengths} in blocks of "
                f"{arguments.by(block)} needs ceil(Nq / bq) x ceil(Nk / bk) = {arguments.by(grid)}"
            )
        kinds = np.where(shown, np.uint8(FULL), np.uint8(EMPTY))
        kinds = kinds.reshape(math.prod(leading), *grid)
        held = held_size(lengths, block)
        self._set((*leading, *lengths), block, *assemble(kinds, lengths, held))

    @classmethod
    def _of(
        cls, shape: Sequence[int], block_size: Pair, kinds: Kinds, patterns: Words,
        predicate: Predicate | None = None,
    ) -> BlockMask:  # fmt: skip
        mask = cls.__new__(cls)
        mask._set(shape, block_size, kinds, patterns, predicate)
        return mask

    def _set(
        self, shape: Sequence[int], block_size: Pair, kinds: Kinds, patterns: Words,
        predicate: Predicate | None = None,
    ) -> None:  # fmt: skip
        kinds.setflags(write=False)
        patterns.setflags(write=False)
        lengths = shape[-2], shape[-1]
        self.__dict__.update(
            shape=tuple(shape),
            block_size=block_size,
            predicate=predicate,  # what shows the elements, if kernels are to evaluate that
            _kinds=kinds,
            _patterns=patterns,
            _lengths=lengths,
            _held=held_size(lengths, block_size),  # of a block, in _patterns
            device_lists={},  # of tiles, for the kernels: memory.device_lists keeps them here
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} cannot be set: a BlockMask is immutable")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} cannot be deleted: a BlockMask is immutable")

    def __reduce__(self) -> tuple[Any, ...]:  # copies are read-only, too
        made = self._kinds, self._patterns, self.predicate
        return self._of, (self.shape, self.block_size, *made)

    @classmethod
    def from_dense(cls, mask: ArrayLike | AnyArray, block_size: BlockSize = 128) -> BlockMask:
        """The mask that a bool array is.

        Parameters
        ----------
        mask : array of bool, shape (..., Nq, Nk)
            True for visible elements. A CuPy array is copied to the host.
        block_size : int or (int, int)
            Queries and keys of a block.

        Examples
        --------
        >>> import numpy as np
        >>> visible = np.arange(64) <= np.arange(64)[:, None]
        >>> BlockMask.from_dense(visible, 32) == BlockMask.causal((64, 64), block_size=32)
        True
        """
        elements, block = arguments.bools("mask", mask), arguments.block_pair(block_size)
        held = held_size((elements.shape[-2], elements.shape[-1]), block)
        return cls._judged(elements.shape, block, constructions.of_dense(elements, held))

    @classmethod
    def from_scipy(cls, matrix: Any, block_size: BlockSize | None = None) -> BlockMask:
        """The mask whose visible elements are the nonzeros of a sparse matrix.

        Parameters
        ----------
        matrix : sparse array or matrix of SciPy or cupyx, shape (Nq, Nk)
            BSR or CSR; another format is converted to CSR. One on a device is copied to the host.
            A zero that is stored is hidden. :meth:`to_scipy` is the way back.
        block_size : int or (int, int), optional
            Queries and keys of a block. By default those of a BSR matrix if they are multiples of
            16, else 128.

        Examples
        --------
        >>> import scipy.sparse
        >>> BlockMask.from_scipy(scipy.sparse.eye_array(200), 64).block_density
        0.25
        """
        if not arguments.is_sparse(matrix):
            raise TypeError(
                f"matrix is a {type(matrix).__name__}: give a sparse array of SciPy or cupyx"
            )
        if len(matrix.shape) != 2:
            raise ValueError(f"matrix has shape {matrix.shape}: give two axes, (Nq, Nk)")
        own = matrix.blocksize if matrix.format == "bsr" else (0, 0)
        if block_size is None:
            block_size = own if all(own) and not any(b % HALF for b in own) else 128
        block = arguments.block_pair(block_size)
        if block != own:
            matrix = matrix.tocsr()
        held = held_size(matrix.shape, block)
        return cls._judged(matrix.shape, block, constructions.of_matrix(matrix, held))

    @classmethod
    def from_function(
        cls, f: Callable[[Indices, Indices, Indices, Indices], Any],
        shape: Sequence[SupportsIndex], block_size: BlockSize = 128,
    ) -> BlockMask:  # fmt: skip
        """The mask that a vectorised predicate describes.

        Parameters
        ----------
        f : callable
            `f(b, h, q, k)` gives True where query `q` of head `h` of batch entry `b` sees key
            `k`. It is called for some queries at a time, with integer arrays that broadcast to
            (these queries, Nk), and returns a bool array that broadcasts to it.
        shape : tuple of int
            (Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk). `b` and `h` are 0 where there is no such axis.
        block_size : int or (int, int)
            Queries and keys of a block.

        Notes
        -----
        A Python function that stays simple is also traced, as those of `score_mod` are, into an
        expression that kernels evaluate for the elements of partial tiles; others read stored bits
        there. Simple is: integers and truth values, of at most 32 bits; arithmetic, comparisons,
        ``& | ~``, `where` and arrays and numbers of its closure or module, indexed inside
        their extent; and at most six operations for each pair of query and key, as in
        ``(ids[q] == ids[k]) & (k <= q)``, without ``//`` and ``%`` of both. The arrays are copied.
        The expression stands for the function only if both agree on all elements. So do masks
        that are combined of such ones by `&`, `|`, `~` and `.T`. NumPy arrays use stored bits.

        Examples
        --------
        Heads that look back over twice as many keys as the head before:

        >>> mask = BlockMask.from_function(
        ...     lambda b, h, q, k: (k <= q) & (q - k < 64 << h), (3, 512, 512), block_size=64
        ... )
        >>> mask.shape, mask.to_dense()[:, -1].sum(axis=-1).tolist()
        ((3, 512, 512), [64, 128, 256])
        """
        if not callable(f):
            raise TypeError(f"f is a {type(f).__name__}: give a function f(b, h, q, k)")
        arguments.check_takes_four(f)
        sizes = arguments.integer_tuple(
            "shape", shape, range(2, 5), "(Nq, Nk), (H, Nq, Nk) or (B, H, Nq, Nk)"
        )
        block = arguments.block_pair(block_size)
        held = held_size((sizes[-2], sizes[-1]), block)
        watched = Watched(f, sizes)
        mask = cls._judged(sizes, block, constructions.of_function(watched, sizes, held))
        return cls._of(sizes, block, mask._kinds, mask._patterns, watched.predicate)

    @classmethod
    def causal(
        cls, shape: Lengths, alignment: Alignment = "bottom_right", *,
        block_size: BlockSize = 128,
    ) -> BlockMask:  # fmt: skip
        """Keys up to the query's own, as `causal=` of :func:`cuflash.attention`.

        Parameters
        ----------
        shape : (int, int)
            Queries and keys, (Nq, Nk).
        alignment : {"bottom_right", "top_left"}
            Whether the diagonal ends at the last query and key, or starts at the first.
        block_size : int or (int, int)
            Queries and keys of a block.

        Examples
        --------
        >>> print(BlockMask.causal((300, 500), block_size=96))
        BlockMask (300, 500), blocks of 96x96, density 0.701
        ■■▨▨··
        ■■■▨▨·
        ■■■■▨▨
        ■■■■■▨
        """
        return cls._band(
            shape, Band(right=0, alignment=arguments.checked_alignment(alignment)), block_size
        )

    @classmethod
    def sliding_window(
        cls, shape: Lengths, window: Window | None, alignment: Alignment = "bottom_right", *,
        block_size: BlockSize = 128,
    ) -> BlockMask:  # fmt: skip
        """Keys around the query's own, as `window=` of :func:`cuflash.attention`.

        Parameters
        ----------
        shape : (int, int)
            Queries and keys, (Nq, Nk).
        window : int or (int or None, int or None) or None
            How many keys to the left and to the right are visible; None is unbounded, one number
            is for both sides.
        alignment : {"bottom_right", "top_left"}
            Whether the diagonal ends at the last query and key, or starts at the first.
        block_size : int or (int, int)
            Queries and keys of a block.

        Examples
        --------
        >>> BlockMask.sliding_window((96, 96), (20, 0)).to_dense()[50].nonzero()[0][[0, -1]]
        array([30, 50])
        """
        return cls._band(shape, arguments.window_band(window, alignment), block_size)

    @classmethod
    def prefix(
        cls, shape: Lengths, length: ArrayLike | AnyArray, alignment: Alignment = "bottom_right",
        *, block_size: BlockSize = 128,
    ) -> BlockMask:  # fmt: skip
        """Keys of a prefix, and those up to the query's own.

        Parameters
        ----------
        shape : (int, int)
            Queries and keys, (Nq, Nk).
        length : int or array of int
            Keys of the prefix, which all queries see. An array's axes are the leading axes of the
            mask: (B, 1) for a length per batch entry.
        alignment : {"bottom_right", "top_left"}
            Whether the diagonal ends at the last query and key, or starts at the first.
        block_size : int or (int, int)
            Queries and keys of a block.

        Examples
        --------
        >>> BlockMask.prefix((64, 64), [[10], [20]], block_size=32).to_dense()[:, 0, 0].sum(axis=-1)
        array([10, 20])
        """
        lengths = arguments.two_lengths(shape)
        prefixes = arguments.counts("length", length)
        if (prefixes < 0).any():
            raise ValueError(f"length={prefixes.min()}: a prefix has 0 keys or more")
        ends = np.minimum(prefixes, lengths[1])[..., None]
        band = Band(right=0, alignment=arguments.checked_alignment(alignment))
        first, stop = constructions.band_interval(band, lengths)
        return cls._intervals(first, np.maximum(stop, ends), lengths, block_size)

    @classmethod
    def documents(
        cls, query_ids: ArrayLike | AnyArray, key_ids: ArrayLike | AnyArray | None = None, *,
        block_size: BlockSize = 128,
    ) -> BlockMask:  # fmt: skip
        """Keys of the query's own document, of several that are packed into one sequence.

        Parameters
        ----------
        query_ids : array of int, shape (..., Nq)
            Which document each query is of, in any order. A negative one is padding, which sees
            nothing and is seen by nothing.
        key_ids : array of int, shape (..., Nk), optional
            Likewise of each key. By default `query_ids`.
        block_size : int or (int, int)
            Queries and keys of a block.

        Examples
        --------
        >>> import numpy as np
        >>> ids = np.repeat([0, 1, 2, -1], [32, 48, 64, 16])
        >>> print(BlockMask.documents(ids, block_size=16))
        BlockMask (160, 160), blocks of 16x16, density 0.29
        ■■········
        ■■········
        ··■■■·····
        ··■■■·····
        ··■■■·····
        ·····■■■■·
        ·····■■■■·
        ·····■■■■·
        ·····■■■■·
        ··········
        """
        queries = arguments.integers("query_ids", query_ids, least=1)
        keys = queries if key_ids is None else arguments.integers("key_ids", key_ids, least=1)
        try:
            leading = np.broadcast_shapes(queries.shape[:-1], keys.shape[:-1])
        except ValueError:
            raise ValueError(
                f"query_ids and key_ids have shapes {queries.shape} and {keys.shape}: "
                "their leading axes must broadcast"
            ) from None
        lengths = queries.shape[-1], keys.shape[-1]
        block = arguments.block_pair(block_size)
        held = held_size(lengths, block)
        kinds, blocks = constructions.of_documents(queries, keys, leading, held)
        return cls._judged((*leading, *lengths), block, blocks, kinds)

    @classmethod
    def dilated(
        cls, shape: Lengths, window: Window | None, dilation: SupportsIndex,
        alignment: Alignment = "bottom_right", *, block_size: BlockSize = 128,
    ) -> BlockMask:  # fmt: skip
        """Every `dilation`-th key around the query's own.

        Parameters
        ----------
        shape : (int, int)
            Queries and keys, (Nq, Nk).
        window : int or (int or None, int or None) or None
            How many keys to the left and to the right the mask spans, hidden ones counted.
        dilation : int
            Distance of visible keys.
        alignment : {"bottom_right", "top_left"}
            Whether the diagonal ends at the last query and key, or starts at the first.
        block_size : int or (int, int)
            Queries and keys of a block.

        Notes
        -----
        Saves no work within the window: each of its blocks is visited.

        Examples
        --------
        >>> BlockMask.dilated((64, 64), 9, 4).to_dense()[30].nonzero()[0]
        array([22, 26, 30, 34, 38])
        """
        lengths = arguments.two_lengths(shape)
        block = arguments.block_pair(block_size)
        step = min(
            arguments.positive("dilation", dilation), max(sum(lengths), 1)
        )  # no farther keys
        band = arguments.window_band(window, alignment)
        held = held_size(lengths, block)
        kinds, blocks = constructions.of_dilation(band, step, lengths, held)
        return cls._judged(lengths, block, blocks, kinds)

    @classmethod
    def global_local(
        cls, shape: Lengths, window: Window | None, global_tokens: ArrayLike | AnyArray | range,
        *, block_size: BlockSize = 128,
    ) -> BlockMask:  # fmt: skip
        """Keys around the query's own, and tokens that see all and are seen by all.

        Parameters
        ----------
        shape : (int, int)
            Queries and keys, (Nq, Nk).
        window : int or (int or None, int or None) or None
            How many keys to the left and to the right are visible.
        global_tokens : int or sequence of int
            That many first tokens, or their indices among the keys. Query `i` is the token of key
            `i + Nk - Nq`: the last query is that of the last key.
        block_size : int or (int, int)
            Queries and keys of a block.

        References
        ----------
        .. [1] I. Beltagy, M. Peters, A. Cohan, "Longformer: The Long-Document Transformer", 2020,
           arXiv:2004.05150.

        Examples
        --------
        >>> print(BlockMask.global_local((96, 96), 16, range(32, 48), block_size=16))
        BlockMask (96, 96), blocks of 16x16, density 0.533
        ■▨■···
        ▨■■···
        ■■■■■■
        ··■■▨·
        ··■▨■▨
        ··■·▨■
        """
        lengths = arguments.two_lengths(shape)
        block = arguments.block_pair(block_size)
        held = held_size(lengths, block)
        tokens = arguments.token_indices(global_tokens, lengths[1])
        kinds, blocks = constructions.of_tokens(tokens, lengths, held)
        crosses = cls._judged(lengths, block, blocks, kinds)
        return crosses | cls.sliding_window(lengths, window, block_size=block)

    @classmethod
    def _band(cls, shape: Lengths, band: Band, block_size: BlockSize) -> BlockMask:
        lengths = arguments.two_lengths(shape)
        interval = constructions.band_interval(band, lengths)
        return cls._intervals(*interval, lengths, block_size)

    @classmethod
    def _intervals(
        cls, first: Indices, stop: Indices, lengths: Pair, block_size: BlockSize
    ) -> BlockMask:
        """Query q sees the keys of [first[..., q], stop[..., q])."""
        block = arguments.block_pair(block_size)
        shape = *np.broadcast_shapes(first.shape, stop.shape)[:-1], *lengths
        first, stop = (
            np.broadcast_to(x, shape[:-1]).reshape(math.prod(shape[:-2]), lengths[0])
            for x in (first, stop)
        )
        kinds, blocks = constructions.of_intervals(first, stop, lengths, held_size(lengths, block))
        return cls._judged(shape, block, blocks, kinds)

    @classmethod
    def _judged(
        cls, shape: Sequence[int], block_size: Pair, blocks: Blocks, kinds: Kinds | None = None,
        predicate: Predicate | None = None,
    ) -> BlockMask:  # fmt: skip
        """A mask of these `kinds`, by default empty, but for the blocks whose elements are given.

        `blocks` is as :func:`assemble` takes it, of what is held of blocks.
        """
        *leading, query_length, key_length = shape
        lengths = query_length, key_length
        if kinds is None:
            kinds = np.zeros((math.prod(leading), *grid_of(lengths, block_size)), np.uint8)
        held = held_size(lengths, block_size)
        return cls._of(shape, block_size, *assemble(kinds, lengths, held, blocks), predicate)

    @property
    def ndim(self) -> int:
        """Number of axes of `shape`."""
        return len(self.shape)

    @property
    def kinds(self) -> NDArray[np.uint8]:
        """Of each block 0 (empty), 1 (partial) or 2 (full): uint8, (..., rows, columns)."""
        return self._kinds.reshape(self.shape[:-2] + self._kinds.shape[1:])

    @functools.cached_property
    def density(self) -> float:
        """Visible elements per element; 0 if there are no elements."""
        rows, columns = extents_of(self._lengths, self._held)
        full = np.einsum("lij,i,j->", self._kinds == FULL, rows, columns, dtype=np.int64)
        seen = int(full) + int(np.bitwise_count(self._patterns[2:]).sum(dtype=np.int64))
        return seen / max(math.prod(self.shape), 1)

    @functools.cached_property
    def block_density(self) -> float:
        """Blocks that are not empty per block: the share of a dense computation's work."""
        return int(np.count_nonzero(self._kinds)) / max(self._kinds.size, 1)

    @functools.cached_property
    def evenness(self) -> float:
        """How even the work is: visible blocks of a mean row or column per those of the longest.

        The least of all lists that show something, in sixteenths, rounded up.
        """
        shown = self._kinds[self._kinds.any(axis=(1, 2))] != 0
        if not shown.size:
            return 1.0
        counts = (np.count_nonzero(shown, axis=axis) for axis in (1, 2))
        least = min(float(np.min(x.mean(axis=1) / x.max(axis=1))) for x in counts)
        return math.ceil(16 * least) / 16

    @functools.cached_property
    def _pattern_of(self) -> NDArray[np.int32]:
        """Which of `_patterns` each block has."""
        pattern_of = np.array([0, 0, 1], np.int32)[self._kinds]
        partial = self._kinds == PARTIAL
        pattern_of[partial] = np.arange(2, len(self._patterns))
        return pattern_of

    @property
    def T(self) -> BlockMask:
        """The mask with queries and keys exchanged."""
        kinds = np.ascontiguousarray(self._kinds.swapaxes(1, 2))
        order = self._pattern_of.swapaxes(1, 2)[kinds == PARTIAL]

        def blocks(order: NDArray[np.integer[Any]]) -> Iterator[Words]:
            for some in in_chunks(order, math.prod(self._held)):
                elements = unpack(self._patterns[some], self._held[1])
                yield pack(elements.swapaxes(1, 2))

        *leading, query_length, key_length = self.shape
        patterns = np.concatenate([*blocks(np.arange(2)), *blocks(order)])
        shape, predicate = (*leading, key_length, query_length), self.predicate
        turned = None if predicate is None else predicate.T
        return self._of(shape, self.block_size[::-1], kinds, patterns, turned)

    def __and__(self, other: BlockMask) -> BlockMask:
        return self._combined(other, "&")

    def __or__(self, other: BlockMask) -> BlockMask:
        return self._combined(other, "|")

    __rand__, __ror__ = __and__, __or__  # of what is no BlockMask

    def _combined(self, other: BlockMask, operator: str) -> BlockMask:
        if not isinstance(other, BlockMask):
            refuse_array(other)
            return NotImplemented
        return self._judged(*combined(self, other, operator))

    def __invert__(self) -> BlockMask:
        made = complement(self._kinds, self._patterns, self._lengths, self._held)
        predicate = None if self.predicate is None else ~self.predicate
        return self._of(self.shape, self.block_size, *made, predicate)

    def _in_blocks(self, block_size: Pair) -> BlockMask:
        if block_size == self.block_size:
            return self
        made = self._cut(*held_size(self._lengths, block_size))
        return self._of(self.shape, block_size, *made, self.predicate)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        return self is other or (
            (self.shape, self.block_size) == (other.shape, other.block_size)
            and np.array_equal(self._kinds, other._kinds)
            and np.array_equal(self._patterns, other._patterns)
        )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.block_size, self._kinds.tobytes()))

    def tiles(self, rows: int, columns: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """The mask cut into tiles of any size, for kernels.

        Parameters
        ----------
        rows, columns : int
            Queries and keys of a tile. They need not divide block sizes, nor be divided by them.

        Returns
        -------
        kinds : ndarray of uint8, shape (lists, ceil(Nq / rows), ceil(Nk / columns))
            0 for a tile whose elements are all hidden, 2 for one whose elements within the shape
            are all visible, 1 for others. `lists` is the product of the leading axes.
        bits : ndarray of uint32, shape (partial tiles, rows, ceil(columns / 32))
            Elements of partial tiles in the order of `np.flatnonzero(kinds == 1)`: bit `c % 32` of
            word `c // 32` is column `c`. Elements beyond the mask's shape are 0.

        Examples
        --------
        >>> kinds, bits = BlockMask.causal((64, 64), block_size=64).tiles(32, 16)
        >>> kinds
        array([[[1, 1, 0, 0],
                [2, 2, 1, 1]]], dtype=uint8)
        >>> [f"{word:016b}" for word in bits[0, :3, 0]]
        ['0000000000000001', '0000000000000011', '0000000000000111']
        """
        rows, columns = arguments.positive("rows", rows), arguments.positive("columns", columns)
        within = held_size(self._lengths, (rows, columns))
        kinds, patterns = self._cut(*within)
        if within == (rows, columns):
            return kinds, patterns[2:]
        bits = np.zeros((len(patterns) - 2, rows, -(-columns // 32)), np.uint32)
        bits[:, : within[0], : patterns.shape[-1]] = patterns[2:]
        return kinds, bits

    def _cut(self, rows: int, columns: int) -> tuple[Kinds, Words]:
        """Kinds and patterns of tiles."""
        if (rows, columns) == self._held:
            return self._kinds, self._patterns
        kinds = coarsen(self._kinds, self._lengths, self._held, (rows, columns))
        numbers = np.flatnonzero(kinds == PARTIAL)
        grid = kinds.shape

        def tiles() -> Iterator[tuple[Indices, Words]]:
            for some in in_chunks(numbers, rows * columns):
                lists, i, j = np.unravel_index(some, grid)
                queries = (i * rows)[:, None] + np.arange(rows)
                yield some, self._elements(lists, queries, j * columns, columns)

        return assemble(kinds, self._lengths, (rows, columns), tiles())

    def _elements(self, lists: Indices, queries: Indices, keys: Indices, columns: int) -> Words:
        """Words of the elements at `queries`, (n, rows), and `columns` keys from `keys`, (n,)."""
        (query_length, key_length), (bq, bk) = self._lengths, self._held
        words = -(-columns // 32)
        query = np.minimum(queries, query_length - 1)[:, :, None]
        key = keys[:, None] // HALF * HALF + HALF * np.arange(2 * words + 1)
        key = np.minimum(key, key_length - 1)[:, None]
        pattern = self._pattern_of[lists[:, None, None], query // bq, key // bk]
        halves = self._patterns.view(np.uint16)
        index = pattern * np.int64(bq) + query % bq
        found = halves.reshape(-1)[index * halves.shape[-1] + key % bk // HALF]
        if (keys % HALF).any():
            both = found[..., :-1] | found[..., 1:].astype(np.uint32) << np.uint32(HALF)
            found = (both >> (keys % HALF).astype(np.uint32)[:, None, None]).astype(np.uint16)
        found = np.ascontiguousarray(found[..., : 2 * words]).view(np.uint32)
        found &= first_bits(np.minimum(columns, key_length - keys)[:, None], words)[:, None]
        found[queries >= query_length] = 0
        return found

    def part(self, number: int, queries: range, keys: range) -> NDArray[np.bool_] | None:
        """Elements of a rectangle as bool, (queries, keys); None if all of them are visible.

        Parameters
        ----------
        number : int
            Which of the masks along the leading axes, in C order.
        queries, keys : range
            Within the shape, of step 1.

        Examples
        --------
        >>> mask = BlockMask.causal((1000, 1000))
        >>> mask.part(0, range(3), range(4)).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0]])
        >>> mask.part(0, range(600, 1000), range(600)) is None
        True
        """
        kinds = self._kinds_of(number, queries, keys)
        if (kinds == FULL).all():
            return None
        if not kinds.any():
            return np.zeros((len(queries), len(keys)), bool)
        rows = np.arange(queries.start, queries.stop)[None]
        words = self._elements(np.array([number]), rows, np.array([keys.start]), len(keys))
        seen = unpack(words[0], len(keys))
        return None if seen.all() else seen

    def is_empty(self, number: int, queries: range, keys: range) -> bool:
        """Whether a rectangle, as :meth:`part` takes it, lies in empty blocks alone."""
        return not self._kinds_of(number, queries, keys).any()

    def _kinds_of(self, number: int, queries: range, keys: range) -> Kinds:
        """Kinds of the blocks that meet a rectangle."""
        rows, columns = (
            slice(x.start // block, -(-x.stop // block) if x else x.start // block)
            for x, block in zip((queries, keys), self._held)
        )
        return self._kinds[number, rows, columns]

    def to_dense(self) -> NDArray[np.bool_]:
        """The mask as a bool array of shape (..., Nq, Nk), True for visible elements.

        Examples
        --------
        >>> int(BlockMask.causal((100, 100)).to_dense().sum())
        5050
        """
        *leading, query_length, key_length = self.shape
        dense = np.ones((math.prod(leading), query_length, key_length), bool)
        for number, head in enumerate(dense):
            for begin in range(0, query_length, self._held[0]):
                queries = range(begin, min(begin + self._held[0], query_length))
                part = self.part(number, queries, range(key_length))
                if part is not None:
                    head[begin : queries.stop] = part
        return dense.reshape(self.shape)

    def to_scipy(self, index: Iterable[SupportsIndex] = ()) -> Any:
        """One of the masks along the leading axes as a sparse array of SciPy.

        Parameters
        ----------
        index : tuple of int
            Which one: as many indices as there are leading axes, none of a mask of two axes.

        Returns
        -------
        scipy.sparse.bsr_array of bool, shape (Nq, Nk)
            Of the blocks that are not empty. They are those of the mask if the lengths are whole
            blocks; otherwise they are as large as divides both block and length, as BSR needs it,
            and :meth:`from_scipy` is to be given the mask's block size. Hidden elements of a
            partial block are stored zeros.

        Notes
        -----
        Memory is a byte per element of blocks that are not empty, and up to 20 of them for a time
        if the lengths are not whole blocks.

        Examples
        --------
        >>> mask = BlockMask.sliding_window((512, 512), 20, block_size=64)
        >>> matrix = mask.to_scipy()
        >>> matrix.blocksize, matrix.nnz // 64**2, int(matrix.sum())
        ((64, 64), 22, 20572)
        >>> BlockMask.from_scipy(matrix) == mask
        True
        """
        number = arguments.number_of(index, self.shape)
        kinds, (bq, bk) = self._kinds[number], self._held
        patterns = self._patterns[self._pattern_of[number][kinds != EMPTY]]
        return constructions.as_matrix(
            kinds, unpack(patterns, bk), self._lengths, (bq, bk), self.block_size
        )

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, block_size={self.block_size}, "
            f"density={self.density:.3g}, block_density={self.block_density:.3g})"
        )

    def __str__(self) -> str:
        return picture.as_text(self)

    def _repr_svg_(self) -> str:
        """The picture for notebooks: full squares are filled, partial ones crossed out."""
        return picture.as_svg(self)

"""`append_kv`: how tokens get into the caches that `attention` reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .calls.append import append

if TYPE_CHECKING:
    from .typing import AnyArray, Integers


def append_kv(
    k_cache: AnyArray,
    v_cache: AnyArray,
    k: AnyArray,
    v: AnyArray,
    start: Integers,
    *,
    lengths: Integers | None = None,
    page_table: AnyArray | None = None,
) -> None:
    """Write keys and values behind those that a cache holds, in place.

    Parameters
    ----------
    k_cache : array, shape (B, H, capacity, D)
        Cache of keys: float16, bfloat16, float32 or float64. With `page_table` a pool of pages,
        shape (P, H, page_size, D), page_size a multiple of 16. Any strides: memory of shape
        (P, page_size, H, D) is given as `pool.swapaxes(1, 2)`.
    v_cache : array, shape (B, H, capacity, Dv) or (P, H, page_size, Dv)
        Cache of values.
    k : array, shape (B, H, n, D)
        Keys of new tokens, of the type of `k_cache`. Any strides.
    v : array, shape (B, H, n, Dv)
        Their values, of the type of `v_cache`.
    start : int or array of int, shape (B,)
        How many tokens each batch entry holds before: its first new one becomes that position.
    lengths : int or array of int, shape (B,), optional
        How many of the n tokens of each batch entry to write, the first ones; by default all.
    page_table : array of int, shape (B, pages), optional
        Position j of batch entry b is row `j % page_size` of page
        `page_table[b, j // page_size]`. Entries that no token needs may hold anything. No two
        positions that are written may be the same row.

    Raises
    ------
    ValueError
        If shapes or devices do not fit, if a cache overlaps another argument or itself, for a
        number below 0 or one that leads beyond the cache, and, of NumPy arrays, for integers that
        do so or are no pages of the pool. Then nothing is written.
    TypeError
        For types that are not supported or differ from that of the cache.

    Notes
    -----
    Integers on a GPU are not read back. There nothing is written beyond the cache, through a number
    that is no page, and of tokens that k does not have. Beside CuPy arrays, NumPy arrays and lists
    of integers are copied to the device in each call; a number is not.

    On a GPU it is one launch, on the current stream of the arrays' device. It takes no memory and
    can be captured in a CUDA graph once a call of its kind has run.

    `start` counts the tokens before the call, `kv_lengths` of :func:`attention` those after it.

    Examples
    --------
    Prompts of 3 and 5 tokens, padded to 5, then a step of decoding:

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = np.zeros((2, 2, 8, 64, 16))  # 2 sequences, 8 heads, 64 positions
    >>> k, v = rng.standard_normal((2, 2, 8, 5, 16))
    >>> lengths = np.array([3, 5])
    >>> cuflash.append_kv(k_cache, v_cache, k, v, 0, lengths=lengths)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 1, 16))
    >>> cuflash.append_kv(k_cache, v_cache, k, v, lengths)
    >>> lengths += 1
    >>> cuflash.attention(q, k_cache, v_cache, kv_lengths=lengths).shape
    (2, 8, 1, 16)
    >>> np.array_equal(k_cache[:, :, [3, 5]][[0, 1], :, [0, 1]], k[:, :, 0])
    True

    The same in pages of 16 positions, of which each sequence has two anywhere in the pool:

    >>> k_pool, v_pool = np.zeros((2, 6, 8, 16, 16))
    >>> pages = np.array([[4, 0], [1, 5]])
    >>> cuflash.append_kv(k_pool, v_pool, k, v, np.array([15, 16]), page_table=pages)
    >>> np.array_equal(k_pool[4, :, 15], k[0, :, 0]), np.array_equal(k_pool[5, :, 0], k[1, :, 0])
    (True, True)
    """
    append({"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}, start, lengths, page_table)

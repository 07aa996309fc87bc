"""`append_kv` as it is defined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def append_kv(
    k_cache: NDArray[Any],
    v_cache: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    start: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Caches with the tokens of `k` and `v` in them, as :func:`cuflash.append_kv` defines them.

    Parameters
    ----------
    k_cache, v_cache, k, v, start, lengths, page_table
        As in :func:`cuflash.append_kv`. Tokens whose position or page does not exist are left out,
        as on a GPU.

    Returns
    -------
    k_cache, v_cache : ndarray
        Copies of those given.

    Examples
    --------
    >>> cache, token = np.zeros((1, 1, 4, 1)), np.ones((1, 1, 1, 1))
    >>> append_kv(cache, cache, token, 2 * token, 2)[1].ravel()
    array([0., 0., 2., 0.])
    """
    batch, _, tokens, _ = k.shape
    caches = k_cache.copy(), v_cache.copy()
    entries, positions, page_size = len(k_cache), k_cache.shape[-2], k_cache.shape[-2]
    if page_table is not None:
        positions *= np.shape(page_table)[1]
    starts = np.broadcast_to(start, batch)
    counts = np.broadcast_to(tokens if lengths is None else lengths, batch)
    for b in range(batch):
        for token in range(min(tokens, int(counts[b]))):
            position, entry = int(starts[b]) + token, b
            if not 0 <= position < positions:
                continue
            if page_table is not None:
                entry = int(np.asarray(page_table)[b, position // page_size])
                position %= page_size
            if 0 <= entry < entries:
                for cache, new in zip(caches, (k, v)):
                    cache[entry, :, position] = new[b, :, token]
    return caches

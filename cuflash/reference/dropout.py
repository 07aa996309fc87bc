"""Which weights dropout keeps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..dropout import Dropout, checked_seed, checked_share

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..typing import Real


def dropout_keep(seed: int, shape: tuple[int, ...], dropout_p: Real) -> NDArray[np.bool_]:
    """Which softmax weights :func:`cuflash.attention` keeps with this seed.

    Parameters
    ----------
    seed : int
        From 0 to 2^64 - 1.
    shape : tuple of int
        Of all weights, (..., H, N, M) or (N, M). The axes before H are those of the batch.
    dropout_p : float
        The probability that a weight is dropped, in [0, 1): a weight has 15 random bits, so that it
        is rounded to a multiple of 2^-15.

    Returns
    -------
    ndarray of bool
        True for a weight that is kept. It depends on the seed and on the weight's batch entry,
        head, query and key, and not on the sizes of these axes.

    Raises
    ------
    ValueError, TypeError
        For what is no seed, or no such probability.

    Examples
    --------
    >>> from cuflash import reference
    >>> kept = reference.dropout_keep(7, (2, 4, 100, 100), 0.25)
    >>> kept.shape, round(float(kept.mean()), 2)
    ((2, 4, 100, 100), 0.75)
    >>> bool((kept[:, :, :30, :50] == reference.dropout_keep(7, (2, 4, 30, 50), 0.25)).all())
    True
    """
    *leading, rows, columns = shape
    heads = leading[-1] if leading else 1
    dropout = Dropout(checked_share(dropout_p), checked_seed(seed))
    kept = np.empty((math.prod(leading), rows, columns), np.bool_)
    for number, own in enumerate(kept):
        own[...] = dropout.keeps(divmod(number, heads), range(rows), range(columns))
    return kept.reshape(shape)

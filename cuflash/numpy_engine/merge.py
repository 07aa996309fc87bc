"""Results of attention over parts of the keys, merged on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def merge_parts(
    outs: Sequence[NDArray[Any]], lses: Sequence[NDArray[Any]], out: NDArray[Any], lse: NDArray[Any]
) -> None:
    """Write what attention over the keys of all parts gives to `out` and `lse`."""
    # NaN and infinity follow IEEE arithmetic, and half precision may overflow.
    with np.errstate(all="ignore"):
        top = functools.reduce(np.maximum, lses)
        origin = np.where(np.isneginf(top), 0, top)
        total = np.zeros_like(top)
        for own in lses:
            total += np.exp(own - origin)
        sums = np.zeros(out.shape, lse.dtype)
        for part, own in zip(outs, lses):
            share = np.exp(own - origin) / total
            product = np.multiply(share[..., None], part, dtype=sums.dtype)
            product[np.isneginf(own)] = 0  # whatever the part holds there
            sums += product
        out[...] = sums
        lse[...] = top + np.log(total)

"""The element types that kernels take, and the types of their sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

HALF = ("float16", "bfloat16")
SINGLE = (*HALF, "float32")
DOUBLE = ("float64",)
EVERY = (*SINGLE, *DOUBLE)
ACCUMULATORS = {
    "float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64",
}  # fmt: skip
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
CHUNK_BYTES = 16  # the widest load, and the unit of a shared tile's row pitch


def result_dtype(q: np.dtype[Any], k: np.dtype[Any], v: np.dtype[Any]) -> np.dtype[Any]:
    """The type of attention's result: what NumPy promotes the operands' types to."""
    return common_dtype({"q": q, "k": k, "v": v}, "attention")


def common_dtype(given: Mapping[str, np.dtype[Any]], taker: str) -> np.dtype[Any]:
    """What NumPy promotes the types of arrays with these names to; `taker` is who takes them.

    Raises
    ------
    TypeError
        For types other than fp16, bf16, fp32 and fp64, and for fp16 with bf16.
    """
    for name, dtype in given.items():
        if dtype.name not in ITEM_BYTES:
            supported = ", ".join(ITEM_BYTES)
            raise TypeError(f"{name} has dtype {dtype}: {taker} takes {supported}")
    try:
        return np.result_type(*given.values())
    except TypeError as error:
        names, dtypes = ", ".join(given), ", ".join(map(str, given.values()))
        message = f"{names} have dtypes {dtypes}, which have no common type: cast them"
        raise TypeError(message) from error

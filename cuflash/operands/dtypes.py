"""The element types that kernels take, and the types of their sums."""

from __future__ import annotations

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
    """The type of the result: what NumPy promotes the operands' types to.

    Raises
    ------
    TypeError
        For types other than fp16, bf16, fp32 and fp64, and for fp16 with bf16.
    """
    for name, dtype in zip("qkv", (q, k, v)):
        if dtype.name not in ITEM_BYTES:
            supported = ", ".join(ITEM_BYTES)
            raise TypeError(f"{name} has dtype {dtype}: attention takes {supported}")
    try:
        return np.result_type(q, k, v)
    except TypeError as error:
        message = f"q, k, v have dtypes {q}, {k}, {v}, which have no common type: cast them"
        raise TypeError(message) from error

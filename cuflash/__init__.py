"""Exact attention for NumPy and CuPy arrays, with CUDA C kernels compiled at run time."""

from . import reference
from .attention import attention, attention_backward, attention_vjp, plan
from .block_mask import BlockMask
from .plan import Device, Plan

__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "Device",
    "Plan",
    "attention",
    "attention_backward",
    "attention_vjp",
    "plan",
    "reference",
]

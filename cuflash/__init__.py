"""Exact attention for NumPy and CuPy arrays, with CUDA C kernels compiled at run time."""

from typing import TYPE_CHECKING

from . import reference
from ._append_kv import append_kv
from ._attention import attention, attention_backward, attention_vjp
from ._kernel_info import KernelInfo, kernel_info
from ._merge import merge
from ._plan import plan
from ._precompile import CompiledKernel, precompile
from ._varlen import attention_varlen, attention_varlen_backward, attention_varlen_vjp
from .masks.block_mask import BlockMask
from .planning.plan import Plan
from .planning.problem import Device
from .scores.score_mod import ScoreMod

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import typing as typing
else:

    def __getattr__(name: str) -> object:
        """Modules that are imported when they are first used."""
        from importlib import import_module

        if name in ("distributed", "typing"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "BlockMask",
    "CompiledKernel",
    "Device",
    "KernelInfo",
    "Plan",
    "ScoreMod",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "kernel_info",
    "merge",
    "plan",
    "precompile",
    "reference",
]

"""What one call is given: options, and arrays by the names of operands."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..masks.block_mask import BlockMask
from ..operands.dtypes import CHUNK_BYTES
from ..operands.spec import Spec

_BOOL = np.dtype(np.bool_)

# Name, shape, strides in bytes, element type and GPU of an array; no GPU is the CPU.
Form: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], "np.dtype[Any]", "int | None"]


class Options(NamedTuple):
    """What is asked for beside the arrays, as in :func:`cuflash.attention`.

    A number stands for `q_offset`; an array of them is an operand.
    """

    algo: Any = None
    engine: Any = None
    causal: Any = False
    window: Any = None
    q_offset: int | None = None
    softcap: Any = None
    scale: Any = None
    enable_gqa: Any = False
    deterministic: Any = True


class Arguments:
    """The arrays of one call by the names of its operands, and where they lie.

    Parameters
    ----------
    arrays : dict of str to array
        In the order of the kernels' pointers; None for those not given.
    mask : BlockMask or array of bool, optional
    workspace : array, optional
        Device memory for the kernels' use.
    """

    __slots__ = (
        "address_bits", "addresses", "arrays", "device_id", "forms", "mask", "mask_kind",
        "workspace",
    )  # fmt: skip

    def __init__(self, arrays: dict[str, Any], mask: Any = None, workspace: Any = None):
        forms: list[Form] = []  # of the arrays that are given
        addresses = dict.fromkeys(arrays, 0)
        device_id, bits = None, 0
        for name, x in arrays.items():
            if x is None:
                continue
            if isinstance(x, np.ndarray):
                device_id, address = None, x.ctypes.data
            else:
                memory = x.data
                device_id, address = memory.device_id, memory.ptr
            forms.append((name, x.shape, x.strides, x.dtype, device_id))
            addresses[name] = address
            bits |= address
        self.arrays, self.mask, self.workspace = arrays, mask, workspace
        self.forms, self.addresses, self.address_bits = forms, addresses, bits
        self.device_id = device_id  # None is the CPU; a call is made for arrays of one device
        self.mask_kind = "" if mask is None else self._add_mask(mask)

    def _add_mask(self, mask: Any) -> str:
        """Add what is known of a mask; returns its kind, as in Problem."""
        if isinstance(mask, BlockMask):
            self.forms.append(("mask", mask.shape, (), _BOOL, None))
            return "blocks"
        on_host = isinstance(mask, np.ndarray)
        number = None if on_host else mask.device.id
        self.forms.append(("mask", mask.shape, mask.strides, mask.dtype, number))
        self.addresses["mask"] = mask.ctypes.data if on_host else mask.data.ptr
        return "elements"

    def are_aligned(self, names: tuple[str, ...]) -> bool:
        """Whether these arrays start on multiples of CHUNK_BYTES."""
        return all(self.addresses[name] % CHUNK_BYTES == 0 for name in names)

    def specs(self) -> dict[str, Spec]:
        """Those of the arrays and of the mask that are given."""
        specs = {name: Spec(*form) for name, *form, _ in self.forms}
        if self.mask_kind == "blocks":
            specs["mask"] = Spec.contiguous(self.mask.shape, np.bool_)
        return specs

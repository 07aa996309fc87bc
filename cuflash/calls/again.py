"""Calls that a GPU has run before, on arrays of the same forms that lie elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..operands.dtypes import CHUNK_BYTES
from .run import find_call, launch_module

if TYPE_CHECKING:
    from .arguments import Arguments, Options
    from .call import Call


def form_of(arrays: Mapping[str, Any]) -> tuple[object, ...] | None:
    """What calls of arrays have in common that can take each other's place; None for arrays of
    NumPy, and those that do not begin where kernels load rows fastest.
    """
    found: list[object] = []
    for name, x in arrays.items():
        if isinstance(x, np.ndarray) or x.data.ptr % CHUNK_BYTES:
            return None
        found += name, x.shape, x.strides, x.dtype, x.data.device_id
    return tuple(found)


class Again:
    """A call whose operands are parts of arrays: they begin as far behind the beginnings of these
    as they did in a call before, and new results are as large.

    Neither forms nor overlaps are checked: results are to be memory of their own.
    """

    __slots__ = ("call", "device_id", "made", "places")

    def __init__(self, call: Call, arguments: Arguments, wholes: Mapping[str, Any], count: int):
        self.call, self.device_id = call, arguments.device_id
        self.made = [x for x in call.results[:count] if x.operand not in arguments.arrays]
        self.places = {
            name: address - wholes[name].data.ptr if name in wholes else address
            for name, address in arguments.addresses.items()
        }

    @classmethod
    def of(
        cls, kind: type[Call], arguments: Arguments, options: Options, wholes: Mapping[str, Any],
        count: int,
    ) -> Again | None:  # fmt: skip
        """That of a call which has run; None where more than addresses goes with each call."""
        call = find_call(kind, arguments, options)
        if call.launch is None or call.has_lists or call.copied or call.staged or call.dropout_p:
            return None
        return cls(call, arguments, wholes, count)

    def run(self, wholes: Mapping[str, Any]) -> list[Any]:
        """Run on the current stream; returns the new results."""
        addresses = {
            name: place + wholes[name].data.ptr if name in wholes else place
            for name, place in self.places.items()
        }
        made: list[Any] = launch_module().run_again(self.call, addresses, self.made, self.device_id)
        return made

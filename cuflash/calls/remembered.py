"""Calls that are checked and planned once for arguments of one form, and then remembered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ..operands.dtypes import CHUNK_BYTES
from ..operands.spec import Spec
from .arguments import Arguments
from .arrays import check_devices

_logger = logging.getLogger("cuflash")

Call = TypeVar("Call")


def remembered(
    calls: dict[tuple[object, ...], Call], most: int, arguments: Arguments,
    make: Callable[[dict[str, Spec], dict[str, int], bool], Call],
) -> Call:  # fmt: skip
    """The call of this kind among `calls`, which hold `most`, or a new one.

    That is made of the arrays' specs, of what is left of all addresses by 16, and of whether the
    arrays are NumPy's.
    """
    low_bits = {name: x % CHUNK_BYTES for name, x in arguments.addresses.items()}
    key = (*arguments.forms, *low_bits.values())
    call = calls.get(key)
    if call is None:
        check_devices(arguments.arrays)
        specs = arguments.specs()
        call = make(specs, low_bits, arguments.device_id is None)
        shapes = {name: spec.shape for name, spec in specs.items()}
        _logger.debug("new kind of call: %s of %s", type(call).__name__, shapes)
        if len(calls) >= most:
            calls.clear()
        calls[key] = call
    return call

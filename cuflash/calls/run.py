"""From arguments to results: the remembered call of their kind, on the CPU or on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from ..operands.dtypes import CHUNK_BYTES
from ..planning.problem import CPU, Device
from .arguments import Arguments, Options
from .arrays import check_devices, conform, host_results, memory_module
from .call import Call, keep_apart
from .packed import integers_as_read, packed_specs
from .suited import best_call

_logger = logging.getLogger("cuflash")
_LARGEST_ITEM = 8  # bytes
_MAX_CALLS = 1024  # kinds of call that are remembered
_NO_NAMES: frozenset[str] = frozenset()
_calls: dict[tuple[object, ...], Call] = {}


@cache
def launch_module() -> ModuleType:
    """`cuflash.gpu.launch`, which imports CuPy: a CPU does without."""
    from ..gpu import launch

    return launch


def find_call(
    kind: type[Call], arguments: Arguments, options: Options, device: Device | None = None
) -> Call:
    """The remembered call of this kind, or a new one.

    `device` is to be planned for instead of the arrays' own.
    """
    unaligned = _NO_NAMES
    if arguments.address_bits % CHUNK_BYTES:
        unaligned = arguments.unaligned(kind.matrices)
    # 2 == 2.0 and 1 == True, but not all of these are right.
    types = (
        type(options.causal), type(options.softcap), type(options.scale), type(options.split_keys),
    )  # fmt: skip
    key: tuple[object, ...]
    key = (kind, options, types, tuple(arguments.forms), arguments.mask_kind, unaligned, device)
    if arguments.predicate is not None:
        key += (arguments.predicate.key,)
    if kind.backward and arguments.mask_kind == "blocks":
        key += (arguments.mask_evenness,)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that cannot be hashed is wrong: Call says how
        call = None
    if call is not None:
        return call
    if arguments.device_id is not None:
        others = integers_as_read(arguments.arrays, options.longest)
        if others:
            arguments.replace(others)
            return find_call(kind, arguments, options, device)
    return _new_call(key, kind, arguments, options, device, unaligned)


def _new_call(
    key: tuple[object, ...], kind: type[Call], arguments: Arguments, options: Options,
    device: Device | None, unaligned: frozenset[str],
) -> Call:  # fmt: skip
    """Check and plan a call, and remember it."""
    elements = {"mask": arguments.mask} if arguments.mask_kind == "elements" else {}
    check_devices(arguments.arrays | elements)
    if device is None:
        number = arguments.device_id
        device = CPU if number is None else launch_module().device_facts(number)
    specs = arguments.specs()
    if options.longest is not None:
        specs = packed_specs(specs, "page_table" in specs)
    call = best_call(
        kind, specs, options, device, arguments.mask_kind, unaligned, arguments.predicate,
        arguments.mask_evenness,
    )  # fmt: skip
    plan = call.plan
    _logger.debug(
        "new kind of call: %s on %s by %s, algo %s, engine %s",
        plan.problem, plan.device, plan.kernel, plan.algo, plan.engine,
    )  # fmt: skip
    if len(_calls) >= _MAX_CALLS:
        _calls.clear()
    _calls[key] = call
    return call


def run_call(
    kind: type[Call], arguments: Arguments, options: Options, count: int,
    before_first: Callable[[], None] | None = None,
) -> list[Any]:  # fmt: skip
    """Find the call for these arguments and run it; returns its first `count` results.

    `before_first` is called before a GPU's kernels are compiled.
    """
    call, addresses = find_call(kind, arguments, options), arguments.addresses
    keep_apart(call.apart, addresses)
    if arguments.device_id is None:
        return _run_host(call, arguments, count)
    if before_first is not None and call.launch is None:
        before_first()
    if arguments.address_bits % _LARGEST_ITEM and (wrong := _not_on_whole_items(arguments)):
        return _run_on_copies(wrong, call, arguments, options, count)
    results: list[Any] = launch_module().run(call, arguments, count)
    return results


def _not_on_whole_items(arguments: Arguments) -> list[str]:
    """Operands whose address is not a multiple of their item's size."""
    addresses = arguments.addresses
    return [name for name, x in arguments.arrays.items() if addresses[name] % x.dtype.itemsize]


def _run_on_copies(
    wrong: list[str], call: Call, arguments: Arguments, options: Options, count: int
) -> list[Any]:
    """Run a call on CuPy arrays of which copies stand for the operands `wrong`."""
    memory, arrays = memory_module(), arguments.arrays
    with arrays["q"].device:
        copies = {name: memory.copy(arrays[name]) for name in wrong}
        held = arguments.mask, arguments.workspace, arguments.seed, call.wrt
        again = Arguments(call.operands, arrays | copies, *held)
        results = run_call(type(call), again, options, count)
        for number, (name, _) in enumerate(call.results[:count]):
            if name in wrong:
                memory.copy_bytes(arrays[name], results[number])
                results[number] = arrays[name]
    return results


def _run_host(call: Call, arguments: Arguments, count: int) -> list[Any]:
    """Run a call on NumPy arrays; returns its first `count` results."""
    if arguments.workspace is not None:
        raise TypeError(
            f"workspace is a {type(arguments.workspace).__name__}: it goes with CuPy arrays, for "
            "NumPy arrays leave it out"
        )
    results = host_results(dict(call.results[:count]), arguments.arrays, call.titles)
    arrays = call.heads_first(arguments.arrays | results)
    for name, spec in call.copied:
        arrays[name] = conform(arrays[name], spec)
    for name, spec in call.staged:
        arrays[name] = np.empty(spec.shape, spec.dtype)
    call.run_host(arrays, arguments.mask, arguments.seed)
    with np.errstate(all="ignore"):  # half precision may overflow
        for name, x in call.heads_first({name: results[name] for name, _ in call.staged}).items():
            x[...] = arrays[name]
    return list(results.values())

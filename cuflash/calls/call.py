"""Kinds of call: what is checked and planned once for arguments of one form, and remembered."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from ..masks.band import Band, window_sides
from ..masks.block_mask import BlockMask
from ..numpy_engine import walks as host
from ..numpy_engine.tiles import head_masks
from ..operands.checks import check_out, check_read
from ..operands.dtypes import CHUNK_BYTES, result_dtype
from ..operands.layout import check_shapes, make_layout
from ..operands.spec import Spec, check_apart, clearance, conformed
from ..planning.plan import make_plan
from ..planning.problem import CPU, Device, make_problem
from ..scores import UNSCALED, checked_scale
from ..scores import softcap as softcap_score
from .arrays import check_places, conform, memory_module

_LARGEST_ITEM = 8  # bytes
_MAX_CALLS = 1024  # kinds of call that are remembered
_calls: dict[tuple, _Call] = {}
_LENGTHS = ("q_lengths", "kv_lengths", "q_offset")  # integers over the batch axes
_TRAILING = {"lse": 1, "dlse": 1, **dict.fromkeys(_LENGTHS, 0)}  # axes; 2 of all others


class _Call:
    """All that repeats from call to call of one kind: layout, plan and, on a GPU, the launch.

    Subclasses say which arrays there are, which of them are written, and what is expected of them.
    """

    __slots__ = (
        "anywhere", "apart", "copied", "has_lists", "is_empty", "launch", "layout", "lse_dtype",
        "out_dtype", "plan", "results", "scale", "score", "staged", "workspace_bytes",
    )  # fmt: skip
    operands: tuple[str, ...]  # in the order of the kernels' pointers, four matrices first
    written: dict[str, str]  # the results among them, and what errors call these
    empty_values: tuple[float, ...]  # of the results where there is no query or no key
    more_matrices: tuple[int, ...]  # places of those beside the first four
    backward: bool

    def __init__(self, given, device_id, options):
        algo, engine, causal, window, offset, cap, scale, gqa, deterministic, *facts = options
        mask_kind, aligned, device = facts
        inputs = q, k, v = tuple(given[name] for name in "qkv")
        check_shapes(q, k, v)
        self.out_dtype = result_dtype(q.dtype, k.dtype, v.dtype)
        self.lse_dtype = np.dtype("float64" if self.out_dtype == np.float64 else "float32")
        band = Band.from_options(causal, window, given.get("q_offset", offset))
        accumulator = self.lse_dtype.name
        default = 1.0 / math.sqrt(q.shape[-1])
        self.scale = default if scale is None else checked_scale(scale, accumulator)
        # Kernels tell hidden keys by -infinity times the scale, unless a score is changed.
        self.score = UNSCALED if self.scale == 0 else None
        if cap is not None:
            self.score = softcap_score(cap, accumulator)
        lengths = {name: given.get(name) for name in _LENGTHS}
        mask = given.get("mask")
        broadcast = {**lengths, "mask": mask, "enable_gqa": gqa}
        on_gpu = not (device_id is None and device is None)
        specs = self._specs(given, inputs, broadcast, mask_kind, on_gpu)
        self.layout = self._layout(specs, broadcast)
        if mask_kind == "blocks" and mask.shape[-2:] != (q.shape[-2], k.shape[-2]):
            raise ValueError(
                f"mask is a BlockMask of shape {mask.shape}: it must have {q.shape[-2]} queries "
                f"and {k.shape[-2]} keys"
            )
        # Operands that need not lie on multiples of the largest item's size.
        self.anywhere = tuple(
            slot
            for slot, name in enumerate(self.operands)
            if name in given and not (aligned and name not in _TRAILING)
        )
        rows = (spec for name, spec in specs.items() if name not in _TRAILING)
        problem = make_problem(
            self.layout,
            *inputs,
            band=band,
            score=self.score,
            lengths={name: spec.dtype.name for name, spec in lengths.items() if spec is not None},
            mask=mask_kind,
            aligned=aligned and all(spec.rows_are_aligned() for spec in rows),
            backward=self.backward,
            deterministic=deterministic,
        )
        self.plan = make_plan(problem, device or _device_facts(device_id), algo, engine)
        self.workspace_bytes = self.plan.workspace_bytes
        self.has_lists = mask_kind == "blocks"
        self.is_empty = 0 in self.layout.out_shape or k.shape[-2] == 0
        self.launch = None  # of a GPU's kernels, once they are compiled

    def _specs(self, given, inputs, broadcast, mask_kind, on_gpu):
        """The spec of each array that an engine is given, and what has to be done for that."""
        read = (conformed(spec, self.out_dtype) for spec in inputs)
        expected = self._expected(inputs, make_layout(*read, **broadcast))
        for name, spec in expected.items():
            if name in given:
                self._check(name, given[name], spec)
        known = {name: given.get(name, spec) for name, spec in expected.items()}
        specs = {name: self._seen(name, spec, on_gpu) for name, spec in known.items()}
        place = {name: i for i, name in enumerate((*self.operands, "mask"))}
        self.results = tuple((place[name], expected[name]) for name in self.written)
        changed = [name for name in self.operands if name in specs and specs[name] != known[name]]
        # What is read, and of which an engine needs a copy.
        self.copied = tuple(
            (place[name], specs[name])
            for name in changed
            if name in given and name not in self.written
        )
        # What an engine cannot write itself: it writes elsewhere, and that is copied.
        self.staged = tuple(
            (number, place[name], specs[name])
            for number, name in enumerate(self.written)
            if name in changed
        )
        others = [*expected, *_LENGTHS, *(["mask"] if mask_kind == "elements" else [])]
        self.apart = tuple(
            (place[a], place[b], *clearance(given[a], given[b]), (a, b, given[a], given[b]))
            for a, b in self._pairs(others)
            if a in given and b in given
        )
        return specs

    def _pairs(self, names):
        """Pairs of a result and what it must not overlap."""
        written = list(self.written)
        read = [name for name in names if name not in written]
        pairs = [(result, other) for result in written for other in read]
        return pairs + [(a, b) for i, a in enumerate(written) for b in written[:i]]

    def _host_options(self, mask):
        """What the NumPy engine is told beside its arrays."""
        if mask is not None:
            mask = head_masks(mask, self.layout, self.plan.problem.key_length)
        return {"scale": self.scale, "score": self.score, "mask": mask}

    def _check(self, name, spec, expected):
        if name in self.written:
            check_out(self.written[name], spec, expected.shape, expected.dtype)
        elif name not in "qkv":
            check_read(name, spec, expected.shape, expected.dtype, exact=name == "lse")


class ForwardCall(_Call):
    """Calls of `attention`."""

    __slots__ = ()
    operands = ("q", "k", "v", "out", "lse", *_LENGTHS)
    written = {"out": "out", "lse": "lse (the second of out)"}  # noqa: RUF012
    more_matrices = ()
    empty_values = (0, -np.inf)
    backward = False

    def _expected(self, inputs, shapes):
        return {
            **dict(zip("qkv", inputs)),
            "out": Spec.contiguous(shapes.out_shape, self.out_dtype),
            "lse": Spec.contiguous(shapes.lse_shape, self.lse_dtype),
        }

    def _seen(self, name, spec, on_gpu):
        """The spec of the array that an engine is given for the operand `spec`."""
        if name == "lse" or (name == "out" and not on_gpu):
            return spec
        return conformed(spec, self.out_dtype)  # a kernel's rows are contiguous

    def _layout(self, specs, options):
        return make_layout(*(specs[x] for x in ("q", "k", "v", "out", "lse")), **options)

    def run_host(self, arrays, mask) -> None:
        """Run on arrays that are ready to be read and written."""
        host.forward(self.plan, *_spread_views(self, arrays), **self._host_options(mask))


class BackwardCall(_Call):
    """Calls of `attention_backward`."""

    __slots__ = ()
    operands = (
        "dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv", *_LENGTHS,
    )  # fmt: skip
    written = {  # noqa: RUF012
        f"d{name}": f"d{name} (the {number} of grads_out)"
        for name, number in zip("qkv", ("first", "second", "third"))
    }
    more_matrices = (4, 7, 8, 9)
    empty_values = (0, 0, 0)
    backward = True

    def _expected(self, inputs, shapes):
        matrix = Spec.contiguous(shapes.out_shape, self.out_dtype)
        row = Spec.contiguous(shapes.lse_shape, self.lse_dtype)
        return {
            **dict(zip("qkv", inputs)),
            **dict.fromkeys(("dout", "out"), matrix),
            **dict.fromkeys(("lse", "dlse"), row),
            **{f"d{x}": Spec.contiguous(own.shape, own.dtype) for x, own in zip("qkv", inputs)},
        }

    def _seen(self, name, spec, on_gpu):
        """The spec of the array that an engine is given for the operand `spec`."""
        if name in ("lse", "dlse"):
            return conformed(spec, self.lse_dtype, rows=False)
        if name in self.written and not on_gpu:  # the sums themselves
            return conformed(spec, self.lse_dtype, rows=False)
        return conformed(spec, self.out_dtype)

    def _layout(self, specs, options):
        gradients = {name: specs[name] for name in ("dout", "dlse", *self.written)}
        operands = (specs[x] for x in ("q", "k", "v", "out", "lse"))
        return make_layout(*operands, gradients=gradients, **options)

    def run_host(self, arrays, mask) -> None:
        """Run on arrays that are ready to be read and written."""
        for place, _ in self.results:
            arrays[place][...] = 0
        host.backward(self.plan, *_spread_views(self, arrays), **self._host_options(mask))


@cache
def launch_module():
    """`cuflash.launch`, which imports CuPy: a CPU does without."""
    from ..gpu import launch

    return launch


def _device_facts(device_id: int | None) -> Device:
    return CPU if device_id is None else launch_module().device_facts(device_id)


def find_call(kind: type[_Call], arrays, options, device=None, mask=None):
    """The remembered call of this kind, or a new one; the arrays' device; their addresses.

    Parameters
    ----------
    kind : type
        ForwardCall or BackwardCall.
    arrays : tuple
        In the order of `kind.operands`, None for those not given.
    options : tuple
        algo, engine, causal, window, q_offset (an int or None), softcap, scale, enable_gqa,
        deterministic.
    device : Device, optional
        To plan for, instead of the arrays' own.
    mask : BlockMask or array of bool, optional
        The address of an array comes last.
    """
    specs, places, addresses = [], [], []
    for x in arrays:
        if x is None:
            specs.append(None)
            addresses.append(0)
            continue
        specs.append((x.shape, x.strides, x.dtype))
        if isinstance(x, np.ndarray):
            places.append(None)
            addresses.append(x.ctypes.data)
        else:
            memory = x.data
            places.append(memory.device_id)
            addresses.append(memory.ptr)
    a, b, c, d = addresses[:4]
    bits = a | b | c | d
    for place in kind.more_matrices:
        bits |= addresses[place]
    aligned = bits % CHUNK_BYTES == 0
    mask_kind = "" if mask is None else _add_mask(mask, specs, places, addresses)
    algo, engine, causal, window, offset, cap, scale, enable_gqa, deterministic = options
    # 2 == 2.0 and 1 == True, but not all of these are right.
    types = (type(causal), type(cap), type(scale))
    if window is not None and type(window) is not int:
        window = window_sides(window)
    enable_gqa, deterministic = bool(enable_gqa), bool(deterministic)
    options = (
        algo, engine, causal, window, offset, cap, scale, enable_gqa, deterministic, mask_kind,
        aligned, device,
    )  # fmt: skip
    key = (kind, tuple(specs), tuple(places), options, types)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that cannot be hashed is wrong: _Call says how
        call = None
    if call is None:
        names = (*kind.operands, "mask")
        in_places = {name: x for name, x in zip(names, arrays) if x is not None}
        check_places(in_places | ({"mask": mask} if mask_kind == "elements" else {}))
        given = {name: Spec(*spec) for name, spec in zip(names, specs) if spec is not None}
        if mask_kind == "blocks":
            given["mask"] = Spec.contiguous(mask.shape, np.bool_)
        call = kind(given, places[0], options)
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call, places[0], addresses


def _add_mask(mask, specs, places, addresses) -> str:
    """Add what :func:`find_call` needs to know of a mask; returns its kind, as in Problem."""
    if isinstance(mask, BlockMask):
        specs.append((mask.shape, None, np.dtype(np.bool_)))
        return "blocks"
    specs.append((mask.shape, mask.strides, mask.dtype))
    on_host = isinstance(mask, np.ndarray)
    places.append(None if on_host else mask.device.id)
    addresses.append(mask.ctypes.data if on_host else mask.data.ptr)
    return "elements"


def run_call(kind: type[_Call], arrays, options, count: int, mask=None, workspace=None):
    """Find the call for these arguments and run it; returns its first `count` results."""
    call, device_id, addresses = find_call(kind, arrays, options, mask=mask)
    for i, j, low, high, pair in call.apart:
        if low < addresses[j] - addresses[i] < high:
            check_apart(*pair, addresses[j] - addresses[i])
    if device_id is None:
        if workspace is not None:
            raise TypeError(
                f"workspace is a {type(workspace).__name__}: it goes with CuPy arrays, for NumPy "
                "arrays leave it out"
            )
        return _run_host(call, list(arrays), mask, count)
    for slot in call.anywhere:
        if addresses[slot] % _LARGEST_ITEM and (wrong := _not_on_whole_items(arrays, addresses)):
            return _run_on_copies(wrong, call, arrays, options, count, mask, workspace)
    return launch_module().run(call, device_id, arrays, addresses, count, workspace, mask)


def _not_on_whole_items(arrays, addresses) -> list[int]:
    """Operands whose address is not a multiple of their item's size."""
    given = ((i, x) for i, x in enumerate(arrays) if x is not None)
    return [i for i, x in given if addresses[i] % x.dtype.itemsize]


def _run_on_copies(wrong, call: _Call, arrays, options, count: int, mask, workspace):
    """Run a call on CuPy arrays of which copies stand for the operands `wrong`."""
    memory = memory_module()
    with arrays[0].device:
        copies = [memory.on_whole_items(x) if i in wrong else x for i, x in enumerate(arrays)]
        results = run_call(type(call), tuple(copies), options, count, mask, workspace)
        for number, (slot, _) in enumerate(call.results[:count]):
            if slot in wrong:
                memory.copy_bytes(arrays[slot], results[number])
                results[number] = arrays[slot]
    return results


def _run_host(call: _Call, arrays, mask, count: int):
    """Run a call on NumPy arrays; returns its first `count` results."""
    names = list(call.written)
    results = [arrays[place] for place, _ in call.results[:count]]
    for name, x in zip(names, results):
        if x is not None and not x.flags.writeable:
            title = call.written[name]
            raise ValueError(f"{title} is read-only: give an array that can be written to")
    for number, (place, spec) in enumerate(call.results[:count]):
        if results[number] is None:
            arrays[place] = results[number] = np.empty(spec.shape, spec.dtype)
    for place, spec in call.copied:
        arrays[place] = conform(arrays[place], spec)
    for _, place, spec in call.staged:
        arrays[place] = np.empty(spec.shape, spec.dtype)
    call.run_host(arrays, mask)
    with np.errstate(all="ignore"):  # half precision may overflow
        for number, place, _ in call.staged:
            results[number][...] = arrays[place]
    return results


def _spread_views(call: _Call, arrays):
    """Views of the operands, broadcast to the problem's leading axes by stride 0."""
    views = []
    for name, x in zip(call.operands, arrays):
        if x is not None:
            steps = [s * x.dtype.itemsize for s in call.layout.strides[name]]
            tail = len(x.shape) - _TRAILING.get(name, 2)
            shape, strides = call.layout.leading + x.shape[tail:], (*steps, *x.strides[tail:])
            x = np.lib.stride_tricks.as_strided(x, shape, strides)
        views.append(x)
    return views

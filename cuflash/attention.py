"""`attention`: what users call. Checks its arguments, plans, and hands over to an engine."""

from __future__ import annotations

import functools
import math
import numbers
import sys

import numpy as np

from . import host
from .masks import Band
from .operands import (
    Spec,
    check_out,
    check_shapes,
    clearance,
    conformed,
    make_layout,
    make_problem,
    result_dtype,
)
from .plan import CHUNK_BYTES, CPU, Device, Plan, make_plan
from .scores import softcap as softcap_score

_MAX_CALLS = 1024  # kinds of call that are remembered
_DLPACK_CPU = 1  # kDLCPU
_calls: dict[tuple, _Call] = {}
_array_types = {np.ndarray}  # and CuPy's, once one was seen
OPERANDS = ("q", "k", "v", "out", "lse", "q_lengths", "kv_lengths")


class _Call:
    """All that repeats from call to call of one kind: layout, plan and, on a GPU, the launch."""

    __slots__ = (
        "apart", "copied", "is_empty", "launch", "layout", "lse_dtype", "out_dtype", "plan",
        "scale", "score", "specs", "stages_out", "workspace_bytes",
    )  # fmt: skip

    def __init__(self, given, device_id, options):
        algo, engine, causal, window, cap, scale, enable_gqa, aligned, device = options
        q, k, v = inputs = tuple(given[name] for name in "qkv")
        check_shapes(q, k, v)
        self.out_dtype = result_dtype(q.dtype, k.dtype, v.dtype)
        self.lse_dtype = np.dtype("float64" if self.out_dtype == np.float64 else "float32")
        band = Band.from_options(causal, window)
        self.score = None if cap is None else softcap_score(cap)
        self.scale = _checked_scale(scale, q.shape[-1])
        lengths = {name: given.get(name) for name in ("q_lengths", "kv_lengths")}
        self.specs = tuple(conformed(spec, self.out_dtype) for spec in inputs)
        self.copied = any(a is not b for a, b in zip(inputs, self.specs))
        options = {**lengths, "enable_gqa": enable_gqa}
        self.layout = make_layout(*self.specs, **options)
        written = out = given.get("out")
        if out is not None:
            check_out("out", out, self.layout.out_shape, self.out_dtype)
            if not (device_id is None and device is None):
                written = conformed(out, self.out_dtype)  # a kernel's rows are contiguous
        lse = given.get("lse")
        if lse is not None:
            check_out("lse (the second of out)", lse, self.layout.lse_shape, self.lse_dtype)
        if not (out is None and lse is None):
            self.layout = make_layout(*self.specs, written, lse, **options)
        rows = (*self.specs, written or Spec.contiguous(self.layout.out_shape, self.out_dtype))
        problem = make_problem(
            self.layout,
            *self.specs,
            band=band,
            score=self.score,
            lengths={name: spec.dtype.name for name, spec in lengths.items() if spec is not None},
            aligned=aligned and all(spec.rows_are_aligned() for spec in rows),
        )
        self.plan = make_plan(problem, device or _device_facts(device_id), algo, engine)
        self.workspace_bytes = self.plan.workspace_bytes
        self.is_empty = 0 in self.layout.out_shape or k.shape[-2] == 0
        self.stages_out = written is not out  # the kernel writes elsewhere, then out is copied to
        self.launch = None  # of a GPU's kernel, once it is compiled
        # Pairs that must not overlap, each with its places in OPERANDS.
        pairs = [(result, other) for result in ("out", "lse") for other in "qkv"]
        self.apart = tuple(
            (a, OPERANDS.index(a), b, OPERANDS.index(b), *clearance(given[a], given[b]))
            for a, b in (*pairs, ("lse", "out"))
            if a in given and b in given
        )


@functools.cache
def _launch_module():
    from . import launch  # imports CuPy, which a CPU does without

    return launch


def _device_facts(device_id: int | None) -> Device:
    return CPU if device_id is None else _launch_module().device_facts(device_id)


def _checked_scale(scale, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale={scale!r}: give a number")
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale={scale!r}: give a finite number that is not negative")
    return float(scale)


def _is_cupy(x) -> bool:
    cupy = sys.modules.get("cupy")  # an array of it exists only if it is imported
    return cupy is not None and isinstance(x, cupy.ndarray)


def _as_array(name: str, x):
    """`x` itself if NumPy or CuPy made it; else what DLPack or the CUDA interface shows of it."""
    if type(x) in _array_types:
        return x
    if isinstance(x, np.ndarray) or _is_cupy(x):
        _array_types.add(type(x))
        return x
    if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) == _DLPACK_CPU:
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            given = f"{name} is a {type(x).__name__} that NumPy cannot take by DLPack"
            raise TypeError(f"{given} ({error}): give a NumPy array") from error
    if hasattr(x, "__dlpack_device__") or hasattr(x, "__cuda_array_interface__"):
        return _launch_module().as_array(x)
    raise TypeError(
        f"{name} is a {type(x).__name__}: give a NumPy or CuPy array, or one that speaks DLPack"
    )


def _check_places(arrays: dict[str, object]) -> None:
    """Raise a ValueError that says which array is where, unless all are in one place."""
    # The device of a CuPy array has a number, that of a NumPy array is the word "cpu".
    places = {name: getattr(x.device, "id", None) for name, x in arrays.items()}
    if len(set(places.values())) > 1:
        words = {n: "on the CPU" if p is None else f"on GPU {p}" for n, p in places.items()}
        listing = ", ".join(f"{name} {place}" for name, place in words.items())
        raise ValueError(f"arrays are in different places: {listing}; move them to one device")


def _as_lengths(name: str, lengths, like):
    """Lengths as an array of int32 or int64 where `like` is; None stays None."""
    if lengths is None:
        return None
    if isinstance(lengths, (int, np.integer, list, tuple)):
        lengths = np.asarray(lengths)
        lengths = _launch_module().as_array(lengths) if _is_cupy(like) else lengths
    lengths = _as_array(name, lengths)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {lengths.dtype}: lengths are integers")
    whole = all(s % lengths.itemsize == 0 for s in lengths.strides)
    if whole and lengths.dtype.name in ("int32", "int64"):
        return lengths
    return _converted(lengths, np.int64)


def _converted(lengths, dtype):
    if isinstance(lengths, np.ndarray):
        return lengths.astype(dtype, order="C")
    wanted = Spec.contiguous(lengths.shape, dtype)
    return _launch_module().conform(lengths, wanted)


def _both_lengths(q_lengths, kv_lengths, like):
    """Both lengths in the one type that a kernel reads them as."""
    if q_lengths is None and kv_lengths is None:
        return None, None
    q_lengths = _as_lengths("q_lengths", q_lengths, like)
    kv_lengths = _as_lengths("kv_lengths", kv_lengths, like)
    if q_lengths is not None and kv_lengths is not None and q_lengths.dtype != kv_lengths.dtype:
        q_lengths, kv_lengths = (_converted(x, np.int64) for x in (q_lengths, kv_lengths))
    return q_lengths, kv_lengths


def attention(
    q, k, v, *, algo=None, engine=None, causal=False, window=None, softcap=None, q_lengths=None,
    kv_lengths=None, scale=None, enable_gqa=False, return_lse=False, out=None, workspace=None,
):  # fmt: skip
    """Exact attention, `softmax(scale * q @ k.T) @ v`, without the matrix of scores in memory.

    Parameters
    ----------
    q : array, shape (..., H, N, D)
        Queries: float16, bfloat16, float32 or float64. NumPy arrays run on the CPU, CuPy arrays
        on their device and on its current stream; what else speaks DLPack is taken without a
        copy. Any strides; only a last axis that is not contiguous is copied.
    k : array, shape (..., H, M, D)
        Keys.
    v : array, shape (..., H, M, Dv)
        Values. The leading axes of q, k and v broadcast as in `numpy.matmul`, without copies.
    algo : {"fa1", "fa2"}, optional
        FlashAttention-1 (key tiles outside, one thread block per head) or FlashAttention-2
        (one thread block per head and query tile). By default the fastest.
    engine : {"numpy", "simt", "mma"}, optional
        Tiled NumPy, plain FMA kernels or tensor-core kernels. By default the fastest that serves.
    causal : bool or {"bottom_right", "top_left"}
        Query i sees key j iff `j <= i + shift`. True is the same as "bottom_right", where shift
        is the valid key length minus the valid query length; with "top_left" it is 0.
    window : int or (int or None, int or None), optional
        Query i sees keys from `i + shift - left` to `i + shift + right`, inclusive. None leaves a
        side open; one number stands for both sides.
    softcap : float, optional
        Scores s become `softcap * tanh(s / softcap)`.
    q_lengths, kv_lengths : int or array of int, optional
        Valid queries and keys of each batch entry: shape of the leading axes but the heads, or
        broadcastable to it. Rows beyond are 0, keys beyond are hidden. Clamped to [0, N], [0, M].
    scale : float, optional
        By default `1 / sqrt(D)`.
    enable_gqa : bool
        Let q have a multiple of the heads of k and v: query head h uses key head
        `h // (Hq // Hk)`.
    return_lse : bool
        Also return the natural logarithm of each row's sum of exponentials.
    out : array or (array, array), optional
        Where to write the result; with `return_lse` a pair. Exactly the result's shape and type,
        not overlapping an input.
    workspace : array, optional
        Device memory for the kernel's use, at least `plan(...).workspace_bytes`; taken from
        CuPy's pool by default.

    Returns
    -------
    out : array, shape (..., H, N, Dv)
        Of the operands' promoted type. A row that sees no key is 0.
    lse : array, shape (..., H, N)
        Only with `return_lse`: float32, or float64 for float64. -inf for a row that sees no key.

    Raises
    ------
    ValueError
        If shapes, lengths, devices, `out` or an option's value do not fit.
    TypeError
        For types that are not supported.
    NotImplementedError
        If no kernel serves; the message gives each one's reason.

    Notes
    -----
    Halves and float32 accumulate in float32, float64 in float64. The result is deterministic.
    Values in hidden keys, NaN and infinity included, do not reach it.

    References
    ----------
    .. [1] T. Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
       IO-Awareness", 2022, arXiv:2205.14135.
    .. [2] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
       Partitioning", 2023, arXiv:2307.08691.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
    >>> out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 8, 100, 64), (2, 8, 100))

    The first query of a causal mask sees the first key alone:

    >>> np.allclose(out[:, :, 0], v[:, :, 0])
    True

    A step of decoding: one query, a cache of which 40 and 70 keys are valid:

    >>> cuflash.attention(q[:, :, :1], k, v, kv_lengths=np.array([40, 70])).shape
    (2, 8, 1, 64)
    """
    arrays = _arrays(q, k, v, out, return_lse, q_lengths, kv_lengths)
    options = (algo, engine, causal, window, softcap, scale, enable_gqa)
    call, device_id, addresses = _find_call(arrays, options)
    for name, i, other, j, low, high in call.apart:
        if low < addresses[j] - addresses[i] < high:
            raise ValueError(f"{name} overlaps {other} in memory: give it memory of its own")
    if device_id is None:
        results = _run_host(call, arrays, return_lse)
    else:
        results = _launch_module().run(call, device_id, arrays, addresses, return_lse, workspace)
    if not return_lse:
        return results[0] if out is None else out
    return tuple(x if mine is None else mine for x, mine in zip(results, out or (None, None)))


def plan(
    q, k, v, *, algo=None, engine=None, causal=False, window=None, softcap=None, q_lengths=None,
    kv_lengths=None, scale=None, enable_gqa=False, out=None, device=None,
) -> Plan:  # fmt: skip
    """What :func:`attention` would run for these arguments.

    Parameters
    ----------
    q, k, v, algo, engine, causal, window, softcap, q_lengths, kv_lengths, scale, enable_gqa, out
        As in :func:`attention`.
    device : Device, optional
        Plan for this GPU instead of the arrays' own place. No GPU is needed for that.

    Returns
    -------
    Plan
        Printable: kernel, tiles, shared memory, grid, workspace, FLOPs, and why other rows of
        the table were rejected. `.source()` is the CUDA C that would be compiled.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((1, 8, 512, 64), np.float16)
    >>> h200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
    >>> p = cuflash.plan(q, q, q, causal=True, device=h200)
    >>> p.kernel, p.engine, p.grid == 8 * -(-512 // p.block_q)
    ('fa2_forward', 'mma', True)
    """
    if not (device is None or isinstance(device, Device)):
        raise TypeError(f"device={device!r}: give a cuflash.Device, or None for the arrays' own")
    arrays = _arrays(q, k, v, out, isinstance(out, tuple), q_lengths, kv_lengths)
    options = (algo, engine, causal, window, softcap, scale, enable_gqa)
    return _find_call(arrays, options, device)[0].plan


def _arrays(q, k, v, out, return_lse, q_lengths, kv_lengths) -> tuple:
    """The arrays of a call in the order of OPERANDS, None for those not given."""
    q = _as_array("q", q)
    out, lse = _split_out(out, return_lse)
    return (
        q,
        _as_array("k", k),
        _as_array("v", v),
        None if out is None else _as_array("out", out),
        None if lse is None else _as_array("lse", lse),
        *_both_lengths(q_lengths, kv_lengths, q),
    )


def _split_out(out, return_lse):
    """`out=` as a pair of arrays or Nones."""
    if out is None:
        return None, None
    if return_lse:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError(f"out is {_kind(out)}: with return_lse=True give a pair (out, lse)")
        return out
    if isinstance(out, tuple):
        raise TypeError(
            f"out is {_kind(out)}: a pair goes with return_lse=True, else give an array"
        )
    return out, None


def _kind(x) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"


def _find_call(arrays, options, device=None):
    """The remembered call of this kind, or a new one; the arrays' device; their addresses."""
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
    q, k, v, out = addresses[:4]
    aligned = (q | k | v | out) % CHUNK_BYTES == 0
    algo, engine, causal, window, cap, scale, enable_gqa = options
    # 2 == 2.0 and 1 == True, but not all of these are right.
    types = (type(causal), type(cap), type(scale), type(window))
    if window is not None and types[-1] is not int:
        window = tuple(window) if types[-1] is list else window
        types += tuple(map(type, window)) if type(window) is tuple else ()
    options = (algo, engine, causal, window, cap, scale, bool(enable_gqa), aligned, device)
    key = (tuple(specs), tuple(places), options, types)
    try:
        call = _calls.get(key)
    except TypeError:  # an option that cannot be hashed is wrong: _Call says how
        call = None
    if call is None:
        _check_places({name: x for name, x in zip(OPERANDS, arrays) if x is not None})
        given = {name: Spec(*spec) for name, spec in zip(OPERANDS, specs) if spec is not None}
        call = _Call(given, places[0], options)
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call, places[0], addresses


def _conform(x, wanted: Spec):
    """`x` as an engine reads it: itself, or a copy that :func:`operands.conformed` asks for."""
    if x.dtype == wanted.dtype and x.strides == wanted.strides:
        return x
    copy = np.empty(wanted.shape, wanted.dtype)
    copy[...] = x
    return copy


def _spread_view(x, call: _Call, name: str, trailing: int):
    """`x` broadcast to the problem's leading axes by stride 0."""
    strides = [s * x.dtype.itemsize for s in call.layout.strides[name]]
    tail = len(x.shape) - trailing
    return np.lib.stride_tricks.as_strided(
        x, call.layout.leading + x.shape[tail:], (*strides, *x.strides[tail:])
    )


def _run_host(call: _Call, arrays, return_lse):
    """Run a call on NumPy arrays; returns out and lse."""
    *operands, out, lse, q_lengths, kv_lengths = arrays
    for name, x in (("out", out), ("lse", lse)):
        if x is not None and not x.flags.writeable:
            raise ValueError(f"{name} is read-only: give an array that can be written to")
    if out is None:
        out = np.empty(call.layout.out_shape, call.out_dtype)
    if lse is None and return_lse:
        lse = np.empty(call.layout.lse_shape, call.lse_dtype)

    def spread(x, name, trailing):
        return None if x is None else _spread_view(x, call, name, trailing)

    host.forward(
        call.plan,
        *(spread(_conform(x, s), n, 2) for n, x, s in zip("qkv", operands, call.specs)),
        spread(out, "out", 2),
        spread(lse, "lse", 1),
        scale=call.scale,
        score=call.score,
        q_lengths=spread(q_lengths, "q_lengths", 0),
        kv_lengths=spread(kv_lengths, "kv_lengths", 0),
    )
    return out, lse

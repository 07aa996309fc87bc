"""`attention`: what users call. Checks its arguments, plans, and hands over to an engine."""

from __future__ import annotations

import math
import numbers
import sys

import numpy as np

from . import host
from .masks import Band
from .operands import (
    Layout, Spec, check_out, check_shapes, make_layout, make_problem, overlap, result_dtype,
)  # fmt: skip
from .plan import CHUNK_BYTES, CPU, ITEM_BYTES, Device, Plan, make_plan
from .scores import ScoreMod, softcap as softcap_score

_MAX_CALLS = 1024  # kinds of call that are remembered
_calls: dict[tuple, _Call] = {}


class _Call:
    """All that repeats from call to call of one kind: layout, plan and, on a GPU, the launch."""

    __slots__ = ("layout", "launch", "lse_dtype", "lse_spec", "out_dtype", "out_spec", "plan", "scale", "score", "specs")  # fmt: skip

    def __init__(self, specs, lengths, device_id, out, lse, options):
        q, k, v = specs
        algo, engine, causal, window, cap, scale, enable_gqa, aligned, device = options
        band = Band.from_options(causal, window)
        self.score = None if cap is None else softcap_score(cap)
        self.scale = _checked_scale(scale, q.shape[-1])
        self.specs = specs
        self.out_dtype = result_dtype(q.dtype, k.dtype, v.dtype)
        self.lse_dtype = np.dtype("float64" if self.out_dtype == np.float64 else "float32")
        written = out
        if out is not None and not (device_id is None and device is None):
            written = _conformed(out, self.out_dtype)  # a kernel's rows are contiguous
        self.layout = make_layout(q, k, v, written, lse, **lengths, enable_gqa=enable_gqa)
        if out is not None:
            check_out("out", out, self.layout.out_shape, self.out_dtype)
        if lse is not None:
            check_out("lse (the second of out)", lse, self.layout.lse_shape, self.lse_dtype)
        self.out_spec = out or Spec.contiguous(self.layout.out_shape, self.out_dtype)
        self.lse_spec = lse or Spec.contiguous(self.layout.lse_shape, self.lse_dtype)
        aligned = aligned and all(s.rows_are_aligned() for s in (*specs, written or self.out_spec))
        names = {name: spec.dtype.name for name, spec in lengths.items() if spec is not None}
        problem = make_problem(
            self.layout, q, k, v, band=band, score=self.score, lengths=names, aligned=aligned
        )
        if device is None:
            device = _device_facts(device_id)
        self.plan = make_plan(problem, device, algo, engine)
        self.launch = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no key to see or nothing to write."""
        return 0 in self.layout.out_shape or self.plan.problem.key_length == 0

    def prepare_launch(self, device_id):
        """Compile and pack, once."""
        from .launch import Launch
        from .params import pack

        captured = self.score.values if self.score else ()
        template = pack(self.plan, self.layout, self.scale, captured)
        self.launch = Launch(self.plan, template, device_id)


def _device_facts(device_id: int | None) -> Device:
    if device_id is None:
        return CPU
    from .launch import device_facts

    return device_facts(device_id)


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
    if isinstance(x, np.ndarray) or _is_cupy(x):
        return x
    if hasattr(x, "__dlpack_device__"):
        on_host = int(x.__dlpack_device__()[0]) == 1
        if on_host:
            return np.from_dlpack(x)
        import cupy

        return cupy.from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(x)
    raise TypeError(
        f"{name} is a {type(x).__name__}: give a NumPy or CuPy array, or one that speaks DLPack"
    )


def _device_of(arrays: dict[str, object]) -> int | None:
    """The CUDA device that holds all arrays, None for the CPU.

    Raises
    ------
    ValueError
        If they are not all in one place; the message says which is where.
    """
    places = {name: x.device.id if _is_cupy(x) else None for name, x in arrays.items()}
    if len(set(places.values())) > 1:
        listing = ", ".join(f"{n} {'on the CPU' if p is None else f'on GPU {p}'}" for n, p in places.items())
        raise ValueError(f"arrays are in different places: {listing}; move them to one device")
    return next(iter(places.values()))


def _address(x) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def _as_lengths(name: str, lengths, like):
    """Lengths as an int32 or int64 array where `like` is; None stays None."""
    if lengths is None:
        return None
    if isinstance(lengths, (int, np.integer, list, tuple)):
        lengths = np.asarray(lengths)
        if _is_cupy(like):
            import cupy

            lengths = cupy.asarray(lengths)
    lengths = _as_array(name, lengths)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {lengths.dtype}: lengths are integers")
    return lengths if lengths.dtype.name in ("int32", "int64") else lengths.astype(np.int64)


def _spec(x) -> Spec:
    return Spec(x.shape, x.strides, x.dtype)


def _conform(x, dtype):
    """`x` in that type with a contiguous last axis; itself where it is so already."""
    if x.dtype != dtype:
        x = x.astype(dtype)
    if x.shape[-1] > 1 and x.strides[-1] != x.dtype.itemsize:
        x = x.copy(order="C")
    return x


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
    arrays = {"q": _as_array("q", q), "k": _as_array("k", k), "v": _as_array("v", v)}
    lengths = {
        "q_lengths": _as_lengths("q_lengths", q_lengths, arrays["q"]),
        "kv_lengths": _as_lengths("kv_lengths", kv_lengths, arrays["q"]),
    }
    given_out, given_lse = _split_out(out, return_lse)
    call, device_id = _find_call(
        arrays, lengths, given_out, given_lse, algo, engine, causal, window, softcap, scale, enable_gqa
    )  # fmt: skip
    operands = [_conform(x, call.out_dtype) for x in arrays.values()]
    _refuse_overlap(call, operands, given_out, given_lse)

    if device_id is None:
        out, lse = _results(call, given_out, given_lse, return_lse, np.empty)
        _run_host(call, operands, out, lse, lengths)
    else:
        from . import launch

        def take(shape, dtype):
            return launch.empty(shape, dtype, device_id)

        out, lse = _results(call, given_out, given_lse, return_lse, take)
        _run_device(call, operands, out, lse, lengths, workspace, device_id, take)
    return (out, lse) if return_lse else out


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
    arrays = {"q": _as_array("q", q), "k": _as_array("k", k), "v": _as_array("v", v)}
    lengths = {
        "q_lengths": _as_lengths("q_lengths", q_lengths, arrays["q"]),
        "kv_lengths": _as_lengths("kv_lengths", kv_lengths, arrays["q"]),
    }
    given_out, given_lse = _split_out(out, isinstance(out, tuple))
    call, _ = _find_call(
        arrays, lengths, given_out, given_lse, algo, engine, causal, window, softcap, scale, enable_gqa, device
    )  # fmt: skip
    return call.plan


def _split_out(out, return_lse):
    """`out=` as a pair of arrays or Nones."""
    if out is None:
        return None, None
    if return_lse:
        if not isinstance(out, tuple) or len(out) != 2:
            raise TypeError("with return_lse=True, out is a pair (out, lse)")
        return out
    if isinstance(out, tuple):
        raise TypeError("out is a pair only with return_lse=True")
    return out, None


def _find_call(arrays, lengths, out, lse, algo, engine, causal, window, cap, scale, enable_gqa, device=None):
    """The remembered call of this kind, or a new one; and the arrays' device."""
    present = {**arrays, **{n: x for n, x in lengths.items() if x is not None}}
    for name, x in (("out", out), ("lse", lse)):
        if x is not None:
            present[name] = _as_array(name, x)
    if isinstance(window, list):
        window = tuple(window)
    addresses = 0
    for name in ("q", "k", "v", "out"):
        if name in present:
            addresses |= _address(present[name])
    aligned = addresses % CHUNK_BYTES == 0
    device_id = _device_of(present)
    options = (algo, engine, causal, window, cap, scale, bool(enable_gqa), aligned, device)
    key = (device_id, tuple((n, *_spec(x)) for n, x in present.items()), options, type(causal))
    call = _calls.get(key)
    if call is None:
        specs = {name: _spec(x) for name, x in present.items()}
        given = [specs[name] for name in "qkv"]
        check_shapes(*given)
        dtype = result_dtype(*(spec.dtype for spec in given))
        given = [_conformed(spec, dtype) for spec in given]
        call = _Call(
            given, {n: specs.get(n) for n in lengths}, device_id, specs.get("out"), specs.get("lse"), options
        )  # fmt: skip
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call, device_id


def _conformed(spec: Spec, dtype) -> Spec:
    """The spec of what :func:`_conform` makes of an array."""
    if spec.dtype == dtype and (spec.shape[-1] == 1 or spec.strides[-1] == dtype.itemsize):
        return spec
    return Spec.contiguous(spec.shape, dtype)


def _refuse_overlap(call: _Call, operands, out, lse) -> None:
    for name, given, spec in (("out", out, call.out_spec), ("lse", lse, call.lse_spec)):
        if given is None:
            continue
        for other, x, x_spec in zip("qkv", operands, call.specs):
            if overlap(spec, _address(given), x_spec, _address(x)):
                raise ValueError(f"{name} overlaps {other}: give memory of its own")


def _results(call: _Call, out, lse, return_lse, empty):
    """The arrays to write: the caller's, or new ones."""
    if out is None:
        out = empty(call.layout.out_shape, call.out_dtype)
    if lse is None and return_lse:
        lse = empty(call.layout.lse_shape, call.lse_dtype)
    return out, lse


def _spread_view(x, call: _Call, name: str, trailing: int):
    """`x` broadcast to the problem's leading axes by stride 0."""
    strides = [s * x.dtype.itemsize for s in call.layout.strides[name]]
    tail = len(x.shape) - trailing
    return np.lib.stride_tricks.as_strided(
        x, call.layout.leading + x.shape[tail:], (*strides, *x.strides[tail:])
    )


def _run_host(call: _Call, operands, out, lse, lengths) -> None:
    views = [_spread_view(x, call, name, 2) for name, x in zip("qkv", operands)]
    spread = {n: None if x is None else _spread_view(x, call, n, 0) for n, x in lengths.items()}
    host.forward(
        call.plan,
        *views,
        _spread_view(out, call, "out", 2),
        None if lse is None else _spread_view(lse, call, "lse", 1),
        scale=call.scale,
        score=call.score,
        **spread,
    )


def _run_device(call: _Call, operands, out, lse, lengths, workspace, device_id, empty) -> None:
    if call.is_empty:
        out.fill(0)
        if lse is not None:
            lse.fill(-np.inf)
        return
    if call.launch is None:
        call.prepare_launch(device_id)
    target = out
    if out.shape[-1] > 1 and out.strides[-1] != out.dtype.itemsize:
        target = empty(out.shape, out.dtype)
    state = _workspace(call.plan, workspace, empty)
    call.launch(
        *(x.data.ptr for x in operands),
        target.data.ptr,
        0 if lse is None else lse.data.ptr,
        0 if state is None else state.data.ptr,
        *(0 if x is None else x.data.ptr for x in lengths.values()),
    )
    if target is not out:
        out[...] = target


def _workspace(plan: Plan, given, empty):
    """Memory for the kernel's state: the caller's, new, or None where it needs none."""
    needed = plan.workspace_bytes
    if not needed:
        return None
    if given is None:
        return empty((needed,), np.uint8)
    if not _is_cupy(given) or not given.flags.c_contiguous:
        raise ValueError("workspace must be a contiguous CuPy array")
    if given.nbytes < needed or given.data.ptr % CHUNK_BYTES:
        raise ValueError(
            f"workspace has {given.nbytes} bytes: {needed} are needed, from a multiple of 16 on"
        )
    return given

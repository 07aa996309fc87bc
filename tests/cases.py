"""What the kernels are tested on: one list, for the emulator and for a GPU.

Lengths follow from the tiles that the plan chooses, so they stay at the edges when tiles change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import zlib
from dataclasses import KW_ONLY, dataclass, field
from unittest import mock

import ml_dtypes
import numpy as np

from cuflash import BlockMask, ScoreMod, reference
from cuflash.calls import run, suited
from cuflash.operands.dtypes import DOUBLE, EVERY, HALF
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem
from cuflash.planning.turing import TuringTile
from cuflash.planning.wgmma_gradients import SHORT_HEADS
from cuflash.planning.wgmma_two_kernels import LONG_WIDE_HEADS

H200 = Device(90, "NVIDIA H200", multiprocessors=132)
# With so few multiprocessors a small problem keeps them busy: it gets the tiles of a large one, and
# blocks that persist get several items each.
FEW = dataclasses.replace(H200, multiprocessors=2)
T4 = Device(75, "Tesla T4", multiprocessors=40, cache_bytes=4 << 20)
DTYPES = {"mma": HALF, "simt": EVERY, "wgmma": HALF}
ALGOS_OF = {"mma": ("fa1", "fa2"), "simt": ("fa1", "fa2"), "wgmma": ("fa1", "fa2", "fa3")}
# On mma cases of their own, and the widest heads.
OF_THEIR_OWN = (DOUBLE, 128), (("float32",), 128)
KERNELS = [(algo, engine) for engine, algos in ALGOS_OF.items() for algo in algos]
BACKWARD_KERNELS = [kernel for kernel in KERNELS if kernel != ("fa1", "wgmma")]
DIMS = {
    "mma": 64,
    "simt": 32,
    "wgmma": 64,
}  # where a case is not about head dims: few kernels to compile
SIZES = {  # of the values of a case
    "large values": {
        "float16": 2.0**5, "bfloat16": 2.0**96, "float32": 2.0**96, "float64": 2.0**980,
    },
    "small values": {
        "float16": 2.0**-17, "bfloat16": 2.0**-124, "float32": 2.0**-124, "float64": 2.0**-900,
    },
}  # fmt: skip
UNMAPPABLE = {"odd", "offset", "reversed"}  # layouts that no tensor map describes
FAR = 1 << 29  # the largest shift
AXES = "abhnd"  # another one, batch entries, heads, rows and columns


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True)
class Case:
    """One call of attention().

    Parameters
    ----------
    name : str
        The family, then what is special.
    q, k, v : tuple of int
        Shapes.
    options : dict
        Of attention(); lengths as arrays, offsets as arrays or integers.
    layouts : dict
        Where q, k, v and out are not contiguous: how they lie in memory, see :func:`place`.
    poison : str
        "hidden": NaN and infinity in all keys and values that no query sees, and in queries beyond
        their length. "visible": in a few values and a key that some queries see. "weightless keys"
        and "weightless rows": keys, and queries, of which all scores are -infinity, with NaN in
        values that they see. "infinite keys": the first of these without the NaN. "weightless
        values": infinities among values, some of which have a weight of 0.
    copies : bool
        Whether copies stand for operands, where they can: nobody chooses algorithm and engine then,
        and calls count as long (:func:`as_long_calls`).
    """

    name: str
    algo: str
    engine: str
    dtype: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    options: dict = field(default_factory=dict)
    layouts: dict = field(default_factory=dict)
    poison: str = ""
    _: KW_ONLY
    copies: bool = False

    def __str__(self):
        return f"{self.algo}-{self.engine}-{self.dtype}-{self.name}"

    @property
    def family(self):
        """The first word of the name."""
        return self.name.split()[0]

    def call(self):
        """The keyword arguments of attention()."""
        kernel = {} if self.copies else {"algo": self.algo, "engine": self.engine}
        return self.options | kernel

    @property
    def meaning(self):
        """The options that say what the result is, not how it is computed."""
        return {name: x for name, x in self.options.items() if name != "split_keys"}

    @property
    def leading(self):
        """The leading axes of the result."""
        shapes = [x[:-2] for x in (self.q, self.k, self.v)]
        if self.options.get("enable_gqa"):
            shapes[1:] = [(*x[:-1], 1) for x in shapes[1:]]
        return np.broadcast_shapes(*shapes)

    def operands(self):
        """q, k and v as NumPy views of memory laid out as the case says; the same each time."""
        rng = np.random.default_rng(zlib.crc32(str(self).encode()))
        dtype = numpy_dtype(self.dtype)
        q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in (self.q, self.k, self.v))
        self._spoil(q, k, v)
        return tuple(place(x, self.layouts.get(n, "dense")) for n, x in zip("qkv", (q, k, v)))

    def _spoil(self, q, k, v):
        if self.poison == "visible":
            rows = k.shape[-2]
            k[..., rows // 2, 0] = np.nan
            v[..., rows // 3, 0], v[..., rows // 4, -1], v[..., rows - 1, 0] = (
                np.inf,
                -np.inf,
                np.nan,
            )
        elif self.poison in ("infinite keys", "weightless keys"):
            q[..., 0] = abs(q[..., 0]) + 0.5
            k[..., ::7, 0] = -np.inf
            if self.poison == "weightless keys":
                v[..., 7:8, 1] = np.nan
        elif self.poison == "weightless rows":
            k[..., 0] = abs(k[..., 0]) + 0.5
            q[..., ::5, 0] = -np.inf
            v[..., k.shape[-2] // 3, 0] = np.nan
        elif self.poison == "weightless values":
            q[..., 0], k[..., 0], k[..., ::9, 0] = 16, 1, -50000
            v[..., 0, 1], v[..., 9:10, 2], v[..., 1:2, 3] = np.inf, -np.inf, np.inf
        elif self.poison in SIZES:
            q *= 4
            v *= v.dtype.type(SIZES[self.poison][self.dtype])
        elif self.poison == "hidden":
            seen = self._seen()
            keys, values = (_of_heads(seen.any(-2), x.shape[:-1]) for x in (k, v))
            k[~keys], v[~values] = np.nan, np.inf
            q[~_of_heads(seen.any(-1), q.shape[:-1])] = np.nan
            v[~values, 0] = np.nan

    def _seen(self):
        """Which query sees which key."""
        names = ("causal", "window", "mask", "q_lengths", "kv_lengths", "q_offset")
        shape = (*self.leading, self.q[-2], self.k[-2])
        return reference.visible_keys(
            shape, **{n: self.options[n] for n in names if n in self.options}
        )


@dataclass(frozen=True)
class BackwardCase(Case):
    """One call of attention_backward().

    `layouts` may also name dout, and dq, dk and dv, which are then given; `out` is an input here.
    Hidden NaN are also in the rows of dout, out and dlse that see nothing, visible ones in dout.

    Parameters
    ----------
    deterministic, with_dlse : bool
        Whether gradients are the same bits each time, and whether lse has a gradient.
    wrt : tuple of str
        Whose gradients are wanted as well.
    """

    deterministic: bool = True
    with_dlse: bool = False
    wrt: tuple[str, ...] = ()

    def __str__(self):
        return super().__str__().replace("-", "-backward-", 1)

    def call(self):
        """The keyword arguments of attention_backward()."""
        return dict(super().call(), deterministic=self.deterministic, wrt=self.wrt)

    def inputs(self):
        """dout, q, k, v, out, lse and dlse, which may be None, laid out as the case says.

        `out` and `lse` are the reference's, rounded to their types.
        """
        q, k, v = self.operands()
        rng = np.random.default_rng(zlib.crc32(f"dout of {self}".encode()))
        with np.errstate(all="ignore"):
            out, lse = reference.attention(q, k, v, return_lse=True, **self.options)
        dout = rng.standard_normal(out.shape).astype(q.dtype)
        out = out.astype(q.dtype)
        lse = lse.astype(np.float64 if self.dtype == "float64" else np.float32)
        dlse = rng.standard_normal(lse.shape).astype(lse.dtype) if self.with_dlse else None
        if self.poison == "visible":
            dout[..., dout.shape[-2] // 2, 0] = np.nan
            dout[..., dout.shape[-2] // 3, -1] = np.inf
        elif self.poison == "weightless rows":
            dout[..., ::5, :] = np.nan
        elif self.poison == "weightless keys":
            dout[..., 3, 1] = np.inf
        elif self.poison == "hidden":
            blind = ~self._seen().any(-1)
            dout[blind], out[blind] = np.nan, np.inf
            dout[blind, 0] = -np.inf
            if dlse is not None:
                dlse[blind] = np.nan
        dout, out = (
            place(x, self.layouts.get(n, "dense")) for n, x in (("dout", dout), ("out", out))
        )
        return dout, q, k, v, out, lse, dlse

    def array(self, name):
        """The array whose gradient goes by that name in `wrt`."""
        mod = self.options.get("score_mod")
        return self.options[name] if name in self.options else mod.arrays[name]

    def grads_out(self, blank=np.nan):
        """Memory full of `blank` for dq, dk, dv and those of `wrt` in their layouts, or None."""
        if not self.layouts.keys() & {"dq", "dk", "dv"}:
            return None
        grads, dtype = [], numpy_dtype(self.dtype)
        own = {"dq": (self.q, dtype), "dk": (self.k, dtype), "dv": (self.v, dtype)}
        own |= {f"d{x}": (self.array(x).shape, self.array(x).dtype) for x in self.wrt}
        for name, (shape, kind) in own.items():
            x = place(np.zeros(shape, kind), self.layouts.get(name, "dense"))
            owner(x).view(x.dtype)[...] = blank
            grads.append(x)
        return tuple(grads)


def _of_heads(seen, shape):
    """What queries see of keys, of arrays whose heads several heads of queries may share."""
    seen = seen.reshape(*(1,) * (len(shape) - seen.ndim), *seen.shape)
    for axis, size in enumerate(shape):
        groups = (*seen.shape[:axis], size, -1, *seen.shape[axis + 1 :])
        seen = seen.reshape(groups).any(axis + 1)
    return seen


def random_mask(shape, block, shown=0.4, partial=0.3, seed=0):
    """A bool array of blocks: empty, full, or with every other element or so.

    A row and a column of blocks are empty.
    """
    rng = np.random.default_rng(seed)
    *leading, n, m = shape
    grid = (*leading, -(-n // block), -(-m // block))
    blocks = rng.random(grid) < shown
    blocks[..., grid[-2] // 2, :] = blocks[..., :, grid[-1] // 2] = False
    whole = (rng.random(grid) > partial)[..., :, None, :, None]
    elements = rng.random((*grid[:-1], block, grid[-1], block)) < 0.6
    mask = blocks[..., :, None, :, None] & (whole | elements)
    return mask.reshape(*leading, grid[-2] * block, grid[-1] * block)[..., :n, :m]


# Of growing_scores: what the softmax's exponentials of a tile are, taken from tiles visited before.
GROWTHS = {
    "floats": (1, None), "beyond floats": (40, None), "beyond floats at once": (40, 3),
    "almost beyond floats": (6.6, 3),
}  # fmt: skip


def growing_scores(shape, dtype, growth, steps=None, seed=0):
    """q, k, v of which a key's score is the larger the earlier it is, by 40 * `growth` in all.

    That is the order in which kernels visit keys. They grow from key to key, or in so many steps.
    """
    rng = np.random.default_rng(seed)
    q, k, v = rng.standard_normal((3, *shape))
    slope = np.linspace(1, 0, shape[-2])
    if steps:
        slope = np.ceil(slope * steps) / steps
    slope *= growth * 40 / (2 / np.pi * math.sqrt(shape[-1]))
    return tuple(x.astype(numpy_dtype(dtype)) for x in (abs(q), abs(k) * slope[:, None], v))


HUGE = {
    "float16": (2.0**14, 2.0**15), "bfloat16": (2.0**16, 2.0**55), "float32": (2.0**16, 2.0**55),
    "float64": (2.0**29, 2.0**400),
}  # fmt: skip


def huge_scores(shape, dtype, size, sign):
    """q, k, v with scores so large that all weight is that of every third key or, with a `sign` of
    -1, of all others; and which keys have weight.

    Scores that have weight are equal, and exact in any order of summation.
    """
    v = np.random.default_rng(1).standard_normal(shape)
    size *= 1.375  # of a power of 2 the scaled scores would be exact as well, and prove nothing
    q, k = np.full(shape, size), np.full(shape, sign * size / 2)
    k[..., ::3, :] *= 2
    weighs = np.arange(shape[-2]) % 3 == 0
    weighs = weighs if sign > 0 else ~weighs
    return *(x.astype(numpy_dtype(dtype)) for x in (q, k, v)), weighs


def assert_huge_scores(attention, q, k, v, weighs):
    """Fail unless equal weights of :func:`huge_scores` become what they are, or, with a scale of 0,
    those of all keys.

    `attention(scale=...)` returns out and lse, perhaps among others.
    """
    for scale in (None, 0):
        out, lse = (x.get() if hasattr(x, "get") else x for x in attention(scale=scale)[:2])
        mask = weighs if scale is None else None
        bound = reference.forward_bound(np.zeros_like(q), k, v, q.dtype, mask=mask)
        assert (bound.ratios(out)[0] <= 1).all()
        expected = reference.attention(q, k, v, scale=scale, return_lse=True)[1]
        np.testing.assert_allclose(lse, expected, rtol=2e-14 if q.dtype == np.float64 else 1e-6)


def place(values, layout):
    """A view with these values, in memory of its own that holds NaN everywhere else.

    Memory is aligned to 64 bytes and is the base of the view. Layouts: dense; bnhd (heads behind
    positions); padded (rows 16 bytes longer, every leading axis longer by one); odd (rows longer
    by one element); offset (from the second element on); reversed (rows from last to first);
    sparse (every other element of a row); columns (rows are columns); repeated (leading axes of
    stride 0; the values are those of the first); any order of the last letters of AXES, one for
    each axis: that of axes in memory. What has no rows is dense.
    """
    shape, item = values.shape, values.dtype.itemsize
    if values.ndim < 2:
        view = _memory(values.size, values.dtype).reshape(shape)
        view[...] = values
        return view
    if layout == "repeated":
        return np.broadcast_to(place(values[(0,) * (values.ndim - 2)], "dense"), shape)
    rows, columns = shape[-2:]
    order, inner = tuple(range(values.ndim)), slice(None)
    size, start = shape, 0
    letters = AXES[-values.ndim :]
    if sorted(layout) == sorted(letters):
        order = tuple(letters.index(x) for x in layout)
    elif layout == "bnhd":
        order = (*order[:-3], *order[-3:-1][::-1], order[-1])
    elif layout == "columns":
        order = (*order[:-2], order[-1], order[-2])
    elif layout == "padded":
        step = 16 // math.gcd(16, item)
        size = (*(n + 1 for n in shape[:-2]), rows, -(-columns // step) * step + step)
    elif layout == "odd":
        size = (*shape[:-1], columns + 1)
    elif layout == "sparse":
        size, inner = (*shape[:-1], 2 * columns), slice(None, None, 2)
    elif layout == "offset":
        start = 1
    elif layout not in ("dense", "reversed"):
        raise ValueError(layout)
    memory = _memory(math.prod(size) + start, values.dtype)
    view = memory[start:].reshape([size[axis] for axis in order]).transpose(np.argsort(order))
    view = view[(*(slice(n) for n in shape[:-1]), inner)][..., :columns]
    if layout == "reversed":
        view = view[..., ::-1, :]
    view[...] = values
    return view


def _memory(size, dtype, alignment=64):
    raw = np.empty(size * dtype.itemsize + alignment, np.uint8)
    begin = -raw.ctypes.data % alignment
    memory = raw[begin : begin + size * dtype.itemsize].view(dtype)
    memory[...] = np.nan
    return memory


def owner(view):
    """The array whose buffer a view looks into."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def to_device(cupy, view):
    """The NumPy view with the same strides, in a copy of the memory behind it."""
    memory = owner(view)
    copied = cupy.asarray(memory.view(np.uint8).ravel())
    offset = view.ctypes.data - memory.ctypes.data
    return cupy.ndarray(view.shape, view.dtype, copied.data + offset, strides=view.strides)


@contextlib.contextmanager
def as_long_calls():
    """Copies stand for operands wherever they can serve, as in calls that take long."""
    nothing = dict.fromkeys(("LAUNCHES", "PER_BYTE", "TAKEN_PER_FLOP"), 0)
    with mock.patch.multiple(suited, **nothing), mock.patch.object(run, "_calls", {}):
        yield


def calls_of(case):
    """What a case is called in: copies are for calls that count as long."""
    return as_long_calls() if case.copies else contextlib.nullcontext()


def tile_of(algo, engine, dtype, head_dim=None, value_dim=None, backward=False):
    """The table's row that serves problems of these head dims."""
    head_dim = head_dim or DIMS[engine]
    problem = Problem(dtype, (1,), 64, 64, head_dim, value_dim or head_dim, backward=backward)
    return make_plan(problem, FEW, algo, engine).tile


def _next_prime(n):
    while any(n % i == 0 for i in range(2, math.isqrt(n) + 1)):
        n += 1
    return n


def _edges(*sizes):
    """Lengths around those sizes, 1, and a prime beyond all of them."""
    around = {n + d for n in sizes for d in (-1, 0, 1)}
    return sorted({1, *around, _next_prime(max(sizes) * 3 // 2)} - {0})


def _text(options):
    return " ".join(f"{name} {value}" for name, value in options.items())


class _Cases:
    """Collects the cases of one kernel."""

    backward = False

    def __init__(self, algo, engine, dtypes, max_dim=math.inf):
        self.algo, self.engine, self.dtypes, self.list = algo, engine, dtypes, []
        self.max_dim = max_dim

    def tile(self, dtype, *dims):
        return tile_of(self.algo, self.engine, dtype, *dims)

    def add(self, name, dtype, q, k, v=None, layouts=None, poison="", **options):
        case = Case(
            name, self.algo, self.engine, dtype, tuple(q), tuple(k), tuple(v or k), options,
            layouts or {}, poison,
        )  # fmt: skip
        if self.engine != "wgmma" or not (UNMAPPABLE & {*case.layouts.values()}):
            self.list.append(case)

    def turn(self):
        """One dtype after the other, so that every family meets several."""
        return self.dtypes[len(self.list) % len(self.dtypes)]

    def sizes(self, dtype):
        tile = self.tile(dtype)
        return tile.block_q, tile.block_k, DIMS[self.engine]

    # ------------------------------------------------------------------------ families
    def edges(self):
        for dtype in self.dtypes:
            tile, dim = self.tile(dtype), DIMS[self.engine]
            queries, keys = _edges(tile.block_q), _edges(tile.block_k)
            if self.algo == "fa1":  # its warps walk over slabs, its tiles are scored in steps
                queries = sorted({*queries, tile.warp_rows, tile.warp_rows + 1})
                keys = sorted({*keys, tile.step_k, tile.step_k + 1})
            for n in queries:
                for m in keys:
                    modes = (False, True) if dtype != self.dtypes[0] else (False, True, "top_left")
                    for causal in modes:
                        name = f"edges {n}x{m} causal {causal}"
                        self.add(name, dtype, (1, n, dim), (1, m, dim), causal=causal)

    def windows(self):
        block_q, block_k, dim = self.sizes(self.dtypes[0])
        windows = [
            0, 3, (0, 5), (7, 0), (block_k // 2, None), (None, block_k // 3), (2, 10**6),
            (10**9, 1), (block_k, block_q), (block_k - 1, 2), (10**12, 10**12),
        ]  # fmt: skip
        shapes = [(2 * block_q + 5, 2 * block_k + 3), (block_q + 9, 3), (5, 2 * block_k + 1)]
        for i, window in enumerate(windows):
            for n, m in shapes:
                for causal in (False, True, "top_left")[: 3 if i % 2 else 2]:
                    name = f"windows {n}x{m} {window} causal {causal}"
                    self.add(
                        name, self.turn(), (2, n, dim), (2, m, dim), window=window, causal=causal
                    )

    def softcaps(self):
        for dtype in self.dtypes:
            n, m, dim = self.sizes(dtype)
            for cap in (0.5, 20.0):
                options = {"softcap": cap, "causal": cap > 1, "window": (m // 2, None)}
                self.add(f"softcap {cap}", dtype, (2, n + 3, dim), (2, m + 7, dim), **options)
            # The same compiled kernel with another value and scale.
            self.add(
                "softcap and scale", dtype, (2, 3, dim), (2, m + 1, dim), softcap=1.5, scale=0.7
            )

    def lengths(self):
        for kind in ("int32", "int64"):
            for causal in (False, True, "top_left"):
                for window in (None, (9, 4)):
                    dtype = self.turn() if kind == "int32" else self.dtypes[0]
                    n, m, dim = self.sizes(dtype)
                    n, m = min(n, 64) + 7, min(m, 64) + 7
                    q_lengths = np.array([0, 1, n - 8, n, n + 100, -3, n // 2], kind)
                    kv_lengths = np.array([m, 0, m // 2, 1 << 30, m - 8, 5, 1], kind)
                    shapes = (7, 1, n, dim), (7, 1, m, dim)
                    name = f"lengths {kind} causal {causal} window {window}"
                    more = {"causal": causal, "window": window}
                    self.add(
                        f"{name} both",
                        dtype,
                        *shapes,
                        **more,
                        q_lengths=q_lengths,
                        kv_lengths=kv_lengths,
                    )
                    self.add(f"{name} keys", dtype, *shapes, **more, kv_lengths=kv_lengths)
                    self.add(f"{name} queries", dtype, *shapes, **more, q_lengths=q_lengths)
        n, m, dim = self.sizes(self.dtypes[0])
        dtype, count = self.dtypes[0], np.arange(6, dtype=np.int32).reshape(2, 3) * 3
        self.add("lengths of two batch axes", dtype, (2, 3, 2, 9, dim), (2, 3, 2, 17, dim),
                 q_lengths=count[:, :1], kv_lengths=count, causal=True)  # fmt: skip
        self.add("lengths with strides", dtype, (3, 2, 9, dim), (3, 2, 17, dim),
                 q_lengths=count[:, ::-1].T[:, 0], kv_lengths=count[0, ::-1])  # fmt: skip
        self.add("lengths of one for all", dtype, (3, 2, 9, dim), (3, 2, 17, dim),
                 q_lengths=np.int32([7]), kv_lengths=np.int32([16]), causal=True)  # fmt: skip
        self.add("lengths of two integer types", dtype, (3, 2, 9, dim), (3, 2, 17, dim),
                 q_lengths=np.int32([7, 8, 9]), kv_lengths=np.int64([16, 1, 17]))  # fmt: skip
        self.add("lengths of one head", dtype, (9, dim), (17, dim),
                 q_lengths=np.array(5, np.int32), kv_lengths=np.array(3, np.int32))  # fmt: skip
        self.add("lengths without keys", dtype, (2, 2, n + 1, dim), (2, 2, m + 1, dim),
                 kv_lengths=np.int32([0, 0]))  # fmt: skip
        self.add("lengths at the edges", dtype, (3, 2, n + 1, dim), (3, 2, m + 1, dim), causal=True,
                 q_lengths=np.int32([n - 1, n, n + 1]),
                 kv_lengths=np.int32([m, m + 1, m - 1]))  # fmt: skip

    def splits(self):
        """Parts of the keys, and heads of a group in one tile of queries."""
        if self.algo == "fa1":
            return
        _, block_k, dim = self.sizes(self.dtypes[0])
        m, few = 3 * block_k + 5, (2, 4, 3, dim)
        keys = (2, 2, m, dim)
        bands = [{}, {"causal": True}, {"window": (block_k, 2)}, {"causal": "top_left"}]
        for i, (span, band) in enumerate(itertools.product((block_k, 48, 4096, 0), bands)):
            name = f"splits of {span} {_text(band)}"
            self.add(name, self.turn(), few, keys, split_keys=span, enable_gqa=True, **band)
            self.add(f"{name} hidden", self.turn(), keys, keys, split_keys=span, **band,
                     poison="hidden", kv_lengths=np.int32([m - 9, 20 * i]))  # fmt: skip
        lengths = {"q_lengths": np.int32([3, 1]), "kv_lengths": np.int32([m - 50, 33])}
        for span in (block_k, 16):
            for more in ({}, {"causal": True}, {"softcap": 20.0}, {"window": (9, 4)}):
                self.add(f"splits of {span} with lengths {_text(more)}", self.turn(), few, keys,
                         split_keys=span, enable_gqa=True, **more, **lengths)  # fmt: skip
        for shapes in (((5, 1, dim), (1, m, dim)), ((1, 7, 2, dim), (1, 1, m, dim)),
                       ((70, 2, dim), (1, m, dim)), ((2, 90, dim), (2, m, dim)),
                       ((3, 130, 1, dim), (3, 1, m, dim))):  # fmt: skip
            self.add(f"splits of {shapes}", self.turn(), *shapes, split_keys=block_k, causal=True)
        for layout in ("bnhd", "padded", "odd", "reversed"):
            self.add(f"splits of {layout} heads", self.dtypes[0], few, (2, 1, m, dim),
                     split_keys=block_k,
                     layouts=dict.fromkeys(("q", "k", "out"), layout))  # fmt: skip
        rng = np.random.default_rng(0)
        self.add("splits with a mask", self.turn(), few, keys, split_keys=block_k, enable_gqa=True,
                 mask=rng.random((2, 1, 3, m)) < 0.3)  # fmt: skip
        self.add("splits with lengths none", self.turn(), few, keys, split_keys=block_k,
                 enable_gqa=True, kv_lengths=np.int32([0, 0]))  # fmt: skip
        for poison in ("visible", "infinite keys", "weightless keys", "weightless rows"):
            self.add(f"splits {poison}", self.turn(), few, keys, split_keys=block_k,
                     enable_gqa=True, poison=poison)  # fmt: skip
        for dims in ((40, 72), (128, 128), (256, 256)):
            d, e = dims
            if max(dims) > self.max_dim:
                continue
            self.add(f"splits of head dims {dims}", self.turn(), (*few[:3], d), (*keys[:3], d),
                     (*keys[:3], e), split_keys=64, enable_gqa=True, causal=True)  # fmt: skip
        if self.engine != "wgmma":  # rows of arrays begin at chunks, those of parts do not
            for d, e in ((24, 13), (40, 63)):
                self.add(f"splits of {e} padded columns", self.turn(), (*few[:3], d),
                         (*keys[:3], d), (*keys[:3], e), split_keys=64, enable_gqa=True,
                         layouts=dict.fromkeys(("q", "k", "v", "out"), "padded"))  # fmt: skip

    def offsets(self):
        """Diagonals that the caller places: one for all, then one for each batch entry."""
        block_q, block_k, dim = self.sizes(self.dtypes[0])
        n, m = block_q + 9, 2 * block_k + 3
        bands = [{"causal": True}, {"window": (9, 4)}, {"causal": True, "window": (block_k, None)},
                 {"window": (None, 3)}, {"window": (5, None)}]  # fmt: skip
        places = [0, m - n, -3, 4 - n, m // 2, m - 1, m + 10, -n - 10, block_k, FAR, -FAR]
        for i, place in enumerate(places):
            for band in bands[i % 2 :: 2]:
                name = f"offsets {place} {_text(band)}"
                self.add(name, self.turn(), (2, n, dim), (2, m, dim), q_offset=place, **band)
        self.add("offsets 3 without band", self.turn(), (n, dim), (m, dim), q_offset=3)
        self._offsets_of_batch(70, 83)

    def _offsets_of_batch(self, n, m):
        dtype, dim = self.dtypes[0], DIMS[self.engine]
        q, k = (7, 1, n, dim), (7, 1, m, dim)
        far = np.int64([0, m - n, -5, m + 9, 1 << 40, -(1 << 62), 11])
        near = np.int32([7, 1 - n, 0, m, FAR, -FAR, m - n])
        lengths = {"q_lengths": np.int32([n, n - 9, 3, n, 0, n, n + 7]),
                   "kv_lengths": np.int32([m, 5, m - 3, 0, m, m, m + 20])}  # fmt: skip
        for band in ({"causal": True}, {"window": (9, 4)}, {"causal": True, "window": 11}):
            text = _text(band)
            self.add(f"offsets of batch {text}", dtype, q, k, q_offset=far, **band)
            self.add(f"offsets of batch, lengths, {text}", self.dtypes[-1], q, k, q_offset=near,
                     **band, **lengths)  # fmt: skip
        self.add("offsets 4, lengths", dtype, q, k, q_offset=4, causal=True, **lengths)
        self.add("offsets of batch without band", dtype, q, k, q_offset=far)
        self.add("offsets of two integer types", dtype, q, k, q_offset=far, causal=True, **lengths)
        self.add("offsets of batch, hidden nonfinite", dtype, q, k, q_offset=far, window=(20, 3),
                 poison="hidden")  # fmt: skip
        self.add("offsets -6, hidden nonfinite", dtype, q, k, q_offset=-6, causal=True,
                 poison="hidden")  # fmt: skip
        count = np.arange(6).reshape(2, 3) * 9 - 20
        axes = (2, 3, 2, 9, dim), (2, 3, 2, 40, dim)
        self.add("offsets of two batch axes", dtype, *axes, q_offset=count, causal=True)
        self.add("offsets of one batch axis", dtype, *axes, q_offset=count[:, :1], window=8)
        self.add("offsets with strides", dtype, *axes, q_offset=count[::-1, ::-1], causal=True)
        self.add("offsets of one for all", dtype, *axes, q_offset=count[0, 2:], causal=True)
        one = (9, dim), (40, dim)
        self.add("offsets of one head", dtype, *one, q_offset=np.array(13), causal=True)
        q, k, size = (2, 4, n, dim), (2, 2, m, dim), (n, m)
        groups = {"enable_gqa": True, "causal": True}
        self.add("offsets of groups", dtype, q, k, q_offset=far[2:4], **groups)
        for kind, place in (("int", -7), ("batch", far[2:4])):
            more = {"q_offset": place, **groups}
            mask = BlockMask.from_dense(random_mask((4, *size), 32, seed=7), 32)
            self.add(f"offsets of {kind} and blocks", dtype, q, k, mask=mask, **more)
            mask = random_mask((2, 1, *size), 16, seed=8)
            self.add(f"offsets of {kind} and elements", dtype, q, k, mask=mask, **more)

    def heads(self):
        n, m, dim = 9, 21, DIMS[self.engine]
        shapes = {
            "group 2": ((2, 4, n, dim), (2, 2, m, dim), (2, 2, m, dim)),
            "group 3 of 5-D": ((2, 1, 6, n, dim), (1, 2, 2, m, dim), (2, 1, 2, m, dim)),
            "group 3 of three axes": ((2, 6, n, dim), (2, 2, m, dim), (2, 1, m, dim)),
            "group 4, one key head": ((2, 4, n, dim), (2, 1, m, dim), (2, 2, m, dim)),
            "one key head": ((2, 4, n, dim), (2, 1, m, dim), (2, 1, m, dim)),
            "one value head": ((2, 4, n, dim), (2, 4, m, dim), (2, 1, m, dim)),
        }
        if self.engine == "wgmma":
            del shapes["group 3 of 5-D"]  # four axes
        for name, (q, k, v) in shapes.items():
            for causal in (False, True):
                self.add(f"heads {name} causal {causal}", self.turn(), q, k, v, causal=causal,
                         enable_gqa=name.startswith("group"))  # fmt: skip
        self.add("heads with lengths", self.turn(), *shapes["group 2"], enable_gqa=True,
                 causal=True, q_lengths=np.int32([5, 9]), kv_lengths=np.int32([20, 8]))  # fmt: skip

    def axes(self):
        n, m, dim = 6, 19, DIMS[self.engine]
        shapes = {
            "none": ((n, dim), (m, dim), (m, dim)),
            "one": ((3, n, dim), (3, m, dim), (3, m, dim)),
            "keys to all": ((2, 3, n, dim), (m, dim), (m, dim)),
            "crosswise": ((2, 1, 3, n, dim), (1, 2, 1, m, dim), (2, 2, 1, m, dim)),
            "query to all": ((n, dim), (2, 3, m, dim), (3, m, dim)),
        }
        for name, (q, k, v) in shapes.items():
            self.add(f"axes {name}", self.turn(), q, k, v, causal=True)
        if self.engine == "wgmma":  # three axes at most
            return
        six = (2, 2, 1, 2, 2, 2, 2)
        padded = dict.fromkeys(("q", "k", "v"), "padded")
        self.add("axes six irregular", self.turn(), (*six, 3, dim), (*six, 5, dim), layouts=padded)

    def strides(self):
        """Layouts of q, k, v and out: alike, and each alone."""
        n, m, dim = 19, 37, DIMS[self.engine]
        q, k = (2, 3, n, dim), (2, 3, m, dim)
        for layout in (
            "bnhd",
            "padded",
            "odd",
            "offset",
            "reversed",
            "sparse",
            "columns",
            "repeated",
        ):
            dtype = self.turn()
            inputs = dict.fromkeys("qkv", layout)
            self.add(f"strides {layout}", dtype, q, k, layouts=inputs, causal=True)
            if layout != "repeated":
                everything = dict(inputs, out=layout)
                self.add(f"strides {layout} out", dtype, q, k, layouts=everything, causal=True)
        for name in ("q", "k", "v", "out"):
            self.add(f"strides odd {name} only", self.dtypes[0], q, k, layouts={name: "odd"})
            self.add(f"strides padded {name} only", self.dtypes[0], q, k, layouts={name: "padded"})
        self.add("strides dense out", self.dtypes[0], q, k, layouts={"out": "dense"})
        for dtype in self.dtypes:
            self.add(
                "strides odd and window",
                dtype,
                q,
                k,
                layouts=dict.fromkeys("qkv", "odd"),
                window=11,
            )

    def dims(self):
        dims = {
            "mma": [8, 17, 40, 80, 96, 128, 160, 256],
            "simt": [1, 3, 8, 17, 40, 64, 80, 96, 128, 160, 256, 300, 512],
            "wgmma": [8, 24, 40, 72, 80, 96, 128, 136, 160, 192, 200, 224, 256],
        }[self.engine]
        pairs = [(dim, dim) for dim in dims]
        if self.engine == "wgmma":  # multiples of 8
            pairs += [(64, 32), (32, 64), (24, 40), (40, 8), (128, 8), (8, 128), (96, 160)]
        else:
            pairs += [(64, 32), (32, 64), (17, 40), (40, 3), (128, 1), (1, 128), (96, 160), (2, 6)]
        pairs = [x for x in pairs if max(x) <= self.max_dim]
        for i, (dim, value_dim) in enumerate(pairs):
            # All types at one small and one large dim, else one after the other.
            chosen = (
                self.dtypes
                if (dim, value_dim) in ((17, 17), (24, 24), (128, 128))
                else [self.dtypes[i % len(self.dtypes)]]
            )
            for dtype in chosen:
                tile = self.tile(dtype, dim, value_dim)
                n, m = tile.block_q + 1, tile.block_k + 3
                for causal in (False, True):
                    name = f"dims {dim} and {value_dim} causal {causal}"
                    self.add(name, dtype, (n, dim), (m, dim), (m, value_dim), causal=causal)

    def masked(self):
        """Rows that see nothing, and NaN where nobody looks."""
        for dtype in self.dtypes:
            n, m, dim = self.sizes(dtype)
            self.add(
                "masked rows, more queries", dtype, (2, 2 * n + 5, dim), (2, 7, dim), causal=True
            )
            self.add("masked rows, right of all keys", dtype, (2, n + 5, dim), (2, 3, dim),
                     causal="top_left", window=(2, 0))  # fmt: skip
            q, k = (2, 2, n + 5, dim), (2, 2, m + 9, dim)
            lengths = {"q_lengths": np.int32([n, 3]), "kv_lengths": np.int32([m // 2, m + 1])}
            for poison in ("hidden", "visible"):
                name = f"masked {poison} nonfinite"
                self.add(f"{name}, causal", dtype, q, k, poison=poison, causal="top_left")
                self.add(
                    f"{name}, more keys", dtype, (2, 2, 4, dim), k, poison=poison, causal="top_left"
                )
                self.add(f"{name}, window", dtype, (2, 2, 5, dim), k, poison=poison, window=3)
                self.add(f"{name}, lengths", dtype, q, k, poison=poison, **lengths)
                self.add(
                    f"{name}, all", dtype, q, k, poison=poison, causal=True, window=9, **lengths
                )
            self.add("masked nothing, visible nonfinite", dtype, q, k, poison="visible")

    def blocks(self):
        """Block masks, whose blocks are not the kernel's tiles."""
        for i, dtype in enumerate(self.dtypes):
            n, m, dim = self.sizes(dtype)
            size = (n + 37, m + 45)
            q, k = (2, 4, size[0], dim), (2, 4, size[1], dim)
            for block in (16, (48, 32), 128)[i % 2 :]:
                own = (2, 4)[2 - i % 3 :]  # for each batch entry and head, each head, all
                mask = random_mask((*own, *size), np.max(block), seed=i)
                mask = BlockMask.from_dense(mask, block)
                self.add(f"blocks of {block}", dtype, q, k, mask=mask)
            mask = BlockMask.from_dense(random_mask((4, *size), 32), 32)
            more = {"causal": True, "window": (m // 2, None)}
            self.add("blocks and band", dtype, q, k, mask=mask, **more)
            none = BlockMask.from_dense(np.zeros(size, bool))
            self.add("blocks none", dtype, q[1:], k[1:], mask=none)
        dtype, groups = self.dtypes[0], (2, 2, size[1], dim)
        mask = BlockMask.from_dense(random_mask((2, 4, *size), 64, seed=3), 64)
        lengths = {"q_lengths": np.int32([n - 3, n + 37]), "kv_lengths": np.int32([m + 1, m - 9])}
        self.add(
            "blocks with groups and lengths",
            dtype,
            q,
            groups,
            mask=mask,
            enable_gqa=True,
            **lengths,
        )
        self.add("blocks and softcap", dtype, q, k, mask=mask, softcap=2.0, causal="top_left")
        one = BlockMask.from_dense(random_mask((2, 1, *size), 48, seed=4), 48)
        wide = (*k[:-1], 40)
        self.add("blocks and value dim", dtype, q, k, wide, mask=one, causal=True)
        self.add("blocks all", dtype, q[1:], k[1:], mask=BlockMask.from_dense(np.ones(size, bool)))
        for poison in ("hidden", "visible"):
            name, lengths["causal"] = f"blocks with {poison} nonfinite", True
            self.add(name, dtype, q, k, poison=poison, mask=one)
            self.add(f"{name}, lengths", dtype, q, k, poison=poison, mask=mask, **lengths)
        if self.algo != "fa1" and not self.backward:
            m = 3 * self.tile(dtype).block_k + 13
            few = BlockMask.from_dense(random_mask((2, 1, 3, m), 1, shown=0.7, seed=6), 16)
            computed = BlockMask.from_function(
                lambda b, h, q, k: k % 64 > q + 20 * b, few.shape, 16
            )
            for of, mask in (("stored", few), ("computed", computed)):
                self.add(f"blocks {of}, few queries", dtype, (2, 12, 3, dim), (2, 2, m, dim),
                         mask=mask, enable_gqa=True)  # fmt: skip

    def elements(self):
        """Arrays of bool, of every shape that broadcasts."""
        for i, dtype in enumerate(self.dtypes):
            n, m, dim = self.sizes(dtype)
            n, m = n + 21, m + 13
            q, k = (2, 4, n, dim), (2, 4, m, dim)
            for own in ((2, 4), (2, 1), (4,), ())[i % 2 :: 2]:
                mask = random_mask((*own, n, m), 32, seed=i)
                self.add(f"elements of {own}", dtype, q, k, mask=mask, causal=i % 2 == 0)
        dtype = self.dtypes[0]
        keys = random_mask((2, 1, 1, m), 1, shown=0.7)
        self.add("elements of keys", dtype, q, k, mask=keys)
        self.add("elements of queries", dtype, q, k, mask=random_mask((n, 1), 1, shown=0.7))
        self.add("elements of one row", dtype, q, k, mask=keys[0, 0, 0])
        self.add("elements one for all", dtype, q, k, mask=np.array(True))
        self.add("elements transposed", dtype, q, k, mask=random_mask((2, 4, m, n), 32).mT)
        batch_last = np.moveaxis(random_mask((4, 2, n, m), 32), 0, 1)
        self.add("elements with heads outside", dtype, q, k, mask=batch_last[..., ::-1])
        sparse = np.zeros((n, 2 * m), bool)
        sparse[:, ::2] = random_mask((n, m), 16)
        more = {"window": (m // 2, 3), "softcap": 3.0}
        self.add("elements with strides", dtype, q, k, mask=sparse[:, ::2], **more)
        mask = random_mask((2, 4, n, m), 32, seed=5)
        lengths = {"q_lengths": np.int32([n - 3, n]), "kv_lengths": np.int32([m - 9, m + 1])}
        groups = (2, 2, m, dim)
        self.add("elements with groups", dtype, q, groups, mask=mask, enable_gqa=True, **lengths)
        for poison in ("hidden", "visible"):
            self.add(f"elements with {poison} nonfinite", dtype, q, k, poison=poison, mask=mask)

    def extremes(self):
        """Scores of -infinity, weights of 0, and what they meet among the values."""
        for i, dtype in enumerate(self.dtypes):
            n, m, dim = self.sizes(dtype)
            q, k = (2, n // (1 + i) + 6, dim), (2, m + 11, dim)
            for kind in ("keys", "rows", "values"):
                for causal in (False, "top_left"):
                    name, more = f"extremes {kind} causal {causal}", {"causal": causal}
                    self.add(name, dtype, q, k, poison=f"weightless {kind}", **more)
            for more in ({}, {"causal": "top_left"}, {"softcap": 9.0}):
                name = f"extremes infinite keys {more}"
                self.add(name, dtype, q, k, poison="infinite keys", **more)
            for kind in SIZES:
                self.add(f"extremes {kind}", dtype, q, k, poison=kind, causal=True)

    def scales(self):
        for dtype in self.dtypes:
            n, m, dim = self.sizes(dtype)
            for scale in (0, 1e-3, 1.0, 3):
                self.add(
                    f"scale {scale}", dtype, (n + 1, dim), (m + 2, dim), scale=scale, causal=True
                )

    def scores(self):
        """Biases, sinks and expressions, with bands, lengths, groups and split keys."""
        rng = np.random.default_rng(0)
        dtype, dim = self.dtypes[-1], DIMS[self.engine]
        n, m = 70, self.tile(dtype).block_k + 13
        q, k = (2, 4, n, dim), (2, 2, m, dim)
        lengths = {"q_lengths": np.int32([n - 7, n]), "kv_lengths": np.int32([m, m - 30])}
        groups = {"enable_gqa": True, "causal": True}
        sinks = np.float32([[0.5, -np.inf, 3, -2], [150, 0, 1, 2]])
        slopes = np.float32([0.5, 0.1, 0, 0.02])
        self.add("scores alibi and sinks", dtype, q, k, alibi_slopes=slopes, sinks=sinks, **groups,
                 **lengths)  # fmt: skip
        self.add("scores sinks of rows that see nothing", dtype, (n, dim), (9, dim), causal=True,
                 sinks=np.float64(0.5), alibi_slopes=np.array(0.1))  # fmt: skip
        bias = rng.standard_normal((2, 1, n, m)).astype(numpy_dtype(self.dtypes[0]))
        bias[0, 0, 3], bias[..., ::7], bias[..., n - 7 :, 1] = -np.inf, -np.inf, np.nan
        bias[:, :, :, m - 20 :] = np.nan
        shown = {"mask": np.arange(m) < m - 20, "q_lengths": np.int32([n - 7, n - 7])}
        self.add("scores bias", dtype, q, k, bias=bias, softcap=3.0, enable_gqa=True, **shown)
        if self.algo != "fa1" and not self.backward:
            self.add("scores in splits", dtype, (2, 4, 3, dim), k, alibi_slopes=slopes, **groups,
                     sinks=sinks, split_keys=64, bias=bias[1, 0, 5:8].astype(np.float64),
                     mask=shown["mask"])  # fmt: skip
        whole = self.tile(self.dtypes[0]).block_k * 2
        bias = rng.standard_normal((4, whole, whole)).astype(numpy_dtype(self.dtypes[0]))
        wide = bias.astype(np.float32)
        forms = {"of whole tiles": bias, "of float32": wide, "of keys": bias[:, :1]}
        for name, given in forms.items():
            self.add(f"scores bias {name}", self.dtypes[0], (4, whole, dim), (4, whole, dim),
                     bias=given, causal=True)  # fmt: skip
        table = rng.standard_normal((4, 11)).astype(np.float32).T[::2]
        mod = ScoreMod(
            "where((ids[q] == ids[k]) | (k % 3 == 0), "
            "tanh(score * much) + table[(q - k) // 5, head], "
            "minimum(score, -score / 2) - abs(score + batch))",
            ids=rng.integers(0, 3, n + m), table=table, much=0.7,
        )  # fmt: skip
        window = {"window": (m // 2, None), "q_offset": 40}
        self.add("scores of an expression", self.dtypes[0], q, k, score_mod=mod, enable_gqa=True,
                 alibi_slopes=slopes, **window)  # fmt: skip
        if self.algo != "fa1" and not self.backward:
            m = 3 * self.tile(dtype).block_k + 13
            bias = rng.standard_normal((2, 8, 1, m)).astype(numpy_dtype(dtype))
            bias[..., 3::7] = -np.inf
            for of, given in (("keys", bias), ("float32 of keys", bias.astype(np.float32))):
                self.add(f"scores bias {of}, one query", dtype, (2, 8, 1, dim), (2, 2, m, dim),
                         bias=given, enable_gqa=True)  # fmt: skip

    def dropout(self):
        """Dropout with bands, lengths, groups, masks, changed scores and split keys."""
        dtype, dim = self.dtypes[-1], DIMS[self.engine]
        n, m = 70, self.tile(dtype).block_k + 13
        q, k = (2, 4, n, dim), (2, 2, m, dim)
        groups = {"enable_gqa": True, "dropout_p": 0.3, "seed": (1 << 40) + 3}
        lengths = {"q_lengths": np.int32([n - 7, n]), "kv_lengths": np.int32([m, m - 30])}
        self.add("dropout causal", dtype, q, k, causal=True, **groups, **lengths)
        self.add("dropout of all but a few", self.dtypes[0], (n, dim), (m, dim), dropout_p=0.9,
                 seed=0, window=(m // 2, None), q_offset=40)  # fmt: skip
        shown = BlockMask.from_dense(random_mask((n, m), 32, seed=3, shown=0.7), 32)
        sinks = np.float32([0.5, -np.inf, 3, -2])
        self.add("dropout with scores", dtype, q, k, mask=shown, sinks=sinks, softcap=3.0,
                 alibi_slopes=np.abs(sinks[[0, 2, 3, 0]]), **groups)  # fmt: skip
        self.add("dropout with visible nonfinite", dtype, q, k, poison="visible",
                 causal="top_left", **groups)  # fmt: skip
        if self.algo != "fa1" and not self.backward:
            self.add("dropout in splits", dtype, (2, 4, 3, dim), k, split_keys=64, **groups)
        if self.engine == "wgmma":
            self.add("dropout of wide heads", self.dtypes[0], (2, 2, n, 136), (2, 2, m, 136),
                     causal=True, dropout_p=0.5, seed=(1 << 64) - 1)  # fmt: skip

    def wrt(self):
        """The forward pass has no gradients."""

    def orders(self):
        """The forward pass has none to choose."""

    def wide(self):
        """Heads for which mma has rows of their own: some of what other families are for."""
        if (self.algo, self.engine) != ("fa2", "mma") or self.dtypes != HALF:
            return
        rng = np.random.default_rng(0)
        n, m = 70, 141
        dims = (257, 257), (320, 320), (512, 512), (512, 64), (64, 512), (300, 391)
        for (dim, value_dim), causal in itertools.product(dims, (False, True)):
            self.add(f"wide {dim} and {value_dim} causal {causal}", self.turn(), (2, n, dim),
                     (2, m, dim), (2, m, value_dim), causal=causal)  # fmt: skip
        dtype, dim, value_dim = self.dtypes[-1], 320, 264
        q, k, v = ((2, 2, *x) for x in ((n, dim), (m, dim), (m, value_dim)))
        shown = random_mask((2, n, m), 16, shown=0.6)
        lengths = {"q_lengths": np.int32([n, 3]), "kv_lengths": np.int32([m // 2, m + 1])}
        self.add("wide hidden, lengths", dtype, q, k, v, poison="hidden", window=40, **lengths)
        self.add("wide visible", dtype, q, k, v, poison="visible", causal="top_left")
        self.add("wide rows that see nothing", dtype, q, (2, 2, 9, dim), causal=True)
        self.add("wide blocks", dtype, q, k, v, mask=BlockMask.from_dense(shown, 16), causal=True)
        self.add("wide elements visible", dtype, q, k, v, mask=shown, poison="visible")
        for kind in ("keys", "rows", "values"):
            self.add(f"wide weightless {kind}", dtype, q, k, v, poison=f"weightless {kind}")
        self.add("wide infinite keys", dtype, q, k, v, poison="infinite keys", softcap=9.0)
        slopes, sinks = np.float32([0.5, 0.1]), np.float32([0.5, -np.inf])
        self.add("wide slopes and sinks", dtype, q, k, v, alibi_slopes=slopes, sinks=sinks,
                 **lengths)  # fmt: skip
        mod = ScoreMod("where((q + k) % 3 == 0, score / 2, score) + t[k]",
                       t=rng.standard_normal(m))  # fmt: skip
        self.add("wide expression", dtype, q, k, v, score_mod=mod, causal=True)
        self.add("wide dropout", dtype, q, k, v, dropout_p=0.3, seed=5, causal=True)
        group = {"enable_gqa": True, "causal": True}
        few, keys, values = (2, 4, 3, dim), (2, 2, m, dim), (2, 2, m, value_dim)
        self.add("wide heads of a group", dtype, few, keys, values, **group)
        self.add("wide splits", dtype, few, keys, values, split_keys=48, **group,
                 kv_lengths=np.int32([m, 50]))  # fmt: skip
        self.add("wide splits visible", dtype, q, k, v, split_keys=64, poison="visible")
        for layout in ("odd", "bnhd", "reversed", "sparse"):
            layouts = dict.fromkeys(("q", "k", "v", "out"), layout)
            self.add(f"wide strides {layout}", self.turn(), q, k, v, layouts=layouts, window=60)

    def long(self):
        """Nor for heads of more queries."""


class _BackwardCases(_Cases):
    """Collects the backward cases of one kernel: smaller and fewer, with an eye on sums."""

    backward = True

    def tile(self, dtype, *dims):
        return tile_of(self.algo, self.engine, dtype, *dims, backward=True)

    def add(
        self, name, dtype, q, k, v=None, layouts=None, poison="", deterministic=True, wrt=(),
        **options,
    ):  # fmt: skip
        case = BackwardCase(
            name, self.algo, self.engine, dtype, tuple(q), tuple(k), tuple(v or k), options,
            layouts or {}, poison, deterministic=deterministic,
            with_dlse=bool(wrt) or len(self.list) % 3 == 0, wrt=wrt,
        )  # fmt: skip
        if not any(self.misfits(*x) for x in case.layouts.items()):
            self.list.append(case)

    def splits(self):
        """Gradients do not split keys."""

    def misfits(self, name, layout):
        """Whether the engine does not take such an array."""
        mapped = name in ("q", "k", "v", "dout") or layout != "reversed"
        return self.engine == "wgmma" and layout in UNMAPPABLE and mapped

    def edges(self):
        n, m, dim = self.sizes(self.dtypes[0])
        lengths = [(a, b) for a in (1, n - 1, n + 1) for b in (1, m - 1, m + 1)]
        for i, (a, b) in enumerate([*lengths, (n, m), (n, 2 * m), (2 * n, m)]):
            causal = (False, True, "top_left")[i % 3]
            self.add(f"edges {a}x{b}", self.dtypes[0], (1, a, dim), (1, b, dim), causal=causal)
        for dtype in self.dtypes:
            n, m, dim = self.sizes(dtype)
            for causal in (False, True):
                name = f"edges beyond two tiles causal {causal}"
                q, k = (1, 2 * n + 3, dim), (1, 2 * m + 5, dim)
                self.add(name, dtype, q, k, causal=causal)

    def windows(self):
        n, m, dim = self.sizes(self.dtypes[0])
        windows = [
            (0, False), (3, True), ((0, 5), False), ((7, 0), "top_left"), ((m // 2, None), True),
            ((None, m // 3), False), ((m, n), False), ((m - 1, 2), "top_left"), ((9, 2), False),
        ]  # fmt: skip
        shapes = [(2 * n + 5, m + 3), (n + 9, 3), (5, 2 * m + 1)]
        for i, (window, causal) in enumerate(windows):
            a, b = shapes[i % 3]
            self.add(f"windows {a}x{b} {window} causal {causal}", self.turn(), (2, a, dim),
                     (2, b, dim), window=window, causal=causal)  # fmt: skip

    def softcaps(self):
        for dtype in self.dtypes:
            n, m, dim = self.sizes(dtype)
            q, k = (2, n + 3, dim), (2, m + 7, dim)
            self.add("softcap 1.5", dtype, q, k, softcap=1.5, causal=True, window=(m // 2, None))
        self.add("softcap and scale", dtype, (2, 3, dim), k, softcap=20.0, scale=0.7)

    def lengths(self):
        for kind in ("int32", "int64"):
            for causal, window in ((False, None), (True, (9, 4)), ("top_left", None)):
                dtype = self.turn() if kind == "int32" else self.dtypes[0]
                n, m, dim = 39, 47, DIMS[self.engine]
                q_lengths = np.array([0, 1, n - 8, n, n + 100, -3, n // 2], kind)
                kv_lengths = np.array([m, 0, m // 2, 1 << 30, m - 8, 5, 1], kind)
                self.add(f"lengths {kind} causal {causal} window {window}", dtype, (7, 1, n, dim),
                         (7, 1, m, dim), causal=causal, window=window, q_lengths=q_lengths,
                         kv_lengths=kv_lengths)  # fmt: skip
        n, m, dim = self.sizes(dtype)
        count = np.arange(6, dtype=np.int32).reshape(2, 3) * 3
        q, k = (3, 2, n + 1, dim), (3, 2, m + 1, dim)
        self.add("lengths of keys", dtype, q, k, kv_lengths=np.int32([m - 1, 0, 3]))
        self.add("lengths of queries", dtype, q, k, q_lengths=np.int32([n + 1, 0, 3]), causal=True)
        self.add("lengths without keys", dtype, q, k, kv_lengths=np.int32([0, 0, 0]))
        self.add("lengths at the edges", dtype, q, k, causal=True,
                 q_lengths=np.int32([n - 1, n, n + 1]),
                 kv_lengths=np.int32([m, m + 1, m - 1]))  # fmt: skip
        self.add("lengths of two batch axes", dtype, (2, 3, 2, 9, dim), (2, 3, 2, 17, dim),
                 q_lengths=count[:, :1], kv_lengths=count, causal=True)  # fmt: skip

    def offsets(self):
        n, m, dim = self.sizes(self.dtypes[0])
        bands = [{"causal": True}, {"window": (9, 4)}, {"window": (m, None)}, {"window": (None, 3)}]
        places = [0, m - n, -3, 4 - n, m // 2, m + 10, -n - 10, FAR, -FAR]
        for i, place in enumerate(places):
            for band in bands[i % 2 :: 2]:
                self.add(f"offsets {place} {_text(band)}", self.turn(), (2, n + 5, dim),
                         (2, m + 9, dim), q_offset=place, **band)  # fmt: skip
        self._offsets_of_batch(39, 47)

    def heads(self):
        super().heads()
        n, m, dim = 9, 21, DIMS[self.engine]
        q, k = (2, 4, n, dim), (2, 4, m, dim)
        self.add("heads one query head", self.turn(), (2, 1, n, dim), k)
        self.add("heads one head of all", self.turn(), (1, n, dim), (m, dim), k, causal=True)
        self.add("heads one key, own values", self.turn(), q, (1, 1, m, dim), k)
        long = (1, 2, self.tile(self.dtypes[0]).block_k + 3, dim)
        self.add("heads group 2 of several tiles", self.dtypes[0], (1, 4, n, dim), long,
                 enable_gqa=True)  # fmt: skip

    def strides(self):
        """Layouts of all arrays: alike, and each alone."""
        n, m, dim = 19, 37, DIMS[self.engine]
        q, k = (2, 3, n, dim), (2, 3, m, dim)
        names = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
        for layout in ("bnhd", "padded", "odd", "offset", "reversed", "sparse", "columns"):
            everything = dict.fromkeys(names, layout)
            self.add(f"strides {layout}", self.turn(), q, k, layouts=everything, causal=True)
        inputs = dict.fromkeys(names[:5], "repeated")
        self.add("strides repeated", self.turn(), q, k, layouts=inputs, causal=True)
        for i, name in enumerate(names):
            layout = ("odd", "reversed", "padded")[i % 3]
            self.add(f"strides {layout} {name} only", self.dtypes[0], q, k, layouts={name: layout})
        shared = (2, 1, m, dim)
        self.add("strides of summed gradients", self.dtypes[0], q, shared,
                 layouts=dict.fromkeys(("dq", "dk", "dv"), "bnhd"))  # fmt: skip
        self.add("strides odd of summed gradients", self.dtypes[0], q, shared,
                 layouts=dict.fromkeys(("dq", "dk", "dv"), "odd"))  # fmt: skip

    def dims(self):
        dims = {
            "mma": [
                8, 17, 40, 80, 96, 128, (64, 32), (32, 64), (17, 40), (40, 3), (128, 8), 512, 300,
                (512, 64), (17, 272),
            ],
            "simt": [
                1, 3, 17, 40, 64, 96, 128, 160, 256, 300, 512, (17, 40), (40, 3), (1, 128),
            ],
            "wgmma": [
                8, 24, 40, 72, 96, 128, (64, 32), (8, 64), (64, 128), (96, 128), (128, 8),
                160, 256, (192, 128), (128, 256), (136, 8), 200, (224, 72),
            ],
        }[self.engine]  # fmt: skip
        for i, dim in enumerate(dims):
            dim, value_dim = dim if isinstance(dim, tuple) else (dim, dim)
            if max(dim, value_dim) > self.max_dim:
                continue
            dtype = self.turn() if max(dim, value_dim) <= 64 else self.dtypes[i % 2 * -1]
            tile = self.tile(dtype, dim, value_dim)
            n, m = tile.block_q + 1, tile.block_k + 3
            name = f"dims {dim} and {value_dim}"
            self.add(name, dtype, (n, dim), (m, dim), (m, value_dim), causal=i % 2 == 0)

    def long(self):
        """On Hopper, heads of so many queries that tiles are larger above head dim 64, or that one
        kernel serves above 128.
        """
        if self.engine != "wgmma":
            return
        n, banded = (x + 7 for x in SHORT_HEADS)
        for i, (dim, value_dim) in enumerate([(96, 96), (128, 128), (192, 128), (152, 160)]):
            dtype, m = self.dtypes[-1 - i % 2], 140
            q, k, v = (2, n, dim), (2, m, dim), (2, m, value_dim)
            name = f"long {dim}"
            self.add(name, dtype, q, k, (2, m, 40))
            self.add(f"{name} in any order", dtype, q, k, v, deterministic=False)
            self.add(f"{name} visible", dtype, q, k, v, poison="visible")
            self.add(f"{name} hidden, lengths", dtype, (2, 1, n, dim), (2, 1, m, dim),
                     (2, 1, m, value_dim), poison="hidden", q_lengths=np.int32([n, 300]),
                     kv_lengths=np.int32([m // 2, m + 1]))  # fmt: skip
            self.add(f"{name} of a group", dtype, (1, 3, banded, dim), (1, 1, m, dim),
                     (1, 1, m, value_dim), causal=True, enable_gqa=True)  # fmt: skip
            self.add(f"{name} window", dtype, (banded, dim), k, v, window=(60, 9),
                     causal="top_left")  # fmt: skip
        n, banded = (x + 7 for x in LONG_WIDE_HEADS)
        k, v = (2, m, 168), (2, m, 40)
        self.add("long 168 softcap", dtype, (2, n, 168), k, v, poison="visible", softcap=3.0)
        self.add("long 168 softcap causal", dtype, (2, banded, 168), k, v, causal="top_left",
                 softcap=3.0)  # fmt: skip

    def wide(self):
        """Heads that have kernels or tiles of their own: some of what other families are for."""
        if self.engine == "simt" or self.max_dim < 264:
            return
        dtype = self.dtypes[-1]
        on_hopper = self.engine == "wgmma"
        dim, value_dim = (136, 40) if on_hopper else (264, 272)
        tile = self.tile(dtype, dim, value_dim)
        n, m = (128 if on_hopper else tile.block_q) + 9, 2 * tile.block_k + 5
        q, k, v = (2, n, dim), (2, m, dim), (2, m, value_dim)
        shown = random_mask((2, n, m), 32, shown=0.6)
        lengths = {"q_lengths": np.int32([n, 3]), "kv_lengths": np.int32([m // 2, m + 1])}
        heads = {"enable_gqa": True, "causal": True}
        self.add("wide heads of a group", dtype, (1, 4, n, dim), (1, *k), (1, *v), **heads)
        self.add("wide heads one query head", dtype, (1, n, dim), k, v, window=(40, 9))
        self.add("wide masked hidden, lengths", dtype, (2, 1, n, dim), (2, 1, m, dim),
                 (2, 1, m, value_dim), poison="hidden", causal=True, **lengths)  # fmt: skip
        self.add("wide masked visible", dtype, q, k, v, poison="visible", causal="top_left")
        self.add("wide blocks", dtype, q, k, v, mask=BlockMask.from_dense(shown, 32), causal=True)
        self.add("wide elements", dtype, q, k, v, mask=shown, softcap=2.0)
        self.add("wide elements visible", dtype, q, k, v, mask=shown[0], poison="visible")
        self.add("wide extremes keys", dtype, q, k, v, poison="weightless keys")
        self.add("wide extremes rows", dtype, q, k, v, poison="weightless rows", softcap=9.0)
        self.add("wide extremes infinite keys", dtype, q, k, v, poison="infinite keys", causal=True)
        self.add("wide orders any", dtype, q, k, v, causal=True, deterministic=False)
        layouts = dict.fromkeys(("q", "k", "v", "dout", "dq", "dk", "dv"), "bnhd")
        self.add("wide strides", self.dtypes[0], (2, *q), (2, *k), (2, *v), window=(70, None),
                 layouts=layouts)  # fmt: skip

    def masked(self):
        """Rows and keys that see nothing, and NaN where nobody looks."""
        for dtype in self.dtypes:
            n, m, dim = self.sizes(dtype)
            more = (2, n + 12, dim)
            self.add("masked rows, more queries", dtype, more, (2, 7, dim), causal=True)
            self.add("masked rows, right of all keys", dtype, (2, n + 5, dim), (2, 3, dim),
                     causal="top_left", window=(2, 0))  # fmt: skip
            q, k = (2, 2, n + 5, dim), (2, 2, m + 9, dim)
            lengths = {"q_lengths": np.int32([n, 3]), "kv_lengths": np.int32([m // 2, m + 1])}
            hidden = {"poison": "hidden"}
            self.add("masked hidden, lengths", dtype, q, k, **hidden, **lengths)
            self.add("masked hidden, all", dtype, q, k, **hidden, causal=True, window=9, **lengths)
            self.add("masked hidden, more queries", dtype, (2, *more), (2, 2, 7, dim), **hidden,
                     causal=True)  # fmt: skip
            self.add("masked hidden, more keys", dtype, (2, 2, 4, dim), k, **hidden,
                     causal="top_left")  # fmt: skip
            self.add("masked visible, causal", dtype, q, k, poison="visible", causal="top_left")
            self.add("masked visible", dtype, q, k, poison="visible")

    def scales(self):
        n, m, dim = self.sizes(self.dtypes[0])
        for scale in (0, 1e-3, 3):
            q, k = (n + 1, dim), (m + 2, dim)
            self.add(f"scale {scale}", self.turn(), q, k, scale=scale, causal=True)

    def wrt(self):
        """Gradients of what scores depend on: of each way in which an array is broadcast."""
        if self.algo == "fa1":  # the same kernels
            return
        rng = np.random.default_rng(1)
        dtype, dim = self.dtypes[-1], DIMS[self.engine]
        n, m = 70, self.tile(dtype).block_k + 13
        q, k = (2, 4, n, dim), (2, 2, m, dim)
        half = numpy_dtype(self.dtypes[0])
        bias = rng.standard_normal((4, n, m)).astype(half)
        bias[0, 3], bias[..., 5], bias[:, n - 7 :, 1] = -np.inf, -np.inf, np.nan
        lengths = {"q_lengths": np.int32([n - 7, 9]), "kv_lengths": np.int32([m, m - 30])}
        self.add("wrt bias, slopes and sinks", dtype, q, k, wrt=("sinks", "bias", "alibi_slopes"),
                 bias=bias, alibi_slopes=np.float64([0.5, 0.1, 0, 0.02]), enable_gqa=True,
                 sinks=np.float32([[0.5, -np.inf, 3, -2], [9, 0, 1, 2]]), causal=True,
                 **lengths)  # fmt: skip
        slopes = np.float32([0.5, 0.1, 0, 0.02])
        self.add("wrt slopes alone", dtype, q, k, wrt=("alibi_slopes",), alibi_slopes=slopes,
                 enable_gqa=True, causal=True)  # fmt: skip
        arrays = {
            "of_queries": rng.standard_normal((2 * n, 4)).astype(np.float32)[::2].T,
            "of_keys": rng.standard_normal(m).astype(half),
            "of_entries": rng.standard_normal(2),
            "whole": np.array(0.3, np.float32),
        }
        mod = ScoreMod(
            "where(k < 40, score * of_queries[head, q], tanh(score) * whole) "
            "+ of_keys[k] * of_entries[batch]", **arrays,
        )  # fmt: skip
        layouts = {"dq": "dense", "dof_queries": "columns"}
        shown = {"mask": random_mask((2, 1, n, m), 16, shown=0.7), "softcap": 3.0}
        shown |= {"dropout_p": 0.2, "seed": 9}
        self.add("wrt of an expression", dtype, q, k, wrt=tuple(arrays), score_mod=mod,
                 enable_gqa=True, layouts=layouts, **shown)  # fmt: skip
        arrays = {"table": rng.standard_normal((9, 4)).astype(half).T}
        mod = ScoreMod("score * table[head, (q - k) // 20] + table[k % 3, 1]", **arrays)
        self.add("wrt indices that are worked out", dtype, q, k, wrt=("table",), score_mod=mod,
                 enable_gqa=True, deterministic=False, causal=True,
                 layouts={"dq": "dense", "dtable": "padded"})  # fmt: skip

    def orders(self):
        """Blocks that add to dQ in any order."""
        for dtype in self.dtypes:
            n, m, dim = self.sizes(dtype)
            self.add("orders any", dtype, (2, n + 1, dim), (2, 2 * m + 3, dim), causal=True,
                     deterministic=False)  # fmt: skip
        self.add("orders any of groups", dtype, (4, n + 1, dim), (2, m + 3, dim), enable_gqa=True,
                 deterministic=False)  # fmt: skip


class _BackwardCasesInPlanes(_BackwardCases):
    """Of float32 on mma, whose rows are aligned, and whose heads share no queries."""

    def add(self, name, dtype, q, k, v=None, **more):
        shared = name.startswith(("heads one query head", "heads one head of all", "axes query"))
        if not (shared or "5-D" in name or name == "axes crosswise"):
            super().add(name, dtype, q, k, v, **more)

    def misfits(self, name, layout):
        return layout in ("odd", "offset") and name != "out"

    def dims(self):
        pairs = (4, 4), (20, 36), (36, 20), (32, 64), (64, 4), (48, 48), (96, 72), (72, 128)
        for i, dims in enumerate(pairs):
            (dim, value_dim), causal = dims, i % 2 == 0
            self.add(f"dims {dim} and {value_dim}", self.dtypes[0], (2, 33, dim), (2, 67, dim),
                     (2, 67, value_dim), causal=causal)  # fmt: skip


def _served(kernels, of_their_own):
    """Those of halves, of all types on FMA units, and on mma of other types."""
    served = [(algo, engine, DTYPES[engine]) for algo, engine in kernels]
    mma = [kernel for kernel in kernels if kernel[1] == "mma"]
    return served + [(*kernel, *own) for kernel in mma for own in of_their_own]


def _all_cases(kind, served):
    cases = []
    for kernel in served:
        of_kernel = kind(*kernel)
        for family in FAMILIES:
            getattr(of_kernel, family)()
        # fa2 and fa3 on wgmma are one source; fa3 goes through more of it. Of doubles and floats on
        # mma little but the products is their own.
        step = 6 if kernel[:2] == ("fa2", "wgmma") else 1 if kernel[2] == DTYPES[kernel[1]] else 3
        cases += of_kernel.list[::step]
    assert len({str(case) for case in cases}) == len(cases)
    return cases


FAMILIES = (
    "edges windows softcaps lengths heads axes strides dims long wide masked extremes blocks "
    "elements scales orders offsets splits scores dropout wrt"
).split()
CASES = _all_cases(_Cases, _served(KERNELS, OF_THEIR_OWN))
BACKWARD_CASES = _all_cases(_BackwardCases, _served(BACKWARD_KERNELS, OF_THEIR_OWN[:1]))
BACKWARD_CASES += _all_cases(_BackwardCasesInPlanes, [("fa2", "mma", ("float32",), 64)])


def device_of(row):
    """A device that a row of the table is for."""
    return T4 if isinstance(row, TuringTile) else H200


def row_problem(row, dtype):
    """A problem that puts a row of the table to work: its largest dims, across its tile's edges."""
    dim, device = row.max_dim, device_of(row)
    while True:
        lengths = row.block_q + 1, row.block_k + 1
        problem = Problem(dtype, (1,), *lengths, dim, dim, backward=row.backward)
        if row.shared_bytes(problem) <= device.shared_bytes:
            return problem
        dim -= 8


def on_row(plan, row):
    """The plan with another row of the table."""
    return dataclasses.replace(plan, tile=row)


def groups(most=None, cases=CASES):
    """(name, cases): of one kernel, type and family, at most so many together."""
    together = {}
    for case in cases:
        together.setdefault(f"{case.algo}-{case.engine}-{case.dtype}-{case.family}", []).append(
            case
        )
    for name, cases in together.items():
        size = most or len(cases)
        for begin in range(0, len(cases), size):
            part = f"-{begin // size}" if len(cases) > size else ""
            yield f"{name}{part}", cases[begin : begin + size]


def check_all(cases, check):
    """Call `check(case)` for each, and fail with what all of those that failed had to say."""
    failures = []
    for case in cases:
        try:
            check(case)
        except Exception as error:
            failures.append((case, error))
    if failures:
        text = "\n\n".join(f"{case}: {type(e).__name__}: {e}" for case, e in failures[:5])
        message = f"{len(failures)} of {len(cases)} cases failed, the first ones:\n\n{text}"
        raise AssertionError(message) from failures[0][1]

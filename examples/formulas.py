"""Formulas over the rows of arrays: one text, run by NumPy or compiled into one CUDA kernel.

    norm = Formula('''
        total = sum(x * x)
        scale = 1 / sqrt(total / n + epsilon)
        y = x * scale
    ''')
    norm(x=x, epsilon=1e-6, scale=scale, y=y)

A row is the last axis; leading axes broadcast. Each line assigns an expression in the syntax that
Python and C share, or the `sum` or the `max` of one over the row. `n` is the row's length. What is
assigned and was given as an array is written to that array, which may be an operand as well: here
`scale`, of shape (..., 1), and `y`. Other names are temporary. On a GPU a warp works on a row. It
reads the row again after each sum: by then it is in the cache.
"""

from __future__ import annotations

import math
import re
import textwrap

import numpy as np

WARPS = 8  # of a thread block
ITEMS = 8  # of a row that a thread loads before it uses one
MINUS_INFINITY = "__int_as_float(0xff800000)"
LEADING = 3  # axes before the row's
C_TYPES = {
    "bfloat16": "__nv_bfloat16",
    "float16": "__half",
    "float32": "float",
    "float64": "double",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
}
PRELUDE = """
__device__ REAL where(bool c, REAL a, REAL b) { return c ? a : b; }

__device__ REAL sum_of_warp(REAL x) {
    for (int i = 16; i; i /= 2) x += __shfl_xor_sync(0xffffffff, x, i);
    return x;
}

__device__ REAL max_of_warp(REAL x) {
    for (int i = 16; i; i /= 2) x = max(x, __shfl_xor_sync(0xffffffff, x, i));
    return x;
}
"""


def _over_row(function):
    return lambda x: function(x, axis=-1, keepdims=True)


NUMPY = {"exp": np.exp, "log": np.log, "sqrt": np.sqrt, "where": np.where}
NUMPY |= {"sum": _over_row(np.sum), "max": _over_row(np.max)}


class Formula:
    """Lines of assignments, called with the arrays and numbers that they name.

    Parameters
    ----------
    text : str
        As in this module's description. Functions are exp, log, sqrt and where; numbers in the
        text are integers, others are operands.

    Notes
    -----
    Names that begin with an underscore, `n` and the functions are taken.

    Examples
    --------
    >>> softmax = Formula('''
    ...     top = max(x)
    ...     total = sum(exp(x - top))
    ...     y = exp(x - top) / total
    ... ''')
    >>> y = np.empty((2, 3))
    >>> softmax(x=np.array([[1.0, 1.0, 1.0], [0.0, -np.inf, 0.0]]), y=y)
    >>> y.round(3)
    array([[0.333, 0.333, 0.333],
           [0.5  , 0.   , 0.5  ]])
    """

    def __init__(self, text: str):
        self.text = textwrap.dedent(text).strip()
        self.lines = [tuple(line.split(" = ", 1)) for line in self.text.splitlines()]
        self.assigned = dict.fromkeys(name for name, _ in self.lines)
        self.name = "_".join(("formula", *self.assigned))  # of the kernel
        self._code = compile(self.text, "<formula>", "exec")
        self._kernels = {}

    def __call__(self, **operands) -> None:
        """Work the lines out for these operands; results go to the arrays among them."""
        arrays = {name: x for name, x in operands.items() if getattr(x, "ndim", 0)}
        if all(isinstance(x, np.ndarray) for x in arrays.values()):
            self._run_numpy(operands, arrays)
        else:
            self._run_cuda(operands, arrays)

    def _run_numpy(self, operands, arrays):
        real = real_of(arrays)
        names = NUMPY | {"n": max(x.shape[-1] for x in arrays.values())} | operands
        names |= {name: x.astype(real, copy=False) for name, x in arrays.items()}
        with np.errstate(over="ignore", divide="ignore"):
            exec(self._code, names)
        for name in self.assigned:
            if name in arrays:
                arrays[name][...] = names[name]

    def _run_cuda(self, operands, arrays):
        import cupy

        key, blocks, arguments = self.launch(operands, arrays)
        if key not in self._kernels:
            self._kernels[key] = cupy.RawKernel(self.source(*key), self.name)
        self._kernels[key]((blocks,), (32 * WARPS,), arguments)

    def launch(self, operands, arrays):
        """What :meth:`source` needs, the number of thread blocks, and the kernel's arguments."""
        length = max(x.shape[-1] for x in arrays.values())
        numbers = tuple(name for name in operands if name not in arrays)
        kinds = tuple((name, x.dtype.name, x.shape[-1] == length) for name, x in arrays.items())
        leading = np.broadcast_shapes(*(x.shape[:-1] for x in arrays.values()))
        leading = (1,) * (LEADING - len(leading)) + leading
        rows = math.prod(leading)
        arguments = [np.int32(x) for x in (rows, *leading[1:])]
        for x in arrays.values():
            arguments += [x, *row_strides(x)]
        real = real_of(arrays).type
        arguments += [real(operands[name]) for name in numbers]
        return (kinds, length, numbers), -(-rows // WARPS), tuple(arguments)

    def source(self, kinds, length, numbers=()) -> str:
        """The CUDA C.

        Parameters
        ----------
        kinds : sequence of (str, str, bool)
            Of each array its name, its type, and whether it has whole rows, not one number each.
        length : int
            Of a row.
        numbers : sequence of str
            The names of operands that are numbers.
        """
        real = "double" if any(dtype == "float64" for _, dtype, _ in kinds) else "float"
        parameters, places, loads, stores = [], [], [], []
        for name, dtype, whole in kinds:
            strides = "".join(f", long long {name}_{axis}" for axis in range(LEADING))
            parameters.append(f"{C_TYPES[dtype]}* {name}_{strides}")
            places.append(f"{name}_ += _i0 * {name}_0 + _i1 * {name}_1 + _i2 * {name}_2;")
            at = f"{name}_[{'_j' if whole else 0}]"
            if self._is_read(name):
                loads.append((name, at))
            if name in self.assigned:
                once = "" if whole else "if (_j == 0) "
                stores.append(f"{once}{at} = ({C_TYPES[dtype]})({name});")
        parameters += [f"{real} {name}" for name in numbers]
        known = {name for name, _ in loads}
        body, elementwise = [], []
        for name, expression in self.lines:
            reduced = re.fullmatch(r"(sum|max)\((.*)\)", expression)
            if reduced is None:
                elementwise.append(f"{'' if name in known else 'REAL '}{name} = {expression};")
                known.add(name)
                continue
            kind, of = reduced.groups()
            step = f"{name} += {of};" if kind == "sum" else f"{name} = max({name}, (REAL)({of}));"
            start = "0" if kind == "sum" else MINUS_INFINITY
            body.append(f"REAL {name} = {start};")
            body.append(_loop("LENGTH", loads, [*elementwise, step]))
            body.append(f"{name} = {kind}_of_warp({name});")
        whole = any(x for name, _, x in kinds if name in self.assigned)
        body.append(_loop("LENGTH" if whole else "1", loads, [*elementwise, *stores]))
        text = "\n    ".join([*places, *body])
        return (
            f"#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
            f"typedef {real} REAL;\nconstexpr int LENGTH = {length};\n{PRELUDE}\n"
            f'extern "C" __global__ void {self.name}(int _rows, int _size1, int _size2,\n        '
            + ",\n        ".join(parameters)
            + ") {\n"
            "    const int _row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;\n"
            "    const int _lane = threadIdx.x % 32;\n"
            "    if (_row >= _rows) return;\n"
            "    const long long _i2 = _row % _size2, _i1 = _row / _size2 % _size1;\n"
            "    const long long _i0 = _row / _size2 / _size1;\n"
            "    const REAL n = LENGTH;\n"
            f"    {text}\n}}\n"
        )

    def _is_read(self, name) -> bool:
        """Whether an expression has the name before a line assigns it."""
        for assigned, expression in self.lines:
            if re.search(rf"\b{name}\b", expression):
                return True
            if assigned == name:
                return False
        return False


def _loop(length, loads, statements) -> str:
    """A thread's share of a row: some items are loaded at a time, then used one by one."""
    steps = 1 if length == "1" else ITEMS
    each = f"for (int _u = 0, _j = _start; _u < {steps}; ++_u, _j += 32) if (_j < {length})"
    lines = [f"for (int _start = _lane; _start < {length}; _start += {32 * steps}) {{"]
    if loads:
        lines += [f"    REAL {name}_items[{steps}];" for name, _ in loads]
        fill = " ".join(f"{name}_items[_u] = {at};" for name, at in loads)
        lines += ["    #pragma unroll", f"    {each} {{ {fill} }}"]
    lines += ["    #pragma unroll", f"    {each} {{"]
    lines += [f"        REAL {name} = {name}_items[_u];" for name, _ in loads]
    lines += [f"        {statement}" for statement in statements]
    return "\n    ".join([*lines, "    }", "}"])


def real_of(arrays) -> np.dtype:
    """The type to compute in: float64 where an array has it, else float32."""
    return np.dtype("f8" if any(x.dtype == "f8" for x in arrays.values()) else "f4")


def row_strides(x) -> list[np.int64]:
    """How many elements lie between rows along each leading axis, 0 where one row is repeated."""
    if x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        raise ValueError(f"rows must be contiguous, not of strides {x.strides}")
    missing = LEADING + 1 - x.ndim
    if missing < 0:
        raise ValueError(f"at most {LEADING + 1} axes, not shape {x.shape}")
    axes = zip(x.shape[:-1], x.strides[:-1])
    return [np.int64(0)] * missing + [np.int64(s // x.itemsize * (d > 1)) for d, s in axes]

"""Kernels behind those of a backward pass: gradients of the arrays that scores depend on."""

from __future__ import annotations

import math
import re
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from ..scores.emit import ELEMENTS, Emitter, field_of
from ..scores.expression import Node

if TYPE_CHECKING:
    from ..operands.layout import Layout
    from ..operands.spec import Spec
    from ..scores.score import ScoreForm
    from ..scores.wanted import Target
    from .problem import Problem

WALK = "array_gradients"  # the file of the kernels that walk tiles
_OF = "_of_"  # between a kernel's file and the name of the array
_NUMBER = re.compile(r"_(\d+)$")  # of a place that is read


class Wanted(NamedTuple):
    """An array whose gradient is asked for.

    Parameters
    ----------
    name : str
    kind : str
        As of a :class:`Target`.
    element : str
        Its type.
    keeps_queries, keeps_keys : bool
        Whether it has elements for each query, and for each key.
    entries : int
        How many parts it has that heads of their own add to; of scattered ones, elements. Of
        packed sequences, of each.
    reads : int
        In how many places scores read it.
    keeps_sequences : bool
        Whether it has such parts for each of several packed sequences.
    """

    name: str
    kind: str
    element: str
    keeps_queries: bool = False
    keeps_keys: bool = False
    entries: int = 1
    reads: int = 1
    keeps_sequences: bool = False

    @property
    def is_scattered(self) -> bool:
        """Whether its elements are at indices that an expression works out."""
        return self.kind == "scattered"

    @property
    def is_of_pairs(self) -> bool:
        """Whether it has an element for each query and key."""
        return self.keeps_queries and self.keeps_keys and not self.is_scattered

    @property
    def is_summed_later(self) -> bool:
        """Whether the sums of blocks are added by another kernel."""
        return self.kind != "sink" and not (self.keeps_queries and self.keeps_keys)

    @property
    def label(self) -> str:
        """The name in letters that a kernel's may have."""
        return self.name.encode("ascii", "backslashreplace").decode().replace("\\", "_")

    @property
    def field(self) -> str:
        """The field of Params with its address; others begin with that name."""
        return f"gradient_{self.name}"


def wanted_of(target: Target, spec: Spec, layout: Layout) -> Wanted:
    """What kernels are compiled for of a target, whose gradient has that spec."""
    if target.kind == "scattered":
        entries = math.prod(spec.shape)
    else:
        steps = layout.strides[target.operand]
        entries = math.prod(n for n, step in zip(layout.leading, steps) if step)
    queries, keys = (step != 0 for step in target.steps)
    of_sequences = layout.entry_strides.get(target.operand, 0) != 0
    own = target.name, target.kind, spec.dtype.name
    return Wanted(*own, queries, keys, entries, len(target.reads), of_sequences)


class Extents(NamedTuple):
    """What kernels of such gradients walk: heads, and queries, keys and tiles of each.

    Heads of packed sequences count for each sequence, and are as long as the longest may be.
    """

    heads: int
    sequences: int
    queries: int
    keys: int
    query_tiles: int
    key_tiles: int

    def entries(self, wanted: Wanted) -> int:
        """Parts that heads of their own add to; of scattered ones, elements."""
        return wanted.entries * (self.sequences if wanted.keeps_sequences else 1)

    def sums(self, wanted: Wanted) -> int:
        """What is left to be added later."""
        if wanted.is_scattered:
            return wanted.entries
        places = self.keys if wanted.keeps_keys else self.key_tiles
        return self.heads * (self.queries if wanted.keeps_queries else places)

    def grids(self, wanted: Wanted, threads: int) -> dict[str, int]:
        """Blocks of each kernel, by its file; of side kernels with so many threads."""
        walk = self.heads * (self.query_tiles if wanted.keeps_queries else self.key_tiles)
        elements = entries = self.entries(wanted)
        elements *= self.queries if wanted.keeps_queries else 1
        elements *= self.keys if wanted.keeps_keys else 1
        if wanted.keeps_queries and wanted.keeps_keys:
            walk = entries * self.query_tiles * self.key_tiles
        return {
            WALK: walk,
            "array_sums": -(-elements * 32 // threads),
            "array_zeros": -(-elements // threads),
            "sink_gradients": entries,
        }


def extents_of(problem: Problem, tiles: tuple[int, int], block: tuple[int, int]) -> Extents:
    """Of a problem with so many tiles of queries and keys, each of so many."""
    heads, count = problem.head_count, problem.sequences
    if count is None:
        return Extents(heads, 1, problem.query_length, problem.key_length, *tiles)
    queries, keys = problem.longest
    return Extents(
        heads * count, count, queries, keys, -(-queries // block[0]), -(-keys // block[1])
    )


def kernels_of(wanted: Wanted, walk: str = WALK) -> tuple[str, ...]:
    """Names of the kernels of one gradient, in their order; `walk` is the file of its walks."""
    if wanted.kind == "sink":
        return (f"sink_gradients{_OF}{wanted.label}",)
    sums = (f"array_sums{_OF}{wanted.label}",) if wanted.is_summed_later else ()
    walks = (walk_name(wanted.label, i, walk) for i in range(wanted.reads))
    zeros = (f"array_zeros{_OF}{wanted.label}",) if wanted.is_scattered else ()
    return (*zeros, *walks, *sums)


def walk_name(label: str, read: int = 0, walk: str = WALK) -> str:
    """The name of the kernel for one of the places in which scores read an array."""
    return f"{walk}{f'_{read}' if read else ''}{_OF}{label}"


def read_of(kernel: str) -> int:
    """Which of the places that scores read an array in a kernel is for."""
    number = _NUMBER.search(kernel.partition(_OF)[0])
    return int(number[1]) if number else 0


def array_of(kernel: str) -> str:
    """The label of the array whose gradient a kernel computes, empty for other kernels."""
    return kernel.partition(_OF)[2]


def file_of(kernel: str) -> str:
    """The name of the file of such a kernel."""
    return _NUMBER.sub("", kernel.partition(_OF)[0])


def text_of(kernel: str) -> str | None:
    """CUDA C of such a kernel: its file, with its own name."""
    if not array_of(kernel):
        return None
    file = file_of(kernel)
    text = (files(__package__.partition(".")[0]) / "kernels" / f"{file}.cu").read_text("utf-8")
    return text.replace(f" {file}(const", f" {kernel}(const")


def variable_of(form: ScoreForm, name: str, read: int = 0) -> Node | None:
    """The read that scores are differentiated by for the gradient of an array."""
    reads = [read for node in form.nodes for read in node.reads(name)]
    return reads[read] if reads else None


def _element_function(variable: Node | None) -> str:
    """CUDA C: which element of the array a pair reads, as they lie in C order; -1 for none."""
    body = "    return -1;\n"
    if variable is not None:
        capture = variable.value
        start = "&" if capture.axes == 1 else ""
        size = f"({start}p.{field_of(capture)}_size)"
        lines = []
        for axis, node in enumerate(variable.inputs):
            reads, text = Emitter(of_head=False).stage(node)
            lines.append(
                f"    {{ {reads} const auto index = {text}; const int extent = {size}[{axis}];\n"
                "      if (!is_index(index, extent)) return -1;\n"
                "      element = element * extent + index; }\n"
            )
        body = "    long long element = 0;\n" + "".join(lines) + "    return element;\n"
    return (
        "template <typename Head>\n"
        "__device__ __forceinline__ long long array_element(const Head& located, int q, int k, "
        "const Params& p) {\n"
        "    [[maybe_unused]] const int batch = located.batch, head = located.head;\n"
        f"{body}}}"
    )


def declarations(wanted: Wanted, form: ScoreForm, read: int) -> str:
    """CUDA C of what such kernels know of their gradient."""
    constants = {
        "SCATTERS": wanted.is_scattered,
        "KEEPS_QUERIES": wanted.keeps_queries,
        "KEEPS_KEYS": wanted.keeps_keys,
        "KEEPS_SEQUENCES": wanted.keeps_sequences,
        "ARRAY_IS_ADDED": form.adds(variable_of(form, wanted.name, read)),
    }
    lines = [f"constexpr bool {name} = {str(x).lower()};" for name, x in constants.items()]
    lines += [
        f"constexpr int ARRAY_ENTRIES = {wanted.entries};",
        f"using ArrayElement = {ELEMENTS[wanted.element]};",
    ]
    functions = (
        ("ArrayElement*", "array_gradient", ""),
        ("const long long*", "array_axis_strides", "_axis_stride"),
        ("const long long*", "array_steps", "_step"),
    )
    lines += [
        f"__device__ __forceinline__ {kind} {name}(const Params& p) "
        f"{{ return p.{wanted.field}{tail}; }}"
        for kind, name, tail in functions
    ]
    stride = f"p.{wanted.field}_entry_stride" if wanted.keeps_sequences else "0"
    lines.append(
        "__device__ __forceinline__ long long array_entry_stride(const Params& p) "
        f"{{ return {stride}; }}"
    )
    variable = variable_of(form, wanted.name, read) if wanted.is_scattered else None
    return "\n".join([*lines, _element_function(variable)])

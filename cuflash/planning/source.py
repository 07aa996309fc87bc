"""Plan -> one CUDA C string: a generated prelude, then the kernel's file with its headers."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from importlib.resources import files

from ..scores.emit import Emitter
from ..scores.expression import Node, parse
from ..scores.line import Line
from .params import Field, fields, struct_dtype
from .problem import Problem
from .tile import Tile
from .visible import mask_function

C_TYPES = {
    "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
}  # fmt: skip
_PACKAGE = __name__.partition(".")[0]
C_INTEGERS = {"": "int", "int32": "int", "int64": "long long"}
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|\s*//.*')  # or a string, which may hold //
_ROWS = """\
constexpr bool FINDS_ROWS = {finds}, READS_ROWS = {reads}, QUERIES_SHARE_ROW = {shared};
using RowElement = {element};"""
_INCLUDE = re.compile(r'#include "([\w./]+)"\s*')


def params_struct(struct: Sequence[Field]) -> str:
    """Params of these fields, in C."""
    lines = [
        f"    {c_type} {name}{f'[{count}]' if count > 1 else ''};"
        for name, _, count, c_type in struct
    ]
    size = struct_dtype(struct).itemsize
    check = f'static_assert(sizeof(Params) == {size}, "Params as Python packs it");'
    return "\n".join(["struct Params {", *lines, "};", check])


def _geometry(problem: Problem, tile: Tile) -> list[str]:
    """Where each buffer begins in shared memory, and how large the tiles of all buffers are.

    Both count bytes. Kernels take the former and assert the latter.
    """
    shared = tile.shared(problem)
    ends = itertools.accumulate((buffer.bytes for buffer in shared), initial=0)
    sizes = {buffer.name: buffer.tile_bytes for buffer in (*shared, *tile.workspace(problem))}
    return [
        _namespace("shared_at", {buffer.name: end for buffer, end in zip(shared, ends)}),
        _namespace("tile_bytes", sizes),
    ]


def _namespace(name: str, values: dict[str, int]) -> str:
    lines = [f"constexpr int {key} = {value};" for key, value in values.items()]
    return "\n".join([f"namespace {name} {{", *lines, "}"])


def _score_function(
    problem: Problem, variable: Node | None = None, knows_queries: bool = False
) -> str:
    """The changes of the score one after the other, what scores are measured in, and the sinks.

    They are differentiated by the score or by what is read of an array. Head, defined further on,
    is a template's.
    """
    form = problem.score
    unit = f"p.capture_{form.unit}" if form.unit else "Accumulator(1)"
    scale = "p.score_scale" if form.unit else "p.scale"
    emitter = Emitter(variable=variable)
    *before, (reads, last) = [emitter.stage(node) for node in form.nodes] or [("", "score")]
    steps = "".join(f"    {{ {reads} score = {text}; }}\n" for reads, text in before)
    steps += f"    {reads}\n" if reads else ""
    # Backward asks for queries that do not exist, and multiplies zeros by what it gets.
    asks = problem.backward and not knows_queries
    if asks and (form.may_be_nan or variable is not None):
        last = f"unsigned(int(q)) < unsigned(located.query_length) ? T({last}) : T(0)"
    uses_functions = form.stages or form.sink or problem.mask_form.text
    functions = expand("score_functions.cuh") if uses_functions else ""
    members = "".join(f" {c_type} {name};" for c_type, name, _ in emitter.of_head)
    found = "".join(f"    found.{name} = {read};\n" for _, name, read in emitter.of_head)
    text = f"""\
{functions}#line 1 "score expression"
__device__ __forceinline__ Accumulator score_unit(const Params& p) {{ return {unit}; }}
__device__ __forceinline__ Accumulator score_scale(const Params& p) {{ return {scale}; }}
struct OfHead {{{members} }};
template <typename Head>
__device__ __forceinline__ OfHead read_of_head(const Head& located, const Params& p) {{
    [[maybe_unused]] const int batch = located.batch, head = located.head;
    OfHead found;
{found}    return found;
}}
template <typename T, typename Given, typename Head, typename Q, typename K>
__device__ __forceinline__ T modify(T score, const OfHead& of_head, const Given& element,
                                    const Head& located, Q q, K k, const Params& p) {{
    [[maybe_unused]] const int batch = located.batch, head = located.head;
{steps}    return {last};
}}
{_rows_function(emitter)}"""
    if form.line and variable is None:
        text += _line_functions(emitter, form.line)
    if form.sink:
        reads, sink = Emitter(of_head=False).stage(parse(form.sink, form.captures))
        text += f"""
__device__ __forceinline__ Accumulator read_sink(const Params& p, int batch, int head) {{
    {reads}
    return {sink};
}}"""
    return text


def _line_functions(emitter: Emitter, line: Line) -> str:
    """The line along the keys that is added to scores; of one that bends, without abs."""
    reads, distance = Emitter(of_head=False).stage(line.distance)
    return f"""
template <typename Head>
__device__ __forceinline__ Accumulator line_slope(const OfHead& of_head, const Head& located,
                                                  const Params& p) {{
    [[maybe_unused]] const int batch = located.batch, head = located.head;
    return {emitter.slope(line)};
}}
template <typename Head>
__device__ __forceinline__ int line_distance(const Head& located, int q, int k, const Params& p) {{
    [[maybe_unused]] const int batch = located.batch, head = located.head;
    {reads}
    return {distance};
}}"""


def _rows_function(emitter: Emitter) -> str:
    """What kernels call for the rows of a captured array; whether these are of halves, of which,
    and whether all queries of a head share one.
    """
    if emitter.rows is None:
        return _ROWS.format(finds="false", reads="false", shared="false", element="__half")
    element, rows, shared = emitter.rows_text()
    reads = element != "float"  # in pairs that a register holds
    constants = _ROWS.format(
        finds="true", reads=str(reads).lower(), shared=str(shared).lower(),
        element=element if reads else "__half",
    )  # fmt: skip
    return f"""\
{constants}
template <typename Head>
__device__ __forceinline__ auto find_rows(const Head& located, const Params& p) {{
    [[maybe_unused]] const int batch = located.batch, head = located.head;
    return {rows};
}}"""


def prelude(problem: Problem, tile: Tile) -> str:
    """What only this problem's kernels need: types, constants, Params and the score expression."""
    integers = problem.q_lengths or problem.kv_lengths or problem.q_offset
    constants = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"
        for name, value in sorted(tile.constants(problem).items())
    ]
    return "\n".join(
        [
            f"// {problem.dtype}, {tile}",
            "#include <cuda_bf16.h>",
            "#include <cuda_fp16.h>",
            f"using Element = {C_TYPES[problem.dtype]};",
            f"using Accumulator = {C_TYPES[problem.accumulator]};",
            f"using Length = {C_INTEGERS[integers]};",
            f"using PageNumber = {C_INTEGERS[problem.page_table]};",
            f"using Offset = {C_INTEGERS[problem.offsets]};",
            *constants,
            *_geometry(problem, tile),
            params_struct(tuple(fields(problem))),
            _score_function(problem, tile.variable(problem), tile.knows_queries),
            *([mask_function(problem.mask_form, tile.backward)] if problem.mask_form.text else []),
            *([products] if (products := tile.products(problem)) else []),
            "",
        ]
    )


@functools.cache
def expand(name: str, text: str | None = None) -> str:
    """A kernel's file with each header pasted once, where it is first included.

    `#line` directives keep compiler messages and profilers on the true file and line. The text is
    one string because CuPy's disk cache keys on it: headers found through `-I` would go stale.
    `text` stands for the file of that name.
    """
    seen: set[str] = set()

    def paste(name: str, text: str) -> list[str]:
        seen.add(name)
        lines = [f'#line 1 "cuflash/kernels/{name}"']
        for number, line in enumerate(text.splitlines(), 1):
            included = _INCLUDE.fullmatch(line) if line.startswith("#include") else None
            if included is None:
                lines.append("" if line == "#pragma once" else line)
            elif included[1] not in seen:
                lines += paste(included[1], _read(included[1]))
                lines.append(f'#line {number + 1} "cuflash/kernels/{name}"')
            else:
                lines.append("")
        return lines

    return "\n".join(paste(name, text or _read(name))) + "\n"


@functools.cache
def _read(name: str) -> str:
    """A file of kernels; a call's kernels share most headers."""
    return (files(_PACKAGE) / "kernels" / name).read_text("utf-8")


@functools.lru_cache(maxsize=16)
def without_comments(text: str) -> str:
    """The same lines without their comments: what is compiled.

    CuPy's disk cache keys on it, so that a comment that changes makes nobody compile again.
    """
    return "\n".join(
        _COMMENT.sub(lambda found: found[1] or "", line) if "//" in line else line
        for line in text.split("\n")
    )


@functools.lru_cache(maxsize=256)
def kernel_source(problem: Problem, tile: Tile, kernel: str) -> str:
    """The whole source of one of a row's kernels, with its comments."""
    if not tile.threads:
        raise ValueError(f"the {tile.engine} engine compiles nothing")
    return prelude(problem, tile.of_kernel(kernel)) + expand(
        f"{kernel}.cu", tile.kernel_text(kernel)
    )

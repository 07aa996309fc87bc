"""Plan -> one CUDA C string: a generated prelude, then the kernel's file with its headers."""

from __future__ import annotations

import functools
import re
from importlib.resources import files

from ..masks.band import MAX_SHIFT
from .params import fields, params_dtype
from .plan import BARRIER_BYTES, Plan

C_TYPES = {
    "float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double",
}  # fmt: skip
_PACKAGE = __name__.partition(".")[0]
C_INTEGERS = {"": "int", "int32": "int", "int64": "long long"}
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|\s*//.*')  # or a string, which may hold //
_INCLUDE = re.compile(r'#include "([\w./]+)"\s*')


def _params_struct(plan: Plan) -> str:
    lines = [
        f"    {c_type} {name}{f'[{count}]' if count > 1 else ''};"
        for name, _, count, c_type in fields(plan)
    ]
    size = params_dtype(plan).itemsize
    check = f'static_assert(sizeof(Params) == {size}, "Params as Python packs it");'
    return "\n".join(["struct Params {", *lines, "};", check])


def _constants(plan: Plan) -> dict[str, int | bool]:
    tile = plan.tile
    return {
        "ENGINE_IS_MMA": tile.engine == "mma",
        "THREADS": plan.threads,
        "WARPS": tile.warps,
        "MIN_BLOCKS": tile.min_blocks,
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "STEP_K": tile.step_k,
        "STAGES": tile.stages,
        "LOAD_UNROLL": tile.load_unroll,
        "WARP_SLABS": tile.slabs,
        "WARP_SPLIT": tile.split,
        "QUERIES_IN_REGISTERS": tile.queries_in_registers,
        "TAKES_MAXIMA": tile.maxima,
        "ROW_LANES": tile.row_lanes,
        "LANE_ROWS": tile.lane_rows,
        "HEAD_DIM": plan.problem.head_dim,
        "HEAD_DIM_V": plan.problem.value_dim,
        "ALIGNED": plan.problem.aligned,
        "SHARED_BYTES": plan.shared_bytes,
        "SHIFT_IS_GIVEN": plan.problem.shift_is_given,
        "MAX_SHIFT": MAX_SHIFT,
        "SCORE_IS_MODIFIED": bool(plan.problem.score),
        "MASKED": bool(plan.problem.mask),
        "MASK_ROWS": tile.scored[0],
        "MASK_COLUMNS": tile.scored[1],
        **(
            {"PING_PONG": tile.ping_pong, "BARRIER_BYTES": BARRIER_BYTES}
            if tile.engine == "wgmma"
            else {}
        ),
        **({"STEP_Q": tile.step_q, "ORDERED": plan.is_ordered} if tile.backward else {}),
    }


def _product(name: str, plan: Plan, columns: int, depth: int, a_in_registers: bool) -> str:
    """A function of one product of 64 rows: C += A B, or C = A B^T with A in shared memory, too.

    It takes a wgmma instruction for every 16 of `depth`, all of them in one statement: for each of
    its many operands NVRTC needs long. C[i][j] is register 4 * (j / 2) + 2 * i + j % 2, as the
    instruction numbers them; Left and Right say how far to move the descriptors of A and B.
    """
    count, kind = columns // 2, {"float16": "f16", "bfloat16": "bf16"}[plan.problem.dtype]
    steps = range(-(-depth // 16))
    inputs: list[str] = []

    def operand(constraint: str, expression: str) -> str:
        inputs.append(f'"{constraint}"({expression})')
        return f"%{count + len(inputs) - 1}"

    if a_in_registers:
        layouts, parameter = "typename Right", f"const unsigned int (&a)[{len(steps)}][4]"
        majors, move = "1", "rows"
    else:
        layouts, parameter = "typename Left, typename Right", "unsigned long long a"
        majors, move = "0, 0", "columns"
        a = operand("l", "a")
    b = operand("l", "b")
    sums = ", ".join(f"%{i}" for i in range(count))
    lines = ["{", ".reg .pred sum;", ".reg .b64 left, right;"]
    for i in steps:
        if a_in_registers:
            left = "{" + ", ".join(operand("r", f"a[{i}][{r}]") for r in range(4)) + "}"
        else:
            left = "left"
            lines.append(f"add.s64 left, {a}, {operand('n', f'Left::columns({i})')};")
        lines += [
            f"add.s64 right, {b}, {operand('n', f'Right::{move}({i})')};",
            f"setp.ne.b32 sum, {int(a_in_registers or i > 0)}, 0;",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
            f"{{{sums}}}, {left}, right, sum, 1, 1, {majors};",
        ]
    text = "\n        ".join(f'"{line}\\n"' for line in [*lines, "}"])
    cells = ", ".join(f'"+f"(C[{r // 2 % 2}][{r // 4 * 2 + r % 2}])' for r in range(count))
    return f"""\
template <{layouts}>
__device__ __forceinline__ void {name}(float (&C)[2][{columns // 4}], {parameter},
                                       unsigned long long b) {{
    asm volatile(
        {text}
        : {cells}
        : {", ".join(inputs)} : "memory");
}}"""


def _products(plan: Plan) -> str:
    """S = Q K^T, both rows by rows in shared memory; O += P V, P in registers, V by columns."""
    tile = plan.tile
    _, value_width = tile.widths(plan.problem)
    return "\n".join(
        [
            _product("multiply_shared", plan, tile.step_k, plan.problem.head_dim, False),
            _product("multiply_registers", plan, value_width, tile.step_k, True),
        ]
    )


def _score_function(plan: Plan) -> str:
    """The expression with the names it may use; Head, defined further on, is a template's."""
    names = plan.problem.captures
    captures = "".join(f"    const Accumulator {name} = p.{name};\n" for name in names)
    return f"""\
template <typename T, typename Head>
__device__ __forceinline__ T modify(T score, const Head& located, int q, int k, const Params& p) {{
    [[maybe_unused]] const int batch = located.batch, head = located.head;
{captures}#line 1 "score expression"
    return {plan.problem.score or "score"};
}}"""


def prelude(plan: Plan) -> str:
    """What only this plan's kernel needs: types, constants, Params and the score expression."""
    problem = plan.problem
    integers = problem.q_lengths or problem.kv_lengths or problem.q_offset
    constants = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"
        for name, value in _constants(plan).items()
    ]
    return "\n".join(
        [
            f"// {problem.dtype}, {plan.tile}",
            "#include <cuda_bf16.h>",
            "#include <cuda_fp16.h>",
            f"using Element = {C_TYPES[problem.dtype]};",
            f"using Accumulator = {C_TYPES[problem.accumulator]};",
            f"using Length = {C_INTEGERS[integers]};",
            *constants,
            _params_struct(plan),
            _score_function(plan),
            *([_products(plan)] if plan.engine == "wgmma" else []),
            "",
        ]
    )


@functools.cache
def expand(name: str) -> str:
    """A kernel's file with each header pasted once, where it is first included.

    `#line` directives keep compiler messages and profilers on the true file and line. The text is
    one string because CuPy's disk cache keys on it: headers found through `-I` would go stale.
    """
    folder, seen = files(_PACKAGE) / "kernels", set()

    def paste(name):
        seen.add(name)
        lines = [f'#line 1 "cuflash/kernels/{name}"']
        for number, line in enumerate((folder / name).read_text().splitlines(), 1):
            included = _INCLUDE.fullmatch(line)
            if included is None:
                lines.append("" if line == "#pragma once" else line)
            elif included[1] not in seen:
                lines += paste(included[1])
                lines.append(f'#line {number + 1} "cuflash/kernels/{name}"')
            else:
                lines.append("")
        return lines

    return "\n".join(paste(name)) + "\n"


def without_comments(text: str) -> str:
    """The same lines without their comments: what is compiled.

    CuPy's disk cache keys on it, so that a comment that changes makes nobody compile again.
    """
    return "\n".join(_COMMENT.sub(lambda found: found[1] or "", line) for line in text.split("\n"))


@functools.lru_cache(maxsize=256)
def kernel_source(plan: Plan, kernel: str) -> str:
    """The whole source of one of the plan's kernels, with its comments."""
    if plan.engine == "numpy":
        raise ValueError("the numpy engine compiles nothing")
    return prelude(plan) + expand(f"{kernel}.cu")

"""CUDA C of a warpgroup's products: wgmma instructions, one statement for all steps of a sum."""

from __future__ import annotations

from typing import Literal, TypeAlias

from .problem import Problem
from .tile import ceil_div

# How an operand's numbers that are summed over lie: along the rows of a matrix in shared memory,
# down its columns, or in registers.
Summed: TypeAlias = Literal["along", "down", "registers"]


def product(
    name: str, problem: Problem, columns: int, depth: int, *, a: Summed = "along",
    b: Summed = "along",
) -> str:  # fmt: skip
    """A function of one product of 64 rows and `columns` columns, summed over `depth`.

    C = A B with A in shared memory; C += A B with A in registers.

    It takes a wgmma instruction for every 16 of `depth`, all of them in one statement: for each of
    its many operands NVRTC needs long. C[i][j] is register 4 * (j / 2) + 2 * i + j % 2, as the
    instruction numbers them; Left and Right say how far to move the descriptors of A and B.
    """
    count, kind = columns // 2, {"float16": "f16", "bfloat16": "bf16"}[problem.dtype]
    steps = range(ceil_div(depth, 16))
    moves = {"along": "columns", "down": "rows"}
    inputs: list[str] = []

    def operand(constraint: str, expression: str) -> str:
        inputs.append(f'"{constraint}"({expression})')
        return f"%{count + len(inputs) - 1}"

    majors = f"{int(b == 'down')}"
    if a == "registers":
        layouts, parameter = "typename Right", f"const unsigned int (&a)[{len(steps)}][4]"
    else:
        layouts, parameter = "typename Left, typename Right", "unsigned long long a"
        majors = f"{int(a == 'down')}, {majors}"
        start = operand("l", "a")
    right = operand("l", "b")
    sums = ", ".join(f"%{i}" for i in range(count))
    lines = ["{", ".reg .pred sum;", ".reg .b64 left, right;"]
    for i in steps:
        if a == "registers":
            left = "{" + ", ".join(operand("r", f"a[{i}][{r}]") for r in range(4)) + "}"
        else:
            left = "left"
            lines.append(f"add.s64 left, {start}, {operand('n', f'Left::{moves[a]}({i})')};")
        lines += [
            f"add.s64 right, {right}, {operand('n', f'Right::{moves[b]}({i})')};",
            f"setp.ne.b32 sum, {int(a == 'registers' or i > 0)}, 0;",
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

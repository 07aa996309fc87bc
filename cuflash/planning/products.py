"""CUDA C of a warpgroup's products: wgmma instructions, one statement for all steps of a sum."""

from __future__ import annotations

import functools
from typing import Literal, TypeAlias

from .tile import ceil_div

# How an operand's numbers that are summed over lie: along the rows of a matrix in shared memory,
# down its columns, or in registers.
Summed: TypeAlias = Literal["along", "down", "registers"]
# Pairs of planes of A and of B.
Planes: TypeAlias = tuple[tuple[int, int], ...]

KINDS = {"float16": "f16", "bfloat16": "bf16", "float32": "f16"}  # float32 is planes of halves


@functools.lru_cache(maxsize=256)
def product(
    name: str, dtype: str, columns: int, depth: int, *, a: Summed = "along",
    b: Summed = "along", planes: Planes = (), adds: bool | None = None,
) -> str:  # fmt: skip
    """A function of one product of 64 rows and `columns` columns, summed over `depth`.

    C = A B with A in shared memory; C += A B with A in registers.

    It takes a wgmma instruction for every 16 of `depth`, all of them in one statement: for each of
    its many operands NVRTC needs long. C[i][j] is register 4 * (j / 2) + 2 * i + j % 2, as the
    instruction numbers them; Left and Right say how far to move the descriptors of A and B.

    Of matrices that are two planes it is the sum of products of these `planes`, in this order.
    `adds` says whether it is added to C, by default where A is in registers.
    """
    count, kind = columns // 2, KINDS[dtype]
    depth = ceil_div(depth, 16)
    adds = a == "registers" if adds is None else adds
    steps = [(i, pair) for pair in planes or ((0, 0),) for i in range(depth)]
    moves = {"along": "columns", "down": "rows"}
    inputs: list[str] = []

    def operand(constraint: str, expression: str) -> str:
        inputs.append(f'"{constraint}"({expression})')
        return f"%{count + len(inputs) - 1}"

    majors = f"{int(b == 'down')}"
    if a == "registers":
        layouts, parameter = (
            "typename Right",
            f"const unsigned int (&a)[{depth * (2 if planes else 1)}][4]",
        )
    else:
        layouts, parameter = "typename Left, typename Right", "unsigned long long a"
        majors = f"{int(a == 'down')}, {majors}"
        start = operand("l", "a")
    right = operand("l", "b")
    sums = ", ".join(f"%{i}" for i in range(count))
    lines = ["{", ".reg .pred sum;", ".reg .b64 left, right;"]
    for number, (i, (of_a, of_b)) in enumerate(steps):
        if a == "registers":
            row = depth * of_a + i
            left = "{" + ", ".join(operand("r", f"a[{row}][{r}]") for r in range(4)) + "}"
        else:
            left, place = "left", f"{i}, {of_a}" if planes else f"{i}"
            lines.append(f"add.s64 left, {start}, {operand('n', f'Left::{moves[a]}({place})')};")
        place = f"{i}, {of_b}" if planes else f"{i}"
        lines += [
            f"add.s64 right, {right}, {operand('n', f'Right::{moves[b]}({place})')};",
            f"setp.ne.b32 sum, {int(adds or number > 0)}, 0;",
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

"""Hopper's engine: wgmma on halves, tiles that the copy engine brings (sm_90a)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..operands.dtypes import HALF, ITEM_BYTES
from .problem import Device, Problem
from .tile import Buffer, KernelTile, MapBox, ceil_div, round_up

if TYPE_CHECKING:
    from ..typing import Engine

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64
BARRIER_BYTES = 1024  # of shared memory, with what else is not tiles


@dataclass(frozen=True, kw_only=True)
class WgmmaTile(KernelTile):
    """A row whose warpgroups have 64 queries each; four more warps copy tiles.

    Parameters
    ----------
    ping_pong : bool
        Whether warpgroups take turns at issuing products.
    """

    engine: ClassVar[Engine] = "wgmma"
    compile_options: ClassVar[tuple[str, ...]] = ("-arch=sm_90a",)

    dtypes: tuple[str, ...] = HALF
    stages: int = 2
    ping_pong: bool = False

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return 32 * self.warps + WARPGROUP

    @property
    def kernel(self) -> str:
        """Name of the kernel, and of its file."""
        return "hopper_fa1_forward" if self.keys_outside else "hopper_forward"

    @property
    def scored(self) -> tuple[int, int]:
        """Rows and columns of a tile of a mask's lists."""
        return self.block_q, self.step_k

    def missing(self, problem: Problem, device: Device) -> str:
        """What the device or the operands lack, or an empty string."""
        if device.arch != 90:
            return f"needs sm_90, the device is sm_{device.arch}"
        if not device.has_features:
            return "needs NVRTC 12.9 or later"
        if problem.head_dim % 8 or problem.value_dim % 8:
            return "serves head dims that are multiples of 8"
        return problem.unmappable if problem.aligned else "needs rows aligned to 16 bytes"

    def widths(self, problem: Problem) -> tuple[int, int]:
        """Columns of a query or key row and of a value row, in steps of the narrowest swizzle."""
        return round_up(problem.head_dim, 32), round_up(problem.value_dim, 32)

    def query_lead(self, problem: Problem) -> int:
        """Rows of a head's first tile of queries that lie before its first query.

        So the last tile, which under a causal mask sees the most keys, is a full one. Not with a
        mask: its tiles begin at the first query.
        """
        if self.keys_outside or problem.mask:
            return 0
        return self.query_tiles(problem) * self.block_q - problem.query_length

    def shared(self, problem: Problem) -> tuple[Buffer, ...]:
        """Tiles as the copy engine lays them out, and barriers."""
        head, value = (width * ITEM_BYTES[problem.dtype] for width in self.widths(problem))
        q_tiles, k_tiles = (self.stages, 1) if self.keys_outside else (1, self.stages)
        return (
            Buffer("Q", self.block_q * head, q_tiles),
            Buffer("K", self.block_k * head, k_tiles),
            Buffer("V", self.block_k * value, k_tiles),
            Buffer("barriers", BARRIER_BYTES),
        )

    def workspace(self, problem: Problem) -> tuple[Buffer, ...]:
        """O, l and m of fa1, as registers hold them."""
        masks = super().workspace(problem)
        if not self.keys_outside:
            return masks
        row = (self.widths(problem)[1] + 2) * ITEM_BYTES[problem.accumulator]
        tiles = problem.head_count * self.query_tiles(problem)
        return (*masks, Buffer("state", self.block_q * row, tiles))

    def map_boxes(self, problem: Problem) -> tuple[MapBox, ...]:
        """A warpgroup's queries; the keys that are scored at once, and their values."""
        head, value = self.widths(problem)
        return (
            MapBox("q", WARPGROUP_ROWS, head),
            MapBox("k", self.step_k, head),
            MapBox("v", self.step_k, value),
        )

    def constants(self, problem: Problem) -> dict[str, int | bool]:
        """Sizes that the kernels read."""
        own = {"PING_PONG": self.ping_pong, "BARRIER_BYTES": BARRIER_BYTES}
        return super().constants(problem) | own

    def products(self, problem: Problem) -> str:
        """S = Q K^T, both rows by rows in shared memory; O += P V, P in registers, V by columns."""
        _, value = self.widths(problem)
        return "\n".join(
            [
                _product("multiply_shared", problem, self.step_k, problem.head_dim, False),
                _product("multiply_registers", problem, value, self.step_k, True),
            ]
        )


def _product(name: str, problem: Problem, columns: int, depth: int, a_in_registers: bool) -> str:
    """A function of one product of 64 rows: C += A B, or C = A B^T with A in shared memory, too.

    It takes a wgmma instruction for every 16 of `depth`, all of them in one statement: for each of
    its many operands NVRTC needs long. C[i][j] is register 4 * (j / 2) + 2 * i + j % 2, as the
    instruction numbers them; Left and Right say how far to move the descriptors of A and B.
    """
    count, kind = columns // 2, {"float16": "f16", "bfloat16": "bf16"}[problem.dtype]
    steps = range(ceil_div(depth, 16))
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


def _both(**sizes: Any) -> tuple[WgmmaTile, WgmmaTile]:
    """The row as fa3 and as fa2."""
    return WgmmaTile(algo="fa3", fill=1.0, **sizes), WgmmaTile(algo="fa2", fill=1.0, **sizes)


_fa1 = partial(WgmmaTile, algo="fa1")

# fmt: off
ROWS = (
    *_both(max_dim=64,  block_k=128, warps=12, stages=4, ping_pong=True),
    *_both(max_dim=64,  block_k=128, warps=8,  stages=4, ping_pong=True),
    *_both(max_dim=128, block_k=80,  warps=12, stages=4, ping_pong=True),
    *_both(max_dim=128, block_k=128, warps=8,  stages=3, ping_pong=True),
    *_both(max_dim=192, block_k=112, warps=8),
    *_both(max_dim=256, block_k=80,  warps=8),
    *_both(max_dim=256, block_k=64,  warps=8),
    _fa1(max_dim=64,  block_k=768, step_k=128, warps=12, stages=1, ping_pong=True),
    _fa1(max_dim=64,  block_k=768, step_k=128, warps=8,  stages=1, ping_pong=True),
    _fa1(max_dim=128, block_k=384, step_k=128, warps=8,  stages=1, ping_pong=True),
    _fa1(max_dim=192, block_k=224, step_k=112, warps=8,  stages=1),
    _fa1(max_dim=256, block_k=160, step_k=80,  warps=8,  stages=1),
    _fa1(max_dim=256, block_k=128, step_k=64,  warps=8,  stages=1),
)
# fmt: on

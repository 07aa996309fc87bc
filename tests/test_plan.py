"""The plan: which row serves and why not the others, its figures, and how it prints."""

import dataclasses
import itertools
import math
import random
import re
import statistics
from collections import Counter

import numpy as np
import pytest
from cases import device_of
from emulator.module import _SHARED_LIMITS
from hypothesis import given
from hypothesis import strategies as st
from scoring import form

import cuflash
from cuflash import reference
from cuflash.masks.band import Band
from cuflash.operands.dtypes import DOUBLE, HALF, ITEM_BYTES
from cuflash.planning import plan as planning
from cuflash.planning.estimate import estimate
from cuflash.planning.mma_float_gradients import FloatKeysTile
from cuflash.planning.plan import MOST_COMPARED, TILES, Plan, make_plan
from cuflash.planning.planes import PlanesTile
from cuflash.planning.planes_gradients import PlanesKeysTile
from cuflash.planning.problem import CPU, SHARED_BYTES, Device, Problem
from cuflash.planning.wgmma_short import WgmmaShortTile
from cuflash.planning.wgmma_wide import WgmmaWideTile
from cuflash.scores.score import softcap

H200 = Device(90, "NVIDIA H200", multiprocessors=132)
GPU_ROWS = [row for row in TILES if row.threads and not row.backward]
BACKWARD_ROWS = [row for row in TILES if row.threads and row.backward]
WITH_OTHERS = FloatKeysTile, PlanesKeysTile, WgmmaShortTile  # tests of their own say with which
ARCHES = (70, 75, 80, 86, 89, 90, 100, 120)


def problem(dtype="float16", leading=(2, 3), n=100, m=90, d=64, e=None, **more):
    return Problem(dtype, leading, n, m, d, d if e is None else e, heads=leading[-1], **more)


def backward(*args, **more):
    return problem(*args, backward=True, **more)


@pytest.mark.one_in(4)
@pytest.mark.no_cover
@pytest.mark.parametrize("row", GPU_ROWS, ids=str)
@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1000))
def test_grid_is_a_block_per_head_or_per_query_tile(row, leading, n):
    plan = Plan(problem(row.dtypes[0], (1, *leading), n), H200, row)
    heads, tiles = math.prod(leading), math.ceil(n / plan.block_q)
    most = 132 * row.blocks_per_multiprocessor
    blocks = {"fa1": heads, "fa2": heads * tiles, "fa3": min(heads * tiles, most)}
    assert plan.grid == blocks[row.algo]
    assert plan.block_q == row.warps // getattr(row, "split", 1) * row.warp_rows
    assert plan.threads == 32 * row.warps + (128 if row.engine == "wgmma" else 0)


@pytest.mark.one_in(4)
@pytest.mark.no_cover
@pytest.mark.parametrize(
    "row",
    [x for x in BACKWARD_ROWS if not isinstance(x, WITH_OTHERS)],
    ids=str,
)
@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1000), st.integers(0, 1000))
def test_backward_grid_is_a_block_per_head_or_per_key_tile(row, leading, n, m):
    plan = Plan(backward(row.dtypes[0], (1, *leading), n, m), H200, row)
    heads, tiles = math.prod(leading), math.ceil(m / plan.block_k)
    rows, main, dq = plan.kernels
    blocks = {"fa1": heads, "fa2": heads * tiles, "fa3": min(heads * tiles, 132)}
    assert plan.grid == main.grid == blocks[row.algo]
    assert rows.grid == heads * math.ceil(n / plan.block_q)
    assert rows.shared_bytes == 0
    assert main.shared_bytes == plan.shared_bytes <= H200.shared_bytes
    if row.engine != "wgmma":
        assert (main.threads, rows.threads) == (32 * row.warps, 32 * row.warps)
        assert plan.block_k == row.warps // row.split * row.warp_rows
    else:  # four warps that copy; a warpgroup has 64 keys, and both the same where heads are wide
        assert (main.threads, rows.threads) == (32 * row.warps + 128, 256)
        assert plan.block_k == (64 if plan.kernel == "hopper_backward_keys" else 128)
    if plan.kernel == "hopper_backward_keys":  # dq has a kernel that is like the main one
        tiles = heads * math.ceil(n / 128)
        assert dq.grid == (min(tiles, 132) if row.algo == "fa3" else tiles)
        assert dq.threads == main.threads
    else:
        assert (dq.grid, dq.threads) == (rows.grid, rows.threads)
        # On wgmma tiles are of dQ^T; mma writes whole rows by way of shared memory.
        of = row.turned_bytes if row.engine == "wgmma" else row.dq_rows_bytes
        assert dq.shared_bytes == of(plan.problem)


@pytest.mark.parametrize("row", GPU_ROWS + BACKWARD_ROWS, ids=str)
def test_rows_are_consistent(row):
    assert row.block_k % row.step_k == 0
    assert 32 <= 32 * row.warps <= 1024
    if row.engine == "mma":
        at_once = 2 * row.step_k if getattr(row, "trades", False) else row.step_k
        assert at_once % 16 == 0
    assert row.max_dim % 16 == 0
    if row.backward:
        assert row.block_q % row.step_q == 0
        if row.engine == "mma":
            # A sum of dQ has 32 queries of a warp or, of doubles and of planes, 16.
            halved = row.dtypes == DOUBLE or isinstance(row, FloatKeysTile)
            assert row.step_q % 8 == row.block_q % (16 if halved else 32) == 0


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("engine", ["simt", "mma"])
def test_extra_memory_is_bounded(algo, engine):
    for dtype in ITEM_BYTES:
        p = problem(dtype, e=48)
        parts = dict(make_plan(p, H200, algo, engine).workspace)
        marks = parts.pop("again", 0)  # of blocks that leave their rows to a kernel behind
        assert marks <= 4 * p.head_count * p.query_length
        state = sum(parts.values())
        bound = ITEM_BYTES[p.accumulator] * p.head_count * p.query_length * (48 + 2)
        assert (0 < state <= bound) if algo == "fa1" else state == 0
    assert make_plan(problem(), CPU, algo).workspace_bytes == 0


def test_forward_and_backward_plans_take_their_own_rows():
    for device, engine in ((CPU, "numpy"), (H200, "simt"), (H200, "mma")):
        for algo in ("fa1", "fa2"):
            for p in (problem(), backward()):
                plan = make_plan(p, device, algo, engine)
                assert plan.tile.backward == p.backward
                assert plan.kernel == f"{algo}_{'backward' if p.backward else 'forward'}"
                assert plan.kernel in [kernel.name for kernel in plan.kernels]
                assert all(row.backward == p.backward for row, _ in plan.rejected)


@pytest.mark.parametrize("n", [1, 192, 193, 4096])
def test_the_last_tile_of_queries_is_whole_on_hopper(n):
    p = Problem("bfloat16", (8, 32), n, 4096, 64, 64, heads=32)
    for algo in ("fa2", "fa3"):
        row = next(x for x in GPU_ROWS if (x.algo, x.block_q) == (algo, 192))
        plan = Plan(p, H200, row)
        assert (plan.query_lead + n) % 192 == 0
        assert 0 <= plan.query_lead < 192
    for other in (("fa1", "wgmma"), ("fa2", "mma")):
        assert make_plan(p, H200, *other).query_lead == 0
    masked = dataclasses.replace(p, mask="blocks")  # whose tiles begin at the first query
    assert make_plan(masked, H200, "fa3", "wgmma").query_lead == 0


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("engine", ["simt", "mma"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_workspace(algo, engine, deterministic):
    """Per query two numbers and a row of dQ; per tile a flag and a turn; nothing of size N x M.

    Blocks that add in order take tickets, so that they start in that order.
    """
    for dtype in ITEM_BYTES:
        if engine == "mma" and dtype == "float32":
            continue
        for d, e in ((64, 64), (17, 40), (128, 3)):
            p = backward(dtype, d=d, e=e, deterministic=deterministic)
            plan = make_plan(p, H200, algo, engine)
            parts, item = dict(plan.workspace), ITEM_BYTES[p.accumulator]
            queries = p.head_count * plan.query_tiles * plan.block_q
            assert list(parts) == ["row_stats", "dq_sum"] + ["turns", "tickets"] * plan.is_ordered
            assert plan.is_ordered == (deterministic and algo == "fa2")
            assert parts["row_stats"] == queries * 2 * item + p.head_count * plan.query_tiles * 16
            assert queries * d * item <= parts["dq_sum"] <= queries * (2 * d + 64) * item
            if plan.is_ordered:
                assert parts["turns"] == 4 * p.head_count * plan.query_tiles
                assert parts["tickets"] == 4
            ends = [size for _, size in plan.workspace]
            starts = [-(-size // 256) * 256 for size in ends[:-1]]
            assert plan.workspace_bytes == sum(starts) + ends[-1]
    assert make_plan(backward(), CPU, algo).workspace_bytes == 0
    assert make_plan(backward(), CPU, algo).workspace == ()


@pytest.mark.parametrize("algo", ["fa2", "fa3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_workspace_on_hopper(algo, deterministic):
    """As above, of rows of multiples of 32 numbers; two turns, of the warpgroups; and heads."""
    for d, e in ((64, 64), (40, 8), (72, 40), (128, 128)):
        many = backward(leading=(24, 12), d=d, e=e, deterministic=deterministic)
        plan = make_plan(many, H200, algo, "wgmma")
        tiles, ordered = 288 * plan.query_tiles, plan.is_ordered
        assert ordered == deterministic
        assert plan.workspace == (
            ("row_stats", tiles * (2 * plan.block_q * 4 + 16)),
            ("dq_sum", tiles * plan.block_q * -(-d // 32) * 32 * 4),
            *([("turns", tiles * 8)] * ordered),
            ("tickets", 4),
            ("located", 288 * 128),
        )


@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_a_block_on_hopper_sums_over_the_heads_that_share_its_keys(algo):
    """Where there are enough of them; else each head's gradients are kept, and summed later."""
    for leading, grouped in (((20, 4, 3), False), ((66, 4, 3), True)):
        p = problem("bfloat16", leading, 100, 100, backward=True, summed=(1, 3, 3), group=3)
        plan = make_plan(p, H200, algo, "wgmma")
        heads = math.prod(leading)
        assert plan.tile.grouped == grouped
        assert plan.tile.blocks(p) == (heads // 3 if grouped else heads)
        launches = {kernel.name: kernel.grid for kernel in plan.kernels}
        own = {} if grouped else {"hopper_sum_dk": heads // 3, "hopper_sum_dv": heads // 3}
        assert launches == {
            "backward_rows": heads, "hopper_backward": plan.grid, "hopper_sum_dq": heads, **own,
        }  # fmt: skip
        parts = dict(plan.workspace)
        for name in ("dk_sum", "dv_sum"):
            assert parts.get(name, 0) == (0 if grouped else heads * 128 * 64 * 4)
        batch = dataclasses.replace(p, summed=(1, heads, 3))  # beyond the group as well
        shared = make_plan(batch, H200, algo, "wgmma")
        assert [x.name for x in shared.kernels[3:]] == (
            ["hopper_sum_dk"] if grouped else ["hopper_sum_dk", "hopper_sum_dv"]
        )
        assert shared.kernels[3].grid == 1


def test_modified_scores_have_smaller_tiles_on_hopper():
    """To change them takes registers, and so does their derivative."""
    for d, queries, fewer in ((64, 128, 96), (128, 80, 64)):
        plan = make_plan(backward(n=600, d=d), H200, "fa3")
        assert plan.block_q == queries
        modified = make_plan(backward(n=600, d=d, score=form("score / 2")), H200, "fa3")
        assert modified.block_q == fewer
        assert "has no registers for modified scores" in dict(modified.rejected).values()


def test_a_softcap_has_smaller_tiles_in_wide_heads():
    """Where other changes of scores do not; nor has it in other heads."""
    for d, changed, capped in ((128, 80, 80), (256, 80, 64)):
        plans = [
            make_plan(problem(n=4096, m=4096, d=d, score=x), H200, "fa3")
            for x in (form("score / 2"), softcap(30.0).form)
        ]
        assert [x.block_k for x in plans] == [changed, capped]
        assert "is slow with a softcap" in dict(plans[1].rejected).values()


@pytest.mark.parametrize("summed", list(itertools.product((1, 2), (1, 3), (1, 6))))
def test_gradients_summed_over_heads(summed):
    """What heads share is kept per head, then summed by a block per row of heads and tile."""
    plan = make_plan(backward(summed=summed), H200, "fa2", "mma")
    launches = {kernel.name: kernel.grid for kernel in plan.kernels}
    shared = [name for name, heads in zip("kv", summed[1:], strict=True) if heads > 1]
    assert list(launches) == [
        "backward_rows", "fa2_backward", "sum_dq", *(f"sum_d{name}" for name in shared)
    ]  # fmt: skip
    parts = dict(plan.workspace)
    assert [f"d{name}_sum" for name in shared] == [x for x in parts if x in ("dk_sum", "dv_sum")]
    assert launches["sum_dq"] == 6 // summed[0] * plan.query_tiles
    for name, heads in zip("kv", summed[1:], strict=True):
        if heads > 1:
            assert launches[f"sum_d{name}"] == 6 // heads * plan.key_tiles
            assert parts[f"d{name}_sum"] == 6 * plan.key_tiles * plan.block_k * 64 * 4


def test_reasons_of_backward_rows():
    mma, large = (
        row for row in BACKWARD_ROWS
        if row.kind == "fa2 backward mma" and row.max_dim < 128 and row.dtypes == HALF
    )  # fmt: skip
    assert mma.reject(backward("float32"), H200) == "serves float16, bfloat16, not float32"
    assert mma.reject(backward(d=mma.max_dim + 1), H200) == (
        f"serves head dims up to {mma.max_dim}"
    )
    assert mma.reject(backward(), Device(75)) == "needs sm_80 or later, the device is sm_75"
    small = dataclasses.replace(H200, shared_bytes=1000)
    assert large.reject(backward(), small).endswith("shared memory, the device has 1000")
    with pytest.raises(
        NotImplementedError, match="queries 100, keys 90, .*, backward on"
    ) as caught:
        make_plan(backward("float32"), H200, "fa1", "mma")
    rows = [r for r in BACKWARD_ROWS if (r.algo, r.engine) == ("fa1", "mma")]
    assert str(caught.value).splitlines()[1:] == _of_other_types("fa1 backward mma", rows)
    with pytest.raises(NotImplementedError, match=", backward in any order on NVIDIA H200"):
        make_plan(backward("float32", deterministic=False), H200, "fa1", "mma")


def _of_other_types(kind, rows, dtype="float32", of_rows=()):
    """What a plan says of rows that do not serve a type."""
    counts = Counter(row.dtypes for row in rows)
    return [
        f"  {kind} ({counts[dtypes]} rows): serves {', '.join(dtypes)}, not {dtype}"
        for dtypes in of_rows or counts
    ]


MASKED_PLANS = [
    (make, algo, engine) for make in (problem, backward) for algo in ("fa1", "fa2")
    for engine in ("simt", "mma", "wgmma") if (make, algo, engine) != (backward, "fa1", "wgmma")
]  # fmt: skip


@pytest.mark.parametrize(("make", "algo", "engine"), MASKED_PLANS)
def test_lists_of_an_array_are_made_in_the_workspace(make, algo, engine):
    """A range per row of tiles; per tile a bit per element, an entry and a byte."""
    p = make(n=300, m=500, mask="elements", mask_lists=3, split_keys=0)
    plan = make_plan(p, H200, algo, engine)
    rows, columns = plan.tile.scored
    if p.backward:
        assert (rows, columns) == (plan.block_k, plan.block_q)
    else:
        by_step = plan.tile.warp_rows, plan.tile.step_k
        if engine == "wgmma":
            by_step = plan.block_q, plan.tile.step_k
        assert (rows, columns) == (by_step if algo == "fa1" else (plan.block_q, plan.block_k))
    lengths = (500, 300) if p.backward else (300, 500)
    down, across = math.ceil(lengths[0] / rows), math.ceil(lengths[1] / columns)
    assert plan.tile.scored_tiles(p) == (down, across)
    assert [kernel[:4] for kernel in plan.kernels[:2]] == [
        ("mask_tiles", 3 * down * across, 128, 0),
        ("mask_lists", 3 * down, 32, 0),
    ]
    parts = dict(plan.workspace)
    assert {name: parts.pop(name) for name in list(parts)[:4]} == {
        "mask_ranges": 3 * down * 8,
        "mask_entries": 3 * down * across * 16,
        "mask_bits": 3 * down * across * rows * 4 * math.ceil(columns / 32),
        "mask_states": 3 * down * across,
    }
    remembers = engine == "wgmma" and algo != "fa1" and not p.backward
    assert parts.pop("clean_values", 0) == remembers * 8 * p.head_count * plan.key_tiles
    # All else is as without a mask, but for bits in shared memory, or with a BlockMask, whose lists
    # are given.
    for mask in ("", "blocks"):
        other = dataclasses.replace(plan, problem=dataclasses.replace(p, mask=mask))
        assert [x[:3] for x in other.kernels] == [x[:3] for x in plan.kernels[2:]]
        staged = mask == "" and engine == "wgmma" and algo != "fa1"
        bits = {plan.kernel: staged * plan.tile.stages * rows * columns // 8}
        shared = [x[3] + bits.get(x.name, 0) for x in other.kernels]
        assert shared == [x[3] for x in plan.kernels[2:]]
        assert dict(other.workspace) == parts
    assert plan.workspace_bytes > sum(dict(plan.workspace).values()) - 256
    assert [x % 256 for x in plan.workspace_offsets.values()] == [0] * len(plan.workspace)


def test_the_numpy_engine_makes_no_lists():
    for make in (problem, backward):
        plan = make_plan(make(mask="elements", mask_lists=6), CPU)
        assert plan.workspace == ()
        assert "mask_tiles" not in [kernel.name for kernel in plan.kernels]


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_each_size_of_shared_memory_has_rows_of_tensor_cores(arch):
    """They are chosen by that size, so that another device's rows can be tried on an H200."""
    device = Device(arch, has_features=False)
    limited = Device(90, shared_bytes=SHARED_BYTES[arch], has_features=False)
    both = itertools.product((problem, backward), (32, 64, 128, 256))
    for make, d in (*both, *((problem, d) for d in (257, 288, 320, 400, 496, 512))):
        p = make("bfloat16", (4, 64), 1000, 1000, d)
        plan = make_plan(p, device, "fa2")
        assert plan.engine == "mma"
        assert plan.shared_bytes <= device.shared_bytes
        assert make_plan(p, limited, "fa2").tile == plan.tile


def test_tiles_that_lie_across_blocks_of_masks_do_not_serve():
    """Of the rows of mma that would be one of 48 keys."""
    p = problem(leading=(4, 64), n=1000, m=1000, d=128)
    chosen = make_plan(p, H200, engine="mma").tile
    odd = dataclasses.replace(chosen, block_k=48, step_k=48)
    assert odd.reject(p, H200) == chosen.reject(p, H200) == ""
    for mask in ("blocks", "elements"):
        masked = dataclasses.replace(p, mask=mask)
        reason = "its tiles of 128x48 lie across the blocks of masks"
        assert odd.reject(masked, H200) == reason
        assert chosen.reject(masked, H200) == ""
    for row in GPU_ROWS + BACKWARD_ROWS:
        of_row = problem(row.dtypes[0], mask="blocks", d=8, backward=row.backward)
        if isinstance(row, PlanesTile):  # whose tiles must also be those of the kernel behind
            continue
        if isinstance(row, WgmmaWideTile):  # of which test_wide_gradients.py has the reason
            continue
        odd = any(bin(size).count("1") > 1 for size in row.scored)  # no power of two
        reason = row.reject(of_row, device_of(row))
        assert reason if odd else "lie across" not in reason, row


@pytest.mark.parametrize("make", [problem, backward])
def test_places_in_lists_are_31_bits(make):
    row = make_plan(make(mask="blocks"), H200, "fa2", "simt").tile
    across = 1 << 15
    lengths = row.scored[0] * across, row.scored[1] * across  # 2^30 tiles
    n, m = lengths[::-1] if row.backward else lengths
    p = make("float16", (2, 3), n, m, mask="blocks", mask_lists=1)
    assert row.reject(p, H200) == ""
    for more in ({"mask_lists": 2}, {"query_length": 2 * n}, {"key_length": 2 * m}):
        large = dataclasses.replace(p, **more)
        assert row.reject(large, H200) == "the mask has more than 2^31 of its tiles"
        assert row.reject(dataclasses.replace(large, mask=""), H200) == ""
    p = dataclasses.replace(p, mask_lists=2, query_length=n - row.scored[row.backward])
    assert row.reject(p, H200) == ""


@pytest.mark.parametrize("make", [problem, backward])
def test_numbers_of_tiles_are_31_bits(make):
    most = make("float16", ((1 << 31) - 1,), 1, 1)
    assert make_plan(most, H200).grid > 0
    with pytest.raises(NotImplementedError, match=r"more than 2\^31 of its tiles"):
        make_plan(dataclasses.replace(most, leading=(1 << 31,)), H200)


@pytest.mark.parametrize("engine", ["mma", "wgmma"])
def test_ordered_blocks_are_of_heads_enough_and_of_what_the_cache_holds(engine):
    """Of long heads few fit into the cache, and many blocks of one would wait for each other."""
    device = Device(90, "NVIDIA H200", multiprocessors=132, cache_bytes=60 << 20)

    def heads(length, **more):
        p = backward("float16", (256,), length, length, **more)
        return make_plan(p, device, "fa2", engine).section

    window = Band(1 << 20, 0)  # under a causal mask alone the last tiles of keys may be first
    least = {"mma": 64, "wgmma": 16}[engine]  # columns of heads / 64, for each block
    length, least_open = {"mma": (4096, least), "wgmma": (8192, 8)}[engine]
    assert heads(length) == least_open > heads(length, deterministic=False)
    assert heads(32 << 10, band=window) == {"mma": 26, "wgmma": least}[engine]
    bytes_of_a_head = 512 * (4 * 64 * 2 + 64 * 4)  # Q, K, V, dO and the sums of dQ
    held = device.cache_bytes // 2 // bytes_of_a_head
    assert abs(heads(512) - held) <= held / 3  # sections are of one size
    lengths = [n << 10 for n in (32, 64, 128, 256, 1024)]
    caches = {"mma": [13, 6, 4, 1, 1], "wgmma": [6, 2, 1, 1, 1]}[engine]
    assert [heads(n) for n in lengths] == caches
    assert [heads(n, band=window) for n in lengths[1:]] == [13, 6, 4, 1]


def order_of_keys(dim, length, heads=64, **more):
    """Heads that Hopper's blocks work on at a time under a causal mask, whether the last tiles of
    keys are first and whether a quarter of them is late.
    """
    h100 = Device(90, "NVIDIA H100", multiprocessors=132, cache_bytes=50 << 20)
    problem = backward("float16", (heads,), length, length, dim, **{"band": Band(right=0), **more})
    plan = make_plan(problem, h100, "fa3", "wgmma")
    constants = plan.tile.constants(plan.problem)
    return plan.section, constants["LAST_KEYS_FIRST"], constants["LATE_QUARTER"]


def test_the_last_tiles_of_keys_add_first_under_a_causal_mask_where_heads_are_small():
    """Few heads at a time then, as nobody waits; more where turns come fast."""
    found = [order_of_keys(128, n << 10) for n in (1, 4, 8, 16, 32)]
    assert found == [(8, 1, 1), (2, 1, 1), (2, 1, 1), (2, 1, 1), (8, 0, 0)]
    found = [order_of_keys(64, n << 10, heads=128) for n in (1, 4, 16, 32, 64)]
    assert found == [(32, 1, 1), (8, 1, 1), (4, 1, 1), (4, 1, 1), (10, 0, 0)]
    for more in [{"band": Band()}, {"band": Band(100, 0)}, {"band": Band(0)}, {"mask": "blocks"}]:
        assert order_of_keys(64, 4096, **more)[1:] == (False, False), more
    assert not order_of_keys(64, 4096, deterministic=False)[1]


def test_tiles_of_keys_under_an_array_of_bool_are_not_late():
    for length, first in ((8 << 10, True), (32 << 10, False)):
        assert order_of_keys(64, length, mask="elements")[1:] == (first, False)


def test_packed_sequences_have_the_order_of_keys_of_a_batch():
    """So that bits are the same. It is added up where the early and late tiles of each begin."""
    for length, sequences in ((1024, 16), (1024, 64), (4096, 1), (4096, 16), (65536, 2)):
        packed = {"sequences": sequences, "longest": (length, length)}
        own = order_of_keys(64, sequences * length, heads=16, **packed)
        batch = order_of_keys(64, length, heads=16 * sequences)
        assert own[1:] == batch[1:], (length, sequences)
    short = {"sequences": 256, "longest": (300, 300)}
    assert order_of_keys(64, 256 * 300, heads=16, **short)[1:] == (True, False), "three tiles"
    p = backward("float16", (16,), 65_000, 65_000, band=Band(right=0), sequences=16)
    p = dataclasses.replace(p, longest=(4096, 4096))
    plan = make_plan(p, H200, "fa2", "wgmma")
    assert plan.grid == 16 * (507 + 17)
    assert dict(plan.workspace)["key_places"] == 8 * 18


@pytest.mark.parametrize("arch", [80, 89, 90, 120])
@pytest.mark.parametrize(("more", "queries"), [
    ({}, 64), ({"dropout": True}, 32), ({"score": softcap(30.0).form}, 32), ({"mask": "blocks"}, 64)
])  # fmt: skip
def test_narrow_heads_score_half_as_many_queries_at_once_with_dropout_or_a_softcap(
    arch, more, queries
):
    """So that none spills."""
    p = backward("bfloat16", (2, 3), 500, 500, 32, **more)
    plan = make_plan(p, Device(arch), "fa2", "mma")
    assert f"STEP_Q = {queries};" in plan.source()


@pytest.mark.parametrize("band", [Band(), Band(right=0)], ids=["full", "causal"])
def test_all_heads_at_a_time_where_tiles_of_keys_are_few(band):
    """So few blocks of one head wait for each other. Heads are few then, or the cache has them."""

    def takes_all(dim, length, heads, **more):
        found = order_of_keys(dim, length, heads, band=band, **more)
        assert not (found[1] and found[0] == heads)
        return found[0] == heads

    assert takes_all(128, 4096, 32)  # 1024 tiles of 128 keys for 132 multiprocessors
    assert not takes_all(128, 5120, 32)
    assert takes_all(128, 1024, 32)
    assert not takes_all(128, 1024, 64)
    assert takes_all(64, 2048, 32)
    assert not takes_all(64, 2048, 48)
    assert takes_all(64, 1024, 64) == (band == Band())  # a tile has eight steps
    assert not takes_all(64, 1024, 96)
    assert not takes_all(128, 4096, 32, mask="elements")
    grouped = {"group": 4, "summed": (1, 4, 4)}
    assert takes_all(128, 8192, 32, **grouped) == (band == Band())  # 8 groups of four heads


@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_no_queries_are_served_by_hopper_as_few_are(algo):
    for dim in (8, 64, 96, 128, 192, 256):
        assert make_plan(backward(n=0, d=dim), H200, algo, "wgmma").engine == "wgmma"


def test_short_heads_have_smaller_tiles_of_queries():
    """Above head dim 64, and longer ones under a band."""

    def planned(length, dim, **more):
        return make_plan(backward("bfloat16", (4, 16), length, length, dim, **more), H200).block_q

    causal = {"band": Band(right=0)}
    for dim, queries in ((64, 128), (96, 96), (128, 80)):
        short = min(queries, 64) if dim > 64 else queries
        assert [planned(n, dim) for n in (100, 512, 513, 4096)] == [short, short, queries, queries]
        assert [planned(n, dim, **causal) for n in (512, 1024, 1025)] == [short, short, queries]
        assert planned(1024, dim, band=Band(100, 0)) == short
    packed = backward("bfloat16", (4,), 40 * 512, 40 * 512, 128, sequences=40)
    packed = dataclasses.replace(packed, longest=(512, 512))
    assert make_plan(packed, H200).block_q == 64, "as a batch of such lengths"
    rejected = make_plan(backward(n=512, d=128), H200, "fa3").rejected
    assert "takes 513 queries, smaller tiles are faster for 512" in dict(rejected).values()


def test_heads_of_large_groups_have_blocks_each_where_the_longest_tiles_come_last():
    def is_grouped(group, length, **more):
        p = backward("bfloat16", (16, 32), length, length, 128, **{"band": Band(right=0), **more})
        p = dataclasses.replace(p, summed=(1, group, group), group=group)
        return make_plan(p, H200, "fa3").tile.grouped

    assert [is_grouped(4, n) for n in (4095, 4096)] == [True, False]
    assert [is_grouped(8, n) for n in (2047, 2048)] == [True, False]
    assert is_grouped(2, 16384), "so few end late by little"
    for more in {"band": Band()}, {"band": Band(100, 0)}, {"deterministic": False}:
        assert is_grouped(4, 4096, **more), more


def test_heads_that_blocks_of_any_order_begin_with_fill_the_multiprocessors_once():
    """A quarter of that without a band, and no more than eight of them."""

    def section(length, dim=128, **more):
        given = {"band": Band(right=0), "deterministic": False, **more}
        return make_plan(backward("bfloat16", (64,), length, length, dim, **given), H200).section

    lengths = 100, 1024, 4096, 8192, 16384, 32768
    for dim in (64, 128, 256):
        assert [section(n, dim) for n in lengths] == [8, 8, 4, 2, 1, 1]
        assert [section(n, dim, band=Band()) for n in lengths] == [8, 4, 1, 1, 1, 1]
    masked = [section(n, mask="blocks") for n in lengths]
    assert masked == sorted(masked, reverse=True)
    assert masked[0] > 8, "as the cache holds"


def test_heads_come_one_by_one_where_their_tiles_take_equally_long():
    """So few heads' keys come from memory at a time. Else as many as blocks begin with come."""

    def section(length=512, algo="fa3", **more):
        p = problem("bfloat16", (16, 32), length, length, **more)
        rows = [x for x in TILES if (x.algo, x.engine) == (algo, "wgmma") and not x.backward]
        return Plan(p, H200, next(x for x in rows if x.block_q == 128)).section

    assert section() == section(197) == section(kv_lengths="int32") == 1
    assert section(192) == 64  # of two tiles; sections are of one size
    assert section(q_lengths="int32") == 32
    assert section(band=Band(right=0)) == 32 < section(1025, band=Band(right=0))
    for more in {"band": Band(left=100, right=0)}, {"algo": "fa2"}, {"mask": "blocks"}:
        assert section(**more) > 64, more


def test_ordered_blocks_of_a_mask_of_blocks_are_of_all_heads():
    """An array of bool leaves most tiles in the order of a call without it."""

    def section(**more):
        p = backward("float16", (4, 64), 4096, 4096, **more)
        return make_plan(p, H200, "fa2", "mma").section

    assert section(mask="blocks") == 256
    assert section(mask="elements") == section() < 256
    for mask in ("blocks", "elements"):
        assert 1 <= section(mask=mask, deterministic=False) == section(deterministic=False) < 64
    p = problem("float16", (4, 64), 4096, 4096)
    masked = dataclasses.replace(p, mask="blocks")
    assert make_plan(p, H200).section < make_plan(masked, H200).section < 64
    nothing = Plan(backward("float16", (0, 3), mask="blocks"), H200, BACKWARD_ROWS[0])
    assert nothing.section == 1


def test_the_longest_rows_come_first_unless_a_band_or_lengths_say_which():
    def is_longest_first(**more):
        return make_plan(problem(**more), H200).is_longest_first

    assert is_longest_first(mask="blocks")
    assert not is_longest_first()
    assert not is_longest_first(mask="elements")  # whose lists are made on the device
    assert not is_longest_first(mask="blocks", band=Band(right=0))
    assert not is_longest_first(mask="blocks", kv_lengths="int32")
    assert not is_longest_first(mask="blocks", q_lengths="int64")


def test_problems_name_the_kind_of_mask():
    for mask in ("blocks", "elements"):
        p = problem(mask=mask, band=Band(right=0), q_lengths="int32")
        assert f", {p.band}, mask of {mask}, q_lengths" in str(p)
        assert f", mask of {mask}, q_lengths" in str(make_plan(p, H200))
        assert p.flops == problem(band=Band(right=0)).flops
        assert make_plan(p, H200) != make_plan(dataclasses.replace(p, mask_lists=2), H200)
    with pytest.raises(NotImplementedError, match="head dim 5000, mask of blocks on NVIDIA"):
        make_plan(problem(d=5000, mask="blocks"), H200)


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, 3, (5, None), (None, 2), (2**80, 1), (2**63 - 1,) * 2])
def test_flops_are_those_of_the_visible_pairs(causal, window):
    band = Band.from_options(causal, window)
    for n, m in ((9, 9), (4, 13), (13, 4), (0, 3), (3, 0)):
        p = problem(n=n, m=m, d=8, e=5, band=band)
        pairs = int(reference.visible_keys((n, m), causal=causal, window=window).sum())
        assert p.flops == 2 * (8 + 5) * pairs * 6
        assert make_plan(p, H200).flops == p.flops
        of_gradients = backward(n=n, m=m, d=8, e=5, band=band)
        assert of_gradients.flops == 2 * (3 * 8 + 2 * 5) * pairs * 6


@pytest.mark.no_cover
@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_shared_memory_fits_the_device(arch, algo):
    device = Device(arch)
    for dtype in ITEM_BYTES:
        for d in (1, 16, 40, 64, 65, 128, 200, 256, 320, 512):
            for engine in ("simt", "mma"):
                for n in (1, 64, 4096):
                    for make in (problem, backward):
                        try:
                            plan = make_plan(make(dtype, (2, 64), n, n, d), device, algo, engine)
                        except NotImplementedError:
                            continue
                        assert 0 < plan.shared_bytes <= SHARED_BYTES[arch]
                        assert d <= plan.tile.max_dim


def test_the_emulator_has_as_much_shared_memory():
    assert {10 * arch: most for arch, most in SHARED_BYTES.items()} == _SHARED_LIMITS


def served(dtype, algo, arch, d, make=problem):
    """Whether any engine serves, with many blocks and with few."""
    for heads in (1, 4096):
        try:
            make_plan(make(dtype, (heads,), 64, 64, d), Device(arch), algo)
        except NotImplementedError:
            return False
    return True


@pytest.mark.one_in(4)
@pytest.mark.no_cover
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_head_dim_is_served(dtype, algo, arch):
    """Those around multiples of 8, where rows end."""
    dims = [d for d in range(1, 513) if d % 8 in (0, 1)]
    for make in (problem, backward):
        assert [d for d in dims if served(dtype, algo, arch, d, make)] == dims


def widest(dtype, arch, make):
    """The widest heads that are served, in steps of 16."""
    dims = [d for d in range(16, 2048, 16) if served(dtype, "fa2", arch, d, make)]
    assert dims == [*range(16, dims[-1] + 1, 16)]
    return dims[-1]


@pytest.mark.parametrize("arch", [70, 75, 80, 86, 90, 120])
@pytest.mark.parametrize("make", [problem, backward])
def test_the_widest_heads(make, arch):
    """Shared memory of 64 KB, and of 96 KB, holds few rows of float64."""
    limits = {75: (656, 640), 70: (1008, 960)}.get(arch, (1024, 1024))
    assert widest("float64", arch, make) == limits[make is backward]
    assert {widest(x, arch, make) for x in ("float16", "float32")} == {1024}
    with pytest.raises(NotImplementedError, match="serves head dims up to 1024"):
        make_plan(make("float32", d=1025), Device(arch))


@pytest.mark.parametrize("arch", [70, 75, 80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_default_calls_serve_every_head_dim_of_the_contract(dtype, arch):
    for d in (1, 64, 128, 176, 256, 257, 320, 512):
        assert served(dtype, None, arch, d)
        assert served(dtype, None, arch, d, backward)


def test_reasons():
    def reason(row, p=None, device=H200):
        return row.reject(p or problem(), device)

    mma = next(row for row in GPU_ROWS if row.engine == "mma" and row.algo == "fa2")
    simt = next(row for row in GPU_ROWS if row.engine == "simt" and row.algo == "fa2")
    single = next(row for row in GPU_ROWS if "float64" not in row.dtypes and row.engine == "simt")
    few, cpu = [row for row in TILES if row.kind == "fa2 numpy"]
    many = problem(leading=(64, 64))
    assert reason(cpu) == "the numpy engine works on NumPy arrays"
    assert reason(cpu, device=CPU) == ""
    assert reason(few, device=CPU) == "is for up to 16 queries, these are 100"
    assert reason(simt, device=CPU) == "the simt engine works on CuPy arrays"
    assert reason(mma, problem("float32")) == "serves float16, bfloat16, not float32"
    assert reason(single, problem("float64")).endswith(", not float64")
    assert reason(mma, many, Device(75)) == "needs sm_80 or later, the device is sm_75"
    assert reason(simt, problem(d=simt.max_dim + 1)) == f"serves head dims up to {simt.max_dim}"
    assert reason(simt, problem(d=1, e=999)) == f"serves head dims up to {simt.max_dim}"
    small = dataclasses.replace(H200, shared_bytes=1000)
    assert reason(mma, many, small).endswith(" bytes of shared memory, the device has 1000")
    filled = dataclasses.replace(mma, fill=1.0)
    assert reason(filled, problem(leading=(2, 3), n=1)) == (
        "its 6 blocks leave too much of 132 multiprocessors idle"
    )
    assert reason(filled, many) == ""


def hopper(p=None, device=H200, algo="fa3"):
    """Why the engine wgmma does not serve, or an empty string."""
    try:
        return "" if make_plan(p or problem(), device, algo, "wgmma") else None
    except NotImplementedError as error:
        return str(error).splitlines()[1].partition(": ")[2]


def test_hopper_serves_or_says_why_not():
    assert hopper() == hopper(algo="fa2") == hopper(problem("bfloat16", d=256, e=8)) == ""
    assert hopper(algo="fa1") == hopper(problem("bfloat16", d=8, e=256), algo="fa1") == ""
    assert hopper(problem("float32")) == ""
    assert hopper(problem("float32"), algo="fa1") == "serves float16, bfloat16, not float32"
    assert hopper(device=Device(80)) == "needs sm_90, the device is sm_80"
    unused = "needs sm_90, the device is sm_100, whose tcgen05 no kernel uses"
    assert hopper(device=Device(100)) == unused
    assert hopper(device=Device(120)) == "needs sm_90, the device is sm_120"
    assert hopper(device=Device(90, has_features=False)) == "needs NVRTC 12.9 or later"
    assert hopper(problem(d=60)) == "serves head dims that are multiples of 8"
    assert hopper(problem(e=60)) == "serves head dims that are multiples of 8"
    assert hopper(problem(aligned=False)) == "needs rows aligned to 16 bytes"
    assert hopper(problem(unmappable="its strides")) == "its strides"
    assert hopper(device=CPU) == "the wgmma engine works on CuPy arrays"
    for d in (64, 128, 256):
        assert hopper(backward(d=d)) == hopper(backward(d=d), algo="fa2") == ""
    with pytest.raises(NotImplementedError, match="backward on .*:\n  there is no kernel of that"):
        make_plan(backward(), H200, "fa1", "wgmma")


def test_fa1_on_hopper_keeps_its_state_tile_by_tile():
    """A row of O is as wide as registers hold it, and l and m stand behind."""
    for d, e, n in ((64, 64, 100), (64, 40, 1000), (128, 128, 129), (256, 8, 1)):
        plan = make_plan(problem(d=d, e=e, n=n), H200, "fa1", "wgmma")
        assert (plan.kernel, plan.grid) == ("hopper_fa1_forward", 6)
        rows = math.ceil(n / plan.block_q) * plan.block_q
        assert plan.workspace == (("state", 6 * rows * (math.ceil(e / 32) * 32 + 2) * 4),)


def test_fa1_on_hopper_has_key_tiles_as_large_as_shared_memory_holds():
    rows = [row for row in GPU_ROWS if (row.algo, row.engine) == ("fa1", "wgmma")]
    for row in rows:
        p = problem(d=row.max_dim)
        assert row.block_k % row.step_k == 0
        assert row.shared_bytes(p) <= H200.shared_bytes
        larger = dataclasses.replace(row, block_k=row.block_k + row.step_k)
        assert larger.shared_bytes(p) > H200.shared_bytes
    masked = make_plan(problem(d=64, mask="blocks"), H200, "fa1", "wgmma")
    assert masked.tile.scored == (128, 128)  # blocks of masks are powers of two


def test_hopper_serves_what_fills_it():
    """By default as fa3; fa2 and fa1 have the engine, too."""
    large = problem("bfloat16", (8, 64), 1000, 1000)
    for engine in (None, "wgmma"):
        assert make_plan(large, H200, "fa1", engine).kernel == "hopper_fa1_forward"
    for algo, engine in ((None, None), (None, "wgmma"), ("fa3", None), ("fa2", None)):
        plan = make_plan(large, H200, algo, engine)
        assert (plan.algo, plan.kernel) == (algo or "fa3", "hopper_forward")
        assert plan.engine == "wgmma"
        assert plan.compile_options == ("-arch=sm_90a",)
    rejected = [row for row, _ in make_plan(large, H200).rejected if "bfloat16" in row.dtypes]
    assert not [row for row in rejected if row.max_dim == 64]
    assert make_plan(large, H200, engine="mma").engine == "mma"
    for p, *chosen in (  # however few the blocks are
        (dataclasses.replace(large, backward=True), "hopper_backward", "fa3"),
        (backward(), "hopper_backward_short", "fa2"),
    ):
        gradients = make_plan(p, H200)
        assert [gradients.kernel, gradients.algo] == chosen
    for choice in ({"algo": "fa3"}, {"engine": "wgmma"}):  # few blocks: better than none
        assert make_plan(problem(), H200, **choice).algo == "fa3"


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"dtype": "float16", "head_dim": 20}, {}, "serves head dims that are multiples of 8"),
        ({"unmappable": "its strides"}, {}, "its strides"),
        ({"aligned": False}, {}, "needs rows aligned to 16 bytes"),
        ({}, {"arch": 80}, "needs sm_90, the device is sm_80"),
        ({}, {"arch": 100}, "needs sm_90, the device is sm_100, whose tcgen05 no kernel uses"),
        ({}, {"has_features": False}, "needs NVRTC 12.9 or later"),
    ],
)
@pytest.mark.parametrize("algo", [None, "fa2"])
def test_mma_serves_what_hopper_does_not_and_the_plan_says_why(algo, changes, device, reason):
    large = problem("bfloat16", (8, 64), 64, 64)
    plan = make_plan(
        dataclasses.replace(large, **changes), dataclasses.replace(H200, **device), algo
    )
    assert (plan.algo, plan.engine, plan.compile_options) == ("fa2", "mma", ())
    of_type = [x for x in plan.rejected if plan.problem.dtype in x[0].dtypes]
    assert {why for row, why in of_type if row.engine == "wgmma"} == {reason}
    assert f": {reason}\n" in f"{plan}\n"


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"head_dim": 20}, {}, "serves head dims that are multiples of 8"),
        ({"value_dim": 264}, {}, "serves head dims up to 256"),
        ({"unmappable": "its strides"}, {}, "its strides"),
        ({"aligned": False}, {}, "needs rows aligned to 16 bytes"),
        ({}, {"arch": 80}, "needs sm_90, the device is sm_80"),
        ({}, {"has_features": False}, "needs NVRTC 12.9 or later"),
    ],
)
def test_mma_computes_the_gradients_that_hopper_does_not(changes, device, reason):
    gradients = dataclasses.replace(backward("bfloat16", (8, 64), 64, 64), **changes)
    plan = make_plan(gradients, dataclasses.replace(H200, **device))
    assert (plan.algo, plan.engine) == ("fa2", "mma")
    reasons = [why for row, why in plan.rejected if row.engine == "wgmma" and not row.grouped]
    assert reason in reasons
    assert f": {reason}\n" in f"{plan}\n"


@pytest.mark.parametrize("arch", [80, 86, 87, 89, 90, 100, 120])
@pytest.mark.parametrize("algo", [None, "fa1"])
def test_tensor_cores_compute_gradients_of_head_dims_up_to_512(arch, algo):
    for dtype, (d, e), ordered in itertools.product(
        HALF, [(257, 257), (300, 8), (8, 300), (384, 384), (512, 64), (64, 512), (512, 512)],
        (True, False),
    ):  # fmt: skip
        gradients = backward(dtype, n=4096, m=4096, d=d, e=e, deterministic=ordered)
        plan = make_plan(gradients, Device(arch), algo)
        assert (plan.algo, plan.engine, plan.tile.max_dim) == (algo or "fa2", "mma", 512)
        assert plan.shared_bytes <= Device(arch).shared_bytes
    plan = make_plan(backward("bfloat16", d=513), Device(arch), algo)
    assert plan.engine == "simt"
    assert "serves head dims up to 512" in dict(plan.rejected).values()
    assert make_plan(backward("float32", d=300), Device(arch), algo).engine == "simt"


def test_wide_heads_take_the_larger_tiles_that_have_room():
    def tiles(arch, dim):
        tile = make_plan(backward("bfloat16", d=dim), Device(arch)).tile
        return tile.block_q, tile.block_k

    assert [tiles(90, x) for x in (264, 512)] == [(64, 32)] * 2
    assert [tiles(80, x) for x in (400, 416, 512)] == [(64, 32), (32, 32), (32, 32)]
    assert [tiles(86, x) for x in (264, 352, 368, 512)] == [(32, 32)] * 2 + [(32, 16)] * 2


def test_nothing_serves():
    with pytest.raises(NotImplementedError) as caught:
        make_plan(problem("float64", d=64), H200, "fa3", "wgmma")
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "no kernel serves float64 heads 2x3, queries 100, keys 90, head dim 64 on NVIDIA H200 "
        "(sm_90) with algo='fa3', engine='wgmma':"
    )
    rows = [row for row in GPU_ROWS if (row.algo, row.engine) == ("fa3", "wgmma")]
    assert lines[1:] == _of_other_types("fa3 wgmma", rows, "float64", (HALF, ("float32",)))
    with pytest.raises(NotImplementedError, match=r"head dim 5000 on GPU \(sm_80\):\n"):
        make_plan(problem(d=5000), Device(80))


def test_unknown_choices():
    with pytest.raises(
        ValueError, match="algo='flash': choose one of 'fa1', 'fa2', 'fa3', or None"
    ):
        make_plan(problem(), CPU, "flash")
    with pytest.raises(
        ValueError, match="engine='cpu': choose one of 'numpy', 'simt', 'mma', 'wgmma', or"
    ):
        make_plan(problem(), CPU, None, "cpu")


def test_rows_that_do_not_serve_are_listed_with_their_reasons():
    plan = make_plan(problem("float32", (1,), 4, 4, 32), H200)
    rows = [row for row in TILES if row.algo != "fa1" and not row.backward]
    listed = [row for row, _ in plan.rejected]
    serving = [row for row in rows if row not in listed and row.max_dim <= MOST_COMPARED]
    assert listed == [row for row in rows if row in listed]
    bare = [dataclasses.replace(tile, packed=1, span=0) for tile, _ in plan.others]
    chosen = dataclasses.replace(plan.tile, packed=1, span=0)
    assert sorted(map(str, serving)) == sorted(map(str, [chosen, *bare]))
    assert all(reason for _, reason in plan.rejected)
    lines = [line for line in str(plan).splitlines() if line.startswith("rejected")]
    assert len(lines) == len({reason for _, reason in plan.rejected}) < len(plan.rejected)
    gradients = make_plan(backward("float32", (1,), 4, 4, 32), H200)  # the first row that serves
    rows = [row for row in TILES if row.algo != "fa1" and row.backward]
    assert [row for row, _ in gradients.rejected] == rows[: rows.index(gradients.tile)]


def rows_of(text, kind):
    """How many rows of a kind a line of reasons counts."""
    return int((re.search(rf"{kind} \((\d+) rows?\)", text) or [0, 0])[1])


def test_reasons_are_said_once():
    """In the order of their first rows; one row alone is said to be which."""
    half = "serves float16, bfloat16, not float32"
    plan = make_plan(problem("float32", (1,), 4, 4, 32), H200)
    reasons = [x for x in str(plan).splitlines() if x.startswith("rejected")]
    first, double, turing, second, _ = reasons
    assert first.startswith("rejected   fa3 wgmma (")
    assert first.endswith(f"rows): {half}")
    for kind in ("fa3 wgmma", "fa2 wgmma", "fa2 mma"):
        rows = [row for row, why in plan.rejected if (row.kind, why) == (kind, half)]
        assert rows_of(first, kind) == len(rows) > 1
    assert double.startswith("rejected   fa2 mma (")
    assert double.endswith("rows): serves float64, not float32")
    assert turing.endswith("rows): serves float16, not float32")
    alone = next(row for row, why in plan.rejected if why == "serves head dims up to 16")
    assert second == f"rejected   {alone}: serves head dims up to 16"
    with pytest.raises(NotImplementedError) as caught:
        make_plan(backward(d=1100), H200, "fa2")
    _, *lines = str(caught.value).splitlines()
    assert sum(rows_of(line, "fa2 backward mma") for line in lines) >= 2
    assert lines[-1] == "  fa2 numpy 2048x512: the numpy engine works on NumPy arrays"
    reasons = [line.split(": ")[1] for line in lines]
    assert len(set(reasons)) == len(reasons)


def test_printing():
    p = problem(e=32, n=512, m=512, band=Band(right=0), score=form("score * 2"), kv_lengths="int32",
                aligned=False)  # fmt: skip
    plan = make_plan(p, H200, "fa1", "mma")
    lines = dict(line.split(maxsplit=1) for line in str(plan).splitlines())
    assert lines["problem"] == (
        "float16 heads 2x3, queries 512, keys 512, head dim 64, value dim 32, "
        f"{p.band}, score score * 2, kv_lengths, rows not aligned to 16 bytes"
    )
    assert lines["device"] == "NVIDIA H200 (sm_90)"
    assert lines["kernel"] == "fa1_forward, algo fa1, engine mma"
    assert lines["tiles"].startswith(
        f"{plan.block_q} queries x {plan.block_k} keys, {plan.stages} "
    )
    assert lines["block"] == f"{plan.threads} threads, {plan.shared_bytes} bytes of shared memory"
    assert lines["grid"] == "6 blocks"
    assert lines["workspace"] == f"{6 * 512 * 34 * 4} bytes"
    assert lines["work"] == f"{plan.flops / 1e9:.3f} GFLOP"
    gradients = make_plan(backward(n=512, m=512), H200, "fa2", "mma")
    assert "head dim 64, backward\n" in str(gradients)
    assert "\nkernel     fa2_backward, algo fa2, engine mma\n" in str(gradients)
    assert f"\nworkspace  {gradients.workspace_bytes} bytes\n" in str(gradients)
    turns = dict(gradients.workspace)["turns"]
    sums = dict(gradients.workspace)["dq_sum"]
    order = "the same each time: blocks take turns at a tile of dQ"
    assert f"\norder      {order}, dq_sum {sums} bytes, turns {turns} bytes\n" in str(gradients)
    free = make_plan(backward(n=512, m=512, deterministic=False), H200, "fa2", "mma")
    order = f"any: blocks add to a tile of dQ as they come, dq_sum {sums} bytes"
    assert f"\norder      {order}\n" in str(free)
    for alone in (make_plan(backward(), H200, "fa1"), make_plan(backward(d=256), H200)):
        assert "\norder      the same each time: one block adds to a tile of dQ" in str(alone)
    assert "\norder" not in str(make_plan(backward(leading=(1,)), CPU))
    assert "\norder" not in str(plan)
    cpu = str(make_plan(problem(leading=(1,)), CPU))
    assert "device     CPU\nkernel     fa2_forward, algo fa2, engine numpy\n" in cpu
    assert "\ngrid" not in cpu
    assert make_plan(problem(), CPU).shared_bytes == make_plan(problem(), CPU).threads == 0
    assert str(Problem("float32", (), 1, 2, 3, 3)) == (
        "float32 heads 1, queries 1, keys 2, head dim 3"
    )


@pytest.mark.parametrize(
    ("make", "engine"), [(problem, "mma"), (problem, "wgmma"), (backward, "wgmma")]
)
def test_plans_of_planes_say_what_is_left_and_what_it_costs(make, engine):
    plan = make_plan(make("float32", (4, 16), 4096, 4096), H200, "fa2", engine)
    sizes = {x: size for x, size in plan.workspace if "plane" in x or x in ("held_heads", "again")}
    left = {x.name for x in plan.kernels if plan.tile.of_kernel(x.name).engine == "simt"}
    (line,) = [x for x in str(plan).splitlines() if x.startswith("behind")]
    name, text = line.removeprefix("behind     ").split(" on simt, ")
    assert name in left
    assert text == (
        "for what planes do not hold: takes as long as simt does for these heads or rows, on top; "
        f"planes and marks {sum(sizes.values())} bytes"
    )
    assert "k_planes" in sizes
    assert ("q_planes" in sizes) == (make is backward)  # the forward pass makes those as it goes
    assert "\nbehind" not in str(make_plan(make("float32", d=64), H200, "fa2", "simt"))


def test_few_keys_become_planes_on_mma_as_they_are_read():
    """What makes them before would take longer than the rest."""
    plan = make_plan(problem("float32", (1,), 64, 64), H200, "fa2", "mma")
    assert "k_planes" not in dict(plan.workspace)
    assert "\nbehind" in str(plan)


def test_devices():
    assert str(CPU) == "CPU"
    assert str(Device(80)) == "GPU (sm_80)"
    assert Device(80).shared_bytes == 166912
    assert Device(999).shared_bytes == 49152  # what every device has
    assert Device(80, shared_bytes=5).shared_bytes == 5
    assert cuflash.Device is Device


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (("H200",), TypeError, "arch='H200': give an integer, compute capability times ten, as 90"),
        ((9.0,), TypeError, "arch=9.0: give an integer, compute capability times ten"),
        ((True,), TypeError, "arch=True: give an integer"),
        ((None,), TypeError, "arch=None: give an integer"),
        ((61,), ValueError, "arch=61: give compute .*or 0 for the CPU; GPUs are served from 70 on"),
        ((9,), ValueError, "arch=9: give compute capability times ten"),
        ((-90,), ValueError, "arch=-90: give compute capability times ten"),
        ((9000,), ValueError, "arch=9000: give compute capability times ten"),
        ((90, 132), TypeError, "name=132: give a string"),
        ((90, "", 0), ValueError, "multiprocessors=0: give how many there are, 1 or more"),
        ((90, "", 1.5), TypeError, "multiprocessors=1.5: give an integer, how many there are"),
        ((90, "", 1, -1), ValueError, "shared_bytes=-1: give bytes of one block, or 0 for"),
        ((90, "", 1, "48K"), TypeError, "shared_bytes='48K': give an integer, bytes"),
        ((90, "", 1, 0, -1), ValueError, "cache_bytes=-1: give bytes, 0 or more"),
        ((90, "", 1, 0, None), TypeError, "cache_bytes=None: give an integer, bytes"),
        ((90, "", 1, 0, 0, "12.9"), TypeError, "has_features='12.9': give True or False"),
    ],
    ids=str,
)
def test_devices_that_are_none(given, kind, message):
    with pytest.raises(kind, match=message):
        Device(*given)


def test_devices_of_numpys_integers():
    device = Device(np.int64(90), multiprocessors=np.int32(132))
    assert device == Device(90, multiprocessors=132)
    assert str(device) == "GPU (sm_90)"
    assert type(device.arch) is type(device.multiprocessors) is int


def test_plans_are_values():
    a = make_plan(problem(), H200)
    assert make_plan(problem(), dataclasses.replace(H200)) is a  # equal arguments, one plan
    same = make_plan(problem(), H200, a.algo)
    assert same == a
    assert hash(same) == hash(a)
    assert make_plan(problem(n=101), H200) != a
    assert len({a, make_plan(problem(), H200, "fa1"), make_plan(problem(), CPU)}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.problem = None


def test_planning_needs_no_gpu_and_no_arrays_values():
    x = np.empty((1, 2, 3, 4), np.float32)
    plan = cuflash.plan(x, x, x, device=H200)
    assert isinstance(plan, Plan)
    assert plan.device is H200
    assert plan.engine == "simt"


@given(st.integers(0, 64), st.integers(0, 1 << 20), st.integers(1, 128))
def test_sections_are_alike_and_about_half_the_cache(heads, keys, d):
    section = Plan(problem("float16", (heads,), 10, keys, d), H200, GPU_ROWS[0]).section
    assert 1 <= section <= max(1, heads)
    cached = max(1, H200.cache_bytes // 2 // max(1, keys * 2 * d * 2))
    assert section <= 1.5 * cached + 1
    if heads:
        assert math.ceil(heads / section) <= math.ceil(heads / cached)


def test_rows_of_numpy_say_their_tiles():
    rows = [row for row in TILES if row.engine == "numpy"]
    sizes = ("16x65536", "2048x512")
    assert {str(row) for row in rows} == {f"{x} numpy {y}" for x in ("fa1", "fa2") for y in sizes}


def test_lengths_that_grow_choose_few_rows():
    planning._chosen.cache_clear()
    sizes = "bfloat16", (4, 8, 4), 1
    for keys in range(2049, 4097):
        make_plan(Problem(*sizes, keys, 128, 128, heads=32, group=4), H200)
    assert planning._chosen.cache_info().misses == 32


def test_rounded_lengths():
    def rounded(queries, keys):
        given = problem(n=queries, m=keys)
        p = given.rounded
        lengths = {"query_length": p.query_length, "key_length": p.key_length}
        assert p == dataclasses.replace(given, **lengths)
        return tuple(lengths.values())

    exact = [(1, 1), (17, 63), (197, 64), (256, 256), (512, 1024), (1056, 4096), (4224, 1 << 20)]
    assert [rounded(*given) for given in exact] == exact
    assert rounded(257, 300) == (272, 304)
    assert rounded(1009, 1025) == (1024, 1056)
    assert rounded(4097, 16385) == (4224, 16896)
    for length in range(257, 20000, 7):
        queries, keys = rounded(length, length)
        assert queries == keys
        assert 0 <= keys - length < max(16, length / 32)
    packed = problem(n=5000, m=6001, sequences=3, longest=(300, 4097)).rounded
    assert (packed.query_length, packed.key_length, packed.longest) == (5120, 6016, (304, 4224))
    gradients = backward("bfloat16", (4, 8), 1000, 1001, 64)
    assert gradients.rounded is gradients


def test_a_row_for_rounded_lengths_takes_hardly_longer():
    """And serves just these, as all plans do."""
    draw = random.Random(2)
    times = []
    for _ in range(60):
        keys = int(2 ** draw.uniform(6, 14))
        queries = draw.choice([1, 4, keys, min(keys, 1000)])
        dtype, dim = draw.choice(["float16", "float32"]), draw.choice([64, 128])
        p = Problem(dtype, (4, 8), queries, keys, dim, dim, heads=8, band=Band(right=0))
        plan, exact = make_plan(p, H200), planning._chosen(p, H200, None, None)
        assert plan.problem is p
        assert not plan.tile.reject(p, H200)
        times.append(estimate(plan.tile, p, H200) / estimate(exact.tile, p, H200))
    assert statistics.fmean(times) < 1.005
    assert max(times) < 1.1

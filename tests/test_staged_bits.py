"""A mask's bits in shared memory, on wgmma; tiles that the band hides."""

import functools

import numpy as np
import pytest
from cases import GROWTHS, growing_scores, numpy_dtype, random_mask
from emulated import attention, attention_backward
from emulator import available
from emulator.module import EAGER
from test_emulator_catches import must_be_caught
from tolerance import assert_backward_close, assert_forward_close

from cuflash import reference
from cuflash.masks.band import Band
from cuflash.masks.predicate import MaskForm
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem
from cuflash.scores.score import softcap

emulated = pytest.mark.skipif(available() is not None, reason=str(available()))
H200 = Device(90, "NVIDIA H200", multiprocessors=132)
FEW = Device(90, "NVIDIA H200", multiprocessors=2)


def long_plan(dim, backward=False, mask="elements", dtype="bfloat16", **more):
    """Of long sequences in many heads."""
    sizes = (dtype, (4, 2048 // dim), 4096, 4096, dim, dim)
    options = {"heads": 2048 // dim, "mask": mask, "band": Band(right=0), "backward": backward}
    return make_plan(Problem(*sizes, **(options | more)), H200)


def test_an_array_of_bool_has_the_tiles_of_plain_calls():
    for dim, sizes in ((64, (192, 128)), (128, (192, 80))):
        plan = long_plan(dim)
        assert (plan.block_q, plan.block_k) == sizes
        assert "STAGES_BITS = true" in plan.source()
        plain = long_plan(dim, mask="", band=Band())
        assert plain.tile == plan.tile
        assert "STAGES_BITS = false" in plain.source()


def test_plain_causal_calls_of_wide_heads_have_tiles_of_their_own():
    for dim, sizes in ((64, (192, 128)), (72, (192, 64)), (128, (192, 64)), (136, (128, 80))):
        plan = long_plan(dim, mask="")
        assert (plan.block_q, plan.block_k) == sizes
        assert plan.tile.causal == (64 < dim <= 128)
    for more in (
        {"mask": "elements"}, {"band": Band()}, {"band": Band(left=512, right=0)},
        {"dropout": True}, {"score": softcap(30.0).form},
    ):  # fmt: skip
        assert not long_plan(128, **{"mask": "", **more}).tile.causal


def test_what_else_changes_scores_has_tiles_of_powers_of_two():
    for more in ({"dropout": True}, {"score": softcap(30.0).form}):
        for dim in (64, 128):
            tile = long_plan(dim, **more).tile
            assert all(size & (size - 1) == 0 for size in tile.scored)


def test_bits_come_by_shared_memory_where_there_is_room():
    for dim, staged in ((64, True), (128, False)):
        plan = long_plan(dim, mask="blocks")
        assert (plan.block_q, plan.block_k) == (128, 128)
        assert f"STAGES_BITS = {str(staged).lower()}" in plan.source()
    computed = Problem("bfloat16", (4, 32), 4096, 4096, 64, 64)
    assert not long_plan(64).tile.stages_bits(computed)


# Head dims and types of gradients: of one kernel, of two, on planes, and on planes of wide rows.
GRADIENTS = [(64, "bfloat16"), (256, "bfloat16"), (64, "float32"), (256, "float32")]


@pytest.mark.parametrize(("dim", "dtype"), GRADIENTS)
def test_bits_of_gradients_come_by_shared_memory(dim, dtype):
    plan = long_plan(dim, backward=True, dtype=dtype)
    kernels = [x.name for x in plan.kernels if x.name.startswith("hopper_") and "sum" not in x.name]
    assert kernels
    for kernel in kernels:
        assert "STAGES_BITS = true" in plan.source(kernel)
        tile = plan.tile.of_kernel(kernel)
        assert tile.shared(plan.problem)[-1].name == "bits"
        assert tile.shared_bytes(plan.problem) <= H200.shared_bytes
    for others in ({"mask": ""}, {"mask": "blocks", "mask_form": MaskForm("q % 3 != 0")}):
        assert "STAGES_BITS = false" in long_plan(dim, True, dtype=dtype, **others).source()


def operands(dim, dtype="bfloat16"):
    rng = np.random.default_rng(dim)
    kind = numpy_dtype(dtype)
    return [rng.standard_normal((2, 2, 300, dim)).astype(kind) for _ in range(4)]


def shown():
    """Tiles of which nothing, all or a part is visible; a row and keys that nobody sees."""
    mask = random_mask((1, 1, 300, 300), 64, seed=4, shown=0.6, partial=0.5)
    mask[..., :200, :100] = True
    mask[..., 3, :] = mask[..., 7] = mask[..., -1] = False
    return mask


def check(dim=64, schedule=0, backward=False, dtype="bfloat16", **options):
    """Several items a block; what is hidden are NaN and infinities or, since planes do not hold
    these, large numbers.
    """
    q, k, v, dout = operands(dim, dtype)
    poison = (9, 9, 9) if dtype == "float32" else (np.nan, np.inf, np.nan)
    k[..., 7, :], v[..., 7, :], v[..., -1, :] = poison
    options = {"mask": shown(), "causal": True} | options
    where = {"engine": "wgmma", "algo": "fa3", "schedule": schedule, "device": FEW}
    if not backward:
        result = attention(q, k, v, row=long_plan(dim, dtype=dtype).tile, **where, **options)
        assert "STAGES_BITS = true" in result.plan.source()
        assert np.isfinite(result.out.astype(np.float32)).all()
        assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **options)
        return
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    inputs = dout, q, k, v, out.astype(q.dtype), lse.astype(np.float32)
    row = long_plan(dim, True, dtype=dtype).tile
    grads = attention_backward(*inputs, row=row, **where, **options)
    assert "STAGES_BITS = true" in grads.plan.source()
    assert_backward_close(grads[:3], dout, q, k, v, plan=grads.plan, **options)


def check_lost():
    """Of scores that are worked out again the mask hides those that it hid before."""
    q, k, v = growing_scores((2, 600, 64), "bfloat16", *GROWTHS["beyond floats at once"])
    mask = random_mask((1, 600, 600), 64, seed=4, shown=0.6, partial=1)
    where = {"engine": "wgmma", "algo": "fa3", "device": FEW, "row": long_plan(64).tile}
    for schedule in (0, 1, EAGER):
        result = attention(q, k, v, mask=mask, schedule=schedule, **where)
        assert_forward_close(result.out, result.lse, q, k, v, mask=mask)


WAYS = {
    "causal": {},
    "no band": {"causal": False},
    "window": {"causal": False, "window": (100, 30)},
    "lengths": {"causal": "bottom_right", "kv_lengths": np.int32([300, 150]),
                "q_lengths": np.int32([260, 300])},
    "offset": {"causal": True, "q_offset": np.int32([0, 130])},
}  # fmt: skip


@emulated
@pytest.mark.one_in(3)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("way", WAYS)
def test_results_are_right(way, dim):
    check(dim, **WAYS[way])


@emulated
@pytest.mark.one_in(5)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("way", WAYS)
def test_results_of_planes_are_right(way, dim):
    check(dim, dtype="float32", **WAYS[way])


@emulated
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("schedule", [EAGER, 1])
def test_so_they_are_under_other_schedules(schedule, dtype):
    check(schedule=schedule, dtype=dtype)


@emulated
def test_so_they_are_of_scores_worked_out_again():
    check_lost()


@emulated
@pytest.mark.one_in(5)
@pytest.mark.parametrize(("dim", "dtype"), GRADIENTS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_right(way, dim, dtype):
    check(dim, backward=True, dtype=dtype, **WAYS[way])


@emulated
@pytest.mark.one_in(4)
@pytest.mark.parametrize(("dim", "dtype"), GRADIENTS)
@pytest.mark.parametrize("schedule", [EAGER, 1])
def test_so_gradients_are_under_other_schedules(dim, dtype, schedule):
    check(dim, schedule, backward=True, dtype=dtype)


window = functools.partial(check, **WAYS["window"])
gradients, of_two, of_planes, of_wide = (
    functools.partial(check, dim, backward=True, dtype=dtype) for dim, dtype in GRADIENTS
)
PLANTED = [
    ("bits are not waited for", r"full\.expect\(BYTES\);", "", check),
    ("bits are of another tile", r"p\.mask_bits \+ i64\(number\)", "p.mask_bits + i64(0)", check),
    ("bits of another slot", r"smem\.staged\[now\.slot\]\.bits\.hide", "smem.staged[0].bits.hide",
     check),
    ("the visit of another slot", r"smem\.staged\[now\.slot\]\.visit", "smem.staged[0].visit",
     check),
    ("bits that hide late are left out", r"smem\.staged\[now\.slot\]\.bits\.hide\(S, .*?\);", "",
     check),
    ("the band is left out where bits hide late", r"&&\s+!keys\.is_cut_by_band\(visit\)", "",
     window),
    ("bits are overwritten while lanes read",
     r"__syncwarp\(\);(?=  // all lanes have read what is hidden)", "", check_lost),
    ("all consumers have the first one's rows", r"tile,\s+consumer \* SLAB\);", "tile, 0);", check),
    ("columns are those of the lane before", r"lane_column - 2 \* w", "lane_column - 2 * w + 2",
     check),
    ("all pairs have the first one's bits", r"spread_signs\(lower, upper, byte\)",
     "spread_signs(lower, upper, 0)", of_two),
    ("halves of pairs are exchanged", r"spread_signs\(lower, upper", "spread_signs(upper, lower",
     of_two),
    ("the band shows a column more", r"bits_from\(last \+ 1 - 32", "bits_from(last + 2 - 32",
     of_planes),
    ("a row of three words is one of four", r"words \+ r \* WORDS", "words + r * 4",
     functools.partial(check, 128)),
    ("planes do not wait for bits", r"full\.expect\(BYTES\);", "",
     functools.partial(check, dtype="float32")),
    ("planes have bits of another slot", r"find_bits\(smem\.staged\[now\.slot\]",
     "find_bits(smem.staged[0]", functools.partial(check, dtype="float32")),
    ("gradients do not wait for bits", r"full\.expect\(BYTES\);", "", gradients),
    ("dQ does not wait for bits", r"full\.expect\(BYTES\);", "", of_two),
    ("gradients have bits of another slot", r"find_bits\(smem\.bits\[slot\]",
     "find_bits(smem.bits[0]", gradients),
    ("dK has bits of another slot", r"find_bits\(smem\.bits\[slot\],", "find_bits(smem.bits[0],",
     of_planes),
    ("dQ has bits of another slot", r"find_bits\(smem\.bits\[slot\]\[", "find_bits(smem.bits[0][",
     of_planes),
    ("all queries have the first ones' bits", r"smem\.bits\[slot\]\[consumer\]",
     "smem.bits[slot][0]", of_two),
    ("all warps have the first ones' bits", r"smem\.bits\[slot\]\[column\]",
     "smem.bits[slot][0]", of_wide),
    ("all keys have the first ones' bits", r"staged\.words \+ first_row \* StagedBits::WORDS",
     "staged.words", of_wide),
    ("the band hides a row too many", r"row_last = query_of\(tile_row \+ MASK_ROWS - 1\)",
     "row_last = query_of(tile_row - 1)", check),
    ("a window hides too much", r"farthest < i64\(head\.shift\) - p\.band_left",
     "farthest < i64(head.shift)", window),
    ("lengths do not count", r"if \(VARLEN \|\| p\.q_lengths.*?return false;", "",
     functools.partial(check, **WAYS["offset"])),
    ("keys and queries are exchanged", r"ROWS_ARE_KEYS \? row_begin - column_last : ",
     "", functools.partial(check, backward=True)),
]  # fmt: skip


@emulated
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("text", "wrong", "test"), [x[1:] for x in PLANTED],
                         ids=[x[0] for x in PLANTED])  # fmt: skip
def test_planted_bugs_are_caught(monkeypatch, text, wrong, test):
    must_be_caught(monkeypatch, text, wrong, test)

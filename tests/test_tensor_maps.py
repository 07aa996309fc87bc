"""Tensor maps: what they say of operands, and which operands no map describes."""

import math

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.gpu.tensor_maps import TensorMap, tensor_maps
from cuflash.operands.layout import make_layout
from cuflash.operands.spec import Spec
from cuflash.planning.plan import make_plan
from cuflash.planning.problem import Device, Problem

H200 = Device(90, "NVIDIA H200", multiprocessors=132)


def maps_of(q, k, v, **options):
    """The maps of three arrays."""
    layout = make_layout(*(Spec(x.shape, x.strides, x.dtype) for x in (q, k, v)), **options)
    plan = cuflash.plan(q, k, v, engine="wgmma", device=H200, **options)
    return plan, tensor_maps(plan, layout)


def zeros(*shape):
    return np.zeros(shape, ml_dtypes.bfloat16)


def test_dense():
    plan, maps = maps_of(zeros(2, 3, 100, 64), *(zeros(2, 3, 90, 64) for _ in "kv"))
    axes, box = (6, 1, 1), (1, 1, 1)  # both axes of heads walk as one
    strides = (64 * 2, 64 * 100 * 2, 16, 16)
    assert maps["q"] == TensorMap((64, 100, *axes), strides, (64, 64, *box), 128, 128)
    strides = (64 * 2, 64 * 90 * 2, 16, 16)
    assert maps["k"] == TensorMap((64, 90, *axes), strides, (64, plan.block_k, *box), 128, 128)
    assert maps["v"] == maps["k"]


def test_sectors_that_memory_brings():
    """Gradients gain from longer ones, see docs/few-queries.md."""
    x = zeros(2, 3, 512, 64)
    spec = Spec(x.shape, x.strides, x.dtype)
    gradients = dict.fromkeys(("dout", "dq", "dk", "dv"), spec)
    for backward, sector in ((False, 128), (True, 256)):
        layout = make_layout(*[spec] * 3, gradients=gradients if backward else None)
        plan = cuflash.plan(x, x, x, engine="wgmma", device=H200, backward=backward)
        maps = tensor_maps(plan, layout)
        assert {x.sector for x in maps.values()} == {sector}


def test_heads_behind_positions_in_groups():
    q = zeros(2, 100, 6, 128).swapaxes(1, 2)
    k, v = (zeros(2, 90, 2, 128).swapaxes(1, 2) for _ in "kv")
    _, maps = maps_of(q, k, v, enable_gqa=True)
    assert maps["q"].dims == (128, 3, 100, 2, 2)  # the tile packs the heads of a group
    assert maps["q"].strides == (256, 6 * 256, 100 * 6 * 256, 3 * 256)
    assert maps["k"].dims == (128, 90, 2, 2, 1)  # one key head for the group: by index
    assert maps["k"].strides == (2 * 256, 90 * 2 * 256, 256, 16)


def paged(heads=2):
    k = zeros(9, heads, 48, 64)
    q, table = zeros(3, 4, 5, 64), np.zeros((3, 7), np.int32)
    options = {"page_table": table, "kv_lengths": np.zeros(3, np.int32), "enable_gqa": True}
    specs = {"page_table": Spec(table.shape, table.strides, table.dtype)}
    layout = make_layout(
        *(Spec(x.shape, x.strides, x.dtype) for x in (q, k, k)), **specs, enable_gqa=True
    )
    plan = cuflash.plan(q, k, k, engine="wgmma", device=H200, **options)
    return plan, tensor_maps(plan, layout)


def test_pools():
    plan, maps = paged()
    box = math.gcd(plan.block_k, 48)
    assert maps["k"].dims == (64, 48, 2, 9, 1)
    assert maps["k"].strides == (128, 48 * 128, 2 * 48 * 128, 16)
    assert maps["k"].box == (64, box, 1, 1, 1)
    assert maps["v"] == maps["k"]
    _, maps = paged(heads=1)
    assert maps["k"].dims == (64, 48, 1, 9, 1)


def test_narrow_panels_and_values_of_their_own_width():
    _, maps = maps_of(zeros(5, 40), zeros(9, 40), zeros(9, 96))
    assert (maps["q"].dims, maps["q"].box, maps["q"].swizzle) == (
        (40, 5, 1, 1, 1), (64, 64, 1, 1, 1), 128
    )  # fmt: skip
    assert (maps["v"].dims, maps["v"].box[0], maps["v"].swizzle) == ((96, 9, 1, 1, 1), 32, 64)


def test_one_row_has_a_stride_all_the_same():
    _, maps = maps_of(zeros(3, 1, 64), zeros(3, 7, 64), zeros(3, 7, 64))
    assert maps["q"].strides[0] % 16 == 0
    assert maps["q"].strides[0] > 0


def why_not(q, k, v):
    with pytest.raises(NotImplementedError) as caught:
        cuflash.plan(q, k, v, engine="wgmma", device=H200)
    return str(caught.value).splitlines()[1].partition(": ")[2]


def test_reasons():
    q, k, v = (zeros(2, 3, n, 64) for n in (100, 90, 90))
    assert why_not(q[..., ::-1, :], k, v) == "tensor maps have no negative strides, q has"
    assert why_not(q, k, v[::-1]) == "tensor maps have no negative strides, v has"
    row = np.broadcast_to(zeros(2, 3, 1, 64), k.shape)
    assert why_not(q, row, v) == "tensor maps repeat no rows, k does"
    wide = zeros(2, 3, 100, 65)[..., :64]
    assert why_not(wide, k, v) == "needs rows aligned to 16 bytes"
    singles = ([2 if i == j else 1 for j in range(4)] for i in range(3))
    axes = [np.broadcast_to(zeros(*shape, 9, 64), (2, 2, 2, 2, 9, 64)) for shape in singles]
    assert why_not(*axes) == "tensor maps have 3 leading axes, these fold into 4"


def test_strides_that_tensor_maps_cannot_describe_are_served_by_mma():
    q, k = zeros(64, 4, 100, 64), zeros(64, 4, 90, 64)
    assert cuflash.plan(q, k, k, device=H200).engine == "wgmma"
    plan = cuflash.plan(q, np.broadcast_to(k[..., :1, :], k.shape), k, device=H200)
    assert plan.engine == "mma"
    of_type = [x for x in plan.rejected if plan.problem.dtype in x[0].dtypes]
    reasons = {reason for row, reason in of_type if row.engine == "wgmma"}
    assert reasons == {"tensor maps repeat no rows, k does"}


def test_a_broadcast_head_is_one_position():
    problem = Problem("float16", (4, 8), 64, 64, 64, 64)
    assert make_plan(problem, H200, engine="wgmma").engine == "wgmma"
    _, maps = maps_of(zeros(4, 8, 64, 64), zeros(4, 1, 64, 64), zeros(64, 64))
    assert maps["k"].dims[2:] == (4, 1, 1)
    assert maps["v"].dims[2:] == (1, 1, 1)

"""The CUDA C kernels, executed by the emulator: the cases that a GPU runs too, and exact laws."""

import dataclasses
import functools
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from cases import (
    BACKWARD_CASES,
    BACKWARD_KERNELS,
    CASES,
    DIMS,
    DTYPES,
    FAR,
    FEW,
    GROWTHS,
    H200,
    HUGE,
    KERNELS,
    BackwardCase,
    Case,
    assert_huge_scores,
    calls_of,
    check_all,
    groups,
    growing_scores,
    huge_scores,
    numpy_dtype,
    owner,
    place,
    row_problem,
    tile_of,
)  # fmt: skip
from emulated import attention, attention_backward
from emulator import EAGER, Memory, Module, available
from hypothesis import example, given, settings
from hypothesis import strategies as st
from random_cases import plain_case, random_case, smaller_device
from tolerance import assert_arrays_close, assert_backward_close, assert_forward_close

from cuflash import reference
from cuflash.gpu.arguments import pack
from cuflash.masks.band import Band
from cuflash.operands.dtypes import DOUBLE
from cuflash.operands.layout import MAX_LENGTH, make_layout
from cuflash.operands.spec import Spec
from cuflash.planning import source
from cuflash.planning.plan import TILES, make_plan
from cuflash.planning.problem import Device, Problem
from cuflash.planning.turing import TuringTile
from cuflash.reference import UNIT_ROUNDOFF, forward_bound
from cuflash.scores.score import Score

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

KERNELS_AND_DTYPES = [(*kernel, dtype) for kernel in KERNELS for dtype in DTYPES[kernel[1]]]
EACH_KERNEL = pytest.mark.parametrize(("algo", "engine"), KERNELS)
EACH_TYPE = pytest.mark.parametrize(("algo", "engine", "dtype"), KERNELS_AND_DTYPES)
EACH_BACKWARD_KERNEL = pytest.mark.parametrize(("algo", "engine"), BACKWARD_KERNELS)
EACH_BACKWARD_TYPE = pytest.mark.parametrize(
    ("algo", "engine", "dtype"), [x for x in KERNELS_AND_DTYPES if x[:2] in BACKWARD_KERNELS]
)
COUNTED = {"mma": "mma", "wgmma": "wgmma", "simt": "accesses"}  # as a measure of work
SENTINEL = 7.0


def run(case, **more):
    return attention(*case.operands(), **case.call(), **{"device": FEW, **more})


def out_of(case):
    """(out, lse) to write into, with a pattern around and in them, or None."""
    layout = case.layouts.get("out")
    if layout is None:
        return None
    blank = np.zeros((*case.leading, case.q[-2], case.v[-1]), numpy_dtype(case.dtype))
    out = place(blank, layout)
    owner(out).view(out.dtype)[...] = SENTINEL
    lse_type = np.float64 if case.dtype == "float64" else np.float32
    lse = np.full((*blank.shape[:-1], 2), SENTINEL, lse_type)[..., 0]
    return out, lse


def assert_close(case, result):
    q, k, v = case.operands()
    return assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **case.meaning)


def check_forward(case, **more):
    return assert_close(case, run(case, **more))


def random(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def assert_written_inside(view, name):
    """What lies between and around the view's rows still holds the sentinel."""
    memory = owner(view).view(view.dtype).copy()
    start = (view.ctypes.data - owner(view).ctypes.data) // view.itemsize
    inside = np.ndarray(view.shape, view.dtype, memory, start * view.itemsize, view.strides)
    inside[...] = SENTINEL
    assert (memory == SENTINEL).all(), f"wrote beside the rows of {name}"


# ---------------------------------------------------------------------- against the reference
def is_twin(case):
    """Whether bfloat16 has the same case and, but for the names of types, the same kernel."""
    return case.dtype == "float16" and case.family != "extremes"


def thinned(cases):
    """A GPU runs all cases. Here a 20th of twins and of offsets (one integer of a head) is enough,
    and of bfloat16 on simt, whose float32 is the same but for its loads, a tenth of float64, whose
    kernels are those of other types but for the products, a 40th of float32 on mma, which has
    tests of its own, a 14th of fa1, a half of long heads, a tenth of what is not on wgmma, of
    splits and of head dims, and a fourth of the rest.
    """

    def step(case):
        kind = case.engine, case.dtype
        if case.family == "extremes":
            return 1
        if case.family == "offsets" or is_twin(case) or kind == ("simt", "bfloat16"):
            return 20
        if kind == ("mma", "float32"):
            return 40
        if case.dtype == "float64":
            return 10
        if case.algo == "fa1":
            return 14
        if case.family == "long":
            return 2
        return 10 if case.engine != "wgmma" or case.family in ("splits", "dims") else 4

    return [case for i, case in enumerate(cases) if i % step(case) == 0]


# The tiles of fa1 on wgmma are large: of its cases every third is checked.
OF_FA1 = [str(c) for c in CASES if (c.algo, c.engine) == ("fa1", "wgmma")]
UNCHECKED = {*OF_FA1} - {*OF_FA1[::3]}


def check(case):
    out = out_of(case)
    result = run(case, out=out, mode="fast" if str(case) in UNCHECKED else "check")
    assert_close(case, result)
    if out is not None:
        assert result.out is out[0]
        assert_written_inside(result.out, "out")
        assert (result.lse.base[..., 1] == SENTINEL).all(), "wrote beside lse"


GROUPS = dict(groups(most=24, cases=thinned(CASES)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("group", GROUPS)
def test_case(group):
    check_all(GROUPS[group], check)


def run_backward(case, **more):
    dout, q, k, v, out, lse, dlse = case.inputs()
    given = {"dlse": dlse, "grads_out": case.grads_out(SENTINEL)}
    large = case.algo == "fa3" or (case.engine, case.dtype) == ("mma", "float64")
    given["device"] = FEW if large else H200
    return attention_backward(dout, q, k, v, out, lse, **case.call(), **{**given, **more})


def check_backward(case, **more):
    result = run_backward(case, **more)
    dout, q, k, v, _, _, dlse = case.inputs()
    assert_backward_close(result[:3], dout, q, k, v, dlse=dlse, plan=result.plan, **case.meaning)
    options = dict(case.meaning, dlse=dlse, plan=result.plan)
    assert_arrays_close(result.others, case.wrt, dout, q, k, v, **options)
    if case.grads_out() is not None:
        names = ("dq", "dk", "dv", *(f"d{name}" for name in case.wrt))
        for name, gradient in zip(names, (*result[:3], *result.others), strict=True):
            assert_written_inside(gradient, name)
    return result


# The checker takes several times as long as running fast: it gets part of the cases, small ones.
CHECKED = [
    case
    for i, case in enumerate(thinned(BACKWARD_CASES))
    if case.family in ("masked", "orders") or i % (2 if case.family == "extremes" else 4) == 0
]
UNCHECKED_BACKWARD = [case for case in thinned(BACKWARD_CASES) if case not in CHECKED]
BACKWARD_GROUPS = dict(groups(most=24, cases=UNCHECKED_BACKWARD))
CHECKED_GROUPS = dict(groups(most=24, cases=CHECKED))


@pytest.mark.parametrize("group", CHECKED_GROUPS)
def test_backward_case(group):
    check_all(CHECKED_GROUPS[group], check_backward)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("group", BACKWARD_GROUPS)
def test_backward_case_fast(group):
    check_all(BACKWARD_GROUPS[group], lambda case: check_backward(case, mode="fast"))


BACKWARD_SCHEDULED = CHECKED[::11]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(4))
def test_gradients_do_not_depend_on_the_schedule(part):
    def check(case):
        first = run_backward(case, schedule=0)
        for seed in (1, 2, 3):
            other = check_backward(case, schedule=seed)
            if case.deterministic:
                for one, another in zip(first[:3], other[:3], strict=True):
                    assert np.ascontiguousarray(one).tobytes() == (
                        np.ascontiguousarray(another).tobytes()
                    )

    check_all(BACKWARD_SCHEDULED[part::4], check)


SCHEDULED = [c for c in CASES[::97] if math.prod(c.q) < 1 << 16]
PARTS = [SCHEDULED[i::4] for i in range(4)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_results_do_not_depend_on_the_schedule(part):
    def check(case):
        first = run(case, schedule=0)
        for seed in (1, 2):
            other = run(case, schedule=seed)
            assert other.out.tobytes() == first.out.tobytes()
            assert other.lse.tobytes() == first.lse.tobytes()

    check_all(PARTS[part], check)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dim", [40, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("algo", ["fa1", "fa3"])
def test_long_rows_on_hopper(algo, dim, causal):
    """Copies get ahead of the products, and each block works on several items."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 700, dim)).astype(ml_dtypes.bfloat16) for _ in range(3))
    options = {"causal": causal, "algo": algo, "engine": "wgmma", "mode": "fast"}
    results = [attention(q, k, v, schedule=seed, device=FEW, **options) for seed in (EAGER, 0, 1)]
    assert_forward_close(*results[0][:2], q, k, v, causal=causal)
    for result in results[1:]:
        assert result.out.tobytes() == results[0].out.tobytes()
        assert result.lse.tobytes() == results[0].lse.tobytes()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("length", [96, 500, 576])
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (150, 60)}], ids=str)
@pytest.mark.parametrize("algo", ["fa2", "fa3"])
def test_no_products_for_keys_that_no_query_sees(algo, band, length):
    """Consumers of 64 queries pass by such tiles, and those without queries do nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, length, 128)).astype(np.float16) for _ in range(3))
    result = attention(q, k, v, algo=algo, engine="wgmma", device=FEW, **band)
    assert_forward_close(*result[:2], q, k, v, **band)
    visible = Band.from_options(**band).to_dense(length, length)
    step, products = result.plan.block_k, 0
    for end in range(length, 0, -64):  # the first slab may be a partial one
        seen = visible[max(0, end - 64) : end].any(0)
        tiles = sum(seen[begin : begin + step].any() for begin in range(0, length, step))
        products += tiles * (128 // 16 + step // 16)
    assert result.stats["wgmma"] == 2 * 4 * products  # of heads and warps


GROWING = [
    *[("fa3", "wgmma", "float16", dim) for dim in (64, 32, 80, 256)],
    ("fa3", "wgmma", "bfloat16", 64), ("fa1", "wgmma", "float16", 64),
    *[("fa2", "mma", "float16", dim) for dim in (64, 128, 256)],
    ("fa2", "mma", "float64", 64),
    ("fa2", "mma", "bfloat16", 32), ("fa1", "mma", "float16", 64),
    ("fa2", "simt", "float32", 64), ("fa1", "simt", "float32", 64),
]  # fmt: skip
ONCE = "beyond floats at once"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("growth", "kernel"), [
    *itertools.product(GROWTHS, GROWING[:1]), *itertools.product(["floats", ONCE], GROWING[1:]),
], ids=str)  # fmt: skip
def test_scores_that_grow(growth, kernel):
    """Tile by tile, in the order in which keys are visited."""
    algo, engine, dtype, dim = kernel
    q, k, v = growing_scores((2, 600, dim), dtype, *GROWTHS[growth])
    result = attention(q, k, v, algo=algo, engine=engine, device=FEW)
    assert_forward_close(*result[:2], q, k, v)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("sign", [1, -1])
@EACH_TYPE
def test_huge_scores(algo, engine, dtype, sign):
    """The rounding of a row's origin is not the weights' exponent."""
    tile = tile_of(algo, engine, dtype)
    for size in HUGE[dtype]:
        q, k, v, weighs = huge_scores((1, tile.block_k + 9, DIMS[engine]), dtype, size, sign)
        q = q[:, :40]
        run = functools.partial(attention, q, k, v, algo=algo, engine=engine, mode="fast")
        assert_huge_scores(run, q, k, v, weighs)


@pytest.mark.parametrize("group", [g for g in GROUPS if "masked" in g or "softcap" in g])
def test_fast_mode(group):
    check_all(GROUPS[group], lambda case: assert_close(case, run(case, mode="fast", schedule=1)))


# ---------------------------------------------------------------------- every row of the table
def rows_of(backward):
    """Rows with half of their types, by turns. fa2 and fa3 on wgmma are one source; test_turing.py
    has those of sm_75.
    """
    return [
        pytest.param(row, dtype, id=f"{i}-{row.algo}-{row.engine}-{row.max_dim}-{dtype}")
        for i, row in enumerate(TILES)
        if row.threads and row.backward == backward
        if (row.algo, row.engine) != ("fa2", "wgmma") and not isinstance(row, TuringTile)
        for dtype in (row.dtypes[-2:] if backward else row.dtypes)[i % 2 :: 2]
    ]


def with_forward(dtype, dout, q, k, v, **options):
    """dout, q, k, v, and out and lse rounded to their types."""
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    return (
        dout, q, k, v, out.astype(q.dtype), lse.astype(np.float64 if dtype == "float64" else "f4"),
    )  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("row", "dtype"), rows_of(backward=True))
def test_every_backward_row_of_the_table(row, dtype):
    problem = row_problem(row, dtype)
    rng = np.random.default_rng(0)
    kernel = {"algo": row.algo, "engine": row.engine, "row": row, "mode": "fast"}
    for step, options in ((0, {}), (row.block_q // 2, {"causal": True})):
        q, dout = random(rng, dtype, 2, problem.query_length + step, problem.head_dim)
        k, v = random(rng, dtype, 2, problem.key_length + 2 * step, problem.head_dim)
        inputs = with_forward(dtype, dout, q, k, v, **options)
        result = attention_backward(*inputs, **kernel, **options)
        assert result.plan.tile is row
        assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, **options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("row", "dtype"), rows_of(backward=False))
def test_every_row_of_the_table(row, dtype):
    problem = row_problem(row, dtype)
    rng = np.random.default_rng(0)
    for step, options in ((0, {}), (row.block_k // 2, {"causal": True}), (3, {"window": (5, 2)})):
        q = random(rng, dtype, problem.query_length + step, problem.head_dim)
        k, v = random(rng, dtype, 2, problem.key_length + 2 * step, problem.head_dim)
        result = attention(q, k, v, row=row, algo=row.algo, engine=row.engine, **options)
        assert result.plan.tile is row
        assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, **options)


@pytest.mark.parametrize(
    "row", [x for x in TILES if x.dtypes == DOUBLE and not x.backward], ids=str
)
def test_infinities_for_each_row_of_doubles(row):
    """A block that finds some in its sums walks over its keys once more."""
    dim, keys = row.max_dim, 2 * row.block_k + 5
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, keys, dim))
    v[:, keys // 2, 3], v[:, -1, 1] = np.nan, np.inf
    result = attention(q, k, v, causal=True, row=row, algo=row.algo, engine=row.engine)
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, causal=True)


def check_random(case, **more):
    # Planes of a head with NaN in it are not written: what becomes of them is written over later.
    is_backward, out = isinstance(case, BackwardCase), out_of(case)
    makes_planes = case.copies or case.engine == "wgmma" or (is_backward and case.engine == "mma")
    in_planes = case.dtype == "float32" and makes_planes
    more["mode"] = "fast" if in_planes and case.poison else "check"
    with calls_of(case):
        if is_backward:
            check_backward(case, **more)
        else:
            check_forward(case, out=out, **more)
    if not is_backward and out is not None:
        assert_written_inside(out[0], "out")


@pytest.mark.parametrize("seed", range(14))
def test_random_case(seed):
    check_random(random_case(seed))


# 3 and 6 want the gradient of slopes alone; 79 has scores on simt that are not in pairs; in 50077 a
# row with NaN has weights that dropout does not keep; in 3000013 tickets lie behind the last
# section; in 6000019 several warps mark the same rows.
@pytest.mark.parametrize("seed", [3, 6, 79, 882, 50077, 3000013, 6000019])
def test_plain_random_case(seed):
    check_random(plain_case(seed))


def test_random_case_with_less_shared_memory():
    """Where tiles of 8 queries took the bits of others for dropout."""
    case = plain_case(4150)
    check_random(case, device=smaller_device(case))


# On both sides of where rows of the tables end, and of what they make of narrow heads.
HEAD_DIMS = {
    "wgmma": (8, 32, 40, 64, 72, 96, 104, 128, 136, 160, 192, 200, 256),
    "mma": (1, 8, 17, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256),
}


@pytest.mark.one_in(24)
@pytest.mark.parametrize(
    ("engine", "dim", "value_dim"),
    [(name, *pair) for name, x in HEAD_DIMS.items() for pair in itertools.product(x, x)],
)
def test_every_pair_of_head_dims(engine, dim, value_dim):
    algo = "fa3" if engine == "wgmma" else "fa2"
    dtype = DTYPES[engine][(dim + value_dim) // 8 % 2]
    shapes = (2, 133, dim), (2, 197, dim), (2, 197, value_dim)
    for kind, check in ((Case, check_forward), (BackwardCase, check_backward)):
        case = kind(f"dims {dim} {value_dim}", algo, engine, dtype, *shapes, {"causal": dim > 64})
        check(case, mode="fast")


@EACH_KERNEL
def test_heads_in_sections_of_the_cache(algo, engine):
    """Heads whose keys share the L2 cache: sections of three heads, and a last one of two."""
    dim, dtype = DIMS[engine], DTYPES[engine][0]
    block_q = tile_of(algo, engine, dtype).block_q
    q, k, v = random(np.random.default_rng(1), dtype, 3, 2, 4, 2 * block_q + 1, dim)
    head_bytes = 2 * k[0, 0].nbytes
    device = Device(90, multiprocessors=132, cache_bytes=2 * 3 * head_bytes + 2)
    result = attention(q, k, v, algo=algo, engine=engine, causal=True, device=device)
    assert result.plan.section == 3
    assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, causal=True)


def test_cases_ask_for_the_kernel_that_they_are_of():
    for case in (*CASES, *BACKWARD_CASES):
        asked = case.call()
        assert (asked["algo"], asked["engine"]) == (case.algo, case.engine)


@pytest.mark.parametrize(
    ("dim", "device", "kernel"),
    [(32, H200, "hopper_backward_short"), (160, FEW, "hopper_backward_keys")],
)
def test_sums_of_heads_that_share_queries(dim, device, kernel):
    """Blocks store dQ of each head, also ahead of the end of the kernel that works out rows."""
    shapes = (2, 1, 150, dim), (2, 2, 70, dim), (2, 2, 70, dim)
    options = {"q_lengths": np.array([140, 30]), "kv_lengths": np.array([70, 0])}
    case = BackwardCase("shared queries", "fa2", "wgmma", "bfloat16", *shapes, options)
    assert check_backward(case, device=device).plan.kernel == kernel


def test_a_ticket_behind_the_last_section_is_of_no_head():
    """Sections of one head each: behind the last one there are no heads to divide by."""
    shapes = 3 * [(2, 70, 16)]
    case = BackwardCase("sections", "fa3", "wgmma", "float16", *shapes, {"window": (69, 0)})
    device = dataclasses.replace(FEW, cache_bytes=1)
    assert check_backward(case, device=device).plan.section == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("algo", "engine", "arch"),
    [
        (*kernel, arch)
        for kernel in BACKWARD_KERNELS
        if kernel[1] != "wgmma"
        for arch in (75, 80, 120)
        if arch >= 80 or "simt" in kernel
    ],
)
def test_other_architectures(algo, engine, arch):
    """Before sm_80 there is no cp.async; shared memory is smaller before and after the H200."""
    rng, device = np.random.default_rng(2), Device(arch)
    for dtype, dim in itertools.product(DTYPES[engine][:2], (DIMS[engine], 128)):
        q, k, v = random(rng, dtype, 3, 2, 75, dim)
        result = attention(q, k, v, algo=algo, engine=engine, causal=True, device=device)
        assert_forward_close(result.out, result.lse, q, k, v, plan=result.plan, causal=True)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("algo", "engine", "arch"),
    [
        (*kernel, arch)
        for kernel in BACKWARD_KERNELS
        if kernel[1] != "wgmma"
        for arch in (75, 80, 120)
        if arch >= 80 or "simt" in kernel
    ],
)
def test_gradients_on_other_architectures(algo, engine, arch):
    """Before sm_90 there is no vector atomic addition; before sm_80 no cp.async."""
    rng, dtype = np.random.default_rng(13), DTYPES[engine][-2 if engine == "simt" else -1]
    dout, q, k, v = random(rng, dtype, 4, 2, 75, DIMS[engine])
    inputs = with_forward(dtype, dout, q, k, v, causal=True)
    kernel = {"algo": algo, "engine": engine, "causal": True}
    result = attention_backward(*inputs, **kernel, device=Device(arch))
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("arch", "dim"), [(80, 40), (86, 136)])
def test_gradients_in_any_order_where_registers_are_few(arch, dim, causal):
    """Blocks begin at different tiles of queries, and keep the entry of a visit, not its index."""
    rng = np.random.default_rng(17)
    dout, q, k, v = random(rng, "bfloat16", 4, 2, 200, dim)
    inputs = with_forward("bfloat16", dout, q, k, v, causal=causal)
    options = {"algo": "fa2", "engine": "mma", "causal": causal, "deterministic": False}
    result = attention_backward(*inputs, **options, device=Device(arch))
    assert_backward_close(result[:3], dout, q, k, v, plan=result.plan, causal=causal)


# ------------------------------------------------------------------------------ exact laws
@EACH_BACKWARD_TYPE
def test_gradients_of_keys_sum_to_zero(algo, engine, dtype):
    """Adding the same vector to all keys changes no weight."""
    rng, dim = np.random.default_rng(14), DIMS[engine]
    q, dout = random(rng, dtype, 2, 2, 33, dim)
    k, v = random(rng, dtype, 2, 2, 79, dim)
    inputs = with_forward(dtype, dout, q, k, v)
    result = attention_backward(*inputs, algo=algo, engine=engine, mode="fast")
    bound = reference.backward_bound(dout, q, k, v, dtype)
    total = result.dk.astype(bound.dk.dtype).sum(axis=-2)
    assert (np.abs(total) <= bound.dk_bound.sum(axis=-2)).all()


@EACH_BACKWARD_TYPE
def test_values_of_one_have_no_gradient_behind_them(algo, engine, dtype):
    """With equal values the output depends on neither queries nor keys."""
    rng, dim = np.random.default_rng(15), DIMS[engine]
    q, dout, k = random(rng, dtype, 3, 2, 40, dim)
    ones = np.ones_like(k)
    inputs = with_forward(dtype, dout, q, k, ones, causal=True)
    kernel = {"algo": algo, "engine": engine, "causal": True, "mode": "fast"}
    result = attention_backward(*inputs, **kernel)
    assert_backward_close(result[:3], dout, q, k, ones, plan=result.plan, causal=True)
    u = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    largest = u * dim * np.abs(dout.astype(float)).max() * 40
    assert np.abs(result.dq.astype(float)).max() <= largest * np.abs(k.astype(float)).max()
    assert np.abs(result.dk.astype(float)).max() <= largest * np.abs(q.astype(float)).max()


@EACH_BACKWARD_TYPE
def test_gradients_of_the_past_do_not_see_the_future(algo, engine, dtype):
    """Of keys, whose later ones no query of a causal prefix sees; of queries, likewise."""
    tile, dim = tile_of(algo, engine, dtype, backward=True), DIMS[engine]
    rng, prefix = np.random.default_rng(16), min(tile.block_q, tile.block_k) + 3
    n = prefix + tile.block_q
    dout, q, k, v = random(rng, dtype, 4, n, dim)
    kernel = {"algo": algo, "engine": engine, "causal": True, "mode": "fast"}
    one = attention_backward(*with_forward(dtype, dout, q, k, v, causal=True), **kernel)
    dout, q, k, v = (x.copy() for x in (dout, q, k, v))
    for x in (dout, q, k, v):
        x[prefix:] = random(rng, dtype, n - prefix, dim)
    other = attention_backward(*with_forward(dtype, dout, q, k, v, causal=True), **kernel)
    assert one.dq[:prefix].tobytes() == other.dq[:prefix].tobytes()
    assert not np.array_equal(one.dk[:prefix], other.dk[:prefix])


@EACH_BACKWARD_KERNEL
def test_gradients_of_grouped_heads_are_sums(algo, engine):
    """In the type of sums and in the order of the heads, so that the last bit is known."""
    rng, dim = np.random.default_rng(17), DIMS[engine]
    dtype = "float32" if engine == "simt" else "float16"
    q, dout = random(rng, dtype, 2, 2, 6, 20, dim)
    k, v = random(rng, dtype, 2, 2, 2, 30, dim)
    kernel = {"algo": algo, "engine": engine, "causal": True, "mode": "fast"}
    inputs = with_forward(dtype, dout, q, k, v, enable_gqa=True, causal=True)
    grouped = attention_backward(*inputs, enable_gqa=True, **kernel)
    repeated = (np.repeat(x, 3, axis=1) for x in (k, v))
    plain = attention_backward(*with_forward(dtype, dout, q, *repeated, causal=True), **kernel)
    assert grouped.dq.tobytes() == plain.dq.tobytes()
    for mine, each in ((grouped.dk, plain.dk), (grouped.dv, plain.dv)):
        each = each.reshape(2, 2, 3, 30, dim)
        rounded = UNIT_ROUNDOFF[dtype] * np.abs(each.astype(float)).sum(2)
        error = np.abs(mine.astype(float) - each.astype(float).sum(2))
        assert (error <= 2 * rounded + 2**-24).all()


@pytest.mark.one_in(4)
@EACH_TYPE
def test_lse_of_equal_scores_counts_the_visible_keys(algo, engine, dtype):
    """With q = 0 the sum of exponentials is a count: a key too many or too few shows."""
    tile, dim = tile_of(algo, engine, dtype), DIMS[engine]
    n, m = tile.block_q + 5, 2 * tile.block_k + 3
    mode = "check" if engine == "simt" else "fast"  # other tiles are large, values are the point
    rng = np.random.default_rng(3)
    q, k = np.zeros((2, n, dim), numpy_dtype(dtype)), random(rng, dtype, 2, m, dim)
    u = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    lengths = {"q_lengths": n - 3, "kv_lengths": m - 2}
    choices = [{}, {"window": (9, 4)}, lengths, {**lengths, "window": (tile.block_k, 0)}]
    offsets = [{"q_offset": tile.block_k + 1, "window": (9, 4)}, {"q_offset": np.int32([-3])}]
    calls = [*itertools.product(choices, (False, True, "top_left")), *zip(offsets, (False, True))]
    for options, causal in calls:
        shaped = {name: np.int32([x]) if "lengths" in name else x for name, x in options.items()}
        result = attention(
            q[None], k[None], k[None], algo=algo, engine=engine, causal=causal, mode=mode, **shaped
        )
        count = reference.visible_keys((1, 2, n, m), causal=causal, **shaped).sum(-1)
        with np.errstate(divide="ignore"):
            expected = np.log(count.astype(float))
        assert np.array_equal(np.isneginf(result.lse), count == 0), result.plan
        error = np.abs(result.lse[count > 0] - expected[count > 0])
        assert (error <= 4 * u * np.maximum(1, expected[count > 0])).all(), result.plan
        assert np.array_equal(np.rint(np.exp(result.lse)), count), result.plan


@EACH_TYPE
def test_values_of_one_give_one(algo, engine, dtype):
    rng, dim = np.random.default_rng(4), DIMS[engine]
    q, k = random(rng, dtype, 3, 33, dim), random(rng, dtype, 3, 79, dim)
    ones = np.ones((3, 79, dim), q.dtype)
    for options in ({}, {"causal": True}, {"window": 7}):
        result = attention(q, k, ones, algo=algo, engine=engine, **options)
        # Half types round P to the type before the product, but its sum is that of exact P.
        u, u_acc = (
            UNIT_ROUNDOFF[dtype],
            UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"],
        )
        error = np.abs(result.out.astype(float) - 1)
        assert error.max() <= 2 * (2 * u + u_acc * (8 + np.sqrt(79))), result.plan


@EACH_TYPE
def test_permuted_keys_change_nothing(algo, engine, dtype):
    rng, dim = np.random.default_rng(5), DIMS[engine]
    m = tile_of(algo, engine, dtype).block_k + 21
    q, (k, v) = random(rng, dtype, 2, 11, dim), random(rng, dtype, 2, 2, m, dim)
    order = rng.permutation(m)
    one = attention(q, k, v, algo=algo, engine=engine)
    other = attention(q, k[:, order], v[:, order], algo=algo, engine=engine)
    bound = forward_bound(q, k, v, dtype)
    assert (np.abs(one.out.astype(float) - other.out.astype(float)) <= 2 * bound.out_bound).all()
    assert (np.abs(one.lse - other.lse) <= 2 * bound.lse_bound).all()


@pytest.mark.one_in(3)
@EACH_TYPE
def test_causal_prefix_depends_on_its_prefix_only(algo, engine, dtype):
    tile, dim = tile_of(algo, engine, dtype), DIMS[engine]
    rng, prefix = np.random.default_rng(6), tile.block_q + 3
    n = 2 * max(tile.block_q, min(tile.block_k, 128)) + 7
    q, k, v = random(rng, dtype, 3, n, dim)
    options = {"algo": algo, "engine": engine, "causal": True}
    if engine == "wgmma":  # its tiles are large
        options["mode"] = "fast"
    one = attention(q, k, v, **options)
    for changed in (random(rng, dtype, n, dim), np.full((n, dim), np.nan, k.dtype)):
        k[prefix:], v[prefix:] = changed[prefix:], changed[prefix:]
        other = attention(q, k, v, **options)
        assert one.out[:prefix].tobytes() == other.out[:prefix].tobytes()
        assert one.lse[:prefix].tobytes() == other.lse[:prefix].tobytes()
        assert not np.array_equal(one.out[prefix:], other.out[prefix:])


@pytest.mark.parametrize("dtype", DTYPES["wgmma"])
def test_fa3_equals_fa2_bit_by_bit(dtype):
    """Which block works on an item, and after which other, changes nothing."""
    rng, dim = np.random.default_rng(19), DIMS["wgmma"]
    q, (k, v) = random(rng, dtype, 3, 2, 400, dim), random(rng, dtype, 2, 3, 2, 300, dim)
    for options in ({}, {"causal": True}, {"kv_lengths": np.int32([300, 0, 7])}):
        kernel = {"engine": "wgmma", "device": FEW, "mode": "fast", **options}
        fa2, fa3 = (attention(q, k, v, algo=a, **kernel) for a in ("fa2", "fa3"))
        assert fa3.plan.grid == 2 * fa3.plan.tile.blocks_per_multiprocessor < fa2.plan.grid
        assert fa2.out.tobytes() == fa3.out.tobytes()
        assert fa2.lse.tobytes() == fa3.lse.tobytes()


@pytest.mark.parametrize(("engine", "dtype"), [(e, d) for e in DTYPES for d in DTYPES[e]])
def test_fa1_equals_fa2(engine, dtype):
    rng, dim = np.random.default_rng(7), DIMS[engine]
    q, (k, v) = random(rng, dtype, 2, 70, dim), random(rng, dtype, 2, 2, 150, dim)
    for options in ({}, {"causal": True}, {"window": (30, 3), "softcap": 2.0}):
        fa1, fa2 = (attention(q, k, v, algo=a, engine=engine, **options) for a in ("fa1", "fa2"))
        bound = forward_bound(q, k, v, dtype, **options)
        assert (np.abs(fa1.out.astype(float) - fa2.out.astype(float)) <= 2 * bound.out_bound).all()
        with np.errstate(invalid="ignore"):
            lse_error = np.where(fa1.lse == fa2.lse, 0, np.abs(fa1.lse - fa2.lse))
        assert (lse_error <= 2 * bound.lse_bound).all()


@EACH_TYPE
def test_halves_merged_by_lse_equal_the_whole(algo, engine, dtype):
    rng, dim = np.random.default_rng(8), DIMS[engine]
    q, (k, v) = random(rng, dtype, 2, 21, dim), random(rng, dtype, 2, 2, 90, dim)
    whole = attention(q, k, v, algo=algo, engine=engine)
    halves = [
        attention(q, k[:, part], v[:, part], algo=algo, engine=engine)
        for part in (slice(None, 37), slice(37, None))
    ]
    lse = np.logaddexp(*(half.lse.astype(float) for half in halves))
    out = sum(np.exp(half.lse - lse)[..., None] * half.out.astype(float) for half in halves)
    bound = forward_bound(q, k, v, dtype)
    # Each half has the whole's bound at most twofold: its weights sum to one on their own.
    weights = np.maximum.reduce([np.exp(half.lse - lse) for half in halves])[..., None]
    assert weights.max() < 1
    assert (np.abs(lse - whole.lse) <= 3 * bound.lse_bound).all()
    assert (np.abs(out - whole.out.astype(float)) <= 3 * bound.out_bound).all()


@EACH_KERNEL
def test_grouped_heads_equal_repeated_ones(algo, engine):
    rng, dim, dtype = np.random.default_rng(9), DIMS[engine], DTYPES[engine][-1]
    q, (k, v) = random(rng, dtype, 2, 6, 20, dim), random(rng, dtype, 2, 2, 3, 30, dim)
    grouped = attention(q, k, v, algo=algo, engine=engine, enable_gqa=True, causal=True)
    repeated = (np.repeat(x, 2, axis=1) for x in (k, v))
    plain = attention(q, *repeated, algo=algo, engine=engine, causal=True)
    assert grouped.out.tobytes() == plain.out.tobytes()
    assert grouped.lse.tobytes() == plain.lse.tobytes()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("layout", ["bnhd", "padded", "odd", "offset", "reversed", "sparse"])
@EACH_TYPE
def test_strided_views_equal_their_copies(algo, engine, dtype, layout):
    q, k, v = random(np.random.default_rng(10), dtype, 3, 2, 2, 45, DIMS[engine])
    if engine == "wgmma" and layout in ("odd", "offset", "reversed"):
        with pytest.raises(NotImplementedError, match="rows aligned|negative strides"):
            attention(*(place(x, layout) for x in (q, k, v)), algo=algo, engine=engine)
        return
    copy = attention(q, k, v, algo=algo, engine=engine, causal=True)
    views = [place(x, layout) for x in (q, k, v)]
    strided = attention(*views, algo=algo, engine=engine, causal=True)
    assert copy.out.tobytes() == strided.out.tobytes()
    assert copy.lse.tobytes() == strided.lse.tobytes()
    shared = attention(q, q, q, algo=algo, engine=engine)  # one array may be all three
    assert_forward_close(shared.out, shared.lse, q, q, q, plan=shared.plan)


@EACH_KERNEL
def test_lse_may_be_unwanted(algo, engine):
    q, k, v = random(np.random.default_rng(11), DTYPES[engine][0], 3, 2, 40, DIMS[engine])
    with_lse, without = (
        attention(q, k, v, algo=algo, engine=engine, return_lse=wanted) for wanted in (True, False)
    )
    assert without.lse is None
    assert with_lse.out.tobytes() == without.out.tobytes()


# ------------------------------------------------------------------------------ work
@pytest.mark.parametrize("window", [(20, 20), (20, 0)])
@EACH_KERNEL
def test_work_is_proportional_to_the_window(algo, engine, window):
    """For a fixed window, as many more instructions for the second N queries as for the third."""
    dtype, dim = DTYPES[engine][0], DIMS[engine]
    tile, what = tile_of(algo, engine, dtype), COUNTED[engine]
    step = np.lcm(tile.block_q, tile.block_k)
    kernel = {"algo": algo, "engine": engine, "row": tile, "split_keys": 0}

    def work(length, **options):
        q = np.zeros((length, dim), numpy_dtype(dtype))
        return attention(q, q, q, **kernel, **options).stats[what]

    one, two, four = (work(n * step, window=window) for n in (1, 2, 4))
    slope = two - one
    if what != "accesses":
        assert four - two == 2 * slope
    else:
        assert four - two == pytest.approx(2 * slope, rel=0.03)
    # Every query tile of the second half visits the same few key tiles, not all.
    per_tile = work(2 * step) / (2 * step / tile.block_q) / (2 * step / tile.step_k)
    rows = tile.block_q if engine == "wgmma" else 1
    visits = (rows + sum(window) - 1) // tile.step_k + 2
    assert slope <= 1.2 * per_tile * visits * (step / tile.block_q) or step <= 2 * tile.step_k


@EACH_KERNEL
def test_causal_masks_halve_the_work(algo, engine):
    dtype, dim = DTYPES[engine][0], DIMS[engine]
    tile, what = tile_of(algo, engine, dtype), COUNTED[engine]
    length = 8 * max(tile.scored)
    q = np.zeros((length, dim), numpy_dtype(dtype))
    full, causal = (
        attention(q, q, q, algo=algo, engine=engine, causal=c).stats[what] for c in (False, True)
    )
    assert causal < 0.66 * full


@EACH_KERNEL
def test_hidden_keys_cost_nothing(algo, engine):
    """Keys beyond the length: as many products as if they were not there."""
    dtype, dim = DTYPES[engine][0], DIMS[engine]
    tile = tile_of(algo, engine, dtype)
    m = 3 * tile.block_k
    q, k = np.zeros((1, 5, dim), numpy_dtype(dtype)), np.zeros((1, m, dim), numpy_dtype(dtype))
    kernel = {"algo": algo, "engine": engine, "row": tile, "split_keys": 0}
    what = COUNTED[engine]
    long, short = (
        attention(q, x, x, kv_lengths=np.int32(7), **kernel).stats[what] for x in (k, k[:, :8])
    )
    assert long == short if what != "accesses" else long == pytest.approx(short, rel=0.02)


# ---------------------------------------------------------------------- the plan and the launch
@EACH_KERNEL
def test_grid_is_what_the_papers_say(algo, engine):
    """fa1: one block per head, fa2: one per head and query tile. Counted by the emulator."""
    dtype, dim = DTYPES[engine][0], DIMS[engine]
    tile = tile_of(algo, engine, dtype)
    block_q = tile.block_q
    q, k, v = random(np.random.default_rng(12), dtype, 3, 2, 3, 2 * block_q + 1, dim)
    result = attention(q, k, v, algo=algo, engine=engine, row=tile)
    assert result.stats["blocks"] == result.plan.grid == (6 if algo == "fa1" else 6 * 3)
    rows = 3 * block_q if engine == "wgmma" else 2 * block_q + 1  # wgmma: of whole tiles
    needed = 6 * rows * (dim + 2) * 4
    assert result.plan.workspace_bytes == (needed if algo == "fa1" else 0)


@EACH_BACKWARD_KERNEL
def test_backward_grid_is_what_the_papers_say(algo, engine):
    """fa1: one block per head, fa2: one per head and key tile. Counted by the emulator.

    On wgmma this problem is short: beside a head's blocks for keys it has one for its queries.
    """
    dtype, dim = DTYPES[engine][0], DIMS[engine]
    block_k = tile_of(algo, engine, dtype, backward=True).block_k
    rng = np.random.default_rng(18)
    (q, dout), (k, v) = (
        random(rng, dtype, 2, 3, 9, dim),
        random(rng, dtype, 2, 3, 2 * block_k + 1, dim),
    )
    inputs = with_forward(dtype, dout, q, k, v)
    result = attention_backward(*inputs, algo=algo, engine=engine, mode="fast")
    blocks = {"fa1": 1, "fa2": 3, "fa3": 3}[algo] + (result.plan.kernel == "hopper_backward_short")
    assert result.stats["blocks"] == result.plan.grid == 3 * blocks


EDGES = """
// Of each head, for the first and the last tile of queries and of keys: whether they visit each
// other and are uncut, asked from both sides; for the first and last rows of all: who sees whom.
extern "C" __global__ void edges(Params p, int* out) {
    const Head head = locate_head(p, blockIdx.x);
    out += blockIdx.x * 24;
    for (int i = 0; i < 4; ++i) {
        const int row = i / 2 ? p.query_length / 64 - 1 : 0;
        const int column = i % 2 ? p.key_length / 64 - 1 : 0;
        const KeyTiles<64> keys(p, head, row, 64);
        *out++ = keys.begin <= column && column < keys.end;
        *out++ = !keys.is_cut({column, -1, -1});
        const QueryTiles<64> queries(p, head, column, 64, 0);
        *out++ = queries.end - queries.count <= row && row < queries.end;
        *out++ = !queries.is_cut({row, -1, -1});
        const int q = i / 2 ? p.query_length - 1 : 0, k = i % 2 ? p.key_length - 1 : 0;
        *out++ = VisibleKeys(p, head, q).has(k);
        *out++ = VisibleQueries(p, head, k).has(q);
    }
}
"""
SIDES = st.none() | st.sampled_from([0, 1, 10**10]) | st.integers(0, 2**30)


@settings(max_examples=60, deadline=None)
@given(st.tuples(SIDES, SIDES), st.lists(st.integers(-FAR, FAR), max_size=4))
@example((None, None), [])
@example((None, 0), [])
@example((0, None), [])
def test_the_farthest_shifts_of_the_longest_sequences(window, offsets):
    """Sums of positions, shifts and widths stay integers of 32 bits."""
    n, band = MAX_LENGTH, Band.from_options(False, window)
    offsets = np.int64([FAR, -FAR, FAR - 64, 64 - FAR, 1 << 62, -(1 << 62), *offsets])
    count = len(offsets)
    spec = Spec.contiguous((count, 1, n, 8), np.dtype("f4"))
    layout = make_layout(spec, spec, spec, q_offset=Spec((count,), (8,), offsets.dtype))
    problem = Problem("float32", (count, 1), n, n, 8, 8, band=band, q_offset="int64")
    plan = make_plan(problem, H200, "fa2", "simt")
    memory, got = Memory(), np.zeros((count, 4, 6), np.int32)
    params = pack(plan, layout, 1.0, Score())
    params["q_offset"] = memory.place(offsets)
    prelude = source.prelude(plan.problem, plan.tile)
    module = Module(prelude + source.expand("seams/key_tiles.cuh") + EDGES)
    module.launch("edges", count, 1, [params, memory.place(got)], memory=memory)
    memory.fetch()
    memory.close()
    for shift, of_head in zip(np.clip(offsets, -FAR, FAR).tolist(), got.tolist(), strict=True):
        for i, corner in enumerate(of_head):
            q, k = i // 2 * (n - 64), i % 2 * (n - 64)
            first, last = band.key_range(q, q + 64, shift, n)
            tile = first < k + 64 and k < last, band.covers(q, q + 64, k, k + 64, shift)
            q, k = i // 2 * (n - 1), i % 2 * (n - 1)
            seen = band.covers(q, q + 1, k, k + 1, shift)
            assert corner == [*tile, *tile, seen, seen], (shift, i)


def test_device_of_the_tests():
    assert H200.shared_bytes == 232448

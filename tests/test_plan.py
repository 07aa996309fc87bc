"""The plan: which row serves and why not the others, its figures, and how it prints."""

import dataclasses
import math

import numpy as np
import pytest
from emulator.module import _SHARED_LIMITS
from hypothesis import given
from hypothesis import strategies as st

import cuflash
from cuflash import reference
from cuflash.masks import Band
from cuflash.plan import CPU, ITEM_BYTES, SHARED_BYTES, TILES, Device, Plan, Problem, make_plan

H200 = Device(90, "NVIDIA H200", multiprocessors=132)
GPU_ROWS = [row for row in TILES if row.engine != "numpy"]
ARCHES = (70, 75, 80, 86, 89, 90, 100, 120)

# (type, algo, architecture): head dims up to this one are served; more need more shared memory
# than the architecture has.
LIMITS = {
    ("float16", "fa1", 75): 500,
    ("bfloat16", "fa1", 75): 500,
    ("float32", "fa1", 75): 500,
    ("float64", "fa1", 70): 378,
    ("float64", "fa1", 75): 250,
    ("float64", "fa1", 86): 390,
    ("float64", "fa1", 89): 390,
    ("float64", "fa1", 120): 390,
    ("float64", "fa2", 70): 506,
    ("float64", "fa2", 75): 336,
}


def problem(dtype="float16", leading=(2, 3), n=100, m=90, d=64, e=None, **more):
    return Problem(dtype, leading, n, m, d, d if e is None else e, heads=leading[-1], **more)


@pytest.mark.parametrize("row", GPU_ROWS, ids=str)
@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1000))
def test_grid_is_a_block_per_head_or_per_query_tile(row, leading, n):
    plan = Plan(problem(row.dtypes[0], (1, *leading), n), H200, row)
    tiles = math.ceil(n / plan.block_q)
    assert plan.grid == math.prod(leading) * (tiles if row.algo == "fa2" else 1)
    assert plan.block_q == row.warps * row.warp_rows
    assert plan.threads == 32 * row.warps


@pytest.mark.parametrize("row", GPU_ROWS, ids=str)
def test_rows_are_consistent(row):
    assert row.block_k % row.step_k == 0
    assert 32 <= 32 * row.warps <= 1024
    if row.engine == "mma":
        assert row.step_k % 16 == 0
    assert row.max_dim % 16 == 0


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("engine", ["simt", "mma"])
def test_extra_memory_is_bounded(algo, engine):
    for dtype in ITEM_BYTES:
        if engine == "mma" and ITEM_BYTES[dtype] > 2:
            continue
        p = problem(dtype, e=48)
        state = make_plan(p, H200, algo, engine).workspace_bytes
        bound = ITEM_BYTES[p.accumulator] * p.head_count * p.query_length * (48 + 2)
        assert (0 < state <= bound) if algo == "fa1" else state == 0
    assert make_plan(problem(), CPU, algo).workspace_bytes == 0


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [None, 3, (5, None), (None, 2), (2**80, 1), (2**63 - 1,) * 2])
def test_flops_are_those_of_the_visible_pairs(causal, window):
    band = Band.from_options(causal, window)
    for n, m in ((9, 9), (4, 13), (13, 4), (0, 3), (3, 0)):
        p = problem(n=n, m=m, d=8, e=5, band=band)
        pairs = int(reference.visible_keys((n, m), causal=causal, window=window).sum())
        assert p.flops == 2 * (8 + 5) * pairs * 6
        assert make_plan(p, H200).flops == p.flops


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_shared_memory_fits_the_device(arch, algo):
    device = Device(arch)
    for dtype in ITEM_BYTES:
        for d in (1, 16, 40, 64, 65, 128, 200, 256, 320, 512):
            for engine in ("simt", "mma"):
                for n in (1, 64, 4096):
                    try:
                        plan = make_plan(problem(dtype, (2, 64), n, n, d), device, algo, engine)
                    except NotImplementedError:
                        continue
                    assert 0 < plan.shared_bytes <= SHARED_BYTES[arch]
                    assert d <= plan.tile.max_dim


def test_the_emulator_has_as_much_shared_memory():
    assert {10 * arch: most for arch, most in SHARED_BYTES.items()} == _SHARED_LIMITS


def served(dtype, algo, arch, d):
    """Whether any engine serves, with many blocks and with few."""
    for heads in (1, 4096):
        try:
            make_plan(problem(dtype, (heads,), 64, 64, d), Device(arch), algo)
        except NotImplementedError:
            return False
    return True


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_head_dim_is_served(dtype, algo, arch):
    missing = [d for d in range(1, 513) if not served(dtype, algo, arch, d)]
    limit = LIMITS.get((dtype, algo, arch), 512)
    assert missing == list(range(limit + 1, 513))


def test_reasons():
    def reason(row, p=None, device=H200):
        return row.reject(p or problem(), device)

    mma = next(row for row in GPU_ROWS if row.engine == "mma" and row.algo == "fa2")
    simt = next(row for row in GPU_ROWS if row.engine == "simt" and row.algo == "fa2")
    single = next(row for row in GPU_ROWS if "float64" not in row.dtypes and row.engine == "simt")
    cpu = next(row for row in TILES if row.engine == "numpy")
    many = problem(leading=(64, 64))
    assert reason(cpu) == "the numpy engine works on NumPy arrays"
    assert reason(cpu, device=CPU) == ""
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


def test_nothing_serves():
    with pytest.raises(NotImplementedError) as caught:
        make_plan(problem("float32", d=64), H200, "fa2", "mma")
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "no kernel serves float32 heads 2x3, queries 100, keys 90, head dim 64 on NVIDIA H200 "
        "(sm_90) with algo='fa2', engine='mma':"
    )
    rows = [row for row in TILES if (row.algo, row.engine) == ("fa2", "mma")]
    assert len(lines) == 1 + len(rows)
    for line, row in zip(lines[1:], rows, strict=True):
        assert line == f"  {row}: serves float16, bfloat16, not float32"
    with pytest.raises(NotImplementedError, match=r"head dim 5000 on GPU \(sm_80\):\n"):
        make_plan(problem(d=5000), Device(80))


def test_unknown_choices():
    with pytest.raises(ValueError, match="algo='flash': choose one of 'fa1', 'fa2', or None"):
        make_plan(problem(), CPU, "flash")
    with pytest.raises(ValueError, match="engine='cpu': choose one of 'numpy', 'simt', 'mma', or"):
        make_plan(problem(), CPU, None, "cpu")


def test_earlier_rows_are_listed_with_their_reasons():
    plan = make_plan(problem("float32", (1,), 4, 4, 32), H200)
    rows = [row for row in TILES if row.algo == "fa2"]
    assert tuple(row for row, _ in plan.rejected) == tuple(rows[: rows.index(plan.tile)])
    assert all(reason for _, reason in plan.rejected)
    text = str(plan)
    for row, reason in plan.rejected:
        assert f"\nrejected   {row}: {reason}" in text


def test_printing():
    p = problem(e=32, n=512, m=512, band=Band(right=0), score="score * 2", kv_lengths="int32",
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
    cpu = str(make_plan(problem(leading=(1,)), CPU))
    assert "device     CPU\nkernel     fa2_forward, algo fa2, engine numpy\n" in cpu
    assert "\ngrid" not in cpu
    assert make_plan(problem(), CPU).shared_bytes == make_plan(problem(), CPU).threads == 0
    assert str(Problem("float32", (), 1, 2, 3, 3)) == (
        "float32 heads 1, queries 1, keys 2, head dim 3"
    )


def test_devices():
    assert str(CPU) == "CPU"
    assert str(Device(80)) == "GPU (sm_80)"
    assert Device(80).shared_bytes == 166912
    assert Device(999).shared_bytes == 49152  # what every device has
    assert Device(80, shared_bytes=5).shared_bytes == 5
    assert cuflash.Device is Device


def test_plans_are_values():
    a = make_plan(problem(), H200)
    assert make_plan(problem(), dataclasses.replace(H200)) is a  # equal arguments, one plan
    assert make_plan(problem(), H200, "fa2") == a
    assert hash(make_plan(problem(), H200, "fa2")) == hash(a)
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
def test_section_is_what_half_the_cache_holds(heads, keys, d):
    plan = Plan(problem("float16", (heads,), 10, keys, d), H200, GPU_ROWS[0])
    assert 1 <= plan.section <= max(1, heads)
    if 1 < plan.section:
        assert plan.section * keys * 2 * d * 2 <= H200.cache_bytes // 2


def test_numpy_rows_are_the_hosts():
    from cuflash import host

    for row in TILES:
        if row.engine == "numpy":
            assert host.default_blocks(row.algo, 64, 64) == (row.block_q, row.block_k)
            assert str(row) == f"{row.algo} numpy {row.block_q}x{row.block_k}"

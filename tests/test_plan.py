"""The plan: which row serves and why not the others, its figures, and how it prints."""

import dataclasses
import itertools
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
GPU_ROWS = [row for row in TILES if row.engine != "numpy" and not row.backward]
BACKWARD_ROWS = [row for row in TILES if row.engine != "numpy" and row.backward]
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


# The same for backward, whatever the algorithm: it holds keys, values, queries and dout.
BACKWARD_LIMITS = {
    ("float16", 70): 448, ("bfloat16", 70): 448, ("float32", 70): 448, ("float64", 70): 224,
    ("float16", 75): 320, ("bfloat16", 75): 320, ("float32", 75): 320, ("float64", 75): 160,
    ("float64", 80): 416, ("float64", 86): 256, ("float64", 89): 256, ("float64", 120): 256,
}  # fmt: skip


def problem(dtype="float16", leading=(2, 3), n=100, m=90, d=64, e=None, **more):
    return Problem(dtype, leading, n, m, d, d if e is None else e, heads=leading[-1], **more)


def backward(*args, **more):
    return problem(*args, backward=True, **more)


@pytest.mark.parametrize("row", GPU_ROWS, ids=str)
@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1000))
def test_grid_is_a_block_per_head_or_per_query_tile(row, leading, n):
    plan = Plan(problem(row.dtypes[0], (1, *leading), n), H200, row)
    heads, tiles = math.prod(leading), math.ceil(n / plan.block_q)
    blocks = {"fa1": heads, "fa2": heads * tiles, "fa3": min(heads * tiles, 132)}
    assert plan.grid == blocks[row.algo]
    assert plan.block_q == row.warps * row.warp_rows
    assert plan.threads == 32 * row.warps + (128 if row.engine == "wgmma" else 0)


@pytest.mark.parametrize("row", BACKWARD_ROWS, ids=str)
@given(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 1000), st.integers(0, 1000))
def test_backward_grid_is_a_block_per_head_or_per_key_tile(row, leading, n, m):
    plan = Plan(backward(row.dtypes[0], (1, *leading), n, m), H200, row)
    heads, tiles = math.prod(leading), math.ceil(m / plan.block_k)
    rows, main, dq = plan.kernels
    assert plan.grid == main.grid == heads * (tiles if row.algo == "fa2" else 1)
    assert rows.grid == dq.grid == heads * math.ceil(n / plan.block_q)
    assert (rows.shared_bytes, dq.shared_bytes) == (0, 0)
    assert main.shared_bytes == plan.shared_bytes <= H200.shared_bytes
    assert {kernel.threads for kernel in plan.kernels} == {32 * row.warps}
    assert plan.block_k == row.warps // row.split * row.warp_rows


@pytest.mark.parametrize("row", GPU_ROWS + BACKWARD_ROWS, ids=str)
def test_rows_are_consistent(row):
    assert row.block_k % row.step_k == 0
    assert 32 <= 32 * row.warps <= 1024
    if row.engine == "mma":
        assert row.step_k % 16 == 0
    assert row.max_dim % 16 == 0
    if row.backward:
        assert row.block_q % row.step_q == 0
        if row.engine == "mma":
            assert row.step_q % 16 == row.block_q % 32 == 0


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


def test_forward_and_backward_plans_take_their_own_rows():
    for device, engine in ((CPU, "numpy"), (H200, "simt"), (H200, "mma")):
        for algo in ("fa1", "fa2"):
            for p in (problem(), backward()):
                plan = make_plan(p, device, algo, engine)
                assert plan.tile.backward == p.backward
                assert plan.kernel == f"{algo}_{'backward' if p.backward else 'forward'}"
                assert plan.kernel in [kernel.name for kernel in plan.kernels]
                assert all(row.backward == p.backward for row, _ in plan.rejected)


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("engine", ["simt", "mma"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_workspace(algo, engine, deterministic):
    """Per query two numbers and a row of dQ; per tile of dQ a turn; nothing of size N x M."""
    for dtype in ITEM_BYTES:
        if engine == "mma" and ITEM_BYTES[dtype] > 2:
            continue
        for d, e in ((64, 64), (17, 40), (128, 3)):
            p = backward(dtype, d=d, e=e, deterministic=deterministic)
            plan = make_plan(p, H200, algo, engine)
            parts, item = dict(plan.workspace), ITEM_BYTES[p.accumulator]
            queries = p.head_count * plan.query_tiles * plan.block_q
            assert list(parts) == ["rows", "dq_sum"] + ["turns"] * plan.is_ordered
            assert plan.is_ordered == (deterministic and algo == "fa2")
            assert parts["rows"] == queries * 2 * item
            assert queries * d * item <= parts["dq_sum"] <= queries * (2 * d + 64) * item
            if plan.is_ordered:
                assert parts["turns"] == 4 * (p.head_count * plan.query_tiles + 1)
            ends = [size for _, size in plan.workspace]
            starts = [-(-size // 256) * 256 for size in ends[:-1]]
            assert plan.workspace_bytes == sum(starts) + ends[-1]
    assert make_plan(backward(), CPU, algo).workspace_bytes == 0
    assert make_plan(backward(), CPU, algo).workspace == ()


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
    mma, large = BACKWARD_ROWS[0], BACKWARD_ROWS[1]
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
        make_plan(backward("float64"), H200, "fa2", "mma")
    rows = [r for r in BACKWARD_ROWS if (r.algo, r.engine) == ("fa2", "mma")]
    assert len(str(caught.value).splitlines()) == 1 + len(rows)
    with pytest.raises(NotImplementedError, match=", backward in any order on NVIDIA H200"):
        make_plan(backward("float64", deterministic=False), H200, "fa2", "mma")


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


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_head_dim_is_served(dtype, algo, arch):
    missing = [d for d in range(1, 513) if not served(dtype, algo, arch, d)]
    limit = LIMITS.get((dtype, algo, arch), 512)
    assert missing == list(range(limit + 1, 513))
    missing = [d for d in range(1, 513) if not served(dtype, algo, arch, d, backward)]
    assert missing == list(range(BACKWARD_LIMITS.get((dtype, arch), 512) + 1, 513))


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


def hopper(p=None, device=H200, algo="fa3"):
    """Why the engine wgmma does not serve, or an empty string."""
    try:
        return "" if make_plan(p or problem(), device, algo, "wgmma") else None
    except NotImplementedError as error:
        return str(error).splitlines()[1].partition(": ")[2]


def test_hopper_serves_or_says_why_not():
    assert hopper() == hopper(algo="fa2") == hopper(problem("bfloat16", d=256, e=8)) == ""
    assert hopper(problem("float32")) == "serves float16, bfloat16, not float32"
    assert hopper(device=Device(80)) == "needs sm_90, the device is sm_80"
    assert hopper(device=Device(100)) == "needs sm_90, the device is sm_100"
    assert hopper(device=Device(90, has_features=False)) == "needs NVRTC 12.9 or later"
    assert hopper(problem(d=60)) == "serves head dims that are multiples of 8"
    assert hopper(problem(e=60)) == "serves head dims that are multiples of 8"
    assert hopper(problem(aligned=False)) == "needs rows aligned to 16 bytes"
    assert hopper(problem(unmappable="its strides")) == "its strides"
    assert hopper(device=CPU) == "the wgmma engine works on CuPy arrays"
    with pytest.raises(NotImplementedError, match="backward on .*:\n  there is no kernel of that"):
        make_plan(backward(), H200, "fa3")


def test_hopper_is_the_choice_where_it_fills_the_device():
    many = make_plan(problem(leading=(8, 64), n=1000), H200)
    assert (many.algo, many.engine, many.kernel) == ("fa3", "wgmma", "hopper_forward")
    assert many.compile_options == ("-arch=sm_90a",)
    few = make_plan(problem(), H200)
    assert (few.algo, few.engine, few.compile_options) == ("fa2", "mma", ())
    assert make_plan(problem(), H200, engine="wgmma").engine == "wgmma"  # better than none


def test_nothing_serves():
    with pytest.raises(NotImplementedError) as caught:
        make_plan(problem("float32", d=64), H200, "fa2", "mma")
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "no kernel serves float32 heads 2x3, queries 100, keys 90, head dim 64 on NVIDIA H200 "
        "(sm_90) with algo='fa2', engine='mma':"
    )
    rows = [row for row in GPU_ROWS if (row.algo, row.engine) == ("fa2", "mma")]
    assert len(lines) == 1 + len(rows)
    for line, row in zip(lines[1:], rows, strict=True):
        assert line == f"  {row}: serves float16, bfloat16, not float32"
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


def test_earlier_rows_are_listed_with_their_reasons():
    plan = make_plan(problem("float32", (1,), 4, 4, 32), H200)
    rows = [row for row in TILES if row.algo != "fa1" and not row.backward]
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
    gradients = make_plan(backward(n=512, m=512), H200, "fa2", "mma")
    assert "head dim 64, backward\n" in str(gradients)
    assert "\nkernel     fa2_backward, algo fa2, engine mma\n" in str(gradients)
    assert f"\nworkspace  {gradients.workspace_bytes} bytes\n" in str(gradients)
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
def test_sections_are_alike_and_about_half_the_cache(heads, keys, d):
    section = Plan(problem("float16", (heads,), 10, keys, d), H200, GPU_ROWS[0]).section
    assert 1 <= section <= max(1, heads)
    cached = max(1, H200.cache_bytes // 2 // max(1, keys * 2 * d * 2))
    assert section <= 1.5 * cached + 1
    if heads:
        assert math.ceil(heads / section) <= math.ceil(heads / cached)


def test_numpy_rows_are_the_hosts():
    from cuflash import host

    for row in TILES:
        if row.engine == "numpy":
            assert host.default_blocks(row.algo, 64, 64) == (row.block_q, row.block_k)
            assert str(row) == f"{row.algo} numpy {row.block_q}x{row.block_k}"

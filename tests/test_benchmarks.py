"""The suite of asv_bench: well formed, skipped where there is no GPU, swept, and published.

`asv_bench/benchmarks` is imported under its own name, as asv does.
"""

import contextlib
import dataclasses
import functools
import html
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path
from urllib.parse import parse_qs

import numpy as np
import pytest
from cases import H200
from compile_kernels import compile_source, require_nvrtc

import cuflash
from cuflash.compare import machine, meters

BENCH = Path(__file__).resolve().parents[1] / "asv_bench"
MODULES = sorted(path.stem for path in (BENCH / "benchmarks").glob("[a-z]*.py"))
NEEDS_GPU = {"backward", "block_sparse", "compile", "decode", "forward", "memory", "tiles"}


@pytest.fixture
def suite(monkeypatch):
    """Imports a module of the suite on a machine without a GPU."""
    monkeypatch.syspath_prepend(BENCH)
    gpu = importlib.import_module("benchmarks.gpu")
    monkeypatch.setattr(gpu, "find_cupy", lambda: None)
    monkeypatch.setattr(gpu, "find_torch", lambda: None)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def classes(module):
    """The benchmarks of a module."""
    own = (x for x in vars(module).values() if getattr(x, "__module__", "") == module.__name__)
    return [x for x in own if any(name.startswith(("track_", "time_")) for name in dir(x))]


def test_the_suite_has_a_module_for_every_question():
    assert {"accuracy", "host", "overhead", *NEEDS_GPU} < set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_benchmarks_have_versions_names_and_units(suite, name):
    for kind in classes(suite(name)):
        assert isinstance(kind.version, str), kind
        assert len(kind.params) == len(kind.param_names), kind
        for method in (m for m in dir(kind) if m.startswith("track_")):
            assert getattr(kind, method).unit, (kind, method)


@pytest.mark.parametrize("name", sorted(NEEDS_GPU))
def test_without_a_gpu_setup_skips(suite, name):
    for kind in classes(suite(name)):
        with pytest.raises(NotImplementedError, match="needs .*GPU"):
            kind().setup(*(values[0] for values in kind.params))


@pytest.fixture
def beside_wgmma(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("beside_wgmma")


def test_products_beside_instructions_are_not_serialized(beside_wgmma):
    require_nvrtc()
    for name, body in beside_wgmma.INSTRUCTIONS:
        source = beside_wgmma.SOURCE.replace("BODY", body).replace("MULTIPLIES", "1")
        assert compile_source(source, "sm_90a").messages == (), name


def test_instructions_beside_products_need_a_gpu(beside_wgmma, capsys):
    if beside_wgmma.bench.find_cupy() is None:
        assert beside_wgmma.main() == 77
        assert "needs a GPU" in capsys.readouterr().out


def test_importing_the_suite_asks_for_no_device():
    code = "import sys; from benchmarks import " + ", ".join(MODULES)
    code += "; print([x for x in ('cupy', 'torch') if x in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(BENCH.parent)},
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr


def test_host_benchmarks_prepare_once(suite):
    bench = suite("host").Host()
    bench.setup(512, True, "fa2")
    prepared = bench.arrays
    bench.setup(512, True, "fa2")
    assert bench.arrays is prepared
    bench.setup(512, True, "unfused")
    assert bench.arrays is not prepared
    bench.time_forward(512, True, "unfused")
    assert bench.track_extra_bytes(512, True, "unfused") > 8 * 512 * 512 * 4
    ratio = suite("host").HostRatio()
    found = ratio.track_ratio(512, False, "fa1")
    assert found["number"] == 1
    assert all(x > 0 for x in found["samples"])


def test_accuracy_is_the_error_of_the_result(suite):
    bench = suite("accuracy").Accuracy()
    bench.setup("fp32", "fa2", "numpy")
    right = bench.track_relative_error("fp32", "fa2", "numpy")
    assert 0 < right < 1e-6
    bench.found = bench.found + 0.01 * np.abs(bench.found).max()
    assert bench.track_relative_error("fp32", "fa2", "numpy") > 0.009
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        bench.setup("fp32", "fa2", "simt")


def test_the_meters_are_those_of_this_checkout(suite):
    gpu = suite("gpu")
    for theirs, ours in ((gpu.meters, meters), (gpu.machine, machine)):
        assert Path(theirs.__file__) == Path(ours.__file__)
        assert theirs is not ours  # another version of cuflash may be what is measured
    assert gpu.meters.DTYPES is gpu.machine.DTYPES is not machine.DTYPES


def test_the_suite_measures_a_version_without_meters_of_its_own(tmp_path):
    """As early ones are: one file, here, that says nothing of what it has."""
    (tmp_path / "cuflash.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks import gpu; print(gpu.meters.draw, *gpu.DTYPES)"],
        cwd=BENCH, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.endswith(" bf16 fp16 fp32 fp64\n"), done.stderr


def test_a_call_that_no_kernel_serves_skips(suite):
    need_kernel, x = suite("gpu").need_kernel, np.zeros((2, 3, 4, 8), np.float32)
    need_kernel(x, x, x, algo="fa2", causal=True)
    for choice, words in (
        ({"algo": "fa3"}, "no kernel serves"),
        ({"algo": "fa9"}, "algo='fa9'"),  # of a later version
        ({"engine": "wg"}, "engine='wg'"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            need_kernel(x, x, x, **choice)
    with pytest.raises(NotImplementedError, match="no dropout, window_of"):
        need_kernel(x, x, x, dropout=0, window_of=None)
    with pytest.raises(ValueError, match="causal"):
        need_kernel(x, x, x, causal="left")


def operands(**options):
    """A problem of (batch, heads, length, width), whose tensors are NumPy's."""

    class Tensor(np.ndarray):
        def transpose(self, a, b):
            return np.swapaxes(self, a, b)

    tensors = [np.full((2, 3, 5, 4), i).view(Tensor) for i in range(3)]
    q, k, v = (types.SimpleNamespace(torch=x) for x in tensors)
    return types.SimpleNamespace(q=q, k=k, v=v, causal=True, options=options)


@pytest.mark.parametrize(("name", "gives_lse"), [("FA3", False), ("FA4", True)])
def test_flash_attention_takes_part_where_it_is_installed(suite, monkeypatch, name, gives_lse):
    gpu, seen = suite("gpu"), []
    module, package = gpu.FLASH[name]

    def flash_attn_func(q, k, v, causal):
        seen.append(([x.shape for x in (q, k, v)], causal))
        return (v, None) if gives_lse else v

    call = gpu.Problem.flash_attention(operands(), name)
    for part in (module.split(".")[0], module):
        monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(ModuleNotFoundError, match=f"^{package} is not installed"):
        call()
    for part in (module.split(".")[0], module):
        found = types.SimpleNamespace(flash_attn_func=flash_attn_func)
        monkeypatch.setitem(sys.modules, part, found)
    out = call()
    assert seen == [([(2, 5, 3, 4)] * 3, True)]
    assert out.shape == (2, 3, 5, 4)
    assert (out == 2).all()


def test_settings_softcap_and_lengths_of_flash_attention(suite, monkeypatch):
    gpu, seen = suite("gpu"), []

    def function(q, k, v, **options):
        seen.append(options)
        return q

    def flash_function(name, *choice):
        seen.extend((name, *choice))
        return function

    monkeypatch.setattr(gpu, "flash_function", flash_function)
    monkeypatch.setattr(gpu.Operand, "torch", property(lambda operand: operand.cupy))
    gpu.Problem.flash_attention(operands(softcap=30.0), "FA3", num_splits=8)()
    gpu.Problem.flash_attention(operands(kv_lengths="lengths"), "FA4", pack_gqa=True)()
    assert seen == [
        "FA3", "flash_attn_func", {"causal": True, "num_splits": 8, "softcap": 30.0},
        "FA4", "flash_attn_with_kvcache",
        {"causal": True, "pack_gqa": True, "cache_seqlens": "lengths"},
    ]  # fmt: skip


@pytest.mark.parametrize("layout", ["bnhd", "bhnd"])
def test_few_queries_over_caches_with_lengths_in_pages(suite, monkeypatch, layout):
    gpu = suite("gpu")
    monkeypatch.setattr(gpu, "need_gpu", lambda: np)
    options = {"key_heads": 2, "queries": 3, "kv_lengths": np.array([20, 33])}
    problem = gpu.Problem((2, 4, 64, 16), "fp32", gpu.BOTTOM_RIGHT, layout, **options)
    assert problem.label == "fp32 (2,4/2,3/64,16) causal lengths 20/33"
    assert problem.flops == 4 * 16 * 4 * (3 * 20 - 3 + 3 * 33 - 3)
    assert problem.key_bytes == 2 * 2 * 16 * 4 * (20 + 33)
    expected = problem.ours(None)().copy()
    assert np.abs(expected).min(axis=-1).all()
    paged, tight = problem.in_pages(16), problem.with_capacity(48)
    assert paged.k.cupy.shape == (8, 2, 16, 16)
    assert tight.k.cupy.shape == (2, 2, 48, 16)
    assert paged.label.endswith(" pages of 16")
    for other in (paged, tight):
        np.testing.assert_allclose(other.ours(None)(), expected, rtol=1e-5, atol=1e-6)
    lengths = problem.options["kv_lengths"]
    lengths[:] = 64
    assert abs(problem.ours(None)() - expected).max() > 0.1  # lengths count


def test_decode_runs_on_every_cache(suite, monkeypatch):
    gpu, decode = suite("gpu"), suite("decode")
    monkeypatch.setattr(gpu, "need_gpu", lambda: np)
    monkeypatch.setattr(gpu, "meter", meters.HostMeter)
    monkeypatch.setattr(gpu, "MILLISECONDS", 1.0)
    monkeypatch.setattr(gpu, "host_times", lambda calls, batches: [[2.0] * batches])
    for cache in decode.CACHES:
        bench = decode.Decode()
        bench.setup("2x128", cache)
        assert bench.call().shape == (2, 32, 1, 128)
        assert len(bench.track_seconds("2x128", cache)["samples"]) >= 5
        assert bench.track_host_seconds("2x128", cache)["samples"] == [2e-6] * 10
    options = decode.draw("2x128", "pages").options
    assert set(options["kv_lengths"]) == {128}
    assert options["page_table"].shape == (2, 2)
    assert decode.draw("2x4096", "split_keys").options["split_keys"] == decode.SPAN


def test_gradients_of_a_peer_run_its_forward_pass_once(suite, monkeypatch):
    gpu, seen = suite("gpu"), []

    class Tensor(np.ndarray):
        def detach(self):
            return self

        requires_grad_ = detach

    def grad(out, inputs, dout, retain_graph):
        seen.append("backward")
        return tuple(out * x * dout for x in inputs)

    def forward(q, k, v):
        seen.append("forward")
        return q + k + v

    torch = types.SimpleNamespace(
        enable_grad=contextlib.nullcontext, autograd=types.SimpleNamespace(grad=grad),
        use_deterministic_algorithms=seen.append,
    )  # fmt: skip
    for name in ("find_torch", "need_torch"):
        monkeypatch.setattr(gpu, name, lambda: torch)
    operands = [types.SimpleNamespace(torch=np.full(1, i).view(Tensor)) for i in range(1, 5)]
    in_order = gpu._in_order, [True, "backward", False]
    for around, words in ((contextlib.nullcontext, ["backward"]), in_order):
        call = gpu.gradients(forward, *operands, around)
        assert seen == []
        assert [int(x[0]) for x in call()] == [24, 48, 72]
        call()
        assert seen == ["forward", *words, *words]
        seen.clear()


def test_gradients_of_grouped_heads_wider_values_and_softcap(suite, monkeypatch):
    gpu = suite("gpu")
    monkeypatch.setattr(gpu, "need_gpu", lambda: np)
    options = {"key_heads": 2, "value_width": 24, "softcap": 30.0}
    problem = gpu.Backward((1, 4, 8, 16), "fp32", True, "bnhd", **options)
    assert problem.label == "backward fp32 (1,4/2,8,16/24) causal softcap 30"
    assert problem.flops == 2 * (3 * 16 + 2 * 24) * 4 * 36
    assert problem.chosen(deterministic=False) == "fa2 numpy"
    assert [x.cupy.shape for x in problem.results] == [(1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 24)]
    found = tuple(x.copy() for x in problem.ours(None)())
    assert problem.error(problem.served("fa1")(), found) < 1e-6
    with pytest.raises(NotImplementedError, match="no kernel serves"):
        problem.served("fa3")
    plain = gpu.Backward((1, 2, 8, 16), "fp32")
    assert plain.label == "backward fp32 (1,2,8,16)"
    assert plain.flops == 10 * 16 * 2 * 64


def test_what_flash_attention_itself_lacks_is_named(suite, monkeypatch, tmp_path):
    (tmp_path / "fa3_fwd_interface.py").write_text("import fa3_fwd._C")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'fa3_fwd'"):
        suite("gpu").Problem.flash_attention(operands(), "FA3")()


@pytest.fixture
def peers(suite):
    """asv_bench/against_peers.py; it imports CuPy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("cupy", reason="needs CuPy: pip install '.[cuda13x]'")
        return importlib.import_module("against_peers")


class FakeProblem:
    """Stands for operands on a GPU: what is called, by name."""

    others, results, dtype, tolerance, flops, widths = (), (), "bf16", 0.1, 1e9, (64, 64)
    key_bytes = 1e9

    def __init__(self, shape, dtype, causal=False, layout="bhnd", **options):
        self.shape, self.dtype, self.options, self.causal = shape, dtype, options, bool(causal)
        self.queries = options.get("queries", shape[2])
        words = [f"{dtype} ({','.join(map(str, shape))})", *(["causal"] if causal else [])]
        names = (f"{self.queries} queries" if x == "queries" else x for x in options)
        self.label = " ".join([*words, *names])

    def in_pages(self, page_size):
        return FakeProblem(self.shape, self.dtype, **{f"pages of {page_size}": page_size})

    def with_capacity(self, keys):
        return self

    def chosen(self, deterministic=True):
        return "fa3 wgmma" if deterministic else "fa2 mma"

    def name(self, *kind, **options):
        return " ".join(map(str, (*kind, *options.values())))

    ours = torch_fused = flash_attention = flex_attention = name
    torch_gradients = flash_gradients = name

    def error(self, theirs, mine):
        return abs(theirs - mine)


@pytest.fixture
def session(peers, monkeypatch):
    """A session that finds a ratio of 2 or, of FlashAttention-3, 8 or none."""

    class Fake(peers.Session):
        def compare_pairs(self, group, problem, contenders, pairs):
            found = []
            for name, peer, target in pairs:
                several = isinstance(peer, tuple)
                for x in (name, *(peer if several else (peer,))):
                    assert x in contenders
                row = {"group": group, "problem": problem.label, "shape": problem.shape}
                row.update(name=name, peer="the fastest" if several else peer)
                row.update(target=target, mark="pass", note="")
                if peer != "FA3" or problem.shape[3] != 256:
                    row.update(ratio=8.0 if peer == "FA3" else 2.0, us=250.0)
                found.append(row)
            self.keep(found)
            return found

    for module in ("against_peers", "peer_decode", "peer_gradients"):
        for kind in ("Problem", "Backward"):
            monkeypatch.setattr(sys.modules[module], kind, FakeProblem, raising=False)
    monkeypatch.setattr(peers.bench, "release", lambda: None)
    return lambda **asked: Fake(None, 1.0, **asked)


def targets(session, mode):
    """What rows of a mode are held to, by shape and peer; without those held to nothing."""
    found = {}
    for row in session.rows:
        if "shape" in row and row["name"].endswith("any order") == (mode == "any order"):
            peer = "any order" if row["peer"].endswith("any order") else row["peer"]
            if row["target"]:
                found.setdefault(row["shape"], {})[peer] = row["target"]
    return found


def test_hopper_has_targets_and_a_mean_for_every_peer(peers, session):
    session = session()
    peers.hopper(session)
    by_peer = {}
    for row in session.rows:
        if row["name"] == "fa3 wgmma" and "shape" in row:
            by_peer.setdefault(row["shape"][2:], {})[row["peer"]] = row["target"]
    every = dict.fromkeys(("cuDNN", "torch FA2", "FA3", "FA4"), 0.95)
    assert by_peer.pop((4096, 32)) == {
        **every, "cuDNN": 1.2, "torch FA2": 1.2, "FlexAttention": 0.95
    }  # fmt: skip
    assert by_peer.pop((65536, 64)) == {**every, "cuDNN": 1.1}
    for (length, width), found in by_peer.items():
        assert width in (64, 128, 256)
        assert found == (dict.fromkeys(every) if length == 1024 else every)
    means = {row["peer"]: row for row in session.rows if row["problem"] == "geometric mean"}
    assert session.rows[-4:] == list(means.values())
    assert {peer: row["ratio"] for peer, row in means.items()} == pytest.approx(
        {"cuDNN": 2, "torch FA2": 2, "FA3": 8, "FA4": 2}
    )
    assert {peer: row["note"] for peer, row in means.items()} == {
        "cuDNN": "12 of 12", "torch FA2": "12 of 12", "FA3": "8 of 12", "FA4": "12 of 12"
    }  # fmt: skip


@pytest.fixture
def decode_rows(peers, session, monkeypatch):
    """Rows of the group, by problem and peer, where no peer has settings."""
    monkeypatch.setattr(sys.modules["peer_decode"], "flash_calls", lambda p, name: {"": name})

    def rows(**asked):
        found = session(**asked)
        peers.decode(found)
        by_problem = {}
        for row in found.rows:
            by_problem.setdefault(row["problem"], {})[row["peer"]] = row
        return by_problem

    return rows


def test_decode_is_held_to_the_fastest_peer(decode_rows):
    found, torch = decode_rows(), ("cuDNN", "torch FA2")
    every = {*torch, "FA3", "FA4", "the fastest"}
    against = {problem: rows for problem, rows in found.items() if "FA4" in rows}
    assert len(against) == 14 + 10
    for problem, rows in against.items():
        short = "causal" in problem and "queries" in problem
        assert set(rows) == every - set(torch if short else ())
        assert {peer: row["target"] for peer, row in rows.items() if row["target"]} == {
            "the fastest": 1.0
        }
    one = against["bf16 (1,32,65536,128) key_heads 1 queries"]
    assert one["FA3"]["note"] == "4.00 TB/s"
    assert one["cuDNN"]["rate"] == 4.0
    assert "rate" not in against["bf16 (1,2,16384,128)"]["cuDNN"]


def test_room_pages_and_softcap_may_take_little(decode_rows):
    targets = {
        problem: {peer: row["target"] for peer, row in rows.items()}
        for problem, rows in decode_rows().items()
        if "FA4" not in rows
    }
    softcap = "bf16 (2,16,4096,{}) causal softcap"
    pages = "bf16 (16,32,8192,128) pages of {}"
    assert targets == {
        "bf16 (64,32,65536,128) key_heads 1 queries kv_lengths":
            {"room for 16384": 1 / 1.1, "FA3": 1.0},
        **{
            pages.format(size): {"no pages": 1 / most, "no pages, no lengths": 1 / most}
            for size, most in ((16, 1.12), (64, 1.05), (256, 1.03))
        },
        **{
            softcap.format(width): {"no softcap": 1 / most, "FA3": 1.0}
            for width, most in ((64, 1.6), (128, 1.25), (256, 1.15))
        },
    }  # fmt: skip


def test_a_part_of_decode_can_be_asked_for(decode_rows):
    assert {row["shape"][2:] for rows in decode_rows(lengths=[65536]).values()
            for row in rows.values()} == {(65536, 128)}  # fmt: skip
    assert set(decode_rows(widths=[192])) == {"bf16 (2,16,4096,192) causal value_width"}


def test_peers_have_the_settings_of_their_signatures(peers, monkeypatch):
    decode, grouped = sys.modules["peer_decode"], {"key_heads": 8, "enable_gqa": True}
    problem = FakeProblem((1, 32, 4096, 64), "bf16", **grouped)

    def count(function):
        monkeypatch.setattr(peers.bench, "flash_function", function)
        return list(decode.flash_calls(problem, "FA3"))

    def absent(name):
        raise ModuleNotFoundError(f"{name} is not installed")

    every = count(lambda name: lambda q, k, v, num_splits=1, pack_gqa=None: q)
    assert every[:2] == ["num_splits=0 pack_gqa=True", "num_splits=0 pack_gqa=False"]
    assert len(every) == 10
    assert len(count(lambda name: lambda q, k, v, num_splits=1: q)) == 5
    assert count(lambda name: lambda q, k, v: q) == count(absent) == [""]
    problem.options = {}
    assert len(count(lambda name: lambda q, k, v, num_splits=1, pack_gqa=None: q)) == 5


def test_the_fastest_settings_are_measured(peers, monkeypatch):
    device = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(Device=lambda: device)
    monkeypatch.setattr(peers.bench, "need_gpu", lambda: types.SimpleNamespace(cuda=cuda))
    timer = types.SimpleNamespace(measure=lambda calls, milliseconds: [[x()] for x in calls])
    fastest = functools.partial(
        sys.modules["peer_decode"].fastest_settings, peers.Session(timer, 8.0)
    )
    assert fastest({"num_splits=1": lambda: 3, "num_splits=8": lambda: 2}) == "num_splits=8"
    assert fastest({"num_splits=1": lambda: 3, "num_splits=8": lambda: 1 / 0}) == "num_splits=1"
    assert fastest({"a": lambda: 1 / 0, "b": lambda: 1 / 0}) == "a"
    assert fastest({"": None}) == ""


def test_gradients_on_the_grid_have_targets_and_means(peers, session):
    session = session()
    peers.backward(session)
    any_order, in_order = targets(session, "any order"), targets(session, "deterministic")
    assert len(any_order) == 6
    assert len(in_order) == 9
    for shape, found in in_order.items():
        if shape[2] == 1024:
            assert found == {"the fastest": 0.95}
        else:
            assert found == {"any order": 0.95}
            assert any_order[shape] == {"the fastest": 0.95}
    peers_of = {(row["name"], row["peer"]) for row in session.rows if "shape" in row}
    rows = [("fa2 mma any order", x) for x in ("torch FA2", "cuDNN", "FA4", "the fastest")]
    rows += [("fa3 wgmma", f"{x} deterministic") for x in ("torch FA2", "FA4")]
    rows += [("fa3 wgmma", "the fastest"), ("fa3 wgmma", "fa2 mma any order")]
    assert peers_of == set(rows)
    means = [row for row in session.rows if row["problem"].startswith("geometric mean")]
    held = {(x["problem"], x["name"], x["peer"]): x["target"] for x in means if x["target"]}
    assert held == {
        ("geometric mean", "any order", "the fastest"): 1.0,
        ("geometric mean, D 256", "any order", "the fastest"): 1.2,
    }
    assert {row["note"] for row in means} == {"12 of 12", "4 of 4"}
    assert all(row["ratio"] == pytest.approx(2) for row in means)


def test_a_grid_measured_in_parts_has_the_same_means(peers, session):
    whole, part = session(), session(widths=[64])
    peers.backward(whole)
    peers.backward(part)
    assert {row["shape"][3] for row in part.rows if "shape" in row} == {64}
    assert {row["note"] for row in part.rows if "shape" not in row} == {"4 of 12"}
    assert not any(row["target"] for row in part.rows if "shape" not in row)
    for asked in (
        {"widths": [128]},
        {"lengths": [4096]},
        {"widths": [256], "lengths": [1024, 16384]},
    ):
        later = session(**asked)
        later.rows = json.loads(json.dumps(part.rows))
        peers.backward(later)
        part = later
    both = [sorted(map(peers.peer_rows.identity, x.rows), key=str) for x in (whole, part)]
    assert both[0] == both[1]
    means = [[r for r in x.rows if "shape" not in r] for x in (whole, part)]
    assert sorted(means[0], key=str) == sorted(means[1], key=str)


def test_gradients_beside_the_grid(peers, session):
    session = session()
    peers.backward_more(session)
    any_order, in_order = targets(session, "any order"), targets(session, "deterministic")
    assert any_order == {
        (4, 32, 4096, 128): {"FA4": 1.0},
        (4, 16, 4096, 96): {"the fastest": 1.0},
        (4, 16, 4096, 192): {"the fastest": 1.0},
        (4, 16, 4096, 32): {"torch efficient": 0.85},
        (4, 16, 4096, 64): {"torch efficient": 0.85},
        (4, 16, 4096, 128): {"torch efficient": 0.85, "fa2 mma any order, no softcap": 1 / 1.6},
    }
    assert in_order == {
        (32, 12, 512, 64): {"the fastest": 0.95},
        (1, 8, 512, 64): {"the fastest": 0.95},
        (4, 48, 4096, 32): {"torch FA2": 1.3},
        (4, 16, 4096, 32): {"any order": 0.75},
        (4, 16, 4096, 64): {"any order": 0.75},
        (4, 16, 4096, 128): {"any order": 0.75, "fa3 wgmma, no softcap": 1 / 1.6},
    }
    labels = {row["problem"] for row in session.rows}
    assert {
        "bf16 (4,32,4096,128) causal key_heads", "bf16 (4,16,4096,192) value_width",
        "fp16 (4,48,4096,32) causal", "bf16 (4,16,4096,128) causal softcap",
    } < labels  # fmt: skip


def test_gradients_with_masks_are_held_to_their_share(peers, session, monkeypatch):
    blocks, seen = sys.modules["peer_blocks"], []
    session = session(widths=[64])
    session.compare_pairs = lambda group, problem, contenders, pairs: seen.append(pairs)
    mask = types.SimpleNamespace(density=0.25)
    problem = FakeProblem((1, 32, 16384, 64), "bf16", mask=mask)
    found = [(problem, density, None) for density in (0.25, 0.5)]
    monkeypatch.setattr(blocks, "problems", lambda s, kind: found)
    monkeypatch.setattr(FakeProblem, "operands", (), raising=False)
    monkeypatch.setattr(peers.bench, "flex_gradients", lambda shown: "flex")
    peers.backward_blocks(session)
    share = pytest.approx(1 / (1.2 * 0.25 + 0.03))
    assert seen[0] == [
        ("fa3 wgmma", "fa3 wgmma, no mask", share), ("fa3 wgmma", "FlexAttention", 1.5),
        ("fa2 mma any order", "fa2 mma any order, no mask", share),
        ("fa2 mma any order", "FlexAttention", 1.5),
    ]  # fmt: skip
    assert {target for *_, target in seen[1]} == {None}


@pytest.fixture
def rows_of(peers, monkeypatch):
    """Rows of pairs, where contenders give a result and take so many microseconds."""
    device = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(Device=lambda: device)
    monkeypatch.setattr(peers.bench, "need_gpu", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(peers.bench, "all_values", lambda results: results[0])

    def measure(pairs, **contenders):
        def timer(calls, milliseconds):
            return [[call()[1]] * 5 for call in calls]

        def call(found):
            if found is None:
                raise ModuleNotFoundError("flash-attn-4 is not installed")
            return found

        calls = {name: lambda found=found: call(found) for name, found in contenders.items()}
        session = peers.Session(types.SimpleNamespace(measure=timer), 1.0)
        problem = FakeProblem((1, 2, 3, 4), "bf16")
        return session.compare_pairs("backward", problem, calls, pairs)

    return measure


def test_the_fastest_of_several_peers_is_named_and_who_is_absent(rows_of):
    pairs = [("mine", ("a", "b", "c"), 1.0), ("mine", "c", 1.0)]
    fastest, absent = rows_of(pairs, mine=(0, 100), a=(0, 90), b=(0, 80), c=None)
    assert (fastest["peer"], fastest["note"]) == ("the fastest", "b, without c")
    assert (fastest["ratio"], fastest["mark"]) == (0.8, "SHORT")
    assert absent["mark"] == "n/a"
    assert "flash-attn-4 is not installed" in absent["reason"]
    (none,) = rows_of([("mine", ("c",), 1.0)], mine=(0, 100), c=None)
    assert (none["mark"], none["note"]) == ("n/a", "without c")


def test_a_result_that_differs_is_no_ratio_and_a_failure_is_said(rows_of):
    wrong, *_ = rows_of([("mine", ("a",), 1.0)], mine=(0, 100), a=(0.2, 200))
    assert (wrong["mark"], wrong["reason"]) == ("WRONG", "they differ by 0.2")
    (failed,) = rows_of([("mine", "a", 1.0)], mine=None, a=(0, 200))
    assert failed["mark"] == "FAILED"


def test_rows_of_the_same_figure_take_the_place_of_earlier_ones(peers):
    session = peers.Session(None, 1.0)
    session.add("memory", "x", "fa2", 3, 2, "bytes")
    session.add("memory", "x", "fa3", 1, 2, "bytes")
    session.add("memory", "x", "fa2", 2, 2, "bytes")
    assert [(row["name"], row["value"], row["mark"]) for row in session.rows] == [
        ("fa3", 1, "pass"), ("fa2", 2, "pass")
    ]  # fmt: skip


def test_a_mean_of_nothing_is_no_figure(peers):
    rows = [
        {"group": "hopper", "name": "fa3 wgmma", "peer": "FA4", "mark": "n/a", "reason": "absent"},
        {"group": "hopper", "name": "fa3 wgmma", "peer": "FA4", "mark": "WRONG", "ratio": 3.0},
    ]
    (mean,) = peers.mean_rows(rows, "fa3 wgmma", 2, targets={"FA4": 1.0})
    assert (mean["mark"], mean["note"], mean["target"]) == ("n/a", "0 of 2", None)
    assert "ratio" not in mean


@pytest.mark.parametrize(("target", "mark"), [(2.8, "pass"), (2.9, "SHORT"), (None, "info")])
def test_a_mean_is_geometric_and_has_a_target(peers, target, mark):
    rows = [{"group": "g", "peer": "FA4", "mark": "pass", "ratio": ratio} for ratio in (2.0, 4.0)]
    (mean,) = peers.mean_rows(rows, "any order", 2, targets={"FA4": target})
    assert mean["ratio"] == pytest.approx(8**0.5)
    assert (mean["name"], mean["mark"], mean["target"]) == ("any order", mark, target)
    rows[0]["absent"] = ["cuDNN"]
    (lacking,) = peers.mean_rows(rows, "any order", 2)
    assert lacking["note"] == "2 of 2, 1 without a peer"
    del rows[0]["absent"]
    (part,) = peers.mean_rows(rows, "any order", 3, targets={"FA4": target})
    assert (part["mark"], part["note"], part["target"]) == ("info", "2 of 3", None)


def test_to_append_needs_a_file(peers, capsys):
    with pytest.raises(SystemExit, match="2"):
        peers.main(["small", "--append"])
    assert "--append: to which file?" in capsys.readouterr().err


ROWS = [
    {"group": "small", "problem": "bf16 (1,8,512,64) causal", "name": "fa2 mma", "us": 14.62,
     "tflops": 18.0, "peer": "torch FA2", "ratio": 1.061, "mark": "pass", "target": 1.0,
     "note": ""},
    {"group": "small", "problem": "bf16 (1,8,512,64) causal", "name": "fa2 mma", "value": 14.62,
     "target": 15.4, "unit": "us", "mark": "pass", "note": ""},
    {"group": "hopper", "problem": "bf16 (4,8,4096,64)", "name": "fa3 wgmma", "us": 1086.0,
     "tflops": 506.2, "peer": "cuDNN", "ratio": 1.114, "mark": "pass", "target": 0.95, "note": ""},
    {"group": "hopper", "problem": "bf16 (4,8,4096,64)", "name": "fa3 wgmma", "us": 1086.0,
     "tflops": 506.2, "peer": "FA3", "ratio": 1.0, "mark": "pass", "target": 0.95, "note": ""},
    {"group": "hopper", "problem": "bf16 (4,8,4096,64)", "name": "fa3 wgmma", "us": 1086.0,
     "tflops": 506.2, "peer": "FA4", "mark": "n/a", "target": 0.95, "note": "",
     "reason": "flash-attn-4 is not installed"},
    {"group": "blocks", "problem": "bf16 (1,32,16384,64) density 0.050", "name": "fa3 wgmma",
     "us": 440.0, "tflops": 250.0, "peer": "FlexAttention", "ratio": 0.77, "mark": "SHORT",
     "target": 1.1, "note": ""},
    {"group": "backward", "problem": "backward bf16 (4,8,4096,64)", "name": "fa2 mma", "us": 9.0,
     "tflops": 250.0, "peer": "FA4", "ratio": 0.5, "mark": "SHORT", "target": 0.95, "note": ""},
    {"group": "backward", "problem": "backward bf16 (4,8,4096,64)", "name": "fa2 mma", "us": 9.0,
     "tflops": 250.0, "peer": "the fastest", "ratio": 0.5, "mark": "SHORT", "target": 0.95,
     "note": "FA4", "absent": []},
    {"group": "hopper", "problem": "geometric mean", "name": "fa3 wgmma", "peer": "cuDNN",
     "ratio": 1.114, "mark": "info", "target": None, "note": "1 of 1"},
]  # fmt: skip


def test_the_table_of_the_readme(peers):
    assert peers.peer_rows.markdown(ROWS).splitlines() == [
        "| problem (B, H, N, D) | cuflash | peer | ratio |",
        "|---|---|---|---|",
        "| bf16 (1, 8, 512, 64) causal | fa2 mma, 14.6 us | torch FlashAttention-2 | 1.06 |",
        "| bf16 (4, 8, 4096, 64) | fa3 wgmma, 506 TFLOP/s | cuDNN; FlashAttention-3 | 1.11; 1.00 |",
        "| bf16 (1, 32, 16384, 64), visible 0.050 | fa3 wgmma, 0.44 ms | FlexAttention | 0.77 |",
        "| backward bf16 (4, 8, 4096, 64) | fa2 mma, 250 TFLOP/s | FlashAttention-4 | 0.50 |",
        "| geometric mean | fa3 wgmma | cuDNN | 1.11 |",
    ]


def test_a_report_has_ratios_and_limits(peers, capsys):
    peers.report("small", ROWS[:2])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "512" in line]
    assert lines[0][-3:] == ["1.061", "1.00", "pass"]
    assert lines[1][-4:] == ["14.6", "15.4", "us", "pass"]
    peers.report("hopper", ROWS[2:5])
    text = capsys.readouterr().out
    assert "n/a: FA4: flash-attn-4 is not installed [bf16 (4,8,4096,64)]" in text
    peers.report("host", [])
    assert "host: Host time per call" in capsys.readouterr().out


# ------------------------------------------------------------------------------ the plan's choice
@pytest.fixture
def choice(suite, monkeypatch):
    """asv_bench/choice.py, on the CPU."""
    monkeypatch.setattr(suite("gpu"), "need_gpu", lambda: np)
    return importlib.import_module("choice")


def test_random_problems_are_the_same_for_a_seed(choice):
    cases = choice.draw_cases(100, 1)
    assert cases == choice.draw_cases(100, 1) != choice.draw_cases(100, 2)
    assert all(case.is_moderate for case in cases)
    assert not any(case.causal and case.queries > case.keys for case in cases)
    for name, least in (("width", 3), ("group", 3), ("causal", 2), ("keys", 50)):
        assert len({getattr(case, name) for case in cases}) >= least, name
    assert {case.dtype for case in cases} == {"bf16"}


def test_random_problems_are_of_the_type_asked_for(choice):
    for case in choice.draw_cases(5, 1, few_queries=True, dtype="fp64"):
        assert case.queries <= 16
        assert case.plan(H200).problem.dtype == "float64"


def test_candidates_are_near_and_each_is_another_kernel(choice):
    several = 0
    for case in choice.draw_cases(20, 0):
        plan = case.plan(H200)
        assert plan.problem.group == case.group
        (first, own), *others = choice.candidates(plan)
        assert first == plan
        assert all(own - 1e-3 <= time <= 1.5 * own for _, time in others)  # to the nanosecond
        kernels = {(first.source(), first.kernels)}
        kernels |= {(other.source(), other.kernels) for other, _ in others}
        assert len(kernels) == 1 + len(others) <= 13
        several += len(others) > 1
    assert several > 10


def test_what_a_choice_loses_is_told(choice, monkeypatch, tmp_path, capsys):
    """The second candidate takes a tenth less than the first, the third cannot run."""
    device = types.SimpleNamespace(synchronize=lambda: None)
    np_and_cuda = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda: device))
    launch = types.SimpleNamespace(device_facts=lambda number: H200)
    case = choice.Case(1, 2, 4, 1, 4096, 64, causal=False, dtype="bf16")
    tiles = [plan.tile for plan, _ in choice.candidates(case.plan(H200))]

    def with_row(tile, function):
        def call():
            if tile == tiles[2]:
                raise RuntimeError("too many registers")
            return 18.0 if tile == tiles[1] else 20.0

        return call

    for name, value in (
        ("need_gpu", lambda: np_and_cuda), ("facts", lambda: {"device": "none"}),
        ("release", lambda: None),
        ("meter", lambda: types.SimpleNamespace(measure=lambda x, ms: [[f()] * 5 for f in x])),
    ):  # fmt: skip
        monkeypatch.setattr(choice.bench, name, value)
    problem = types.SimpleNamespace(label="small", inputs=(), options={})
    monkeypatch.setattr(choice.Case, "problem", lambda case: problem)
    monkeypatch.setattr(choice, "launch_module", lambda: launch)
    monkeypatch.setattr(choice, "compile_kernels", len)
    monkeypatch.setattr(choice, "with_row", with_row)
    monkeypatch.setattr(choice, "draw_cases", lambda count, *_: [case] * count)
    file = tmp_path / "rows.json"
    choice.main(["--count", "1", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["tile"], row["best"]) == (str(tiles[0]), str(tiles[1]))
    assert row["lost"] == pytest.approx(20 / 18 - 1)
    assert row["against_estimate"] == pytest.approx(20 / row["estimate"])
    assert len(row["tiles"]) == len(tiles) - 1
    printed = capsys.readouterr().out
    assert f"small: {tiles[2]}: RuntimeError: too many registers" in printed
    assert "lost: mean 11.1 %, more than 5 % in 1, worst 11.1 %: small" in printed


# What follows needs asv.


def require(what: str, variable: str):
    """Skip, or fail where the machine is said to have it."""
    (pytest.fail if os.environ.get(variable) == "1" else pytest.skip)(what)


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    command = ["git", *names, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


TOY = """
import cuflash


class Toy:
    version = "1"

    def track_seconds(self):
        return {"samples": [cuflash.COST * x for x in (0.99, 1.0, 1.01, 1.0, 0.99)], "number": 1}

    track_seconds.unit = "seconds"
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A repository with the configuration and sweep.py of this one, and three commits."""
    if not importlib.util.find_spec("asv"):
        require("asv is not installed: pip install '.[bench]'", "CUFLASH_REQUIRE_BENCH")
    if shutil.which("git") is None:
        require("git is not installed", "CUFLASH_REQUIRE_BENCH")
    monkeypatch.setenv("HOME", str(tmp_path))  # where asv keeps the machine's name
    root = tmp_path / "toy"
    (root / "asv_bench" / "benchmarks").mkdir(parents=True)
    (root / "cuflash").mkdir()
    for name in ("asv.conf.json", "one_process.py", "sweep.py"):
        shutil.copy(BENCH / name, root / "asv_bench")
    (root / "asv_bench" / "benchmarks" / "__init__.py").write_text("")
    (root / "asv_bench" / "benchmarks" / "toy.py").write_text(TOY)
    git(tmp_path, "init", "-q", "-b", "main", str(root))
    for cost in (1.0, 1.1, 0.9):
        (root / "cuflash" / "__init__.py").write_text(f"COST = {cost}\n")
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", f"cost {cost}")
    machine = [sys.executable, "-m", "asv", "machine", "--yes"]
    subprocess.run(machine, cwd=root / "asv_bench", check=True, capture_output=True)
    return root


def sweep(toy, *arguments):
    command = [sys.executable, "sweep.py", *arguments]
    folder = toy / "asv_bench"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout + done.stderr


def results(toy, commit):
    """What asv keeps of the toy benchmark for a commit, by column."""
    (path,) = (toy / "asv_bench" / "results").glob(f"*/{git(toy, 'rev-parse', commit)[:8]}-*")
    text = json.loads(path.read_text())
    return dict(zip(text["result_columns"], text["results"]["toy.Toy.track_seconds"]))


def test_samples_of_a_tracked_figure_get_statistics(toy):
    """asv does not document that `track_` may return samples: every GPU figure relies on it."""
    status, text = sweep(toy, "main~1", "--", "--record-samples")
    assert status == 0, text
    found = results(toy, "main~1")
    assert found["result"] == [pytest.approx(1.1)]
    assert found["samples"] == [pytest.approx([1.089, 1.1, 1.111, 1.1, 1.089])]
    assert found["stats_q_25"][0] < found["stats_q_75"][0]
    assert found["stats_ci_99_a"][0] < 1.1 < found["stats_ci_99_b"][0]


def test_a_range_is_swept_from_its_oldest_commit(toy):
    status, text = sweep(toy, "main~2..main")
    assert status == 0, text
    assert text.index("cost 1.1") < text.index("cost 0.9")
    assert "cost 1.0" not in text
    assert results(toy, "main")["result"] == [pytest.approx(0.9)]


def test_turns_flag_what_is_a_tenth_slower_and_nothing_else(toy):
    status, text = sweep(toy, "main~2", "main~1", "--interleave", "1", "--", "--bench", "Toy")
    assert status == 1, text
    assert re.search(r"^\| \+ .* 1\.1 \| toy\.Toy\.track_seconds", text, re.MULTILINE), text
    names = [line.split(" ", 1)[1] for line in text.splitlines() if " cost 1." in line]
    assert names[:4] == ["cost 1.0", "cost 1.1", "cost 1.1", "cost 1.0"]
    assert len(results(toy, "main~2")["samples"][0]) == 10  # of both its turns
    status, text = sweep(toy, "main~2", "main", "--interleave", "1", "--factor", "1.2")
    assert status == 0, text
    assert "no significant difference" in text


def test_a_failed_benchmark_sets_the_exit_status(toy):
    (toy / "asv_bench" / "benchmarks" / "toy.py").write_text(TOY.replace("COST", "PRICE"))
    status, _ = sweep(toy, "main")
    assert status == 2


ONE_PROCESS = """
import os
import time


class Toy:
    version = "1"
    params = (["a", "b", "skips", "c", "fails", "d", "ends", "e"],)

    def setup(self, what):
        if what == "skips":
            raise NotImplementedError("here")

    def track_process(self, what):
        if what == "fails":
            raise ValueError("that is why")
        if what == "ends":
            os._exit(3)
        print("printed", what)
        return os.getpid()


class Slow:
    timeout = 0.1

    def track_process(self):
        time.sleep(60)


class Then(Toy):
    params = (["f"],)
"""
GPU = """
def find_torch():
    return None


find_cupy = find_torch
"""


def test_benchmarks_share_a_process_until_one_fails(toy):
    folder = toy / "asv_bench" / "benchmarks"
    (folder / "toy.py").write_text(ONE_PROCESS)
    (folder / "gpu.py").write_text(GPU)
    status, text = sweep(toy, "main", "--one-process", "--", "--show-stderr")
    assert status == 2, text
    for words in ("ValueError: that is why", "process of the benchmarks ended", "timed out"):
        assert words in text, text
    (path,) = (toy / "asv_bench" / "results").glob("*/*-*")
    kept = json.loads(path.read_text())
    column = kept["result_columns"].index("result")
    values = {name: row[column] for name, row in kept["results"].items()}
    a, b, skips, c, fails, d, ends, e = values["toy.Toy.track_process"]
    assert a == b == c
    assert skips != skips
    assert fails is ends is None
    assert not values.get("toy.Slow.track_process")
    assert len({a, d, e}) == 3
    assert values["toy.Then.track_process"] == [a]  # it ran ahead
    status, text = sweep(toy, "main", "--one-process", "--", "--bench", "Toy.*'[abc]'")
    assert status == 0, text


def test_outside_tags_become_vendored_ones(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    publish = importlib.import_module("publish")
    page = (
        '<script src="https://code.jquery.com/jquery-3.3.1.min.js" integrity="x"></script>\n'
        '<link rel="stylesheet" href="https://a.b/dist/css/bootstrap.min.css" crossorigin="c">\n'
        '<script src="asv.js"></script>'
    )
    assert publish.localise(page) == (
        '<script src="vendor/jquery-3.3.1.min.js"></script>\n'
        '<link rel="stylesheet" href="vendor/bootstrap.min.css">\n'
        '<script src="asv.js"></script>'
    )
    with pytest.raises(SystemExit, match="load other.js"):
        publish.localise('<script src="https://a.b/other.js">')


def test_graphs_open_on_the_fastest_and_times_on_a_logarithmic_axis(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    publish = importlib.import_module("publish")
    known = json.loads((BENCH / "results" / "benchmarks.json").read_text())
    del known["version"]
    found = {name: parse_qs(view) for name, view in publish.views(known, {}).items()}
    assert found["forward.Forward.track_seconds"] == {
        "p-problem": known["forward.Forward.track_seconds"]["params"][0][:4],
        "p-causal": ["False"],
        "p-algo": ["'fa2'", "'fa3'"],
        "x-axis-scale": ["even"],
        "y-axis-scale": ["log"],
    }
    algos = ["'fa2'", "'fa2 any order'", "'fa3'", "'fa3 any order'"]
    assert found["backward.Backward.track_seconds"]["p-algo"] == algos
    times = {"x-axis-scale": ["even"], "y-axis-scale": ["log"]}
    assert found["decode.Decode.track_host_seconds"] == times
    assert "y-axis-scale" not in found["memory.Memory.track_extra_bytes"]  # fa2 takes 0 bytes
    assert found["forward.ForwardPeers.track_ratio"] == {"x-axis-scale": ["even"]}
    assert set(found) == set(known)
    for name, view in found.items():
        names, values = known[name]["param_names"], known[name]["params"]
        lines = [view.get(f"p-{parameter}", ["all"]) for parameter in names]
        assert math.prod(map(len, lines)) <= 8
        for parameter, all_values in zip(names, values):
            assert set(view.get(f"p-{parameter}", ())) <= set(all_values)
        assert "'fa1'" not in view.get("p-algo", ())


def test_the_legend_moves_or_it_is_said_why_not(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    publish = importlib.import_module("publish")
    assert publish.with_legend_below('a {position: "nw"} b') == 'a {position: "sw"} b'
    with pytest.raises(SystemExit, match="has 0 times"):
        publish.with_legend_below("another version")


def test_every_commit_of_the_graphs_has_a_page(monkeypatch, tmp_path):
    if not (BENCH.parent / ".git").exists():
        pytest.skip("this is no git checkout")
    monkeypatch.syspath_prepend(BENCH)
    publish = importlib.import_module("publish")
    commit = git(BENCH, "rev-parse", "HEAD")
    publish.write_commits(tmp_path, {"revision_to_hash": {"7": commit}, "hash_length": 8})
    (page,) = tmp_path.glob("*/index.html")
    assert page.parent.name == commit[:8]
    subject = html.escape(git(BENCH, "show", "-s", "--format=%s", "HEAD"))
    assert f"<pre>commit {commit}\n" in page.read_text()
    assert f"\n\n{subject}\n" in page.read_text()


def test_a_graph_opens_on_the_machine_with_most_commits(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCH)
    publish = importlib.import_module("publish")
    for path, names in {"a/1-x": "pq", "a/2-x": "p", "b/1-x": "pq", "b/2-x": "q"}.items():
        kept = tmp_path / f"{path}.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps({"results": {key: [] for key in names}}))
    assert publish.find_machines(tmp_path) == {"p": "a", "q": "b"}
    kinds = {"param_names": ["n"], "params": [["1"]], "unit": "bytes"}
    assert publish.views({"p": kinds, "r": kinds}, {"p": "a"}) == {
        "p": "machine=a&x-axis-scale=even", "r": "x-axis-scale=even"
    }  # fmt: skip


OPENED = """
const [page, ...hashes] = process.argv.slice(1);
let listener;
for (const hash of hashes) {
  globalThis.location = {hash};
  globalThis.history = {replaceState: (state, title, to) => { location.hash = to; }};
  globalThis.window = {addEventListener: (event, handler) => { listener = handler; }};
  if (listener) listener(); else (0, eval)(page);
  console.log(location.hash);
}
"""


def test_an_address_without_a_view_gets_one(monkeypatch):
    if shutil.which("node") is None:
        require("node is not installed", "CUFLASH_REQUIRE_BROWSER")
    monkeypatch.syspath_prepend(BENCH)
    publish = importlib.import_module("publish")
    kinds = {"param_names": ["algo"], "params": [["'fa1'", "'fa2'"]], "unit": "seconds"}
    opened = publish.views({"a.B": kinds}, {})
    page = publish.with_views('<head><script src="asv.js"></script></head>', opened)
    head, script, rest = re.fullmatch(r"(<head>)<script>(.*?)</script>\n(.*)", page, re.S).groups()
    assert (head, rest) == ("<head>", '<script src="asv.js"></script></head>')
    hashes = ["#a.B", "#a.B?p-algo=1", "", "#/summarylist", "#a.B"]
    done = subprocess.run(
        ["node", "-e", OPENED, script, *hashes], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    view = "#a.B?x-axis-scale=even&y-axis-scale=log&p-algo=%27fa2%27"
    assert done.stdout.split("\n")[:-1] == [view, *hashes[1:4], view]


def test_the_results_kept_are_of_commits_and_benchmarks_of_this_repository():
    known = json.loads((BENCH / "results" / "benchmarks.json").read_text())
    paths = list((BENCH / "results").glob("*/*-*.json"))
    assert len(paths) >= 6
    for path in paths:
        text = json.loads(path.read_text())
        assert path.name.startswith(text["commit_hash"][:8])
        assert text["params"]["machine"] == path.parent.name
        assert set(text["results"]) <= set(known)
        assert path.stat().st_size < 100_000


def test_the_readme_counts_the_results_kept():
    counts = {"nvidia-h200": [], "nvidia-h100": []}
    for path in (BENCH / "results").glob("*/*-*.json"):
        text = json.loads(path.read_text())
        column = text["result_columns"].index("result")
        found = (values[column] or [] for values in text["results"].values())
        count = sum(x is not None and x == x for values in found for x in values)
        counts[path.parent.name].append(count)
    words = " ".join((BENCH / "README.md").read_text().split())
    h200, h100 = counts.values()
    assert f"holds the history: {len(h200)} commits from the first kernels on, " in words
    assert f"{min(h200)} to {max(h200)} figures each, {sum(h200)} in all" in words
    assert f"`results/nvidia-h100` holds {sum(h100)} figures of {len(h100)} commits" in words


@pytest.fixture
def look():
    """Publishes, serves, and gives what headless Chromium shows of a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    for missing, what in (
        (not importlib.util.find_spec("asv"), "asv is not installed"),
        (browser is None, "chromium is not installed"),
        (shutil.which("npm") is None, "npm is not installed"),
    ):
        if missing:
            require(what, "CUFLASH_REQUIRE_BROWSER")
    if not (BENCH.parent / ".git").exists():
        require(
            "the pages need the history, and this is no git checkout", "CUFLASH_REQUIRE_BROWSER"
        )
    if git(BENCH, "rev-parse", "--is-shallow-repository") == "true":
        require("the clone is shallow", "CUFLASH_REQUIRE_BROWSER")
    with subprocess.Popen(
        [sys.executable, "-u", "publish.py", "--serve", "0"], cwd=BENCH,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as server:  # fmt: skip
        printed = []
        for line in server.stdout:
            printed.append(line)
            if line.startswith("http://"):
                break
        else:
            pytest.fail("".join(printed))

        def show(page, *options):
            command = [browser, "--headless", "--no-sandbox", "--disable-gpu",
                       "--window-size=1300,1000", "--virtual-time-budget=20000", *options,
                       f"{line.strip()}/index.html{page}"]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr[-2000:]
            return done.stdout

        yield show
        server.terminate()


def test_published_pages(look, tmp_path):
    """The grid lists every benchmark; a graph draws lines from the first commit to the last.

    It opens on fa2 and fa3, on the machine with the longest history, on a logarithmic axis, with
    the legend beside the lines. The list of what changed leads to the pages of commits.

    One test: it writes into the checkout, and tests run side by side.
    """
    image = pytest.importorskip("matplotlib.image", reason="reads the screenshot")
    page = look("", "--dump-dom")
    known = json.loads((BENCH / "results" / "benchmarks.json").read_text())
    for name in set(known) - {"version"}:
        assert name.split(".", 1)[1] in page, name
    changed = look("#summarylist?machine=nvidia-h200&cpu=NVIDIA+H200", "--dump-dom")
    links = set(re.findall(r'href="(commits/\w+)"', changed))
    assert links
    assert all((BENCH / "html" / link / "index.html").exists() for link in links)
    page = look("#forward.Forward.track_seconds", "--dump-dom")
    for name in ("log-scale", "even-spacing"):
        assert re.search(rf'<a id="{name}" class="[^"]*\bactive\b', page)
    legend = re.findall(r'class="legendLabel">algo-(\w+); causal-False; problem-bf16 ', page)
    assert legend == ["fa2"] * 4 + ["fa3"] * 4
    picture = tmp_path / "page.png"
    look("#forward.Forward.track_seconds", f"--screenshot={picture}")
    pixels = image.imread(picture)[120:860, 290:1250, :3]
    red, green, blue = np.moveaxis(pixels, -1, 0)
    coloured = {  # thin lines, whose pixels are mixed with the white around them
        "red": red > np.maximum(green, blue) + 0.1,
        "green": green > np.maximum(red, blue) + 0.05,
        "blue": blue > np.maximum(red, green) + 0.05,
    }
    # Of fa2 red and blue; fa3, here green, begins later.
    for name, share in {"red": 0.9, "blue": 0.9, "green": 0.3}.items():
        assert coloured[name].any(axis=0).mean() > share, name


# ------------------------------------------------------------------------------ versions in turns
WALK = '    walk = {"fa1": _walk_fa1, "fa2": _walk_fa2}[plan.algo]\n'
SMALL = ["--shapes", "1,2,64,16", "--dtype", "fp32", "--ms", "1"]


def altered(folder, before):
    """A copy of this package in which the NumPy engine does something else first."""
    package = Path(shutil.copytree(BENCH.parent / "cuflash", folder / "cuflash"))
    text = (package / "numpy_engine" / "walks.py").read_text()
    assert text.count(WALK) == 1
    (package / "numpy_engine" / "walks.py").write_text(text.replace(WALK, before + WALK))
    return str(folder)


@pytest.fixture
def versions(monkeypatch):
    """The script, on the CPU."""
    monkeypatch.syspath_prepend(BENCH)
    module = importlib.import_module("versions")
    monkeypatch.setattr(module, "xp", np)
    return module


def test_versions_take_turns(versions, tmp_path, capsys):
    # A sleep, since work of its own would be as much disturbed by other programs as the rest.
    here, slow = str(BENCH.parent), altered(tmp_path, "    import time; time.sleep(0.02)\n")
    assert (
        versions.main([here, slow, *SMALL, "--shapes", "1,2,64,16", "2,1,33,8", "--causal", "both"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 2 * 2
    for line in lines:
        *label, name, rate, unit, ratio = line.split()
        assert (label[0], unit) == ("fp32", "TFLOP/s")
        assert float(rate) > 0
        assert name in (here, slow)
        assert float(ratio) == 1 if name == here else float(ratio) < 0.8


def test_versions_of_gradients(versions, capsys):
    options = "--backward", "--any-order", "--scale", "2"
    assert versions.main([str(BENCH.parent), *SMALL, *options]) == 0
    assert capsys.readouterr().out.startswith("backward fp32 (1,2,64,16) ")


def test_versions_with_values_of_another_width(versions, capsys):
    assert versions.main([str(BENCH.parent), *SMALL, "--value-width", "8", "--backward"]) == 0
    assert capsys.readouterr().out.startswith("backward fp32 (1,2,64,16) values of 8 ")


def test_versions_of_a_cache(versions, capsys):
    options = "--queries", "1", "--window", "16", "--filled", "40"
    assert versions.main([str(BENCH.parent), *SMALL, *options]) == 0
    label = "fp32 (1,2,1/64,16) window of 16 filled with 40 "
    assert capsys.readouterr().out.startswith(label)


@pytest.mark.parametrize("feature", ["bool mask", "bias, dbias", "key bias"])
def test_versions_of_few_queries(versions, capsys, feature):
    options = "--queries", "3", "--key-heads", "1", "--causal", "yes", "--with", feature
    name = [str(BENCH.parent), *SMALL, *options]
    assert versions.main(name) == versions.main([*name, "--backward"]) == 0
    label = rf"fp32 \(1,2/1,3/64,16\) causal {feature} "
    assert len(re.findall(label, capsys.readouterr().out)) == 2


def test_versions_with_a_mask_of_blocks(versions, capsys):
    """Of 300 keys blocks 0 and 2 are shown, 128 and 44 keys."""
    call = versions.Call((1, 2, 300, 16), "fp32", False, None, {}, queries=3, one_in=2)
    mask = call.of(cuflash).keywords["mask"]
    assert mask.to_dense().sum() == 3 * (128 + 44)
    name = [str(BENCH.parent), *SMALL, "--one-in", "2"]
    assert versions.main(name) == versions.main([*name, "--backward"]) == 0
    assert capsys.readouterr().out.count("fp32 (1,2,64,16) one block in 2 ") == 2


def called(versions, causal, **given):
    """A call of 4 batch entries with 20 to 64 keys, its options, and what its flops are made of."""
    call = versions.Call((4, 2, 64, 16), "fp32", causal, None, {}, shortest=20, **given)
    return call.of(cuflash), call.options, call.flops / (2 * 4 * 16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [None, 3])
def test_packed_sequences_of_random_lengths(versions, causal, queries):
    call, options, pairs = called(versions, causal, queries=queries, packed=True)
    counts, keys = np.diff(options["cu_seqlens_q"]), np.diff(options["cu_seqlens_k"])
    assert len({*keys}) > 1
    assert 20 <= min(keys) <= max(keys) <= options["max_seqlen_k"] == 64
    assert list(counts) == ([3] * 4 if queries else list(keys))
    assert options["max_seqlen_q"] == (queries or 64)
    assert call().shape == (sum(counts), 2, 16)
    shown = sum(n * m - causal * n * (n - 1) / 2 for n, m in zip(counts, keys))
    assert pairs == pytest.approx(shown)


def test_lengths_on_the_device(versions):
    """Batch entries see as many keys by kv_lengths and by q_offset, and as packed sequences."""
    call, options, pairs = called(versions, True, queries=3)
    offset_call, offset_options, offset_pairs = called(versions, True, queries=3, q_offset=True)
    packed_options = called(versions, True, queries=3, packed=True)[1]
    keys = options["kv_lengths"]
    assert list(offset_options["q_offset"] + 3) == list(keys)
    assert list(np.diff(packed_options["cu_seqlens_k"])) == list(keys)
    assert pairs == offset_pairs == pytest.approx(sum(3 * keys - 3))
    np.testing.assert_allclose(call(), offset_call(), atol=1e-6)


@pytest.mark.parametrize("form", ["", "packed", "q_offset"])
def test_versions_of_random_lengths(versions, capsys, form):
    options = "--shortest", "20", "--queries", "3", "--causal", "yes", "--with", "bias, dbias"
    forms = ["--" + form.replace("_", "-")] if form else []
    name = [str(BENCH.parent), *SMALL, *options, *forms]
    assert versions.main(name) == versions.main([*name, "--backward"]) == 0
    label = " ".join(["fp32 (1,2,3/64,16) causal lengths from 20", *filter(None, [form]), "bias"])
    assert capsys.readouterr().out.count(label) == 2


def test_a_q_offset_goes_with_a_causal_mask(versions, capsys):
    with pytest.raises(SystemExit):
        versions.main([str(BENCH.parent), *SMALL, "--q-offset", "--causal", "both"])
    assert "--q-offset goes with --causal yes" in capsys.readouterr().err


def test_the_flops_of_few_queries(versions):
    made = functools.partial(versions.Call, (1, 2, 64, 16), "fp32", True, None, {})
    pairs = {64: 64 * 65 / 2, 3: 62 + 63 + 64, 1: 64}
    for queries, visible in pairs.items():
        assert made(queries=queries).flops == pytest.approx(2 * 4 * 16 * visible)
    assert made().flops == made(queries=64).flops


FORM = r"(backward )?fp32 \(1,2,64,16\) FEATURE +\S+ +\S+ TFLOP/s  1\.000  (\S+) of plain\n"


@pytest.mark.parametrize("feature", ["alibi", "score_mod", "bool mask", "dropout", "bias, dbias"])
def test_versions_with_a_feature(versions, capsys, feature):
    name = [str(BENCH.parent), *SMALL, "--with", feature]
    assert versions.main(name) == versions.main([*name, "--backward"]) == 0
    lines = capsys.readouterr().out
    found = re.findall(FORM.replace("FEATURE", feature), lines)
    assert [direction for direction, _ in found] == ["", "backward "]
    assert all(float(cost) > 0 for _, cost in found)


def test_versions_of_sums_in_order(versions, capsys):
    name = [str(BENCH.parent), *SMALL, "--with", "order"]
    with pytest.raises(SystemExit):
        versions.main(name)
    assert "--with order goes with --backward" in capsys.readouterr().err
    assert versions.main([*name, "--backward"]) == 0
    (found,) = re.findall(FORM.replace(" FEATURE", ""), capsys.readouterr().out)
    assert float(found[1]) > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("    scale = 1 / 0\n", "ZeroDivisionError: division by zero"),
        ("    scale = 2 * scale\n", "ArithmeticError: results differ by"),
    ],
)
def test_versions_that_fail_or_differ(versions, tmp_path, capsys, wrong, message):
    here = str(BENCH.parent)
    assert versions.main([here, altered(tmp_path, wrong), *SMALL]) == 1
    refused, timed = capsys.readouterr().out.splitlines()
    assert message in refused
    assert here in timed
    assert timed.endswith("1.000")


def test_versions_that_all_fail(versions, tmp_path, capsys):
    assert versions.main([altered(tmp_path, "    scale = 1 / 0\n"), *SMALL]) == 1
    (refused,) = capsys.readouterr().out.splitlines()
    assert refused.endswith("ZeroDivisionError: division by zero")


# ------------------------------------------------------------------------------ rows in turns
@pytest.fixture
def every_row(suite, versions, monkeypatch):
    """The script, for calls of NumPy arrays that are planned for an H200."""
    monkeypatch.setattr(suite("gpu"), "need_gpu", lambda: np)
    module = importlib.import_module("every_row")
    monkeypatch.setattr(module, "find_call", functools.partial(module.find_call, device=H200))
    return module


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5, "seed": 3}, {"bias": np.ones((8, 8))}])
@pytest.mark.parametrize("backward", [False, True])
def test_a_call_takes_the_row_that_it_is_given(every_row, monkeypatch, options, backward):
    launch = types.SimpleNamespace(run=lambda call, arguments, count: (call, arguments, count))
    monkeypatch.setattr(every_row, "launch_module", lambda: launch)
    x, lse = np.ones((1, 2, 8, 16), np.float16), np.ones((1, 2, 8), np.float32)
    function = functools.partial(cuflash.attention, x, x, x, causal=True, **options)
    if backward:
        saved = x, x, x, x, x, lse
        function = functools.partial(cuflash.attention_backward, *saved, causal=True, **options)
    usual = cuflash.plan(x, x, x, causal=True, backward=backward, device=H200, **options)
    other = dataclasses.replace(usual.tile, stages=7)
    call, arguments, count = every_row.with_row(other, function)()
    assert (call.plan.tile, call.plan.problem) == (other, usual.problem)
    assert (count, call.launch) == (3 if backward else 1, None)
    assert arguments.arrays["q"] is x
    assert call.workspace_bytes == call.plan.workspace_bytes
    assert every_row.taken(function)[0].plan.tile == usual.tile


@pytest.mark.parametrize("backward", [False, True])
def test_rows_of_packed_sequences(every_row, versions, backward):
    gradients = {} if backward else None
    call = versions.Call((4, 2, 512, 64), "fp16", True, gradients, {}, shortest=20, packed=True)
    plan = every_row.taken(call.of(cuflash))[0].plan
    assert (plan.problem.sequences, plan.problem.backward) == (4, backward)
    assert len(every_row.plans(plan)) > 2


@pytest.mark.parametrize("backward", [False, True])
def test_rows_that_serve_a_call(every_row, backward):
    x = np.zeros((4, 16, 4096, 64), np.float16)
    plan = cuflash.plan(x, x, x, causal=True, backward=backward, device=H200)
    first, *others = found = every_row.plans(plan)
    assert first == plan
    assert len(others) > 2
    assert len({(other.source(), other.kernels) for other in found}) == len(found)
    for other in found:
        assert not other.tile.reject(plan.problem, H200)
        assert (other.algo, other.engine, other.problem) == (plan.algo, plan.engine, plan.problem)


def test_rows_pack_heads_and_split_keys(every_row):
    q, k = np.zeros((16, 32, 1, 64), np.float16), np.zeros((16, 8, 8192, 64), np.float16)
    found = every_row.plans(cuflash.plan(q, k, k, enable_gqa=True, device=H200))
    assert len(found) > 5
    assert sum(other.tile.packed == 4 for other in found) > 3
    few = every_row.plans(cuflash.plan(q[:1, :1], k[:1, :1], k[:1, :1], device=H200))
    assert sum(other.tile.span == 256 for other in few) > 3


def test_rows_take_turns(every_row, monkeypatch, tmp_path, capsys):
    """The second row takes a tenth less than the chosen one, the third cannot run, the last one's
    results are wrong.
    """
    x = np.zeros((1, 2, 512, 64), every_row.bench.DTYPES["bf16"])
    plan = cuflash.plan(x, x, x, causal=True, device=H200)
    rows = [found.tile for found in every_row.plans(plan)]
    assert len(rows) > 3

    def run(call, arguments, count):
        if call.plan.tile == rows[2]:
            raise RuntimeError("too many registers")
        return [arguments.arrays["q"] * (2 if call.plan.tile == rows[-1] else 1)]

    def measure(calls, milliseconds):
        return [[18.0 if f.args[0].plan.tile == rows[1] else 20.0] * 5 for f in calls]

    compiled = []
    launch = types.SimpleNamespace(run=run, compile_all=lambda plan, _: compiled.append(plan.tile))
    monkeypatch.setattr(every_row, "launch_module", lambda: launch)
    for name, value in (
        ("facts", lambda: {"device": "none"}), ("release", lambda: None),
        ("meter", lambda: types.SimpleNamespace(measure=measure)), ("values", np.asarray),
    ):  # fmt: skip
        monkeypatch.setattr(every_row.bench, name, value)
    file = tmp_path / "rows.json"
    assert every_row.main(["--shapes", "1,2,512,64", "--causal", "yes", "--json", str(file)]) == 1
    assert sorted(map(str, compiled)) == sorted(map(str, rows))
    (problem,) = json.loads(file.read_text())["problems"]
    ran = [str(row) for row in rows[:-1] if row != rows[2]]
    assert [x["row"] for x in problem["rows"]] == ran
    assert [x["ratio"] for x in problem["rows"][:2]] == [1.0, pytest.approx(20 / 18)]
    lines = capsys.readouterr().out.splitlines()
    label = lines.index("bf16 (1,2,512,64) causal")
    fastest, second = lines[label + 2 : label + 4]
    assert (fastest.split()[-1], second.split()[-1]) == ("1.111", "1.000")
    assert "*" not in fastest
    assert f"  left out: {rows[2]}: RuntimeError: too many registers" in lines
    assert f"  left out: {rows[-1]}: ArithmeticError: results differ by" in "\n".join(lines)
    assert lines[-1] == "lost: mean 11.1 %, worst 11.1 %: bf16 (1,2,512,64) causal"

"""Source expansion: one string, each header once, true lines, and nothing in it by chance."""

import dataclasses
import itertools
import re
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest
from compile_kernels import compile_source, require_nvrtc
from scoring import form

from cuflash.gpu import offline
from cuflash.gpu.arguments import pack
from cuflash.masks.band import Band
from cuflash.planning import source as source_module
from cuflash.planning.params import fields, params_dtype, pointers
from cuflash.planning.plan import TILES, Plan, make_plan
from cuflash.planning.problem import CPU, Device, Problem
from cuflash.planning.source import without_comments
from cuflash.scores.score import Score, softcap

H200 = Device(90, "NVIDIA H200", multiprocessors=132)
KERNELS = files("cuflash") / "kernels"
NAMES = [
    "fa1_forward.cu", "fa2_forward.cu", "fa2_shared_forward.cu", "fa1_backward.cu",
    "fa2_backward.cu", "backward_rows.cu",
    "sum_dq.cu", "sum_dk.cu", "sum_dv.cu", "mask_tiles.cu", "mask_lists.cu", "hopper_forward.cu",
    "hopper_fa1_forward.cu", "hopper_planes_forward.cu", "tile_planes.cu", "held_heads.cu",
    "plane_ranges.cu", "planes.cu",
    "hopper_planes_backward_keys.cu", "hopper_planes_backward_queries.cu",
    "hopper_planes_backward_wide_queries.cu",
    "planes_backward_keys.cu", "planes_backward_queries.cu",
    "hopper_backward.cu", "hopper_backward_keys.cu",
    "hopper_backward_queries.cu", "hopper_backward_short.cu",
    "hopper_sum_dq.cu", "hopper_sum_dq_rows.cu", "hopper_sum_dk.cu",
    "hopper_sum_dv.cu", "mask_queries.cu", "append_kv.cu", "copy_rows.cu", "merge_parts.cu",
    "merge.cu", "clear_marks.cu", "sequence_starts.cu", "array_gradients.cu", "array_sums.cu",
    "array_zeros.cu", "sink_gradients.cu", "hopper_array_gradients.cu",
]  # fmt: skip
kernels = pytest.mark.parametrize("name", NAMES)


def plan(dtype="float16", algo="fa2", engine=None, d=64, **more) -> Plan:
    problem = Problem(dtype, (2, 3), 100, 90, d, d, heads=3, **more)
    return make_plan(problem, H200, algo, engine)


def prelude(made):
    return source_module.prelude(made.problem, made.tile)


def kernel_files():
    return sorted([*KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")])


def kernel_lines(name):
    return (KERNELS / name).read_text().splitlines()


@kernels
def test_each_line_stands_where_its_directive_says(name):
    file, number, seen = None, None, {}
    for line in source_module.expand(name).splitlines():
        directive = re.fullmatch(r'#line (\d+) "cuflash/kernels/([\w./]+)"', line)
        if directive:
            file, number = directive[2], int(directive[1]) - 1
            continue
        number += 1
        original = kernel_lines(file)[number - 1]
        assert line == original or (
            line == "" and original.startswith(("#include", "#pragma once"))
        )
        assert number not in seen.setdefault(file, set())
        seen[file].add(number)
    for file, numbers in seen.items():
        lost = set(range(1, len(kernel_lines(file)) + 1)) - numbers
        # An include that was expanded gives its own line to the header.
        assert all(kernel_lines(file)[number - 1].startswith("#include") for number in lost)


@kernels
def test_headers_are_pasted_once(name):
    text = source_module.expand(name)
    starts = re.findall(r'#line 1 "cuflash/kernels/([\w./]+)"', text)
    assert len(starts) == len(set(starts))
    assert starts[0] == name
    assert '#include "' not in text
    assert set(re.findall(r"#include <([\w.]+)>", text)) <= {"cuda_bf16.h", "cuda_fp16.h"}


def test_every_kernel_file_is_used():
    used = set(
        re.findall(r'"cuflash/kernels/([\w./]+)"', "".join(map(source_module.expand, NAMES)))
    )
    used |= {"score_functions.cuh"}  # which preludes paste
    assert used == {path.relative_to(KERNELS).as_posix() for path in kernel_files()}


@kernels
def test_kernels_have_no_conditional_text(name):
    for line in source_module.expand(name).splitlines():
        assert not re.match(r"\s*#\s*(if|else|elif|endif|define|undef)", line), line


def test_barriers_are_made_in_one_place():
    """Elsewhere other threads of the warp could do something meanwhile: that place says why not."""
    making = [path.name for path in kernel_files() if "  publish_barriers();" in path.read_text()]
    assert making == ["begin_block.cuh"]


def every_source():
    for algo, engine in (("fa2", "mma"), ("fa1", "simt"), ("fa3", "wgmma"), ("fa1", "wgmma")):
        made = plan(algo=algo, engine=engine, mask="elements", score=form("score / 2 * k"))
        yield from (made.source(kernel.name) for kernel in made.kernels)
    backward = ("fa1", "mma", 64), ("fa2", "mma", 64), ("fa3", "wgmma", 64), ("fa3", "wgmma", 256)
    for algo, engine, d in backward:
        made = plan(algo=algo, engine=engine, d=d, backward=True, summed=(1, 2, 2))
        yield from (made.source(kernel.name) for kernel in made.kernels)


def test_what_is_compiled_has_no_comments():
    """And the same lines otherwise, so that directives stay true."""
    for text in every_source():
        bare = without_comments(text)
        assert "//" not in bare
        assert "/*" not in text
        assert len(bare) < 0.9 * len(text)
        for line, kept in zip(text.split("\n"), bare.split("\n"), strict=True):
            assert line.startswith(kept)
            assert line[len(kept) :].strip()[:2] in ("", "//")
        changed = re.sub("//.*", "// another one", text)
        assert changed != text
        assert without_comments(changed) == bare


def test_comments_end_where_lines_do_and_not_in_strings():
    lines = ['a = "//"; // b', "  // c", 'd("\\"//", "e");//f "g"', "#include <h.h>", "i / j"]
    bare = ['a = "//";', "", 'd("\\"//", "e");', "#include <h.h>", "i / j"]
    assert without_comments("\n".join(lines)).split("\n") == bare


def test_machine_code_does_not_know_of_comments():
    require_nvrtc()
    from cupy.cuda import nvrtc

    def machine_code(text):
        program = nvrtc.createProgram(text, "kernel.cu", [], [])
        nvrtc.compileProgram(
            program, ["-arch=sm_90a", *offline.OPTIONS, f"-I{offline.header_folder()}"]
        )
        return nvrtc.getCUBIN(program)

    text = plan(algo="fa2", engine="mma").source()
    assert machine_code(text) == machine_code(without_comments(text))


def test_text_is_the_same_in_every_process():
    code = """
import numpy as np, cuflash
x = np.zeros((2, 3, 100, 64), np.float16)
h200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
print(cuflash.plan(x, x, x, causal=True, softcap=5.0, kv_lengths=[1, 2], device=h200).source())
"""
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(texts) == 1
    assert "hopper_forward" in texts.pop()


def test_text_depends_on_what_changes_the_code_alone():
    a = plan()
    longer = dataclasses.replace(a.problem, query_length=999, key_length=77, leading=(5, 3))
    assert dataclasses.replace(a, problem=longer).source() == a.source()
    assert softcap(3.0).form == softcap(4.0).form
    texts = [plan(d=d, dtype=t).source() for d in (32, 64) for t in ("float16", "bfloat16")]
    assert len(set(texts)) == 4


@pytest.mark.parametrize("backward", [False, True])
def test_prelude_names_are_its_own(backward):
    """A header that declared a name of the prelude would hide it or not compile."""
    text = "".join(path.read_text() + "\n" for path in kernel_files())
    declared = set(
        re.findall(r"^(?:constexpr \w+|struct|using|typedef .*?) (\w+)\b", text, re.MULTILINE)
    )
    made = plan(backward=backward)
    text = re.sub(r"namespace \w+ {[^}]*}", "", prelude(made))
    names = set(re.findall(r"constexpr \w+ (\w+) =|using (\w+) =|struct (\w+) \{", text))
    names = {name for group in names for name in group if name}
    assert {"Element", "Accumulator", "Length", "Params", "BLOCK_K", "THREADS"} <= names
    assert not names & declared
    members = [name for name, *_ in fields(made.problem)]
    assert len(members) == len(set(members))
    assert not names & set(members)


def test_constants_are_typed():
    text = prelude(plan(engine="simt", dtype="float32"))
    assert "constexpr bool ENGINE_IS_MMA = false;" in text
    assert "constexpr int HEAD_DIM = 64;" in text
    assert "using Element = float;\nusing Accumulator = float;\nusing Length = int;" in text
    assert "using Length = long long;" in prelude(plan(kv_lengths="int64"))
    assert "using Length = long long;" in prelude(plan(q_offset="int64"))
    assert "using Accumulator = double;" in prelude(plan("float64"))


@pytest.mark.parametrize(
    ("algo", "engine", "backward"),
    [("fa1", "simt", False), ("fa2", "mma", False), ("fa3", "wgmma", False), ("fa1", "mma", True),
     ("fa2", "simt", True), ("fa3", "wgmma", True)],
)  # fmt: skip
def test_an_offset_is_a_parameter(algo, engine, backward):
    """Decoding with one that grows compiles once; without one nothing reads it."""

    def text(alignment, **more):
        band = Band(right=0, alignment=alignment)
        return plan(algo=algo, engine=engine, band=band, backward=backward, **more).source()

    assert text(-5) == text(7) == text(0) == text(1 << 29) == text("top_left", q_offset="int32")
    assert text("bottom_right") == text("top_left") != text(0)
    given = "constexpr bool SHIFT_IS_GIVEN = true;"
    assert text(7).replace(given, given.replace("true", "false")) == text("bottom_right")
    assert text("bottom_right", q_offset="int64") != text(7)


def test_score_expression():
    text = plan(score=form("score * slope", captures=("slope",))).source()
    assert "    return (score * p.capture_slope);" in text
    assert "score_unit(const Params& p) { return Accumulator(1); }" in text
    assert "score_scale(const Params& p) { return p.scale; }" in text
    assert "constexpr bool SCORE_IS_MODIFIED = true;" in text
    assert "    return score;" in plan().source()
    text = plan(score=form("tanh(score)", captures=("cap",), unit="cap")).source()
    assert "score_unit(const Params& p) { return p.capture_cap; }" in text
    assert "score_scale(const Params& p) { return p.score_scale; }" in text


def test_numpy_plans_have_no_source():
    with pytest.raises(ValueError, match="the numpy engine compiles nothing"):
        make_plan(plan().problem, CPU).source()


@pytest.mark.parametrize("backward", [False, True])
def test_params(backward):
    problem = Problem("float64", (2, 3), 100, 90, 64, 64, heads=3, backward=backward,
                      score=form("score", captures=("slope", "cap")))  # fmt: skip
    made = make_plan(problem, H200)
    dtype, names = params_dtype(made.problem), pointers(made.problem)
    assert dtype.names[: len(names)] == names
    assert [dtype.fields[name][1] for name in names] == [8 * i for i in range(len(names))]
    assert {name for name, _ in made.workspace} <= set(names)
    assert dtype.names[-2:] == ("capture_slope", "capture_cap")
    assert dtype["scale"] == dtype["capture_cap"] == np.float64
    assert dtype.itemsize % 8 == 0
    assert f"sizeof(Params) == {dtype.itemsize}" in made.source()


def test_packing():
    import cuflash
    from cuflash.operands.layout import make_layout
    from cuflash.operands.spec import Spec

    spec = Spec.contiguous((2, 3, 100, 64), np.dtype("f2"))
    made = cuflash.plan(
        *[np.zeros((2, 3, 100, 64), np.float16)] * 3, causal="top_left", window=(2**60, 5),
        softcap=7.0, device=H200,
    )  # fmt: skip
    params = pack(made, make_layout(spec, spec, spec), 0.5, softcap(7.0))[0]
    assert params["axes"] == 1
    assert params["axis_size"].tolist() == [6, 0, 0, 0, 0, 0]
    assert params["q_axis_stride"][0] == 6400
    assert params["k_row_stride"] == 64
    assert params["band_right"] == 0
    assert params["band_left"] == (1 << 30) - 1
    assert params["bottom_right"] == params["shift"] == 0
    assert params["capture_softcap"] == 7
    assert params["score_scale"] == np.float32(0.5 / 7)
    assert params["scale"] == 0.5
    assert params["query_tiles"] == -(-100 // made.block_q)
    assert params["head_count"] == 6
    assert params["heads"] == 3


@pytest.mark.parametrize("shift", [-(1 << 29), -7, 1 << 29])
def test_packing_an_offset(shift):
    from cuflash.operands.layout import make_layout
    from cuflash.operands.spec import Spec

    made = plan(band=Band(right=0, alignment=shift))
    specs = (Spec.contiguous((2, 3, n, 64), np.dtype("f2")) for n in (100, 90, 90))
    params = pack(made, make_layout(*specs), 1.0, Score())[0]
    assert params["shift"] == shift
    assert params["bottom_right"] == params["q_offset"] == 0


def test_packing_gradients():
    """The backward's operands by their names; heads that share a key have its gradient's row."""
    from cuflash.operands.layout import make_layout
    from cuflash.operands.spec import Spec

    spec, half = Spec.contiguous((2, 4, 100, 64), np.dtype("f2")), np.dtype("f2")
    keys, rows = Spec.contiguous((2, 1, 90, 64), half), Spec.contiguous((2, 4, 100), np.dtype("f4"))
    gradients = {"dout": spec, "dq": spec, "dk": keys, "dv": keys}
    problem = Problem("float16", (2, 4), 100, 90, 64, 64, heads=4, backward=True, summed=(1, 4, 4))
    made = make_plan(problem, H200)
    layout = make_layout(spec, keys, keys, spec, rows, gradients=gradients)
    params = pack(made, layout, 0.5, Score())[0]
    for name in pointers(made.problem):
        assert params[name] == 0
    for name in ("dout", "q", "out", "dq"):
        assert params[f"{name}_row_stride"] == 64
        assert params[f"{name}_axis_stride"][:2].tolist() == [25600, 6400]
    for name in ("k", "v", "dk", "dv"):
        assert params[f"{name}_axis_stride"][:2].tolist() == [5760, 0]
    assert params["lse_row_stride"] == 1
    assert params["scale"] == 0.5


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("algo", "engine"), list(itertools.product(["fa1", "fa2"], ["simt", "mma"]))
)
def test_source_compiles_alone(algo, engine, backward):
    require_nvrtc()
    score = form("score + slope * (k - q)", captures=("slope",))
    made = plan("float16", algo, engine, kv_lengths="int32", backward=backward, score=score,
                summed=(1, 3, 3))  # fmt: skip
    assert len(made.kernels) == (5 if backward else 1)
    for kernel in made.kernels:
        assert compile_source(made.source(kernel.name), "sm_90").messages == ()


@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_each_kernel_has_its_source(algo):
    made = plan(algo=algo, backward=True, summed=(1, 3, 3))
    assert made.source() == made.source(made.kernel)
    texts = {kernel.name: made.source(kernel.name) for kernel in made.kernels}
    sums_dq = made.kernel != "hopper_backward_short"
    assert len(set(texts.values())) == len(texts) == 4 + sums_dq
    for name, text in texts.items():
        assert re.search(rf'extern "C" __global__ void __launch_bounds__\([^)]*\)\s+{name}\(', text)


def test_errors_point_at_the_true_line_of_a_header():
    require_nvrtc()
    text = plan(engine="simt").source()
    lines = kernel_lines("tiles/softmax.cuh")
    number = next(i for i, line in enumerate(lines, 1) if line.startswith("constexpr double LN_2"))
    broken = text.replace(lines[number - 1], "constexpr double LN_2 = missing;")
    with pytest.raises(
        RuntimeError, match=rf"cuflash/kernels/tiles/softmax\.cuh\({number}\): error"
    ):
        compile_source(broken, "sm_90")


def test_tiles_name_kernels_that_exist():
    for row in TILES:
        if row.threads:
            made = Plan(plan(backward=row.backward, summed=(1, 3, 3)).problem, H200, row)
            for kernel in made.kernels:
                text = row.kernel_text(kernel.name)
                assert text or (KERNELS / f"{kernel.name}.cu").is_file()

"""The formulas of examples/: their kernels, in the emulator, against NumPy."""

import doctest

import formulas
import ml_dtypes
import numpy as np
import pytest
from emulator import Memory, Module, available
from formulas import WARPS, Formula

HALF, SINGLE = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
ROUNDED = {HALF: 2.0**-8, SINGLE: 2.0**-20}  # sixteen units roundoff of float32; one of bfloat16

needs_emulator = pytest.mark.skipif(available() is not None, reason=str(available()))


def drawn(*shape, dtype=SINGLE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def launched(formula, **operands):
    """Run the kernel in the emulator's check mode."""
    arrays = {name: x for name, x in operands.items() if getattr(x, "ndim", 0)}
    key, blocks, arguments = formula.launch(operands, arrays)
    memory = Memory()
    placed = [memory.place(x) if isinstance(x, np.ndarray) else x for x in arguments]
    module = Module(formula.source(*key), mode="check")
    module.launch(formula.name, blocks, 32 * WARPS, placed, memory=memory)
    memory.fetch()


def cases(kind):
    """Formulas of the examples with operands, and what they write to."""
    import generate
    import gpt
    import train_gpt

    def x(*shape):
        return drawn(*shape, dtype=kind, seed=len(shape) + shape[-1])

    both, rows, byte = x(5, 640), x(5, 320), np.arange(256)
    gates = {"gate": both[:, :320], "up": both[:, 320:]}  # as the model has them, side by side
    heads = x(2, 3, 6, 32)[:, :, :4]
    angles = {"cos": drawn(3, 1, 16), "sin": drawn(3, 1, 16, seed=1)}
    p = abs(drawn(2, 256))
    rates = {"rate": 0.1, "decay": 0.1, "epsilon": 1e-8, "rate1": 0.1, "rate2": 0.05}
    rates |= {"unbias1": 0.1, "unbias2": 0.05, "clip": np.full((1, 1), 0.5, np.float32)}
    state = {"m": drawn(3, 128), "v": abs(drawn(3, 128)), "p": drawn(3, 128), "w": x(3, 128)}
    weights = {"other": p[:, None], "p": p[..., None], "column": byte, "byte": byte[:, None]}
    limits = {"p": p, "before": p[::-1].copy(), "byte": byte, "top_p": 0.9}
    tokens = {"token": np.zeros((2, 1), np.int64)}
    return {
        "residual_norm": (
            gpt.residual_norm, {"update": x(5, 320), "epsilon": 1e-5},
            {"x": rows, "y": x(5, 320), "scale": drawn(5, 1)},
        ),
        "residual_norm_backward": (
            gpt.residual_norm_backward,
            {"dy": x(5, 320), "y": rows, "scale": drawn(5, 1), "dresidual": x(5, 320)},
            {"dx": x(5, 320)},
        ),
        "rotate": (
            gpt.rotate, {"x1": heads[..., :16], "x2": heads[..., 16:], **angles},
            {"y1": x(2, 3, 4, 16), "y2": x(2, 3, 4, 16)},
        ),
        "swiglu": (gpt.swiglu, gates, {"y": x(5, 320)}),
        "swiglu_backward": (
            gpt.swiglu_backward, {**gates, "dy": rows}, {"dgate": x(5, 320), "dup": x(5, 320)}
        ),
        "cross_entropy": (
            gpt.cross_entropy,
            {"x": x(5, 256), "target": np.arange(5)[:, None], "column": byte, "rows": 5},
            {"loss": drawn(5, 1), "dx": x(5, 256)},
        ),
        "squares": (train_gpt.squares, {"g": rows}, {"total": drawn(5, 1)}),
        "adamw": (train_gpt.adamw, {"g": x(3, 128), **rates}, state),
        "row_product": (
            generate.row_product, {"x": x(3, 64), "w": x(40, 64)[:, None]},
            {"y": x(3, 40).T[..., None]},
        ),
        "probabilities": (generate.probabilities, {"x": x(2, 256), "temperature": 0.8}, {"p": p}),
        "likelier": (generate.likelier, weights, {"before": drawn(2, 256)[..., None]}),
        "draw": (generate.draw, {**limits, "uniform": abs(drawn(2, 1))}, tokens),
        "likeliest": (generate.likeliest, {"x": x(2, 256), "byte": byte}, tokens),
    }  # fmt: skip


OF_HALVES = ("residual_norm", "rotate", "swiglu_backward", "cross_entropy", "adamw", "row_product")


@needs_emulator
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, SINGLE) for name in cases(SINGLE)] + [(name, HALF) for name in OF_HALVES],
    ids=lambda x: str(x),
)
def test_kernels_give_what_numpy_gives(name, kind):
    formula, inputs, outputs = cases(kind)[name]
    expected = {key: x.copy() for key, x in outputs.items()}
    formula(**inputs, **expected)
    launched(formula, **inputs, **outputs)
    for key, wanted in expected.items():
        unit = ROUNDED[wanted.dtype] if wanted.dtype in ROUNDED else 0
        found, wanted = outputs[key].astype(float), wanted.astype(float)
        assert (abs(found - wanted) <= unit * abs(wanted).max()).all(), key


@needs_emulator
@pytest.mark.parametrize("run", [Formula.__call__, launched], ids=["numpy", "emulator"])
def test_results_may_go_where_operands_lie(run):
    both = Formula("""
        a = x - y
        b = x + y
    """)
    x, y = drawn(2, 3, 300)
    wanted = x - y, x + y
    run(both, x=x, y=y, a=x, b=y)
    np.testing.assert_array_equal((x, y), wanted)


def test_the_example_in_the_docstring():
    found = doctest.testmod(formulas)
    assert found.attempted > 2
    assert found.failed == 0


def test_leading_axes_broadcast():
    total, x = np.empty((2, 3, 1)), np.arange(6.0).reshape(2, 1, 3)
    Formula("total = sum(x * w)")(x=x, w=np.eye(3), total=total)
    np.testing.assert_array_equal(total[..., 0], x[:, 0])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 6))[:, ::2], "rows must be contiguous, not of strides"),
        (np.zeros((1, 1, 1, 1, 3)), "at most 4 axes, not shape"),
    ],
)
def test_rows_that_a_kernel_does_not_take(x, message):
    with pytest.raises(ValueError, match=message):
        Formula("y = x")._run_cuda({}, {"x": x})

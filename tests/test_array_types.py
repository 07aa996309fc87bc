"""Arrays that the public functions take: types, layouts, DLPack."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from small_calls import GRADIENTS, Dlpack, K, Q, V, check, inputs, normal, result
from tolerance import assert_forward_close

import cuflash
from cuflash.calls import arrays as array_arguments
from cuflash.calls.arguments import Arguments
from cuflash.calls.call import ForwardCall
from cuflash.operands.spec import Spec

BF16 = np.dtype(ml_dtypes.bfloat16)

pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("algo", ["fa1", "fa2"])
def test_types(dtype, algo):
    arrays = inputs(dtype=dtype)
    out, lse = cuflash.attention(*arrays, algo=algo, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert_forward_close(out, lse, *arrays)


@pytest.mark.parametrize(
    "types",
    [("f2", "f4", "f4"), ("f4", "f2", "f8"), ("f4", BF16, BF16), (BF16, "f8", "f4"), (">f4",) * 3],
    ids=str,
)
def test_mixed_types_promote(types):
    arrays = [x.astype(t) for x, t in zip(inputs(), types, strict=True)]
    check(*arrays)
    # In a layout whose order of axes is not C
    check(*(np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in arrays))
    check(*(np.asfortranarray(x) for x in arrays))


def test_strides_that_are_not_multiples_of_an_item():
    record = np.zeros((2, 3, 7, 4), [("flag", "i1"), ("x", "f4")])
    record["x"] = K
    check(Q, record["x"], V)
    wide = np.zeros(
        (2, 3, 7), [("flag", "i1"), ("x", "f4", (4,))]
    )  # contiguous rows, 17 bytes apart
    wide["x"] = K
    check(Q, wide["x"], V)


def test_subclasses_and_views():
    class Mine(np.ndarray):
        pass

    check(Q.view(Mine), K, V)
    check(Q[:, ::-1], K[:, ::-1, ::-1], V[..., ::-1])
    check(np.broadcast_to(Q[0], Q.shape), K, V)


def test_masked_arrays_are_refused():
    """Their masks would be lost."""
    out, lse = cuflash.attention(Q, K, V, return_lse=True)
    masked = {
        name: np.ma.array(x, mask=x < 0) for name, x in {"q": Q, "k": K, "v": V, "out": out}.items()
    }
    for _ in range(2):
        for name in "qkv":
            arrays = {"q": Q, "k": K, "v": V, name: masked[name]}
            message = (
                f"{name} is a MaskedArray, whose own mask would be ignored: give {name}.data, and"
            )
            with pytest.raises(TypeError, match=f"{message} hide keys with mask= or kv_lengths="):
                cuflash.attention(**arrays)
            with pytest.raises(TypeError, match=message):
                cuflash.plan(**arrays)
            with pytest.raises(TypeError, match=message):
                cuflash.attention_backward(out, **arrays, out=out, lse=lse)
    for name, x, instead in (
        ("out", masked["out"], r"out.data or out.filled\(...\)"),
        ("mask", np.ma.array(np.ones((5, 7), bool)), r"mask.filled\(False\)"),
        ("kv_lengths", np.ma.array([3, 4]), "kv_lengths.data or"),
    ):
        with pytest.raises(TypeError, match=f"{name} is a MaskedArray, .*: give {instead}"):
            cuflash.attention(Q, K, V, **{name: x})


def test_dlpack():
    expected = cuflash.attention(Q, K, V)
    np.testing.assert_array_equal(cuflash.attention(Dlpack(Q), Dlpack(K), V), expected)
    memory = result(2, 3, 5, 6)
    out = Dlpack(memory)
    assert cuflash.attention(Q, K, V, out=out) is out
    np.testing.assert_array_equal(memory, expected)
    lengths = np.array([3, 4])
    np.testing.assert_array_equal(
        cuflash.attention(Q, K, V, kv_lengths=Dlpack(lengths)),
        cuflash.attention(Q, K, V, kv_lengths=lengths),
    )


def test_dlpack_of_a_type_that_numpy_does_not_take():
    with pytest.raises(
        TypeError, match="k is a Dlpack that NumPy cannot take by DLPack .*: give a"
    ):
        cuflash.attention(Q.astype(BF16), Dlpack(K.astype(BF16)), V.astype(BF16))


@pytest.mark.parametrize("workspace", ["nonsense", np.empty(0), 0])
def test_a_workspace_goes_with_device_arrays(workspace):
    out, grads = result(2, 3, 5, 6), tuple(np.full_like(x, 77) for x in (Q, K, V))
    message = f"workspace is a {type(workspace).__name__}: it goes with CuPy arrays, for NumPy ar"
    with pytest.raises(TypeError, match=message):
        cuflash.attention(Q, K, V, out=out, workspace=workspace)
    with pytest.raises(TypeError, match=message):
        cuflash.attention_backward(**GRADIENTS, grads_out=grads, workspace=workspace)
    assert all((x == 77).all() for x in (out, *grads))


def test_what_needs_no_copy_is_not_copied():
    assert array_arguments.conform(K, Spec(K.shape, K.strides, K.dtype)) is K
    copy = array_arguments.conform(K, Spec.contiguous(K.shape, float))
    assert copy.flags.c_contiguous
    np.testing.assert_array_equal(copy, K)


def test_an_array_of_two_names():
    """What is known of it is that of two arrays."""
    x, y = normal(2, 3, 5, 4), normal(2, 3, 5, 4, seed=1)
    for one, other in ((x, y), (Dlpack(x), Dlpack(y))):
        mine = Arguments(ForwardCall.operands, {"q": other, "k": one, "v": one})
        assert [name for name, *_ in mine.forms] == ["q", "k", "v"]
        assert mine.forms[1][1:] == mine.forms[2][1:]
        assert mine.addresses["v"] == mine.addresses["k"] == x.ctypes.data
        assert mine.addresses["q"] == y.ctypes.data
        assert isinstance(mine.arrays["v"], np.ndarray)
        assert mine.arrays["v"] is mine.arrays["k"]


def test_masked_arrays_are_not_imported_to_be_refused():
    """A first call would take 50 ms longer: NumPy imports them when they are asked for."""
    code = """
import sys
import numpy as np
before = set(sys.modules)
import cuflash
class Other(np.ndarray):
    pass
cuflash.attention(*3 * [np.ones((1, 1, 4, 8), np.float32).view(Other)])
print("numpy.ma" in sys.modules.keys() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""The layers of examples/ for Thinc and PyTorch, where these are installed."""

import importlib
import os

import numpy as np
import pytest

# Of a build for an earlier NumPy; no test takes NumPy's arrays but by DLPack.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


def example(name, package, variable):
    """The module of an example, unless its package is missing: then a skip or a failure."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        reason = f"{error}: pip install {package}"
        if os.environ.get(variable) == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def thinc_example():
    return example("thinc_attention", "thinc", "CUFLASH_REQUIRE_EXAMPLE")


@pytest.fixture(scope="module")
def torch_example():
    return example("torch_autograd", "torch", "CUFLASH_REQUIRE_TORCH")


@pytest.fixture
def own_attention(torch_example):
    """The example, which compares with what PyTorch has from version 2.0 on."""
    import torch

    if not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        pytest.skip(f"PyTorch {torch.__version__} has no attention of its own")
    return torch_example


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (2, 0)}, {"algo": "fa1"}])
def test_thinc_gradient_equals_finite_differences(options, thinc_example):
    rng = np.random.default_rng(0)
    model = thinc_example.Attention(2, **options)
    x, step = rng.standard_normal((2, 2, 5, 24))
    dout = rng.standard_normal((2, 5, 8))
    out, backprop = model(x, True)
    assert out.shape == dout.shape
    assert out.dtype == np.float64
    after, before = (model.predict(x + h * step) for h in (1e-5, -1e-5))
    difference = np.sum(dout * (after - before)) / 2e-5
    np.testing.assert_allclose(np.sum(backprop(dout) * step), difference, rtol=1e-7)


def test_thinc_gradient_through_the_projections(thinc_example):
    rng = np.random.default_rng(0)
    model = thinc_example.SelfAttention(8, 2, causal=True)
    for node in model.walk():
        if node.name == "linear":
            outputs, inputs = node.get_dim("nO"), node.get_dim("nI")
            node.set_param("W", rng.standard_normal((outputs, inputs)))
            node.set_param("b", rng.standard_normal(outputs))
    x, step, dout = rng.standard_normal((3, 2, 5, 8))
    out, backprop = model(x, True)
    assert out.dtype == np.float64
    after, before = (model.predict(x + h * step) for h in (1e-5, -1e-5))
    difference = np.sum(dout * (after - before)) / 2e-5
    np.testing.assert_allclose(np.sum(backprop(dout) * step), difference, rtol=1e-6)


def test_thinc_width_that_heads_do_not_divide(thinc_example):
    with pytest.raises(ValueError, match="width=10 is not a multiple of heads=4"):
        thinc_example.SelfAttention(10, 4)


def test_thinc_learns_to_reverse(thinc_example, capsys):
    assert thinc_example.main(["--steps", "101"]) == 0
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 4


@pytest.mark.gpu
def test_thinc_learns_on_the_gpu(thinc_example):
    from thinc.api import CupyOps, use_ops

    with use_ops("cupy"):
        layer = thinc_example.Attention(2)
        assert isinstance(layer.ops, CupyOps)
        losses = list(thinc_example.train(100))
    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2, "scale": 0.3}])
@pytest.mark.parametrize("heads", [2, 1])
def test_torch_gradcheck(heads, options, torch_example):
    import torch

    torch.manual_seed(0)
    shapes = (1, 2, 4, 3), (1, heads, 5, 3), (1, heads, 5, 2)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def function(q, k, v):
        return torch_example.attention(q, k, v, enable_gqa=heads < 2, **options)

    assert torch.autograd.gradcheck(function, operands)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_equals_its_own_attention(causal, own_attention):
    import torch

    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2)):
        differences = own_attention.compare("cpu", dtype, causal=causal)
        assert max(differences.values()) < limit


def test_torch_bfloat16_on_the_cpu(torch_example):
    import torch

    x = torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="q is bfloat16 on the CPU"):
        torch_example.attention(x, x, x)


def test_torch_command_line(own_attention, capsys):
    assert own_attention.main([]) == 0
    assert "float64" in capsys.readouterr().out


@pytest.mark.gpu
def test_torch_on_the_gpu(torch_example):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch_example.main(["--device", "cuda"]) == 0

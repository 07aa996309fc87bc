"""Attention for PyTorch: `cuflash.attention` and its gradients as a `torch.autograd.Function`.

    python examples/torch_autograd.py
    python examples/torch_autograd.py --device cuda

compares results and gradients with PyTorch's own attention. Tensors go to cuflash and back by
DLPack, without copies: on the CPU as NumPy arrays, on a GPU as CuPy arrays on PyTorch's current
stream. Besides cuflash (with CuPy for a GPU) it needs

    pip install torch
"""

from __future__ import annotations

import argparse
import contextlib
import sys

import torch

import cuflash


class Attention(torch.autograd.Function):
    """Exact attention with gradients; :func:`attention` calls it."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        """The attention of q, k and v, and what the gradients need of it."""
        with on_stream_of(q):
            arrays = (as_array(x) for x in (q, k, v))
            results = cuflash.attention(*arrays, return_lse=True, **options)
            out, lse = (torch.from_dlpack(x) for x in results)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        """Gradients of q, k and v, and None for the options."""
        with on_stream_of(dout):
            arrays = (as_array(x) for x in (dout, *ctx.saved_tensors))
            gradients = cuflash.attention_backward(*arrays, **ctx.options)
            return *(torch.from_dlpack(x) for x in gradients), None


def attention(q, k, v, *, causal=False, window=None, scale=None, enable_gqa=False):
    """`cuflash.attention` of tensors, differentiable once.

    Parameters
    ----------
    q, k, v : torch.Tensor, shapes (..., H, N, D), (..., H, M, D) and (..., H, M, Dv)
        On one device. NumPy has no bfloat16 that DLPack knows: on the CPU it is not taken.
    causal, window, scale, enable_gqa
        As in :func:`cuflash.attention`.

    Returns
    -------
    torch.Tensor, shape (..., H, N, Dv)

    Raises
    ------
    TypeError
        For bfloat16 on the CPU.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.device.type == "cpu" and x.dtype == torch.bfloat16:
            raise TypeError(
                f"{name} is bfloat16 on the CPU, which NumPy cannot take by DLPack: "
                f"give {name}.float() or {name}.half(), or move it to a GPU"
            )
    options = {"causal": causal, "window": window, "scale": scale, "enable_gqa": enable_gqa}
    return Attention.apply(q, k, v, options)


def as_array(tensor):
    """The tensor's own memory as an array that `cuflash` takes."""
    tensor = tensor.detach().resolve_neg()
    if tensor.device.type != "cuda":
        return tensor  # cuflash makes it a NumPy array by DLPack
    import cupy

    return cupy.from_dlpack(tensor)


@contextlib.contextmanager
def on_stream_of(tensor):
    """Let CuPy use the device of a CUDA tensor, and PyTorch's current stream there."""
    if tensor.device.type != "cuda":
        yield
        return
    import cupy

    stream = torch.cuda.current_stream(tensor.device)
    with cupy.cuda.Device(tensor.device.index), cupy.cuda.Stream.from_external(stream):
        yield


def compare(device="cpu", dtype=torch.float32, *, causal=True):
    """Largest differences from PyTorch's attention, as a dict of name to float.

    The differences are relative to the largest element of PyTorch's result, computed in float64.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, 100, 64), (2, 2, 100, 64), (2, 2, 100, 64), (2, 8, 100, 64)
    q, k, v, dout = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        for shape in shapes
    )
    names = ("out", "dq", "dk", "dv")
    mine = _with_gradients(attention, (q, k, v), dout, causal=causal, enable_gqa=True)
    theirs = _with_gradients(
        torch.nn.functional.scaled_dot_product_attention,
        [x.double() for x in (q, k, v)],
        dout.double(),
        is_causal=causal,
        enable_gqa=True,
    )
    return {
        name: float((x.double() - y).abs().max() / y.abs().max())
        for name, x, y in zip(names, mine, theirs, strict=True)
    }


def _with_gradients(function, operands, dout, **options):
    operands = [x.clone().requires_grad_() for x in operands]
    out = function(*operands, **options)
    return out.detach(), *torch.autograd.grad(out, operands, dout)


def main(argv=None) -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare with PyTorch's own attention.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch_autograd: PyTorch finds no CUDA device; use --device cpu", file=sys.stderr)
        return 2
    print("Relative differences from scaled_dot_product_attention in float64")
    limits = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2}
    if args.device == "cuda":
        limits[torch.bfloat16] = 1e-1
    agree = True
    for dtype, limit in limits.items():
        differences = compare(args.device, dtype)
        agree &= max(differences.values()) < limit
        listing = "  ".join(f"{name} {value:.1e}" for name, value in differences.items())
        print(f"{str(dtype).removeprefix('torch.'):9} {listing}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())

"""The model of gpt.py in PyTorch: what its loss, gradients and speed are compared with.

`train_gpt.py --check-torch` and `--against-torch` call this. PyTorch runs its own attention, in the
fastest of its fused kernels here, its own norm where it has one, and its fused AdamW; nothing is
compiled. It needs

    pip install torch
"""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from gpt import EPSILON, GPT, ROTARY_BASE

LIMIT = 1e-5  # relative differences in float32: less than 200 units roundoff
BLOCK = 5  # steps that one contender takes before the other has its turn
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")


def as_tensor(array):
    """A copy of a NumPy or CuPy array, where it lies."""
    return torch.from_dlpack(array).clone()


def attention(q, k, v):
    """PyTorch's own, causal with grouped heads; written out for a version that has none."""
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    return scores.softmax(dim=-1) @ v


def norm(x):
    """Rows of root mean square 1."""
    if hasattr(F, "rms_norm"):
        return F.rms_norm(x, x.shape[-1:], eps=EPSILON)
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPSILON)


def rotary(config, length, device, dtype):
    """Cosines and sines, each of shape (length, 1, head_dim / 2)."""
    half = config.head_dim // 2
    rates = ROTARY_BASE ** -(torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.arange(length, device=device)[:, None, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x, cos, sin):
    """Heads (B, N, H, D) turned by the angles."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)


def loss(config, w, tokens, targets, tables):
    """As `GPT.loss` of gpt.py, with the matrices `w` by name."""
    x = w["embedding"][tokens]
    for i in range(config.layers):
        heads = F.linear(norm(x), w[f"{i}.qkv"]).unflatten(-1, (-1, config.head_dim))
        sizes = (config.heads, config.key_heads, config.key_heads)
        q, k, v = heads.split(sizes, dim=2)
        q, k = rotated(q, *tables), rotated(k, *tables)
        out = attention(*(part.transpose(1, 2) for part in (q, k, v)))
        x = x + F.linear(out.transpose(1, 2).flatten(2), w[f"{i}.attended"])
        gate, up = F.linear(norm(x), w[f"{i}.gate_up"]).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, w[f"{i}.down"])
    logits = F.linear(norm(x), w["logits"]).flatten(0, 1)
    return F.cross_entropy(logits.float(), targets.flatten())


def differences(trainer) -> dict[str, float]:
    """How far the loss and each matrix's gradient are from PyTorch's, in float32.

    Relative to PyTorch's loss, and to the largest element of its gradient.
    """
    config, xp = trainer.settings.config, trainer.xp
    model = GPT(config, trainer.master, "float32")
    tokens, targets = trainer.batch(0)
    mine = model.loss(tokens, targets, backward=True)
    w = {name: as_tensor(x).requires_grad_() for name, x in model.w.items()}
    device = w["logits"].device
    tables = rotary(config, tokens.shape[1], device, torch.float32)
    theirs = loss(config, w, as_tensor(tokens), as_tensor(targets), tables)
    theirs.backward()
    found = {"loss": abs(float(mine) / theirs.item() - 1)}
    for name, x in w.items():
        gradient = xp.from_dlpack(x.grad)
        error = abs(model.g[name] - gradient).max() / abs(gradient).max()
        found[f"gradient of {name}"] = float(error)
    return found


def print_check(trainer) -> int:
    """Print :func:`differences`; 1 where one is larger than float32's roundings explain."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found = differences(trainer)
    print(f"Relative differences from PyTorch {torch.__version__} in float32")
    for name, value in found.items():
        print(f"{name:24} {value:.1e}")
    worst = max(found.values())
    print(f"the largest is {worst:.1e}; {LIMIT:.0e} is allowed")
    return 0 if worst <= LIMIT else 1


class TorchTrainer:
    """The training of train_gpt.py in PyTorch, from the same weights and on the same batches."""

    def __init__(self, trainer):
        self.trainer, self.settings = trainer, trainer.settings
        config = self.settings.config
        self.dtype = getattr(torch, self.settings.dtype)
        views = config.views(trainer.master)
        self.master = {name: as_tensor(x).requires_grad_() for name, x in views.items()}
        self.device = self.master["logits"].device
        self.tables = rotary(config, config.context, self.device, self.dtype)
        self.optimizer = torch.optim.AdamW(
            self.master.values(), betas=(0.9, 0.95), weight_decay=self.settings.decay, fused=True
        )
        self.step = trainer.step

    def advance(self) -> None:
        """One step; its loss is in `loss`."""
        batch = (torch.from_dlpack(x) for x in self.trainer.batch(self.step))
        w = {name: x.to(self.dtype) for name, x in self.master.items()}
        found = loss(self.settings.config, w, *batch, self.tables)
        found.backward()
        torch.nn.utils.clip_grad_norm_(self.master.values(), self.settings.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate_at(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step, self.loss = self.step + 1, found.detach()


def only(backend):
    """Let PyTorch's attention use this kernel alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, backend))


def seconds(contender, steps, synchronize) -> float:
    """Of one step, taken over a few."""
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        contender.advance()
    synchronize()
    return (time.perf_counter() - begin) / steps


def fastest_backend(theirs, synchronize) -> str:
    """The attention that PyTorch's steps are fastest with, of those that serve."""
    found = {}
    for backend in BACKENDS:
        try:
            with only(backend):
                seconds(theirs, 2, synchronize)
                found[backend] = seconds(theirs, BLOCK, synchronize)
        except RuntimeError as error:
            print(f"{backend}: {str(error).splitlines()[0]}")
    if not found:
        raise RuntimeError("none of PyTorch's fused attentions serves here")
    print("ms a step: " + ", ".join(f"{name} {1e3 * x:.1f}" for name, x in found.items()))
    return min(found, key=found.get)


def print_race(trainer, steps) -> int:
    """Take steps here and in PyTorch, block by block in turn; print both rates and their ratio."""
    if trainer.xp is np:
        raise ValueError("--against-torch compares on a GPU: add --device gpu")
    if steps < BLOCK:
        raise ValueError(f"--against-torch {steps}: give {BLOCK} steps or more")
    from train_gpt import Stopwatch

    synchronize = torch.cuda.synchronize
    theirs, watch = TorchTrainer(trainer), Stopwatch(trainer.xp)
    backend = fastest_backend(theirs, synchronize)
    theirs = TorchTrainer(trainer)  # from the start again
    trainer.model.stopwatch = watch
    seconds(trainer, 2, synchronize)  # compiles
    watch.seconds()
    mine_each, theirs_each, share = [], [], []
    with only(backend):
        seconds(theirs, 2, synchronize)
        for _ in range(steps // BLOCK):
            mine_each.append(seconds(trainer, BLOCK, synchronize))
            share.append(watch.seconds() / BLOCK / mine_each[-1])
            theirs_each.append(seconds(theirs, BLOCK, synchronize))
    tokens = trainer.settings.batch * trainer.settings.config.context
    for name, each in (("cuflash", mine_each), (f"torch, {backend}", theirs_each)):
        print(f"{name:24} {tokens / statistics.median(each):,.0f} tokens/s")
    ratio = statistics.median(b / a for a, b in zip(mine_each, theirs_each))
    print(f"{'ratio':24} {ratio:.3f} (above 1: cuflash is faster)")
    print(f"{'time in attention':24} {statistics.median(share):.1%} of a step with cuflash")
    mine = float(trainer.losses[trainer.step - 1])
    print(f"loss of step {trainer.step}: {mine:.4f}, torch {theirs.loss.item():.4f}")
    return 0

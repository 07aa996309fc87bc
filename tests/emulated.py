"""`cuflash.attention` with its kernels executed by the emulator, on NumPy arrays."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from cases import H200, on_row
from emulator import Memory, Module
from emulator.memory import TensorMap

import cuflash
from cuflash.calls.arrays import conform, of_batch, split_offset
from cuflash.calls.call import BackwardCall, find_call
from cuflash.gpu.arguments import pack
from cuflash.gpu.tensor_maps import TABLES_BYTES, tensor_maps
from cuflash.gpu.work_order import work_order
from cuflash.masks.tile_lists import tile_lists
from cuflash.operands.layout import make_layout
from cuflash.operands.spec import Spec, conformed
from cuflash.planning.plan import Plan
from cuflash.scores import softcap as softcap_score


class Result(NamedTuple):
    """What a kernel wrote, what it was, and the emulator's counts."""

    out: np.ndarray
    lse: np.ndarray | None
    plan: Plan
    stats: dict


def attention(
    q, k, v, *, out=None, return_lse=True, scale=None, softcap=None, enable_gqa=False, mask=None,
    q_lengths=None, kv_lengths=None, q_offset=None, mode="check", seed=0, row=None, device=H200,
    **options,
):  # fmt: skip
    """attention() as `device` would run it; `row` forces a row of the table, `mode` and `seed`
    are the emulator's.

    New results are never-written memory to the kernel; `out=` counts as written, gaps included.
    """
    lengths = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    plan = cuflash.plan(
        q, k, v, out=out, scale=scale, softcap=softcap, enable_gqa=enable_gqa, mask=mask,
        device=device, q_offset=q_offset, **lengths, **options,
    )  # fmt: skip
    if plan.problem.q_offset:
        lengths["q_offset"] = q_offset
    if row is not None:
        plan = on_row(plan, row)
    dtype = np.dtype(plan.problem.dtype) if plan.problem.dtype != "bfloat16" else v.dtype
    q, k, v = (_conform(x, dtype) for x in (q, k, v))
    for name, x in lengths.items():
        if x is not None:
            lengths[name] = np.asarray(x, getattr(plan.problem, name))
    specs = {name: None if x is None else _spec(x) for name, x in lengths.items()}
    mask_spec = mask
    if mask is not None:
        blocks = isinstance(mask, cuflash.BlockMask)
        mask_spec = Spec.contiguous(mask.shape, np.bool_) if blocks else _spec(mask)
    result, lse = out if return_lse and out is not None else (out, None)
    shapes = make_layout(_spec(q), _spec(k), _spec(v), enable_gqa=enable_gqa, **specs)
    fresh, fresh_lse = result is None, lse is None
    if fresh:
        result = np.empty(shapes.out_shape, dtype)
    if fresh_lse and return_lse:
        lse = np.empty(shapes.lse_shape, plan.problem.accumulator)
    target = _conform(result, dtype)
    layout = make_layout(
        _spec(q), _spec(k), _spec(v), _spec(target), None if lse is None else _spec(lse),
        enable_gqa=enable_gqa, mask=mask_spec, **specs,
    )  # fmt: skip

    memory = Memory()
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    params = pack(plan, layout, scale, softcap_score(softcap).values if softcap else ())
    for name, x in {"q": q, "k": k, "v": v, **lengths}.items():
        params[name] = 0 if x is None else memory.place(x)
    params["out"] = memory.place(target, initialised=not fresh and target is result)
    params["lse"] = 0 if lse is None else memory.place(lse, initialised=not fresh_lse)
    _place_mask(params, mask, plan, memory)
    operands = {"q": q, "k": k, "v": v}
    maps = tensor_maps(plan, layout) if plan.engine == "wgmma" else {}
    more = []
    if plan.engine == "wgmma":
        packed = [TensorMap(operands[name], *x).pack(memory) for name, x in maps.items()]
        order = work_order(plan)
        place = 0 if order is None else memory.place(order)
        text = b"".join([*packed, place.to_bytes(8, "little")]).ljust(TABLES_BYTES, b"\0")
        more = [np.frombuffer(text, f"V{TABLES_BYTES}")]
    stats = _launch(plan, [params, *more], memory, mode, seed)
    if target is not result:
        result[...] = target
    return Result(result, lse, plan, stats)


class Gradients(NamedTuple):
    """What the kernels of a backward pass wrote, what they were, and the emulator's counts."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    plan: Plan
    stats: dict


def attention_backward(
    dout, q, k, v, out, lse, *, dlse=None, grads_out=None, algo=None, engine=None, causal=False,
    window=None, mask=None, softcap=None, q_lengths=None, kv_lengths=None, q_offset=None,
    scale=None, enable_gqa=False, deterministic=True, mode="check", seed=0, row=None, device=H200,
):  # fmt: skip
    """attention_backward() as `device` would run it; `row`, `mode` and `seed` as in attention().

    New gradients are never-written memory to the kernels; `grads_out=` counts as written.
    """
    given = (dout, q, k, v, out, lse, dlse, *(grads_out or (None,) * 3))
    offset, offsets = split_offset(q_offset)
    arrays = [*given, *of_batch(q_lengths, kv_lengths, offsets, q)]
    options = (algo, engine, causal, window, offset, softcap, scale, enable_gqa, deterministic)
    call = find_call(BackwardCall, tuple(arrays), options, device, mask)[0]
    plan = call.plan if row is None else on_row(call.plan, row)
    results, fresh = [], set()
    for place, spec in call.results:
        if arrays[place] is None:
            arrays[place] = np.empty(spec.shape, spec.dtype)
            fresh.add(place)
        results.append(arrays[place])
    for place, spec in call.copied:
        arrays[place] = conform(arrays[place], spec)
    for _, place, spec in call.staged:
        arrays[place] = np.empty(spec.shape, spec.dtype)
        fresh.add(place)

    memory = Memory()
    params = pack(plan, call.layout, call.scale, call.score.values if call.score else ())
    for place, (name, x) in enumerate(zip(BackwardCall.operands, arrays, strict=True)):
        params[name] = 0 if x is None else memory.place(x, initialised=place not in fresh)
    _place_mask(params, mask, plan, memory)
    stats = _launch(plan, [params], memory, mode, seed)
    for number, place, _ in call.staged:
        results[number][...] = arrays[place]
    return Gradients(*results, plan, stats)


def _place_mask(params, mask, plan, memory) -> None:
    """Place an array's elements, or the lists of a block mask."""
    if plan.problem.mask == "elements":
        params["mask"] = memory.place(mask)
    elif plan.problem.mask == "blocks":
        turned = mask.T if plan.problem.backward else mask
        lists = tile_lists(turned, *plan.tile.scored, plan.is_longest_first)
        for name, x in lists._asdict().items():
            params[f"mask_{name}"] = 0 if x is None or not x.size else memory.place(x)


def _launch(plan, args, memory, mode, seed) -> dict:
    """Run the plan's kernels one after the other; the counts of the one that does the work."""
    for name, size in plan.workspace:
        part = np.empty(size, np.uint8)
        args[0][name] = memory.place(part, initialised=False)
    stats = {}
    for kernel in plan.kernels:
        module = Module(plan.source(kernel.name), mode=mode, arch=plan.device.arch * 10)
        module.launch(
            kernel.name, kernel.grid, kernel.threads,
            args if kernel.name == plan.kernel else args[:1],
            shared_bytes=kernel.shared_bytes, seed=seed, memory=memory,
        )  # fmt: skip
        if kernel.name == plan.kernel:
            stats = module.stats
    memory.fetch()
    memory.close()
    return stats


def _spec(x):
    return Spec(x.shape, x.strides, x.dtype)


def _conform(x, dtype):
    spec = _spec(x)
    return x if conformed(spec, dtype) is spec else np.array(x, dtype, order="C")

"""`cuflash.attention` and its gradients with their kernels executed by the emulator, on NumPy
arrays: the product's own calls and plans, launched on its memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from cases import H200, on_row
from emulator import Memory, Module
from emulator.memory import TensorMap

from cuflash.calls.append import AppendCall
from cuflash.calls.arguments import (
    Arguments,
    Joined,
    Options,
    backward_arrays,
    forward_arrays,
    split_dropout,
    split_scores,
    unpacked,
)
from cuflash.calls.arrays import as_integers, as_mask, conform, split_offset
from cuflash.calls.call import BackwardCall, ForwardCall
from cuflash.calls.merge import MergeCall
from cuflash.calls.packed import packed_queries
from cuflash.calls.run import find_call
from cuflash.calls.suited import fill
from cuflash.gpu.arguments import pack
from cuflash.gpu.tensor_maps import tables_bytes, tensor_maps
from cuflash.gpu.work_order import work_order
from cuflash.masks.tile_lists import tile_lists
from cuflash.planning.append import OPERANDS
from cuflash.planning.plan import Plan
from cuflash.planning.visible import mask_field_of
from cuflash.scores.emit import field_of


class Result(NamedTuple):
    """What a kernel wrote, what it was, and the emulator's counts."""

    out: np.ndarray
    lse: np.ndarray | None
    plan: Plan
    stats: dict


def attention(
    q, k, v, *, algo=None, engine=None, causal=False, window=None, mask=None, softcap=None,
    q_lengths=None, kv_lengths=None, q_offset=None, scale=None, enable_gqa=False, return_lse=True,
    split_keys=None, page_table=None, bias=None, score_mod=None, alibi_slopes=None, sinks=None,
    dropout_p=0.0, seed=None, out=None, mode="check", schedule=0, row=None, device=H200,
    truncates=False,
):  # fmt: skip
    """attention() as `device` would run it; `row` forces a row of the table, `mode`, `schedule`
    (its seed) and `truncates` are the emulator's.

    New results are never-written memory to the kernel; `out=` counts as written, gaps included.
    """
    offset, offsets = split_offset(q_offset)
    q, starts, longest = unpacked(q)
    text, scored = split_scores(q, score_mod, bias, sinks, alibi_slopes)
    share, number, seeds = split_dropout(q, dropout_p, seed)
    scored |= starts | seeds
    options = Options(
        algo, engine, causal, window, offset, softcap, scale, enable_gqa, split_keys=split_keys,
        score_mod=text, dropout_p=share, longest=longest, joins=type(out) is Joined,
    )  # fmt: skip
    given_lse = return_lse and out is not None
    lengths = q_lengths, kv_lengths
    arrays = forward_arrays(q, k, v, out, given_lse, *lengths, offsets, page_table) | scored
    count = 1 + return_lse
    asked = arrays, options, count, mask, number
    return Result(*_run(ForwardCall, *asked, mode, schedule, row, device, truncates))


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, *, max_seqlen_q=None, max_seqlen_k=None, out=None,
    checked=True, **options,
):  # fmt: skip
    """attention_varlen() as :func:`attention` here. With `checked=False` nobody looks at the
    offsets, as where they are on a device.
    """
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    queries = _packed(q, k, starts, longest, options.get("page_table"), checked)
    return attention(queries, k, v, out=out, **options)


class Gradients(NamedTuple):
    """What the kernels of a backward pass wrote, what they were, and the emulator's counts."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    plan: Plan
    stats: dict
    others: tuple[np.ndarray, ...] = ()


def attention_backward(
    dout, q, k, v, out, lse, *, dlse=None, grads_out=None, algo=None, engine=None, causal=False,
    window=None, mask=None, softcap=None, q_lengths=None, kv_lengths=None, q_offset=None,
    scale=None, enable_gqa=False, deterministic=True, bias=None, score_mod=None,
    alibi_slopes=None, sinks=None, dropout_p=0.0, seed=None, wrt=(), mode="check", schedule=0,
    row=None, device=H200, truncates=False,
):  # fmt: skip
    """attention_backward() as `device` would run it; `row`, `mode`, `schedule`, `truncates` as in
    attention().

    New gradients are never-written memory to the kernels; `grads_out=` counts as written.
    """
    q, starts, longest = unpacked(q)
    inputs = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    inputs |= {} if dlse is None else {"dlse": dlse}
    offset, offsets = split_offset(q_offset)
    text, scored = split_scores(q, score_mod, bias, sinks, alibi_slopes)
    share, number, seeds = split_dropout(q, dropout_p, seed)
    scored |= starts | seeds
    options = Options(
        algo, engine, causal, window, offset, softcap, scale, enable_gqa, deterministic,
        score_mod=text, dropout_p=share, longest=longest, wrt=tuple(wrt),
    )  # fmt: skip
    arrays = backward_arrays(inputs, grads_out, q_lengths, kv_lengths, offsets, wrt) | scored
    asked = arrays, options, 3 + len(wrt), mask, number
    results = _run(BackwardCall, *asked, mode, schedule, row, device, truncates)
    return Gradients(*results[:3], *results[-2:], results[3:-2])


def attention_varlen_backward(
    dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k=None, *, max_seqlen_q=None,
    max_seqlen_k=None, checked=True, **options,
):  # fmt: skip
    """attention_varlen_backward() as :func:`attention_varlen` here."""
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    queries = _packed(q, k, starts, longest, None, checked)
    return attention_backward(dout, queries, k, v, out, lse, **options)


def _packed(q, k, starts, longest, page_table, checked):
    """Queries of packed sequences; what says where these begin unchecked, if wanted."""
    if checked:
        return packed_queries(q, k, *starts, *longest, page_table)
    queries = packed_queries(q, k, *map(np.zeros_like, starts), *longest, page_table)
    queries.starts.update(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    return queries


def append_kv(
    k_cache, v_cache, k, v, start, *, lengths=None, page_table=None, mode="check", seed=0
):
    """append_kv() as a GPU would run it; returns its plan. NumPy's checks of integers are left out:
    a device does not see these."""
    arrays = {"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
    first, starts = split_offset(start)
    count, counts = split_offset(lengths)
    for name, x in (("start", starts), ("lengths", counts), ("page_table", page_table)):
        if x is not None:
            arrays[name] = as_integers(name, x)
    memory = Memory()
    addresses = dict.fromkeys(OPERANDS, 0) | {name: memory.place(x) for name, x in arrays.items()}
    call = AppendCall(Arguments(OPERANDS, arrays).specs(), addresses, on_host=False)
    params = call.params.copy()
    for name, address in addresses.items():
        params[name] = address
    params["first"], params["count"] = first or 0, call.tokens if count is None else count
    (kernel,) = call.plan.kernels
    module = Module(call.plan.source(), mode=mode)
    module.launch(kernel.name, kernel.grid, kernel.threads, [params], seed=seed, memory=memory)
    memory.fetch()
    memory.close()
    return call.plan


def merge(outs, lses, *, out=None, mode="check", seed=0):
    """merge() as a GPU would run it; returns out, lse and the plan.

    New results are never-written memory to the kernel; `out=`, a pair, counts as written.
    """
    arrays = {}
    for name, x in (("outs", outs), ("lses", lses)):
        stacked = isinstance(x, np.ndarray)
        arrays |= {name: x} if stacked else {f"{name}[{i}]": part for i, part in enumerate(x)}
    operands = *arrays, "out", "lse"
    arrays |= dict(zip(("out", "lse"), out or ()))
    memory = Memory()
    addresses = dict.fromkeys(operands, 0)
    addresses |= {name: memory.place(x) for name, x in arrays.items()}
    call = MergeCall(Arguments(operands, arrays).specs(), addresses, on_host=False)
    for name, spec in call.results:
        if name not in arrays:
            arrays[name] = np.empty(spec.shape, spec.dtype)
            addresses[name] = memory.place(arrays[name], initialised=False)
    for name, spec in call.copied:
        arrays[name] = conform(arrays[name], spec)
        addresses[name] = memory.place(arrays[name])
    params = call.params.copy()
    for name, parts in (("outs", call.outs), ("lses", call.lses)):
        params[name][0, : len(parts.names)] = [addresses[x] for x in parts.names]
    params["out"], params["lse"] = addresses["out"], addresses["lse"]
    (kernel,) = call.plan.kernels
    module = Module(call.plan.source(), mode=mode)
    module.launch(kernel.name, kernel.grid, kernel.threads, [params], seed=seed, memory=memory)
    memory.fetch()
    memory.close()
    return arrays["out"], arrays["lse"], call.plan


def _run(
    kind, arrays, options, count, mask, number, mode, schedule, row, device, truncates=False
):  # fmt: skip
    """The first results of a call, padded with None, its plan and the emulator's counts."""
    mask = as_mask(mask)
    asked = Arguments(kind.operands, arrays, mask, seed=number)
    call = find_call(kind, asked, options, device)
    plan = call.plan if row is None else on_row(call.plan, row)
    results, fresh = {}, set()
    for name, spec in call.results[:count]:
        if name not in arrays:
            arrays[name] = np.empty(spec.shape, spec.dtype)
            fresh.add(name)
        results[name] = arrays[name]
    arrays, written = call.heads_first(arrays), call.heads_first(results)
    for name, spec in (*call.copied, *call.staged):
        memory = np.empty(spec.spanned_bytes, np.uint8)
        own = np.ndarray(spec.shape, spec.dtype, memory, strides=spec.strides)
        if (name, spec) in call.copied:
            fill(own, arrays[name])
        else:
            fresh.add(name)
        arrays[name] = own

    memory = Memory()
    held = call.captured, call.dropout_p, call.targets, call.mask_held
    params = pack(plan, call.layout, call.scale, call.score, *held)
    fields = {x.operand: field_of(x.capture) for x in call.captured}
    fields |= {x.operand: y.field for x, y in zip(call.targets, plan.problem.wrt)}
    for name, x in arrays.items():
        params[fields.get(name, name)] = memory.place(x, initialised=name not in fresh)
    if "seed_number" in params.dtype.names:
        for name in ("seed_number", "first_query_number", "first_key_number", "first_head"):
            params[name] = asked.addresses[name]
    _place_mask(params, mask, plan, memory)
    fields_of_all = params.dtype.names  # without those of copies
    parts = {name: np.empty(n, np.uint8) for name, n in plan.workspace if name in fields_of_all}
    for name, part in parts.items():
        params[name] = memory.place(part, initialised=False)
    held = arrays | {name: x.view(np.float16) for name, x in parts.items() if x.size % 2 == 0}
    tables = {x.name: _tables(plan, x.name, call.layout, held, memory) for x in plan.kernels}
    stats = _launch(plan, params, tables, memory, mode, schedule, truncates)
    for name, _ in call.staged:
        if name in results:
            written[name][...] = arrays[name][..., : written[name].shape[-1]]
    padding = [None] * (len(call.results) - count)
    return *results.values(), *padding, plan, stats


def _tables(plan, kernel, layout, arrays, memory) -> list:
    """The argument beside Params, of a kernel that reads operands by tensor maps."""
    maps = tensor_maps(plan, layout, kernel)
    if not maps:
        return []
    without_sector = [(name, x[:-1]) for name, x in maps.items()]  # the emulator has no cache
    packed = [TensorMap(arrays[name], *x).pack(memory) for name, x in without_sector]
    order = work_order(plan)
    address = 0 if order is None else memory.place(order)
    size = tables_bytes(plan, len(maps))
    text = b"".join([*packed, address.to_bytes(8, "little")]).ljust(size, b"\0")[:size]
    return [np.frombuffer(text, f"V{size}")]


def _place_mask(params, mask, plan, memory) -> None:
    """Place an array's elements, or the lists of a block mask."""
    if plan.problem.mask == "elements":
        params["mask"] = memory.place(mask)
    elif plan.problem.mask == "blocks":
        turned = mask.T if plan.problem.backward else mask
        order = plan.is_longest_first, plan.chains
        lists = tile_lists(turned, *plan.tile.scored, *order, plan.tile.packed)
        for name, x in lists._asdict().items():
            params[f"mask_{name}"] = 0 if x is None or not x.size else memory.place(x)
        held = mask.predicate.held if mask.predicate else ()
        for capture, x in zip(plan.problem.mask_form.captures, held, strict=True):
            if capture.is_array:
                params[mask_field_of(capture)] = memory.place(x)


def _launch(plan, params, tables, memory, mode, seed, truncates) -> dict:
    """Run the plan's kernels one after the other; the counts of the one that does the work."""
    stats = {}
    for kernel in plan.kernels:
        module = Module(plan.source(kernel.name), mode=mode, arch=plan.device.arch * 10)
        module.launch(
            kernel.name, kernel.grid, kernel.threads,
            [params, *tables[kernel.name]],
            shared_bytes=kernel.shared_bytes, seed=seed, memory=memory, truncates=truncates,
            follows=kernel.follows,
        )  # fmt: skip
        if kernel.name == plan.kernel:
            stats = module.stats
    memory.fetch()
    memory.close()
    return stats

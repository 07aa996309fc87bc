"""`cuflash.attention` with its kernels executed by the emulator, on NumPy arrays."""

import dataclasses

import numpy as np
from emulator import Memory, Module

from cuflash import attention as _  # noqa: F401  (the package imports its modules)
from cuflash.attention import _find_call, _split_out
from cuflash.params import pack
from cuflash.plan import Device

H200 = Device(90, "NVIDIA H200", multiprocessors=132)


def make_call(q, k, v, *, out=None, return_lse=True, tile=None, device=H200, **options):
    """The call that attention() would make on `device`, with another row of the table if given."""
    names = ("algo", "engine", "causal", "window", "softcap", "scale", "enable_gqa")
    algo, engine, causal, window, cap, scale, gqa = (options.get(name) for name in names)
    lengths = {
        name: None if options.get(name) is None else np.asarray(options[name])
        for name in ("q_lengths", "kv_lengths")
    }
    out, lse = _split_out(out, return_lse)
    call, _ = _find_call(
        {"q": q, "k": k, "v": v}, lengths, out, lse,
        algo, engine, causal or False, window, cap, scale, bool(gqa), device,
    )  # fmt: skip
    plan = call.plan if tile is None else dataclasses.replace(call.plan, tile=tile)
    return call, plan, lengths


def attention(q, k, v, *, mode="check", seed=0, out=None, lse=None, **options):
    """(out, lse, plan) as the kernel writes them; `mode` and `seed` are the emulator's."""
    call, plan, lengths = make_call(q, k, v, **options)
    if out is None:
        out = np.empty(call.layout.out_shape, call.out_dtype)
        lse = np.empty(call.layout.lse_shape, call.lse_dtype)
    memory = Memory()
    params = pack(plan, call.layout, call.scale, call.score.values if call.score else ())
    for name, x in {"q": q, "k": k, "v": v, **lengths}.items():
        params[name] = 0 if x is None else memory.place(x)
    params["out"] = memory.place(out, initialised=False)
    params["lse"] = memory.place(lse, initialised=False)
    if plan.workspace_bytes:
        state = np.empty(plan.workspace_bytes, np.uint8)
        params["state"] = memory.place(state, initialised=False)
    module = Module(plan.source(), mode=mode, arch=plan.device.arch * 10)
    grid, block = (plan.grid, 1, 1), (plan.threads, 1, 1)
    module.launch(
        plan.kernel, grid, block, [params],
        shared_bytes=plan.shared_bytes, seed=seed, memory=memory,
    )  # fmt: skip
    memory.fetch()
    return out, lse, plan

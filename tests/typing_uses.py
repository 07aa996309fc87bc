"""Correct and wrong uses of the public functions, for type checkers: nothing here is run.

A line with `wrong: <rule>` must be found by pyright with that rule and by mypy, and no other line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import cuflash
from cuflash import distributed, reference

if TYPE_CHECKING:
    from collections.abc import Mapping

    import cupy
    from typing_extensions import assert_type

    from cuflash.typing import Algo, Array, Causal, CupyArray, Engine, ForwardOptions, Vjp

    F16 = NDArray[np.float16]
    F32 = NDArray[np.float32]
    Row = NDArray[np.floating[Any]]

    class Stubbed(CupyArray):
        """An array of CuPy, were there types of it."""

    class Tensor:
        """As PyTorch's: a type and strides of its own kind."""

        dtype: object

        def stride(self) -> tuple[int, ...]: ...
        def cpu(self) -> Tensor: ...
        def __dlpack__(self, *, stream: int | None = -1) -> object: ...
        def __dlpack_device__(self) -> tuple[int, int]: ...
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]: ...


def right_results(x: F32, h: F16, s: Stubbed, t: Tensor, flag: bool) -> None:
    assert_type(cuflash.attention(x, x, x), F32)
    assert_type(cuflash.attention(h, h, h, return_lse=False), F16)
    assert_type(cuflash.attention(x, x, x, return_lse=True), tuple[F32, Row])
    assert_type(cuflash.attention(x, x, x, return_lse=flag), F32 | tuple[F32, Row])
    assert_type(cuflash.attention(s, s, s), Stubbed)
    assert_type(cuflash.attention(s, s, s, return_lse=True), tuple[Stubbed, Stubbed])
    assert_type(cuflash.attention(t, t, t), Array)
    assert_type(cuflash.attention(t, t, t, return_lse=True), tuple[Array, Array])
    assert_type(cuflash.attention(t, t, t, return_lse=flag), Array | tuple[Array, Array])
    assert_type(cuflash.attention(t, t, t, out=t), Tensor)
    assert_type(cuflash.attention(t, t, t, out=(t, t), return_lse=True), tuple[Tensor, Tensor])
    out, lse = cuflash.attention(x, x, x, return_lse=True)
    assert_type(cuflash.attention(x, x, x, out=out), F32)
    assert_type(cuflash.attention(x, x, x, out=(None, lse), return_lse=True), tuple[F32, Row])
    cuflash.attention(x, x, x, dropout_p=0.1, seed=7)
    cuflash.attention_vjp(x, x, x, dropout_p=np.float32(0.1), seed=np.zeros(1, np.uint64))
    unknown = cupy.zeros((1, 2, 3))
    cuflash.attention(unknown, unknown, unknown, workspace=unknown).get()
    assert_type(cuflash.attention(unknown, unknown, unknown, out=unknown), Any)
    cuflash.attention(x, t, s).shape[-1].bit_length()


def right_ranks(x: F32, s: Stubbed, t: Tensor, comm: distributed.LocalComm, flag: bool) -> None:
    cuflash.distributed.LocalComm.make(2)[0].rank.bit_length()
    assert_type(distributed.shard(x, comm, layout="zigzag"), F32)
    assert_type(distributed.unshard(s, comm, axis=0), Stubbed)
    assert_type(distributed.unshard(t, comm), Array)
    assert_type(distributed.attention(x, x, x, comm=comm, causal=True), F32)
    out, lse = distributed.attention(x, x, x, comm=comm, return_lse=True, method="ring")
    assert_type((out, lse), tuple[F32, Row])
    assert_type(distributed.attention(s, s, s, comm=comm), Stubbed)
    assert_type(distributed.attention(t, t, x, comm=comm), Array)
    either = distributed.attention(t, t, t, comm=comm, return_lse=flag)
    assert_type(either, Array | tuple[Array, Array])
    grads = distributed.attention_backward(out, x, x, x, out, lse, comm=comm, window=3)
    assert_type(grads, tuple[F32, F32, F32])
    distributed.attention(x, x, x, comm=comm, layout="striped")  # wrong: reportCallIssue
    distributed.attention(x, x, x)  # wrong: reportCallIssue


def right_caches(x: F32, s: Stubbed, t: Tensor, table: NDArray[np.int32]) -> None:
    cuflash.append_kv(x, x, x, x, 3, lengths=[1, 2])
    cuflash.append_kv(s, s, t, t, np.array([1, 2]), lengths=None, page_table=table)
    assert_type(cuflash.attention(x, x, x, page_table=table, kv_lengths=3), F32)
    cuflash.plan(x, x, x, page_table=table, kv_lengths=3)


def right_parts(x: F32, s: Stubbed, t: Tensor) -> None:
    assert_type(cuflash.merge(x, x), tuple[F32, Row])
    assert_type(cuflash.merge([x, x], (x, x), out=(x, None)), tuple[F32, Row])
    assert_type(cuflash.merge([s, s], s), tuple[Stubbed, Stubbed])
    assert_type(cuflash.merge([t, x], (t, t)), tuple[Array, Array])
    assert_type(cuflash.merge(t, [t], out=(t, x)), tuple[Tensor, F32])
    parts = [cuflash.attention(x, x, x, return_lse=True)]
    cuflash.merge(*zip(*parts))
    assert_type(cuflash.merge([y for y, _ in parts], [z for _, z in parts]), tuple[F32, Row])


def right_gradients(x: F32, h: F16, s: Stubbed, t: Tensor, flag: bool) -> None:
    assert_type(cuflash.attention_backward(x, x, h, x, x, x), tuple[F32, F16, F32])
    assert_type(cuflash.attention_backward(s, s, s, s, s, s), tuple[Stubbed, Stubbed, Stubbed])
    assert_type(cuflash.attention_backward(t, t, t, t, t, t), tuple[Array, Array, Array])
    cuflash.attention_backward(x, x, x, x, x, x, grads_out=(None, x, None), dlse=x)
    cuflash.attention_backward(x, x, x, x, x, x, algo="fa3", engine="wgmma")
    assert_type(cuflash.attention_vjp(x, x, x), tuple[F32, Vjp[tuple[F32, F32, F32]]])
    (out, lse), vjp = cuflash.attention_vjp(x, x, x, return_lse=True, algo="fa3")
    assert_type((out, lse), tuple[F32, Row])
    assert_type(vjp(out), tuple[F32, F32, F32])
    assert_type(vjp(out, lse), tuple[F32, F32, F32])
    assert_type(vjp(dout=out, dlse=None), tuple[F32, F32, F32])
    assert_type(cuflash.attention_vjp(s, s, s)[1](s), tuple[Stubbed, Stubbed, Stubbed])
    assert_type(cuflash.attention_vjp(t, t, t)[1](t), tuple[Array, Array, Array])
    grads = cuflash.attention_backward(x, x, x, x, x, x, bias=x, sinks=1.0, wrt=["bias", "sinks"])
    assert_type(grads, tuple[Array, ...])
    assert_type(cuflash.attention_vjp(x, x, x, bias=x, wrt=("bias",))[1](x), tuple[Array, ...])
    either, _ = cuflash.attention_vjp(t, t, t, return_lse=flag)
    assert_type(either, Array | tuple[Array, Array])


def right_packed(x: F32, h: F16, s: Stubbed, t: Tensor, starts: NDArray[np.int32]) -> None:
    assert_type(cuflash.attention_varlen(x, x, x, starts), F32)
    assert_type(cuflash.attention_varlen(x, x, x, [0, 2], starts, return_lse=True), tuple[F32, Row])
    assert_type(cuflash.attention_varlen(s, s, s, s, max_seqlen_q=9, causal=True), Stubbed)
    assert_type(cuflash.attention_varlen(t, t, t, t, cu_seqlens_k=t), Array)
    backward = cuflash.attention_varlen_backward
    assert_type(backward(x, x, h, x, x, x, starts), tuple[F32, F16, F32])
    assert_type(backward(s, s, s, s, s, s, s), tuple[Stubbed, Stubbed, Stubbed])
    assert_type(backward(t, t, t, t, t, t, t, dlse=t), tuple[Array, Array, Array])
    out, vjp = cuflash.attention_varlen_vjp(x, x, x, starts, causal=True)
    assert_type(vjp(out), tuple[F32, F32, F32])
    assert_type(cuflash.attention_varlen_vjp(t, t, t, t)[1](t), tuple[Array, Array, Array])
    cuflash.plan(x, x, x, cu_seqlens_q=starts, max_seqlen_q=3)


def right_options(x: F32, n: NDArray[np.int64], t: Tensor) -> None:
    algo: Algo = "fa2"
    engine: Engine = "numpy"
    causal: Causal = "top_left"
    cuflash.attention(x, x, x, algo=algo, engine=engine, causal=causal)
    cuflash.attention(x, x, x, algo=None, engine=None, causal=np.True_, window=None)
    cuflash.attention(x, x, x, window=5)
    cuflash.attention(x, x, x, window=(np.int64(5), None))
    cuflash.attention(x, x, x, q_lengths=3, kv_lengths=n, q_offset=-2)
    cuflash.attention(x, x, x, q_lengths=[3, 4], kv_lengths=t, q_offset=n[0])
    cuflash.attention(x, x, x, scale=1, softcap=np.float32(30))
    cuflash.attention(x, x, x, mask=x > 0, enable_gqa=True)
    cuflash.attention(x, x, x, mask=cuflash.BlockMask.causal((64, 64), block_size=32))
    options: ForwardOptions = {"causal": True, "scale": 0.5}
    assert_type(cuflash.attention(x, x, x, return_lse=True, **options), tuple[F32, Row])
    device = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)
    assert_type(cuflash.plan(x, x, t, device=device, causal=True), cuflash.Plan)
    cuflash.plan(x, x, x, backward=True, deterministic=False, out=(None, x, None)).kernel.upper()


def right_shapes(x: F32) -> None:
    q, kv = (4, 32, 4096, 128), (4, 8, 4096, 128)
    found = cuflash.precompile((q, kv, kv), "bfloat16", causal=True, enable_gqa=True)
    assert_type(found, list[cuflash.CompiledKernel])
    assert_type(found[0].plan, cuflash.Plan)
    assert_type(found[0].seconds, float)
    cuflash.precompile(q, np.float16, device=0, backward=True, deterministic=False, mask=x > 0)
    cuflash.precompile([q, x.shape, (q, kv, kv)], ["float16", np.dtype("float32")], progress=False)
    cuflash.precompile(((1, 8, n, 64) for n in (1, 512)), "float16", aligned=False, window=3)


def right_reference(x: F32, flag: bool) -> None:
    assert_type(reference.attention([[1.0]], [[1.0]], x), Row)
    assert_type(reference.attention(x, x, x, return_lse=True), tuple[Row, Row])
    assert_type(reference.attention(x, x, x, return_lse=flag), Row | tuple[Row, Row])
    assert_type(reference.attention_backward(x, x, x, x, causal=True), tuple[Row, Row, Row])
    grads = reference.attention_backward(x, x, x, x, bias=x, wrt=("bias",))
    assert_type(grads, tuple[Row, ...])
    assert_type(reference.merge([x, x], x), tuple[Row, Row])
    assert_type(reference.forward_bound(x, x, x, "float16").lse_bound, Row)
    reference.attention(x, x, x, dtype=np.longdouble, window=(3, None), kv_lengths=[2, 1])


def right_masks(x: F32, matrix: Any, t: Tensor) -> None:
    mask = cuflash.BlockMask(np.eye(6, dtype=bool), block_size=32, shape=(190, 190))
    assert_type(mask & mask | mask.T, cuflash.BlockMask)
    assert_type(mask.to_dense(), NDArray[np.bool_])
    assert_type(mask.shape, tuple[int, ...])
    assert_type(mask.block_size, tuple[int, int])
    assert_type(mask.density, float)
    cuflash.BlockMask.from_dense(x > 0, (16, 32))
    cuflash.BlockMask.from_scipy(matrix)
    cuflash.BlockMask.from_function(lambda b, h, q, k: (q >= k) & (h < 3), (2, 64, 64))
    cuflash.BlockMask.sliding_window((64, 64), (3, None), "top_left", block_size=32)
    cuflash.BlockMask.prefix((64, 64), [[10], [20]])
    cuflash.BlockMask.documents(np.repeat([0, 1], 32), block_size=16)
    cuflash.BlockMask.dilated((64, 64), 9, 4)
    cuflash.BlockMask.global_local((64, 64), 9, range(3))


def wrong_operands(x: F32, t: Tensor) -> None:
    cuflash.attention([[1.0]], [[1.0]], [[1.0]])  # wrong: reportCallIssue
    cuflash.attention(x, x)  # wrong: reportCallIssue
    cuflash.attention(x, x, None)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, True)  # wrong: reportCallIssue
    cuflash.attention_backward(x, x, x, x)  # wrong: reportCallIssue
    cuflash.attention_backward(x, x, x, x, x, None)  # wrong: reportCallIssue
    cuflash.attention_vjp(x, x, "v")  # wrong: reportCallIssue
    cuflash.plan(x, x, 3.0)  # wrong: reportArgumentType
    cuflash.attention(x, x, x, workspace=x)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, out=(x, x))  # wrong: reportCallIssue
    cuflash.attention(x, x, x, out=x, return_lse=True)  # wrong: reportCallIssue
    cuflash.attention_backward(x, x, x, x, x, x, grads_out=(x, x))  # wrong: reportCallIssue


def wrong_options(x: F32) -> None:
    cuflash.attention(x, x, x, algo="fa4")  # wrong: reportCallIssue
    cuflash.attention(x, x, x, algo=2)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, engine="cuda")  # wrong: reportCallIssue
    cuflash.attention(x, x, x, causal="lower_right")  # wrong: reportCallIssue
    cuflash.attention(x, x, x, window=(1, 2, 3))  # wrong: reportCallIssue
    cuflash.attention(x, x, x, window=2.5)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, softcap="30")  # wrong: reportCallIssue
    cuflash.attention(x, x, x, scale=1j)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, q_lengths=3.5)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, kv_lengths="abc")  # wrong: reportCallIssue
    cuflash.attention(x, x, x, mask=True)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, mask=[[True]])  # wrong: reportCallIssue
    cuflash.attention(x, x, x, is_causal=True)  # wrong: reportCallIssue
    cuflash.attention(x, x, x, dropout_p="0.1")  # wrong: reportCallIssue
    cuflash.attention(x, x, x, dropout=0.1, seed=1)  # wrong: reportCallIssue
    cuflash.attention_backward(x, x, x, x, x, x, algo="fa4")  # wrong: reportCallIssue
    cuflash.attention_backward(x, x, x, x, x, x, engine="cuda")  # wrong: reportCallIssue
    cuflash.attention_backward(x, x, x, x, x, x, bias=x, wrt="bias")  # wrong: reportArgumentType
    cuflash.attention_vjp(x, x, x, engine="gpu")  # wrong: reportCallIssue
    cuflash.attention_vjp(x, x, x, out=x)  # wrong: reportCallIssue
    cuflash.attention_varlen(x, x, x)  # wrong: reportCallIssue
    cuflash.attention_varlen(x, x, x, [0, 1], algo="fa4")  # wrong: reportCallIssue
    cuflash.attention_varlen(x, x, x, [0, 1], dropout=0.1)  # wrong: reportCallIssue
    cuflash.attention_varlen_vjp(x, x, x, [0, 1], out=x)  # wrong: reportCallIssue
    cuflash.plan(x, x, x, algo="fa4")  # wrong: reportArgumentType
    cuflash.plan(x, x, x, device="H200")  # wrong: reportArgumentType
    cuflash.plan(x, x, x, return_lse=True)  # wrong: reportCallIssue
    cuflash.precompile((4, 16, 4096, 128))  # wrong: reportCallIssue
    cuflash.precompile(8, "float16")  # wrong: reportArgumentType
    cuflash.precompile((4, 16), "float16", device="H200")  # wrong: reportArgumentType
    cuflash.precompile((4, 16), "float16", algo="fa4")  # wrong: reportArgumentType
    cuflash.Device("sm_90")  # wrong: reportArgumentType
    cuflash.attention_vjp(x, x, x, page_table=x)  # wrong: reportCallIssue
    cuflash.attention_backward(x, x, x, x, x, x, page_table=x)  # wrong: reportCallIssue
    cuflash.merge(x)  # wrong: reportCallIssue
    cuflash.merge([x, None], x)  # wrong: reportCallIssue
    cuflash.merge(x, x, out=x)  # wrong: reportCallIssue
    cuflash.append_kv(x, x, x, x)  # wrong: reportCallIssue
    cuflash.append_kv(x, x, x, x, 1.5)  # wrong: reportArgumentType
    cuflash.append_kv(x, x, x, x, 0, page_table=[1])  # wrong: reportArgumentType


def wrong_results(x: F32, t: Tensor, flag: bool) -> None:
    cuflash.attention(x, x, x, return_lse=True).shape  # wrong: reportAttributeAccessIssue
    cuflash.attention(x, x, x, return_lse=flag).shape  # wrong: reportAttributeAccessIssue
    cuflash.attention(t, t, t).cpu()  # wrong: reportAttributeAccessIssue
    halves: F16 = cuflash.attention(x, x, x)  # wrong: reportAssignmentType
    cuflash.attention_vjp(x, x, x).shape  # wrong: reportAttributeAccessIssue
    cuflash.attention_vjp(x, x, x)[1](x, x, x)  # wrong: reportCallIssue
    cuflash.plan(x, x, x).kernal  # wrong: reportAttributeAccessIssue
    options: Mapping[str, Algo] = {"algo": "fa5"}  # wrong: reportAssignmentType


def wrong_masks(x: F32) -> None:
    mask = cuflash.BlockMask.causal((64, 64))
    mask & (x > 0)  # wrong: reportOperatorIssue
    cuflash.BlockMask(np.eye(6, dtype=bool), 2.5)  # wrong: reportArgumentType
    cuflash.BlockMask.causal(64)  # wrong: reportArgumentType
    cuflash.BlockMask.causal((64, 64), "lower_right")  # wrong: reportArgumentType
    cuflash.BlockMask.from_function(lambda q, k: q >= k, (64, 64))  # wrong: reportArgumentType
    cuflash.BlockMask.sliding_window((64, 64), "3")  # wrong: reportArgumentType
    cuflash.BlockMask.dilated((64, 64), 9, 0.5)  # wrong: reportArgumentType
    mask.shape = (1, 2)  # wrong: reportAttributeAccessIssue

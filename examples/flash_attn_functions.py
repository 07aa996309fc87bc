"""The Python functions of flash-attn 2.8, by their docstrings, on `cuflash`.

    from flash_attn_functions import flash_attn_func, flash_attn_varlen_func

    out = flash_attn_func(q, k, v, causal=True, dropout_p=0.1)

For those who have code for flash-attn: names, order and defaults of arguments, layouts and meanings
are flash-attn's. Tensors go to cuflash and back without copies: those on a GPU by DLPack to CuPy
arrays, on PyTorch's current stream, those on the CPU to NumPy arrays. Results are in memory that
PyTorch allocates. All but :func:`flash_attn_with_kvcache` are differentiable, once. Besides cuflash
(with CuPy for a GPU) it needs

    pip install torch

What goes beyond flash-attn:

- tensors on the CPU, float32 and float64;
- values of another head dim than keys;
- gradients through softmax_lse;
- pages of any multiple of 16 keys, also with cache_leftpad; rotary embedding of any even number of
  columns.

What differs from its kernels, where the docstrings leave it open:

- softmax_lse is -inf, the logarithm of 0, for a query that sees no key; theirs is inf.
- After the same `torch.manual_seed` other weights are dropped than there.
- S_dmask comes from further calls of cuflash, which never has the matrix in memory. In it each
  weight that is dropped is negative, also one that is too small for its type.
- Without `deterministic` only the gradient of q may differ from run to run.
- num_splits of 2 and more says into how many spans the whole capacity of a cache is divided.
- A window is one for rotary embedding if it is not (-1, -1), as the docstring says. Their kernels
  take windows as long as the cache for none.
"""

from __future__ import annotations

import contextlib
import types

import ml_dtypes
import numpy as np
import torch

import cuflash

PAGE_UNIT = 16  # cuflash's pages hold a multiple of so many keys
SPLIT_UNIT = 16  # with split_keys blocks work on a multiple of so many keys
WEIGHTS_WIDTH = 128  # how many columns of S_dmask one call of cuflash makes


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Attention of a batch.

    Parameters
    ----------
    q : torch.Tensor, shape (B, N, H, D)
    k, v : torch.Tensor, shapes (B, M, Hk, D) and (B, M, Hk, Dv)
        H is a multiple of Hk: query head h uses key head `h // (H // Hk)`.
    dropout_p : float
        The share of weights that are dropped. Which ones follows from a number that is drawn from
        PyTorch's generator of q's device: `torch.manual_seed` repeats it.
    softmax_scale : float, optional
        By default `1 / sqrt(D)`.
    causal : bool
        Query i sees key j iff `j <= i + M - N`.
    window_size : (int, int)
        Query i sees the keys from `i + M - N - left` to `i + M - N + right`. A negative number
        leaves its side open.
    softcap : float
        Above 0, scores s become `softcap * tanh(s / softcap)`.
    alibi_slopes : torch.Tensor, shape (H,) or (B, H), optional
        Adds `-slope * abs(i + M - N - j)` to the score of query i and key j.
    deterministic : bool
        The same gradients each time, bit for bit. Without it that of q is a sum in any order.
    return_attn_probs : bool
        Also return lse and S_dmask.

    Returns
    -------
    out : torch.Tensor, shape (B, N, H, Dv)
        A row that sees no key is 0.
    softmax_lse : torch.Tensor, shape (B, H, N)
        With `return_attn_probs`: the logarithm of each row's sum of exponentials, in float32;
        float64 for float64. -inf for a row that sees no key, where flash-attn has inf.
    S_dmask : torch.Tensor, shape (B, H, N, M)
        With `return_attn_probs` and dropout, else empty: the weights, negative where they are
        dropped, scaled as flash-attn's tests expect it. It takes as much memory as its shape says,
        and is for tests.

    Raises
    ------
    ValueError
        If shapes, devices or an option's value do not fit.
    TypeError
        For types that are not supported.

    Examples
    --------
    >>> q, k, v = (torch.randn(2, 100, 8, 64, requires_grad=True) for _ in range(3))
    >>> out = flash_attn_func(q, k, v, causal=True)
    >>> out.shape
    torch.Size([2, 100, 8, 64])
    >>> dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))

    The first query sees the first key alone:

    >>> torch.allclose(out[:, 0], v[:, 0])
    True
    """
    return _attention(
        (q, k, v), {}, {}, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_func` of keys and values in one tensor, of shape (B, M, 2, Hk, D).

    Their gradient is one tensor, too.
    """
    return _attention(
        (q, kv), {}, {}, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_func` of q, k and v in one tensor, of shape (B, N, 3, H, D).

    Their gradient is one tensor, too.
    """
    return _attention(
        (qkv,), {}, {}, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """Attention of sequences that lie one behind another, each of which attends to itself.

    Parameters
    ----------
    q : torch.Tensor, shape (Tq, H, D)
        Tokens of all sequences.
    k, v : torch.Tensor, shapes (Tk, Hk, D) and (Tk, Hk, Dv)
        With `block_table` pages: (P, page_size, Hk, D) and (P, page_size, Hk, Dv), page_size a
        multiple of 16.
    cu_seqlens_q, cu_seqlens_k : torch.Tensor of int, shape (B + 1,)
        Sequence b has the tokens from `cu_seqlens[b]` to, and without, `cu_seqlens[b + 1]`. Tokens
        of no sequence have out 0 and lse -inf.
    max_seqlen_q, max_seqlen_k : int
        At least the most tokens of a sequence.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, \
    return_attn_probs
        As of :func:`flash_attn_func`, with positions counted in each sequence.
    block_table : torch.Tensor of int, shape (B, pages), optional
        Key j of sequence b is row `j % page_size` of page `block_table[b, j // page_size]`. Such
        a call has no gradients.

    Returns
    -------
    out : torch.Tensor, shape (Tq, H, Dv)
    softmax_lse : torch.Tensor, shape (H, Tq)
        With `return_attn_probs`.
    S_dmask : torch.Tensor, shape (B, H, max_seqlen_q, max_seqlen_k)
        With `return_attn_probs` and dropout, else empty.

    Raises
    ------
    ValueError, TypeError
        As :func:`flash_attn_func`.
    NotImplementedError
        For gradients, and for S_dmask, of keys in pages.

    Examples
    --------
    Three sequences of 2, 0 and 3 tokens:

    >>> q, k, v = torch.randn(3, 5, 8, 64)
    >>> starts = torch.tensor([0, 2, 2, 5])
    >>> out = flash_attn_varlen_func(q, k, v, starts, starts, 3, 3, causal=True)
    >>> out.shape, torch.allclose(out[2], v[2])
    (torch.Size([5, 8, 64]), True)
    """
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    paged = {}
    if block_table is not None:
        del packing["cu_seqlens_k"], packing["max_seqlen_k"]
        paged = {"page_table": block_table, "kv_lengths": cu_seqlens_k.diff()}
    return _attention(
        (q, k, v), packing, paged, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_varlen_func` of keys and values in one tensor, of shape (Tk, 2, Hk, D).

    Their gradient is one tensor, too.
    """
    packing = _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _attention(
        (q, kv), packing, {}, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """:func:`flash_attn_varlen_func` of q, k and v in one tensor, of shape (T, 3, H, D).

    Their gradient is one tensor, too.
    """
    packing = _packing(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _attention(
        (qkv,), packing, {}, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@torch.no_grad()
def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    """Attention to a cache, into which new keys and values are written first.

    Parameters
    ----------
    q : torch.Tensor, shape (B, N, H, D)
    k_cache, v_cache : torch.Tensor, shapes (C, capacity, Hk, D) and (C, capacity, Hk, Dv)
        With `block_table` pages: (P, page_size, Hk, D) and (P, page_size, Hk, Dv), page_size a
        multiple of 16; the capacity is that of `block_table`.
    k, v : torch.Tensor, shapes (B, n, Hk, D) and (B, n, Hk, Dv), optional
        Written to the positions from `cache_seqlens` on, in place. On a GPU what does not fit is
        not written; on the CPU it is a ValueError.
    rotary_cos, rotary_sin : torch.Tensor, shape (capacity or more, rotary_dim / 2), optional
        Cosine and sine of the angles at each position, by which the first rotary_dim columns of k
        and q are rotated. Token i of k is at position `cache_seqlens + i`. So is that of q with
        `causal` or a window; without these all of q is at `cache_seqlens`. Positions beyond the
        last row have its angles.
    cache_seqlens : int or torch.Tensor of int, shape (B,), optional
        How many keys the cache holds before the call. By default all; needed with k.
    cache_batch_idx : torch.Tensor of int, shape (B,), optional
        Which entry of the cache is that of q's entry b; by default the same. Not with
        `block_table`. Where 16 does not divide the capacity, these entries are copied.
    cache_leftpad : torch.Tensor of int, shape (B,), optional
        Keys before this position are hidden.
    block_table : torch.Tensor of int, shape (B, pages), optional
        Position j of entry b is row `j % page_size` of page `block_table[b, j // page_size]`.
    softmax_scale, causal, window_size, softcap, alibi_slopes
        As of :func:`flash_attn_func`, with the keys that there are after the call as M.
    rotary_interleaved : bool
        Whether the pairs that are rotated are columns 0 and 1, 2 and 3, or, False, column i and
        column `i + rotary_dim / 2`.
    num_splits : int
        How many blocks share the keys of a query: 0 leaves it to cuflash, and 1 is not to share.
    return_softmax_lse : bool
        Also return lse.

    Returns
    -------
    out : torch.Tensor, shape (B, N, H, Dv)
        Without gradients.
    softmax_lse : torch.Tensor, shape (B, H, N)
        With `return_softmax_lse`, as of :func:`flash_attn_func`.

    Raises
    ------
    ValueError, TypeError
        If arguments do not fit, or lack others that they need.
    RuntimeError
        If there would be more keys than `block_table` has room for, as in flash-attn. To know it
        the lengths are read back from the GPU, unless a graph is captured.

    Examples
    --------
    A step of decoding for two sequences, of which the cache holds 3 and 5 tokens:

    >>> k_cache, v_cache = torch.zeros(2, 2, 64, 8, 16)
    >>> q, k, v = torch.randn(3, 2, 1, 8, 16)
    >>> lengths = torch.tensor([3, 5])
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    >>> out.shape, torch.equal(k_cache[1, 5], k[1, 0])
    (torch.Size([2, 1, 8, 16]), True)
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        _check_axes(name, x, 4)
    if k is not None or v is not None:
        _check_new(k, v, cache_seqlens)
    own_k, own_v, pages, entries = _own_caches(k_cache, v_cache, cache_batch_idx, block_table)
    capacity = own_k.shape[1] * (1 if pages is None else pages.shape[1])
    start = capacity if cache_seqlens is None else cache_seqlens
    lengths = start if k is None else start + k.shape[1]
    if block_table is not None:
        _check_room(lengths, capacity)
    if rotary_cos is not None or rotary_sin is not None:
        _check_rotary(rotary_cos, rotary_sin, k, capacity, q.shape[-1])
        in_order = causal or tuple(map(int, window_size)) != (-1, -1)
        angles = rotary_cos, rotary_sin, start, rotary_interleaved
        q, k = _rotated(q, *angles, in_order=in_order), _rotated(k, *angles)

    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if pages is not None or cache_seqlens is not None:
        options |= {"page_table": pages, "kv_lengths": lengths}
    if cache_leftpad is not None:
        options["mask"] = _hides_before(cache_leftpad, capacity)
    if num_splits:
        units = -(-capacity // (num_splits * SPLIT_UNIT))
        options["split_keys"] = 0 if num_splits == 1 else max(units, 1) * SPLIT_UNIT
    if k is not None:
        with _on_stream_of(q):
            cuflash.append_kv(*_heads_first(own_k, own_v, k, v), start, page_table=pages)
    out, lse = _forward(q, own_k, own_v, {}, options)
    if entries is not None and k is not None:
        k_cache[entries], v_cache[entries] = own_k, own_v
    return (out, lse) if return_softmax_lse else out


class _Attention(torch.autograd.Function):
    """`cuflash.attention` or `attention_varlen` of q, k and v, which one to three tensors hold."""

    @staticmethod
    def forward(ctx, packing, options, deterministic, *tensors):
        """Out and lse, and what the gradients need of the call."""
        out, lse = _forward(*_split(tensors), packing, options)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.packing, ctx.options, ctx.deterministic = packing, options, deterministic
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        """The gradients of the tensors, and None for the other arguments."""
        if "page_table" in ctx.options:
            raise NotImplementedError("keys in pages, of block_table=, have no gradients")
        *tensors, out, lse = ctx.saved_tensors
        gradients = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]
        dout = torch.zeros_like(out) if dout is None else dout
        backward = cuflash.attention_varlen_backward if ctx.packing else cuflash.attention_backward
        with _on_stream_of(out):
            backward(
                *_heads_first(dout, *_split(tensors), out), _as_array(lse), **ctx.packing,
                **ctx.options, dlse=None if dlse is None else _as_array(dlse),
                deterministic=ctx.deterministic, grads_out=_heads_first(*_split(gradients)),
            )  # fmt: skip
        return None, None, None, *gradients


def _attention(
    tensors, packing, paged, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
    deterministic, return_attn_probs,
):  # fmt: skip
    """What the public functions return; `packing` is empty for a batch, `paged` without pages."""
    names = {1: ("qkv",), 2: ("q", "kv"), 3: ("q", "k", "v")}[len(tensors)]
    for name, x in zip(names, tensors, strict=True):
        in_rows = packing and not (paged and name in "kv")
        _check_axes(name, x, 3 if in_rows else 4, len(name))
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes) | paged
    if dropout_p:
        with _on_stream_of(tensors[0]):
            drawn = torch.randint(2**63 - 1, (1,), device=tensors[0].device)
            options |= {"dropout_p": dropout_p, "seed": _as_array(drawn).view(np.uint64)}
    out, lse = _Attention.apply(packing, options, bool(deterministic), *tensors)
    if not return_attn_probs:
        return out
    if not dropout_p:
        return out, lse, out.new_empty(0)
    q, k, _ = _split([x.detach() for x in tensors])
    return out, lse, _signed_weights(q, k, packing, options)


def _options(softmax_scale, causal, window_size, softcap, alibi_slopes):
    """Keywords of `cuflash.attention` for those of flash-attn."""
    sides = tuple(None if side < 0 else int(side) for side in window_size)
    return {
        "scale": softmax_scale,
        "causal": bool(causal),
        "window": None if sides == (None, None) else sides,
        "softcap": softcap if softcap > 0 else None,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.detach(),
        "enable_gqa": True,
    }


def _packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """Arguments of `cuflash.attention_varlen` that say where sequences are."""
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": int(max_seqlen_q),
        "max_seqlen_k": int(max_seqlen_k),
    }


def _forward(q, k, v, packing, options):
    """Out and lse of tensors, in flash-attn's layouts."""
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v have types {q.dtype}, {k.dtype} and {v.dtype}: give one type")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=sums)
    forward = cuflash.attention_varlen if packing else cuflash.attention
    with _on_stream_of(q):
        *arrays, written = _heads_first(q, k, v, out)
        goal = written, _as_array(lse)
        forward(*arrays, **packing, **options, return_lse=True, out=goal)
    return out, lse


def _signed_weights(q, k, packing, options):
    """S_dmask: negative where a weight is dropped.

    The kernel that writes it in flash-attn goes from the last key block to the first and writes
    `exp(score - m)`, m the largest score so far. The library's tests multiply by `exp(m - lse)`.
    """
    if "page_table" in options:
        raise NotImplementedError("there is no S_dmask of keys in pages: leave out block_table")
    visible = {name: x for name, x in options.items() if name not in ("dropout_p", "seed")}
    weights = _weights(q, k, packing, visible)
    if not weights.numel():
        return weights
    batch, heads, queries, keys = weights.shape
    zeros = q.new_zeros(1, 1, 1, 8)
    equal = zeros.expand(batch, queries, heads, 8), zeros.expand(batch, keys, 1, 8)
    dropout = {name: options[name] for name in ("dropout_p", "seed")} | {"enable_gqa": True}
    kept = _weights(*equal, {}, dropout) > 0  # without dropout each would be 1 / keys

    block = _key_block(q.shape[-1])
    weights = weights.to(torch.promote_types(q.dtype, torch.float32))
    blocks = torch.nn.functional.pad(weights, (0, -keys % block))
    largest = blocks.unflatten(-1, (-1, block)).amax(-1)
    largest = largest.flip(-1).cummax(-1).values.flip(-1).repeat_interleave(block, -1)
    ratios = (weights / largest[..., :keys]).nan_to_num(0)  # 0 / 0: only hidden keys are left
    return torch.where(kept, ratios, -ratios.clamp(min=torch.finfo(q.dtype).tiny)).to(q.dtype)


def _key_block(head_dim):
    """How many keys flash-attn's kernels with dropout take at once, as its tests have it."""
    if head_dim <= 32:
        return 128
    return 32 if 96 < head_dim <= 128 else 64


def _weights(q, k, packing, options):
    """Weights, of shape (B, H, N, M): what comes out where values are an identity matrix."""
    places, keys = torch.arange(k.shape[-3], device=k.device), k.shape[-3]
    if packing:
        keys = packing["max_seqlen_k"]
        _, places = _places(k, packing["cu_seqlens_k"], keys)
    parts = [q.new_empty(*q.shape[:-1], 0)]
    for column in range(0, keys, WEIGHTS_WIDTH):
        columns = torch.arange(column, min(column + WEIGHTS_WIDTH, keys), device=k.device)
        v = (places[:, None] == columns).to(q.dtype)[:, None]
        parts.append(_forward(q, k, v.expand(*k.shape[:-1], -1), packing, options)[0])
    weights = torch.cat(parts, -1)
    if packing:
        starts, longest = packing["cu_seqlens_q"], packing["max_seqlen_q"]
        rows = weights.new_zeros(len(starts), longest, *weights.shape[1:])
        rows[_places(q, starts, longest)] = weights
        weights = rows[:-1]  # the last ones are those of no sequence
    return weights.transpose(1, 2)


def _split(tensors):
    """q, k and v, as views of one to three tensors that hold them."""
    *first, last = tensors
    return tensors if len(tensors) == 3 else (*first, *last.unbind(-3))


def _places(tokens, starts, longest):
    """Of each packed token its sequence, the last one or behind it for those of none, and place."""
    token = torch.arange(len(tokens), device=starts.device)
    sequence = torch.searchsorted(starts.long(), token, right=True) - 1
    return sequence, (token - starts[sequence]).clamp(0, max(longest - 1, 0))


def _own_caches(k_cache, v_cache, cache_batch_idx, block_table):
    """The caches that a call works on, their pages, and which entries they are a copy of."""
    if cache_batch_idx is None:
        return k_cache, v_cache, block_table, None
    if block_table is not None:
        raise ValueError("block_table and cache_batch_idx exclude each other")
    if k_cache.shape[1] % PAGE_UNIT == 0:
        return k_cache, v_cache, cache_batch_idx[:, None], None  # a page is an entry
    entries = cache_batch_idx.long()
    return k_cache[entries], v_cache[entries], None, entries


def _hides_before(start, keys):
    """A mask that shows the keys from `start` on, in each batch entry."""
    seen = torch.arange(keys, device=start.device) >= start[:, None]
    with _on_stream_of(start):  # as bytes, since older releases of PyTorch give away no bool
        return _as_array(seen[:, None, None].view(torch.uint8)).view(np.bool_)


def _rotated(x, cos, sin, start, interleaved, in_order=True):
    """`x` with pairs of its first columns rotated by the angles of its tokens' positions."""
    place = torch.as_tensor(start, device=x.device).reshape(-1, 1)
    if in_order:
        place = place + torch.arange(x.shape[1], device=x.device)
    place = place.long().clamp(max=len(cos) - 1)
    exact = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (table[place].to(exact)[:, :, None] for table in (cos, sin))
    turning, rest = x.split((2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]), -1)
    shape = (-1, 2) if interleaved else (2, -1)
    a, b = turning.to(exact).unflatten(-1, shape).unbind(-1 if interleaved else -2)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1 if interleaved else -2)
    return torch.cat((turned.flatten(-2).to(x.dtype), rest), -1)


def _check_axes(name, x, axes, tensors=1):
    """Raise a ValueError unless `x` has so many axes, and one more if it holds several tensors."""
    if x.ndim != axes + (tensors > 1) or (tensors > 1 and x.shape[-3] != tensors):
        wanted = ["batch", "tokens", "heads", "head dim"][-axes:]
        if tensors > 1:
            wanted.insert(-2, str(tensors))
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be ({', '.join(wanted)})")


def _check_new(k, v, cache_seqlens):
    if k is None or v is None or cache_seqlens is None:
        raise ValueError("k, v and cache_seqlens go together: new tokens, and where they begin")
    for name, x in (("k", k), ("v", v)):
        _check_axes(name, x, 4)


def _check_rotary(cos, sin, k, capacity, head_dim):
    if cos is None or sin is None or k is None:
        raise ValueError("rotary_cos, rotary_sin and k go together")
    if cos.ndim != 2 or cos.shape != sin.shape or len(cos) < capacity:
        raise ValueError(
            f"rotary_cos and rotary_sin have shapes {tuple(cos.shape)} and {tuple(sin.shape)}: "
            f"they must be equal, with a row for each of {capacity} positions"
        )
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rotary_cos rotates {2 * cos.shape[1]} columns of {head_dim}")


def _check_room(lengths, capacity):
    """Raise a RuntimeError for more keys than a block table has room for."""
    if torch.is_tensor(lengths) and lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    longest = int(torch.as_tensor(lengths).max())
    if longest > capacity:
        raise RuntimeError(f"{longest} keys are more than block_table has room for, {capacity}")


def _heads_first(*tensors):
    """Arrays with heads ahead of tokens, but where these are packed, as cuflash takes them."""
    arrays = map(_as_array, tensors)
    return tuple(x.swapaxes(1, 2) if x.ndim == 4 else x for x in arrays)


def _as_array(tensor):
    """The tensor's own memory as an array of NumPy or CuPy."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        import cupy

        return cupy.from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know by DLPack
        return _as_array(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    array = np.from_dlpack(tensor)
    if array.flags.writeable:
        return array
    # By DLPack of before 1.0, that of older releases of PyTorch, nobody can tell that it is.
    shown = array.__array_interface__ | {"data": (tensor.data_ptr(), False)}
    return np.asarray(types.SimpleNamespace(__array_interface__=shown, owner=tensor))


@contextlib.contextmanager
def _on_stream_of(tensor):
    """Let CuPy use the device of a CUDA tensor, and PyTorch's current stream there."""
    if not tensor.is_cuda:
        yield
        return
    import cupy

    stream = torch.cuda.current_stream(tensor.device)
    with cupy.cuda.Device(tensor.device.index), cupy.cuda.Stream.from_external(stream):
        yield

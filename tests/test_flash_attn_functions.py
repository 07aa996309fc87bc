"""flash-attn's functions in examples/, against what their docstrings say, in float64."""

import doctest
import importlib
import inspect
import os

import numpy as np
import pytest
from tolerance import on_host

import cuflash
from cuflash import reference

# Of a build for an earlier NumPy; no test takes NumPy's arrays but by DLPack.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")

BATCH = {1: "flash_attn_qkvpacked_func", 2: "flash_attn_kvpacked_func", 3: "flash_attn_func"}
VARLEN = {n: name.replace("attn_", "attn_varlen_") for n, name in BATCH.items()}
OPTIONS = {
    "nothing": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "left": {"window_size": (4, -1)},
    "right": {"window_size": (-1, 0), "deterministic": True},
    "causal window": {"causal": True, "window_size": (2, 5)},
    "softcap": {"softcap": 0.7},
    "slopes": {"alibi_slopes": "heads"},
    "slopes of each": {"alibi_slopes": "batch", "causal": True},
    "dropout": {"dropout_p": 0.3},
    "all": {
        "dropout_p": 0.2, "softmax_scale": 0.4, "causal": True, "window_size": (6, -1),
        "softcap": 1.5, "alibi_slopes": "batch", "deterministic": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def flash():
    """The example, unless PyTorch is missing: then a skip or a failure."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        reason = f"{error}: pip install torch"
        if os.environ.get("CUFLASH_REQUIRE_TORCH") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return importlib.import_module("flash_attn_functions")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, flash):
    import torch

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    torch.manual_seed(0)
    return request.param


def randn(device, *shape, grad=False):
    import torch

    x = torch.randn(shape, dtype=torch.float64).to(device)
    return x.requires_grad_() if grad else x


def host(x):
    return np.from_dlpack(x.detach().cpu().double())


def assert_close(actual, expected, what):
    """In float64, in which both sides are rounded: a few hundred times of numbers of about 1."""
    np.testing.assert_allclose(host(actual), host(expected), rtol=1e-11, atol=1e-12, err_msg=what)


def specification(
    q, k, v, kept=None, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
    softcap=0.0, alibi_slopes=None, deterministic=False,
):  # fmt: skip
    """Out (N, H, Dv), lse (H, N) and the scores of q (N, H, D), k (M, Hk, D) and v (M, Hk, Dv)."""
    import torch

    (queries, heads, size), keys = q.shape, len(k)
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (softmax_scale or size**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = (torch.arange(n, device=q.device) for n in (queries, keys))
    distance = rows[:, None] + keys - queries - columns
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * distance.abs()
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance >= 0) | (not causal)
    seen &= (distance <= window_size[0]) | (window_size[0] < 0)
    seen &= (-distance <= window_size[1]) | (window_size[1] < 0)
    scores = scores.masked_fill(~seen, -np.inf)
    largest = scores.detach().amax(-1, keepdim=True).clamp(min=-1e9) if keys else 0
    weights = torch.exp(scores - largest)
    sums = weights.sum(-1, keepdim=True)
    is_empty = sums == 0
    sums = sums.masked_fill(is_empty, 1)
    lse = (torch.log(sums) + largest).masked_fill(is_empty, -np.inf)[..., 0]
    weights = weights / sums
    if kept is not None:
        weights = weights * kept / (1 - dropout_p)
    return torch.einsum("hnm,mhd->nhd", weights, v), lse, scores


def scaled(scores, block):
    """exp(scores), over the largest of those from the first key of their block on."""
    scores = host(scores)
    weights = np.empty_like(scores)
    for j in range(0, scores.shape[-1], block):
        largest = scores[..., j:].max(axis=-1, keepdims=True).clip(min=-1e9)
        weights[..., j : j + block] = np.exp(scores[..., j : j + block] - largest)
    return weights


def tensors(count, device, rows_q, rows_k, heads=(4, 2), size=8):
    """Operands of a function that takes so many; rows are leading axes."""
    if count == 1:
        return [randn(device, *rows_q, 3, heads[0], size, grad=True)]
    q = randn(device, *rows_q, heads[0], size, grad=True)
    if count == 2:
        return [q, randn(device, *rows_k, 2, heads[1], size, grad=True)]
    sizes = (size, 5)  # values may have columns of their own
    return [q, *(randn(device, *rows_k, heads[1], n, grad=True) for n in sizes)]


def split(operands):
    *first, last = operands
    return operands if len(operands) == 3 else (*first, *last.unbind(-3))


def given_options(name, device, batch, heads=4):
    """Options for the function, and those of the specification for each batch entry."""
    import torch

    options = dict(OPTIONS[name])
    kind = options.get("alibi_slopes")
    slopes = {"heads": (heads,), "batch": (batch, heads)}.get(kind)
    each = [dict(options) for _ in range(batch)]
    if slopes:
        options["alibi_slopes"] = torch.rand(slopes).to(device)
        for b, own in enumerate(each):
            own["alibi_slopes"] = options["alibi_slopes"].expand(batch, heads)[b].double()
    return options, each


def compare(operands, results, expected):
    """Out, lse and the gradients through both of them."""
    import torch

    dout, dlse = (torch.randn(x.shape, dtype=x.dtype).to(x.device) for x in expected)
    gradients = []
    for out, lse in (results, expected):
        loss = (out * dout).sum() + lse.masked_fill(lse.isinf(), 0).mul(dlse).sum()
        gradients.append(torch.autograd.grad(loss, operands))
    for name, x, y in zip(("out", "lse"), results, expected):
        assert x.shape == y.shape
        assert x.is_contiguous()
        assert_close(x, y, name)
    for number, (x, y) in enumerate(zip(*gradients)):
        assert_close(x, y, f"gradient {number}")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("count", "lengths"), [(1, (9, 9)), (2, (7, 12)), (3, (12, 7))])
def test_batch(count, lengths, name, device, flash):
    import torch

    operands = tensors(count, device, (2, lengths[0]), (2, lengths[1]))
    options, each = given_options(name, device, 2)
    function = getattr(flash, BATCH[count])
    out, lse, signed = function(*operands, **options, return_attn_probs=True)
    is_dropped = signed < 0
    if "dropout_p" not in options:
        assert signed.numel() == 0
        is_dropped = torch.zeros(2, 4, *lengths, dtype=torch.bool, device=device)
    parts = [
        specification(*x, kept, **own) for *x, kept, own in zip(*split(operands), ~is_dropped, each)
    ]
    expected = [torch.stack(x) for x in list(zip(*parts))[:2]]
    compare(operands, (out, lse), expected)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("count", VARLEN)
def test_packed(count, name, device, flash):
    """Four sequences, of which one has no queries and one no keys, and tokens of none."""
    import torch

    starts = [[1, 8, 8, 13, 17], [0, 11, 15, 15, 19]]
    if count == 1:
        starts[1] = starts[0]
    longest = [max(np.diff(x)) for x in starts]
    offsets = [torch.tensor(x, dtype=torch.int32, device=device) for x in starts]
    operands = tensors(count, device, (18,), (20,))
    options, each = given_options(name, device, 4)
    packing = (*offsets, *longest) if count > 1 else (offsets[0], longest[0])
    function = getattr(flash, VARLEN[count])
    out, lse, signed = function(*operands, *packing, **options, return_attn_probs=True)

    expected = torch.zeros_like(out), torch.full_like(lse, -np.inf)
    for b, own in enumerate(each):
        rows, keys = (slice(*x[b : b + 2]) for x in starts)
        kept = None
        if "dropout_p" in options:
            assert signed.shape == (4, 4, *longest)
            kept = signed[b, :, : rows.stop - rows.start, : keys.stop - keys.start] >= 0
        q, k, v = split(operands)
        expected[0][rows], expected[1][:, rows], scores = specification(
            q[rows], k[keys], v[keys], kept, **own
        )
        if kept is not None:
            weights = signed[b, :, : rows.stop - rows.start, : keys.stop - keys.start]
            np.testing.assert_allclose(abs(host(weights)), scaled(scores, 128), atol=1e-12)
    compare(operands, (out, lse), expected)


@pytest.mark.parametrize(("size", "block"), [(32, 128), (40, 64), (96, 64), (100, 32), (136, 64)])
def test_signed_weights(size, block, device, flash):
    """Scaled by the largest score from their block of keys on, and negative where dropped."""
    import torch

    q, k, v = (randn(device, 2, n, h, size) for n, h in ((70, 4), (150, 2), (150, 2)))
    options = {"dropout_p": 0.4, "window_size": (90, 3)}
    torch.manual_seed(3)
    signed = flash.flash_attn_func(q, k, v, **options, return_attn_probs=True)[2]
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, (1,), device=device))
    kept = reference.dropout_keep(seed, signed.shape, 0.4)
    np.testing.assert_array_equal(host(signed) >= 0, kept)
    for x, *operands in zip(host(signed), q, k, v):
        expected = scaled(specification(*operands, **options)[2], block)
        np.testing.assert_allclose(abs(x), expected, atol=1e-12)


def test_gradient_of_lse_alone(device, flash):
    import torch

    q, k = tensors(3, device, (1, 6), (1, 9))[:2]
    _, lse, _ = flash.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    expected = specification(q[0], k[0], k[0], causal=True)[1]
    pairs = (torch.autograd.grad(x.sum(), (q, k)) for x in (lse, expected))
    for x, y in zip(*pairs):
        assert_close(x, y, "gradient")


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic(deterministic, monkeypatch, flash):
    given = []

    def backward(*args, **options):
        given.append(options["deterministic"])
        return cuflash_backward(*args, **options)

    cuflash_backward = cuflash.attention_backward
    monkeypatch.setattr(cuflash, "attention_backward", backward)
    q = randn("cpu", 1, 3, 2, 8, grad=True)
    flash.flash_attn_func(q, q, q, deterministic=deterministic).sum().backward()
    assert given == [deterministic]


def test_dropout_follows_the_generator(device, flash):
    import torch

    q = randn(device, 1, 40, 2, 8)
    outs = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        outs += [flash.flash_attn_func(q, q, q, 0.5) for _ in range(2)]
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[4])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_types(dtype, device, flash):
    """The bits are those of cuflash, for tensors in whose memory heads come after tokens."""
    import torch

    q, k, v, dout = (
        randn(device, 2, n, h, 16).to(getattr(torch, dtype)).requires_grad_()
        for n, h in ((20, 4), (30, 2), (30, 2), (20, 4))
    )
    options = {"causal": True, "window_size": torch.tensor([9, 9]), "deterministic": True}
    out = flash.flash_attn_func(q, k, v, **options)
    results = out, *torch.autograd.grad(out, (q, k, v), dout)
    assert [x.dtype for x in results] == [q.dtype] * 4

    arrays = [flash._as_array(x).swapaxes(1, 2) for x in (q, k, v, dout)]
    options = {"causal": True, "window": (9, 9), "enable_gqa": True}
    out, lse = cuflash.attention(*arrays[:3], return_lse=True, **options)
    gradients = cuflash.attention_backward(arrays[3], *arrays[:3], out, lse, **options)
    for x, y in zip(results, (out, *gradients)):
        expected = on_host(y.swapaxes(1, 2)).astype(np.float64)
        np.testing.assert_array_equal(host(x), expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32"])
def test_arrays_share_memory(dtype, device, flash):
    import torch

    x = torch.zeros(3, 4, 5, dtype=getattr(torch, dtype), device=device)
    view = x.transpose(0, 1)[1:]
    with flash._on_stream_of(x):
        array = flash._as_array(view)
    assert array.dtype.name == dtype
    assert array.shape == (3, 3, 5)
    assert array.strides == tuple(n * x.element_size() for n in view.stride())
    if device == "cpu":
        array[2, 1] = 7
        assert (x[1, 3] == 7).all()
        assert x.sum() == 35
    else:
        assert array.data.ptr == view.data_ptr()


def rotated(x, angles, places, interleaved):
    """Pairs of columns of x (N, H, D) as complex numbers, turned by the angles at their places."""
    import torch

    half = angles.shape[1]
    pairs, rest = x[..., : 2 * half], x[..., 2 * half :]
    columns = torch.arange(2 * half).reshape((half, 2) if interleaved else (2, half))
    columns = columns if interleaved else columns.T
    turn = torch.polar(torch.ones_like(angles), angles)[places][:, None]
    turned = torch.complex(*(pairs[..., x] for x in columns.T)) * turn
    pairs = pairs.clone()
    pairs[..., columns[:, 0]], pairs[..., columns[:, 1]] = turned.real, turned.imag
    return torch.cat([pairs, rest], -1)


def integers(numbers, device):
    import torch

    return torch.tensor(numbers, dtype=torch.int32, device=device)


def new_caches(layout, device):
    """Caches, what says where batch entries are, and the rows of each, counted over all."""
    import torch

    if layout == "pages":
        table = [[7, 2, 0], [4, 9, 5], [3, 8, 1]]
        shape, given = (10, 16), {"block_table": integers(table, device)}
        rows = torch.tensor(table)[..., None] * 16 + torch.arange(16)
    else:
        capacity = 50 if layout == "entries copied" else 48
        entries = [0, 1, 2] if layout == "plain" else [5, 0, 3]
        shape, given = (3 if layout == "plain" else 6, capacity), {}
        if layout != "plain":
            given["cache_batch_idx"] = integers(entries, device)
        rows = torch.tensor(entries)[:, None] * capacity + torch.arange(capacity)
    return [randn(device, *shape, 2, n) for n in (16, 8)], given, rows.reshape(3, -1).to(device)


# Lengths before the call, then tokens to write, queries and options.
CACHES = {
    "whole": (None, 0, 3, {}),
    "lengths": ([9, 0, 40], 0, 3, {"causal": True}),
    "one length": (17, 0, 1, {"window_size": (5, -1)}),
    "append": ([9, 0, 40], 4, 4, {"causal": True}),
    "append fewer": ([9, 2, 40], 2, 5, {"window_size": (7, 3), "softcap": 0.8}),
    "append to one length": (11, 3, 3, {"causal": True}),
    "left, slopes of each": (
        [9, 8, 40], 0, 2, {"cache_leftpad": [3, 0, 40], "alibi_slopes": "batch"},
    ),
    "left and new": ([9, 8, 40], 2, 2, {"cache_leftpad": [3, 8, 1], "causal": True}),
    "splits, slopes": ([9, 8, 40], 1, 1, {"num_splits": 3, "alibi_slopes": "heads"}),
    "no splits": ([9, 8, 40], 1, 1, {"num_splits": 1, "softmax_scale": 0.2}),
    "rotary": ([9, 0, 40], 4, 4, {"causal": True, "rotary": 16}),
    "rotary at one place": ([9, 0, 40], 4, 4, {"rotary": 8}),
    "rotary of halves": (
        [9, 0, 40], 4, 4, {"window_size": (9, 0), "rotary": 16, "rotary_interleaved": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["plain", "entries", "entries copied", "pages"])
@pytest.mark.parametrize("name", CACHES)
def test_cache(name, layout, device, flash):
    import torch

    before, new, queries, options = CACHES[name]
    options = dict(options)
    caches, given, rows = new_caches(layout, device)
    q = randn(device, 3, queries, 4, 16)
    tokens = [randn(device, 3, new, 2, n) for n in (16, 8)] if new else [None, None]
    starts = np.broadcast_to(rows.shape[1] if before is None else before, 3).tolist()
    given["cache_seqlens"] = integers(before, device) if isinstance(before, list) else before
    left = options.pop("cache_leftpad", None)
    if left:
        given["cache_leftpad"] = integers(left, device)
    angles = 6 * torch.rand(60, options.pop("rotary", 0) // 2, dtype=torch.float64).to(device)
    if angles.numel():
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    slopes = torch.rand({"heads": (4,)}.get(options.pop("alibi_slopes", 0), (3, 4))).to(device)
    if "slopes" in name:
        given["alibi_slopes"] = slopes

    own = {x: y for x, y in options.items() if x not in ("num_splits", "rotary_interleaved")}
    interleaved = options.get("rotary_interleaved", True)
    in_order = "causal" in options or "window_size" in options
    wanted = []
    for b, start in enumerate(starts):
        written = [x.flatten(0, 1)[rows[b]] for x in caches]
        places = start + torch.arange(max(queries, new), device=device)
        if new:
            written[0][places[:new]] = rotated(tokens[0][b], angles, places[:new], interleaved)
            written[1][places[:new]] = tokens[1][b]
        places = places[:queries] if in_order else places[:1].expand(queries)
        own_q = rotated(q[b], angles, places, interleaved)
        seen = slice(left[b] if left else 0, start + new)
        if "slopes" in name:
            own["alibi_slopes"] = slopes.expand(3, 4)[b].double()
        results = specification(own_q, *(x[seen] for x in written), **own)
        wanted.append((written, results[:2]))

    results = flash.flash_attn_with_kvcache(
        q, *caches, *tokens, **given, **options, return_softmax_lse=True
    )
    for b, (written, expected) in enumerate(wanted):
        for x, y in zip(results, expected):
            assert_close(x[b], y, f"result of {b}")
        for x, y in zip(caches, written):
            assert_close(x.flatten(0, 1)[rows[b]], y, f"cache of {b}")


def test_packed_pages(device, flash):
    import torch

    pools = [randn(device, 6, 16, 2, 8) for _ in range(2)]
    table = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32, device=device)
    starts = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 3, 8], [0, 20, 50])]
    q = randn(device, 8, 4, 8, grad=True)
    out = flash.flash_attn_varlen_func(q, *pools, *starts, 5, 30, causal=True, block_table=table)
    for b, (rows, keys) in enumerate([(slice(0, 3), 20), (slice(3, 8), 30)]):
        k, v = (x[table[b].long()].flatten(0, 1)[:keys] for x in pools)
        assert_close(out[rows], specification(q[rows], k, v, causal=True)[0], f"sequence {b}")
    with pytest.raises(NotImplementedError, match="keys in pages, .* have no gradients"):
        out.sum().backward()
    with pytest.raises(NotImplementedError, match="no S_dmask of keys in pages"):
        flash.flash_attn_varlen_func(
            q, *pools, *starts, 5, 30, 0.1, block_table=table, return_attn_probs=True
        )


def test_room_of_a_block_table(device, flash):
    """A RuntimeError, as flash-attn raises: its tests expect one."""
    import torch

    q, new = (randn(device, 1, 1, 2, 8) for _ in range(2))
    pools = [randn(device, 4, 16, 2, 8) for _ in range(2)]
    table = torch.zeros(1, 2, dtype=torch.int32, device=device)
    for length, tokens in ((33, (None, None)), (32, (new, new))):
        lengths = torch.tensor([length], dtype=torch.int32, device=device)
        for seqlens in (lengths, length):
            with pytest.raises(RuntimeError, match="33 keys are more than block_table has room f"):
                flash.flash_attn_with_kvcache(
                    q, *pools, *tokens, cache_seqlens=seqlens, block_table=table
                )
    out = flash.flash_attn_with_kvcache(q, *pools, cache_seqlens=32, block_table=table)
    assert not out.isnan().any()


@pytest.mark.parametrize("name", [*BATCH.values(), *VARLEN.values(), "flash_attn_with_kvcache"])
def test_arguments_are_those_of_flash_attn(name, flash):
    """Names, order and defaults as in flash-attn 2.8."""
    shared = {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1),
        "softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
    }  # fmt: skip
    tensors = ["qkv"] if "qkv" in name else ["q", "kv"] if "kvp" in name else ["q", "k", "v"]
    if "varlen" in name and "qkv" in name:
        tensors += ["cu_seqlens", "max_seqlen"]
    elif "varlen" in name:
        tensors += ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    if name == "flash_attn_varlen_func":
        shared["block_table"] = None
    if name == "flash_attn_with_kvcache":
        tensors = ["q", "k_cache", "v_cache"]
        absent = "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"
        shared = dict.fromkeys((*absent, "cache_leftpad", "block_table", "softmax_scale"))
        shared |= {"causal": False, "window_size": (-1, -1), "softcap": 0.0}
        shared |= {"rotary_interleaved": True, "alibi_slopes": None, "num_splits": 0}
        shared["return_softmax_lse"] = False
    found = inspect.signature(getattr(flash, name)).parameters
    assert list(found) == [*tensors, *shared]
    assert {x: found[x].default for x in shared} == shared
    assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in found.values())


WRONG = {
    "axes of q": ("flash_attn_func", [(5, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8)], {},
                  r"q has shape \(5, 2, 8\): it must be \(batch, tokens, heads, head dim\)"),
    "axes of qkv": ("flash_attn_qkvpacked_func", [(1, 5, 2, 2, 8)], {},
                    r"qkv has .* must be \(batch, tokens, 3, heads, head dim\)"),
    "axes of kv": ("flash_attn_kvpacked_func", [(1, 5, 2, 8), (1, 5, 2, 8)], {},
                   r"kv has .* must be \(batch, tokens, 2, heads, head dim\)"),
    "head dims": ("flash_attn_func", [(1, 5, 2, 8), (1, 5, 2, 7), (1, 5, 2, 8)], {},
                  "q and k have head dims 8 and 7"),
    "heads": ("flash_attn_func", [(1, 5, 3, 8), (1, 5, 2, 8), (1, 5, 2, 8)], {}, "heads"),
    "dropout": ("flash_attn_func", [(1, 5, 2, 8)] * 3, {"dropout_p": 1.0}, "dropout_p=1.0: give"),
    "slopes": ("flash_attn_func", [(1, 5, 2, 8)] * 3, {"alibi_slopes": (3,)}, "alibi_slopes"),
    "packed axes": ("flash_attn_varlen_func", [(1, 5, 2, 8)] * 3, {"packed": 1},
                    r"q has .* must be \(tokens, heads, head dim\)"),
    "pages": ("flash_attn_varlen_func", [(5, 2, 8)] * 3, {"packed": 1, "block_table": (1, 1)},
              r"k has .* must be \(batch, tokens, heads, head dim\)"),
    "k without v": ("flash_attn_with_kvcache", [(1, 1, 2, 8)] * 4, {},
                    "k, v and cache_seqlens go together"),
    "no lengths": ("flash_attn_with_kvcache", [(1, 1, 2, 8)] * 5, {}, "k, v and cache_seqlens go"),
    "tables and entries": ("flash_attn_with_kvcache", [(1, 16, 2, 8)] * 3,
                           {"block_table": (1, 1), "cache_batch_idx": (1,)},
                           "block_table and cache_batch_idx exclude each other"),
    "sin alone": ("flash_attn_with_kvcache", [(1, 1, 2, 8)] * 5,
                  {"cache_seqlens": 0, "rotary_sin": (1, 4)}, "rotary_cos, rotary_sin and k go"),
    "few angles": ("flash_attn_with_kvcache", [(1, 9, 2, 8)] * 3 + [(1, 1, 2, 8)] * 2,
                   {"cache_seqlens": 0, "rotary_sin": (8, 4), "rotary_cos": (8, 4)},
                   r"shapes \(8, 4\) and \(8, 4\): .* a row for each of 9 positions"),
    "many angles": ("flash_attn_with_kvcache", [(1, 9, 2, 8)] * 3 + [(1, 1, 2, 8)] * 2,
                    {"cache_seqlens": 0, "rotary_sin": (9, 5), "rotary_cos": (9, 5)},
                    "rotary_cos rotates 10 columns of 8"),
    "a full cache": ("flash_attn_with_kvcache", [(1, 9, 2, 8)] * 3 + [(1, 1, 2, 8)] * 2,
                     {"cache_seqlens": 9}, "start"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors(case, flash):
    import torch

    name, shapes, options, message = WRONG[case]
    options = {
        x: torch.zeros(y, dtype=torch.float32 if "_sl" in x or "ro" in x else torch.int32)
        if isinstance(y, tuple) else y
        for x, y in options.items()
    }  # fmt: skip
    packing = [torch.tensor([0, 5])] * 2 + [5, 5] if options.pop("packed", 0) else []
    with pytest.raises(ValueError, match=message):
        getattr(flash, name)(*(torch.zeros(shape) for shape in shapes), *packing, **options)


@pytest.mark.parametrize(("tokens", "keys"), [(0, 4), (3, 0)])
def test_nothing_to_attend_to(tokens, keys, flash):
    q, k, v = (randn("cpu", 2, n, 4, 8, grad=True) for n in (tokens, keys, keys))
    out, lse, signed = flash.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
    assert signed.shape == (2, 4, tokens, keys)
    assert not out.any()
    assert (lse == -np.inf).all()
    out.sum().backward()
    assert not any(x.grad.any() for x in (q, k, v))


def test_examples(flash):
    failed, tried = doctest.testmod(flash)
    assert tried
    assert not failed


def test_types_that_differ(flash):
    import torch

    q = torch.zeros(1, 2, 2, 8)
    with pytest.raises(TypeError, match="q, k and v have types torch.float32, torch.float16 and"):
        flash.flash_attn_func(q, q.half(), q)


@pytest.mark.gpu
def test_current_stream(flash):
    """Kernels wait for what PyTorch's current stream does before them, and it for them."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA device")
    torch.manual_seed(0)
    x = torch.randn(2, 512, 4, 64, device="cuda", dtype=torch.float16)
    flash.flash_attn_func(x, x, x, causal=True)  # compiles
    expected = flash.flash_attn_func(3 * x, x, x, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        q = torch.zeros_like(x)
        torch.cuda._sleep(50_000_000)
        q.copy_(3 * x)
        out = flash.flash_attn_func(q, x, x, causal=True).clone()
        q.zero_()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)

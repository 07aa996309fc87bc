"""The operator Attention of ONNX, opset 23 to 25, on `cuflash.attention`.

    from onnx_attention import attention

    (y,) = attention([q, k, v], {"is_causal": 1}, outputs=1)
    y, key, value = attention([q, k, v, None, past_key, past_value], {"softcap": 30.0})

For those who execute ONNX graphs on NumPy or CuPy arrays. It needs cuflash (with CuPy for a GPU),
and not the package onnx.
"""

from __future__ import annotations

import numpy as np

import cuflash

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
WINDOWS = ("left_window_size", "right_window_size")  # attributes since opset 25
ATTRIBUTES = (
    "is_causal",
    "kv_num_heads",
    "q_num_heads",
    "qk_matmul_output_mode",
    "scale",
    "softcap",
    "softmax_precision",
    *WINDOWS,
)
PRECISIONS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


def attention(inputs, attributes=None, *, opset=25, outputs=3):
    """The outputs of a node Attention, without its matrix of scores in memory.

    Parameters
    ----------
    inputs : list of array or None
        Q, K, V, attn_mask, past_key, past_value and nonpad_kv_seqlen, of NumPy or of CuPy. None
        stands for an input that is absent; those at the end may be left out.
    attributes : dict, optional
        By their names in ONNX. What is missing has ONNX's default.
    opset : int
        Version of the operator set. Opset 23 has no nonpad_kv_seqlen and pads no masks; windows
        came with opset 25.
    outputs : int
        How many outputs the node has, up to its last one.

    Returns
    -------
    list of array
        Y, present_key and present_value, or the first of them. Y has the type of Q. Without
        past_key the present ones are views of K and V, in their form of four axes. With
        nonpad_kv_seqlen, where the operator does not have them, they are None.

    Raises
    ------
    ValueError
        For shapes, numbers of heads or attributes that the operator does not have, and for what
        :func:`cuflash.attention` refuses: negative scales and head size 0 are such.
    TypeError
        For inputs that are no arrays, and for types that do not fit. attn_mask is of bool or of
        float: what integers would mean, the specification does not say.
    NotImplementedError
        For a fourth output, qk_matmul_output: that is the matrix. Without that output
        qk_matmul_output_mode has no effect.

    Notes
    -----
    This is the specification as of ONNX 1.23. It holds for opsets 23 and 24 as well, whose texts
    were corrected in place: up to 1.21 they added attn_mask before the softcap, and up to 1.22
    is_causal was aligned at the top left. Now

    - the softcap comes first, then attn_mask is added, then the softmax is taken;
    - query i is at position `i + offset` among the keys, for is_causal and for windows. offset is
      the length of past_key, or `nonpad_kv_seqlen - q_sequence_length` for each batch entry, or 0;
    - a query that sees no key has zeros in Y.

    A few points are not the same everywhere in ONNX:

    - attn_mask with a last axis that is too short is padded from opset 24 on. Opset 23 only
      broadcasts it, says the text; ONNX's reference implementation pads there, too.
    - A last axis of 1 can be broadcast or padded, by the text of opset 24 and 25. Here it is
      padded, as in the function that defines the operator and in the reference implementation.
    - Which keys is_causal shows does not depend on attn_mask, says the text. The reference
      implementation shows all queries what the first one sees if attn_mask has one row for all.
    - A negative softcap is the same as a positive one in `softcap * tanh(x / softcap)`, and here.
      The reference implementation ignores it.
    - q_num_heads and kv_num_heads beside inputs of four axes must agree with these. ONNX's shape
      inference refuses them in opset 25, the text does not.
    - Hidden keys and values have no effect here, NaN and infinities included, whether attn_mask
      is of bool or of float. Sums with -inf, as the formulas and the reference implementation
      have them, let NaN through.

    Scores and softmax are at least as precise as softmax_precision and the operands' types demand:
    in float32 for halves and float32, and in float64 if either says so. Scores are not rounded in
    between. `scale` multiplies the products, not its root both factors.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 10, 24), dtype=np.float32)
    >>> heads = {"q_num_heads": 3, "kv_num_heads": 3}
    >>> y, key, value = attention([q, k, v], heads | {"is_causal": 1})
    >>> y.shape, key.shape
    ((2, 10, 24), (2, 3, 10, 8))

    The last three tokens again, with the other ones as the past:

    >>> past = key[:, :, :7], value[:, :, :7]
    >>> again, *_ = attention(
    ...     [q[:, 7:], k[:, 7:], v[:, 7:], None, *past], heads | {"is_causal": 1}
    ... )
    >>> np.allclose(again, y[:, 7:], atol=1e-6)
    True
    """
    if outputs not in (1, 2, 3, 4):
        raise ValueError(f"outputs={outputs}: a node Attention has 1 to 4")
    if outputs == 4:
        raise NotImplementedError(
            "qk_matmul_output is the matrix of scores or weights, which cuflash never has in memory"
        )
    q, k, v, mask, past_key, past_value, lengths = _check_inputs(inputs, opset)
    given = _check_attributes(attributes or {}, opset)

    rank = q.ndim
    q = _with_heads(q, "Q", given, "q_num_heads")
    k = _with_heads(k, "K", given, "kv_num_heads")
    v = _with_heads(v, "V", given, "kv_num_heads")
    batch, heads, queries, size = q.shape
    _check_shape("K", k, (batch, *k.shape[1:3], size))
    _check_shape("V", v, (*k.shape[:3], v.shape[3]))
    if k.shape[1] and heads % k.shape[1]:
        raise ValueError(f"{heads} heads of Q are no multiple of {k.shape[1]} heads of K and V")

    past = 0
    if past_key is not None:
        past = past_key.shape[2] if past_key.ndim == 4 else 0
        k, v = _append("K", past_key, k, past), _append("V", past_value, v, past)
    present = [None, None] if lengths is not None else [k, v]

    sides = tuple(None if given[name] == -1 else given[name] for name in WINDOWS)
    options = {
        "enable_gqa": True,
        "scale": given["scale"],
        "softcap": abs(given["softcap"]) or None,
        "causal": given["is_causal"] == 1,
        "window": None if sides == (None, None) else sides,
        "q_offset": past,
    }
    if lengths is not None:
        _check_shape("nonpad_kv_seqlen", lengths, (batch,))
        options |= {"kv_lengths": lengths, "q_offset": lengths - queries}
    if mask is not None:
        reach = _check_mask(mask, (batch, heads, queries, k.shape[2]), opset)
        k, v = k[:, :, :reach], v[:, :, :reach]
        options["mask" if mask.dtype.name == "bool" else "bias"] = mask.reshape(mask.shape or 1)

    dtype = q.dtype
    if given["softmax_precision"] == 11:
        q, k, v = (x.astype("float64") for x in (q, k, v))
    y = cuflash.attention(q, k, v, **options).astype(dtype, copy=False)
    if rank == 3:
        y = y.transpose(0, 2, 1, 3).reshape(batch, queries, heads * v.shape[3])
    return [y, *present][:outputs]


def _check_inputs(inputs, opset):
    """All seven inputs, those that are absent as None."""
    if opset < 23:
        raise ValueError(f"opset {opset} has no Attention: it came with opset 23")
    arrays = list(inputs) + [None] * (len(INPUTS) - len(inputs))
    if len(arrays) > len(INPUTS):
        raise ValueError(f"{len(arrays)} inputs: Attention has {len(INPUTS)}")
    for name, x in zip(INPUTS, arrays, strict=True):
        if x is not None:
            _module_of(x, name)
        elif name in ("Q", "K", "V"):
            raise ValueError(f"{name} is missing")
    q, k, v, _, past_key, past_value, lengths = arrays
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        raise ValueError(
            f"Q, K and V have {q.ndim}, {k.ndim} and {v.ndim} axes: they need 3 each, or 4 each"
        )
    if (past_key is None) != (past_value is None):
        one, other = INPUTS[4:6] if past_value is None else INPUTS[5:3:-1]
        raise ValueError(f"{one} without {other}: give both or none")
    if lengths is not None and opset < 24:
        raise ValueError(f"opset {opset} has no nonpad_kv_seqlen: it came with opset 24")
    if lengths is not None and past_key is not None:
        raise ValueError("nonpad_kv_seqlen and past_key exclude each other")
    return arrays


def _check_attributes(attributes, opset):
    """All attributes, with their defaults; None for what has none."""
    given = dict.fromkeys(ATTRIBUTES) | {"is_causal": 0, "softcap": 0.0}
    given |= dict.fromkeys(WINDOWS, -1)
    for name, value in attributes.items():
        if name not in ATTRIBUTES:
            raise ValueError(f"Attention has no attribute {name}")
        if name in WINDOWS and opset < 25 and value != -1:
            raise ValueError(f"opset {opset} has no {name}: it came with opset 25")
        given[name] = value
    allowed = {
        "is_causal": (0, 1),
        "qk_matmul_output_mode": (None, 0, 1, 2, 3),
        "softmax_precision": (None, *PRECISIONS),
    }
    for name, values in allowed.items():
        if given[name] not in values:
            listing = ", ".join(str(value) for value in values if value is not None)
            raise ValueError(f"{name}={given[name]}: give one of {listing}")
    for name in WINDOWS:
        if given[name] < -1:
            raise ValueError(f"{name}={given[name]}: give -1 or a width that is not negative")
    return given


def _with_heads(x, name, given, attribute):
    """A view of an input in its form of four axes."""
    heads = given[attribute]
    if x.ndim == 4:
        if heads not in (None, x.shape[1]):
            raise ValueError(f"{attribute}={heads}, but {name} has shape {x.shape}")
        return x
    if heads is None:
        raise ValueError(f"inputs of 3 axes need {attribute}")
    if heads < 1 or x.shape[2] % heads:
        raise ValueError(f"{attribute}={heads} does not divide the width of {name}, {x.shape[2]}")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _append(name, past, new, length):
    """The present keys or values."""
    past_name = {"K": "past_key", "V": "past_value"}[name]
    _check_shape(past_name, past, (*new.shape[:2], length, new.shape[3]))
    if past.dtype != new.dtype:
        raise TypeError(f"{past_name} has dtype {past.dtype}, and {name} {new.dtype}")
    return _module_of(new, name).concatenate((past, new), axis=2)


def _check_mask(mask, shape, opset):
    """How many keys attn_mask reaches; those behind them are hidden."""
    *leading, total = shape
    last = mask.shape[-1] if mask.ndim else 1
    padded = mask.ndim > 0 and opset >= 24
    fits = mask.ndim <= 4 and all(
        size in (1, full) for size, full in zip(mask.shape[-2::-1], leading[::-1])
    )
    if not fits or not (last <= max(total, 1) if padded else last in (1, total)):
        or_padded = ", with a last axis that may be shorter" if padded else ""
        raise ValueError(f"attn_mask {mask.shape} does not broadcast to {shape}{or_padded}")
    if mask.dtype.name not in ("bool", *PRECISIONS.values()):
        raise TypeError(f"attn_mask has dtype {mask.dtype}: give bool or float")
    return last if padded else total


def _check_shape(name, x, shape):
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}, where the other inputs need {shape}")


def _module_of(x, name):
    """The module of an array's functions: CuPy is imported for its own arrays only."""
    if isinstance(x, np.ndarray):
        return np
    if type(x).__module__.partition(".")[0] != "cupy":
        raise TypeError(f"{name} is a {type(x).__name__}: give an array of NumPy or CuPy")
    import cupy

    return cupy

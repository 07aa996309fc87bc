"""A small GPT on NumPy or CuPy arrays around `cuflash.attention_vjp`, with its gradients by hand.

Bytes are tokens. Each layer is attention with rotary positions and grouped heads, then a gated
(SwiGLU) MLP, each behind an RMS norm without weights and added to the residual stream. The arrays
decide where it runs. `train_gpt.py` trains it, `generate.py` has it write.

What is not a product of matrices or the attention is a `Formula`: one text for NumPy, and one
kernel on a GPU. Products are CuPy's `dot` of two axes: of halves it multiplies on tensor cores and
adds in float32, where `matmul` with more axes computes in float32.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np
from formulas import Formula

import cuflash
from cuflash.extras import HOW_TO_INSTALL_CUPY

VOCABULARY = 256  # bytes
EPSILON = 1e-5  # of the norms
ROTARY_BASE = 10000
ALIGNMENT = 32  # of widths, so that every matrix begins at a multiple of 16 bytes
DTYPES = {"float32": np.float32, "float64": np.float64, "bfloat16": ml_dtypes.bfloat16}

residual_norm = Formula("""
    x = x + update
    squares = sum(x * x)
    scale = 1 / sqrt(squares / n + epsilon)
    y = x * scale
""")
residual_norm_backward = Formula("""
    inner = sum(dy * y)
    dx = dresidual + scale * (dy - y * (inner / n))
""")
copy = Formula("y = x")
rotate = Formula("""
    y1 = x1 * cos - x2 * sin
    y2 = x1 * sin + x2 * cos
""")
swiglu = Formula("y = gate / (1 + exp(-gate)) * up")
swiglu_backward = Formula("""
    share = 1 / (1 + exp(-gate))
    dup = dy * gate * share
    dgate = dy * up * share * (1 + gate * (1 - share))
""")
cross_entropy = Formula("""
    top = max(x)
    total = sum(exp(x - top))
    wanted = sum(where(column == target, x, 0))
    loss = top + log(total) - wanted
    p = exp(x - top) / total
    dx = where(column == target, p - 1, p) / rows
""")


@dataclass(frozen=True)
class Config:
    """The sizes of a model; each is checked.

    Parameters
    ----------
    layers, width, hidden : int
        Layers, the width of the residual stream, and that inside the MLPs.
    heads, key_heads, head_dim : int
        Heads of queries, heads of keys and values that these share, and the width of each.
    context : int
        Tokens of a sequence in training. Rotary positions know no limit.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    context: int

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int) and value > 0):
                raise ValueError(f"{field.name}={value!r}: give a whole number above 0")
        if self.heads % self.key_heads:
            raise ValueError(f"heads={self.heads} is no multiple of key_heads={self.key_heads}")
        for name in ("width", "hidden"):
            if getattr(self, name) % ALIGNMENT:
                raise ValueError(f"{name}={getattr(self, name)} is no multiple of {ALIGNMENT}")
        if self.head_dim % 2 or self.heads * self.head_dim % ALIGNMENT:
            raise ValueError(
                f"head_dim={self.head_dim} must be even, and a multiple of {ALIGNMENT} "
                f"with heads={self.heads} of it"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of each matrix, (features out, features in)."""
        attended = self.heads * self.head_dim
        shapes = {"embedding": (VOCABULARY, self.width)}
        for i in range(self.layers):
            shapes[f"{i}.qkv"] = attended + 2 * self.key_heads * self.head_dim, self.width
            shapes[f"{i}.attended"] = self.width, attended
            shapes[f"{i}.gate_up"] = 2 * self.hidden, self.width
            shapes[f"{i}.down"] = self.width, self.hidden
        shapes["logits"] = VOCABULARY, self.width
        return shapes

    @property
    def parameters(self) -> int:
        """How many numbers the matrices hold."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def views(self, flat) -> dict:
        """The matrices, one behind another in a flat array."""
        views, begin = {}, 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape)
            views[name], begin = flat[begin:end].reshape(shape), end
        return views

    def initial(self, seed) -> np.ndarray:
        """All matrices, drawn for the start of training: float32, flat."""
        rng = np.random.default_rng(seed)
        flat = rng.standard_normal(self.parameters, dtype=np.float32)
        for name, x in self.views(flat).items():
            x *= 0.5 if name == "embedding" else x.shape[1] ** -0.5
            if name.endswith(("attended", "down")):  # so that the sum over the layers starts small
                x *= (2 * self.layers) ** -0.5
        return flat


class GPT:
    """The model: weights, what it computes with them, and gradients.

    Parameters
    ----------
    config : Config
    flat : array of float32 or float64, shape (config.parameters,)
        All matrices, of NumPy or CuPy. They are used as they are where `dtype` is theirs.
    dtype : str
        What to compute in: "float32", "float64", "bfloat16".
    deterministic : bool
        As in `cuflash.attention_vjp`.

    Attributes
    ----------
    weights, gradients : array
        Flat, of type `dtype`. The latter are None until :meth:`loss` fills them.
    w, g : dict of str to array
        The same by the matrices' names.
    stopwatch : context manager
        Entered around each call of the attention, forward and backward.
    """

    def __init__(self, config, flat, dtype="float32", *, deterministic=True):
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}")
        self.config, self.xp = config, array_module(flat)
        self.dtype = np.dtype(DTYPES[dtype])
        self.real = np.promote_types(np.float32, flat.dtype)
        self.deterministic = deterministic
        self.stopwatch = contextlib.nullcontext()
        self.weights = flat.astype(self.dtype, copy=False)
        self.w = config.views(self.weights)
        self.gradients = None
        half = config.head_dim // 2
        self._rates = self.xp.asarray(ROTARY_BASE ** -(np.arange(half) / half))
        self._tables = {}

    def rotary(self, positions):
        """Cosines and sines of the angles of these positions, shape (..., 1, head_dim / 2)."""
        angles = positions[..., None, None] * self._rates
        return self.xp.cos(angles).astype(self.real), self.xp.sin(angles).astype(self.real)

    def loss(self, tokens, targets, *, backward=False):
        """Mean cross-entropy, in nats, of the targets behind the tokens.

        Parameters
        ----------
        tokens, targets : array of int, shape (B, N)
        backward : bool
            Also fill :attr:`gradients`.

        Returns
        -------
        array, shape ()
        """
        logits, backprop = self.forward(tokens)
        losses = self.empty((len(logits), 1), self.real)
        derivatives = {"dx": logits} if backward else {}
        cross_entropy(
            x=logits, target=targets.reshape(-1, 1), column=self.xp.arange(VOCABULARY)[None],
            rows=len(logits), loss=losses, **derivatives,
        )  # fmt: skip
        if backward:
            backprop(logits)
        return losses.mean()

    def forward(self, tokens, table=None):
        """Logits, and the function from their gradient to that of all weights.

        Parameters
        ----------
        tokens : array of int, shape (B, N)
        table : pair of array, optional
            What :meth:`rotary` returns for the tokens' positions; by default 0 to N - 1.

        Returns
        -------
        logits : array, shape (B * N, VOCABULARY)
        backward : function
            Takes the gradient of the logits, once, and fills :attr:`gradients`.
        """
        length = tokens.shape[1]
        if table is None:
            if length not in self._tables:
                self._tables = {length: self.rotary(self.xp.arange(length))}
            table = self._tables[length]
        x = self.w["embedding"][tokens.reshape(-1)]  # the residual stream, in place from here on
        update, layers = 0.0, []
        for i in range(self.config.layers):
            y, norm_backward = self.add_and_norm(x, update)
            update, attention_backward = self.attend(i, y, tokens.shape, table)
            layers.append((norm_backward, attention_backward))
            y, norm_backward = self.add_and_norm(x, update)
            update, mlp_backward = self.mlp(i, y)
            layers.append((norm_backward, mlp_backward))
        y, norm_backward = self.add_and_norm(x, update)
        logits, logits_backward = self.product("logits", y)

        def backward(dlogits):
            if self.gradients is None:
                self.gradients = self.empty(self.weights.shape)
                self.g = self.config.views(self.gradients)
            dx = norm_backward(logits_backward(dlogits), 0.0)
            for normed, inner in reversed(layers):
                dx = normed(inner(dx), dx)
            # A sum over tokens in a fixed order, which adding at indices would not have.
            here = tokens.reshape(-1, 1) == self.xp.arange(VOCABULARY)
            self.xp.dot(here.astype(self.dtype).T, dx, out=self.g["embedding"])

        return logits, backward

    def add_and_norm(self, x, update):
        """Add to the residual stream x, in place; its rows, of root mean square 1."""
        y, scale = self.empty(x.shape), self.empty((len(x), 1), self.real)
        residual_norm(x=x, update=update, epsilon=EPSILON, scale=scale, y=y)

        def backward(dy, dresidual):
            residual_norm_backward(dy=dy, y=y, scale=scale, dresidual=dresidual, dx=dy)
            return dy

        return y, backward

    def product(self, name, x):
        """`x @ w.T` of one matrix."""

        def backward(dy):
            self.xp.dot(dy.T, x, out=self.g[name])
            return self.xp.dot(dy, self.w[name])

        return self.xp.dot(x, self.w[name].T), backward

    def attend(self, i, x, shape, table):
        """The attention of layer i over the rows of x, (B, N) tokens."""
        qkv, qkv_backward = self.product(f"{i}.qkv", x)
        q, k, v = self.split(qkv, shape)
        turn((q, k), (q, k), *table)
        out, vjp = self.attention(i, *(part.swapaxes(1, 2) for part in (q, k, v)))
        attended = self.empty((*shape, *out.shape[1::2]))
        copy(x=out.swapaxes(1, 2), y=attended)
        update, out_backward = self.product(f"{i}.attended", attended.reshape(len(x), -1))

        def backward(dupdate):
            dout = out_backward(dupdate).reshape(attended.shape).swapaxes(1, 2)
            with self.stopwatch:
                dq, dk, dv = (part.swapaxes(1, 2) for part in vjp(dout))
            dqkv = self.empty(qkv.shape)
            *turned, dvalues = self.split(dqkv, shape)
            cos, sin = table
            turn((dq, dk), turned, cos, -sin)
            copy(x=dv, y=dvalues)
            return qkv_backward(dqkv)

        return update, backward

    def attention(self, i, q, k, v):
        """The attention of layer i, and the function from its gradient to those of q, k and v."""
        with self.stopwatch:
            return cuflash.attention_vjp(
                q, k, v, causal=True, enable_gqa=True, deterministic=self.deterministic
            )

    def split(self, qkv, shape):
        """Queries, keys and values, each (B, N, heads, head_dim): views."""
        c = self.config
        heads = qkv.reshape(*shape, -1, c.head_dim)
        keys, values = c.heads, c.heads + c.key_heads
        return heads[:, :, :keys], heads[:, :, keys:values], heads[:, :, values:]

    def mlp(self, i, x):
        """`down @ (silu(gate @ x) * (up @ x))` of each row."""
        both, both_backward = self.product(f"{i}.gate_up", x)
        gate, up = both[:, : self.config.hidden], both[:, self.config.hidden :]
        y = self.empty(gate.shape)
        swiglu(gate=gate, up=up, y=y)
        update, down_backward = self.product(f"{i}.down", y)

        def backward(dupdate):
            dy = down_backward(dupdate)
            swiglu_backward(gate=gate, up=up, dy=dy, dgate=gate, dup=up)  # in their place
            return both_backward(both)

        return update, backward

    def empty(self, shape, dtype=None):
        """A new array beside the weights."""
        return self.xp.empty(shape, dtype or self.dtype)


def turn(sources, targets, cos, sin):
    """Rotate each head's pairs (i, i + head_dim / 2) by the angles; a target may be its source."""
    for x, y in zip(sources, targets):
        half = x.shape[-1] // 2
        rotate(
            x1=x[..., :half], x2=x[..., half:], cos=cos, sin=sin, y1=y[..., :half], y2=y[..., half:]
        )


def array_module(array):
    """`numpy` or `cupy`, whichever the array belongs to."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def as_numpy(array):
    """A NumPy array, or what a CuPy array holds."""
    return array if isinstance(array, np.ndarray) else array.get()


def find_module(device):
    """`numpy` for "cpu"; for "gpu" `cupy`, once it is sure that it has a device."""
    if device == "cpu":
        return np
    try:
        import cupy
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"--device gpu needs CuPy: {HOW_TO_INSTALL_CUPY}") from None
    if not cupy.is_available():
        raise RuntimeError("--device gpu: CuPy finds no CUDA device; use --device cpu")
    return cupy

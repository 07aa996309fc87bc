"""Clients of seam 3: biases and sinks as text in the place of the hooks' empty bodies; and dropout.

docs/adding-a-score.md describes what is done here. The emulator runs the kernels; `Hooked` says
what they should compute, and how far from it they may be.
"""

import math

import emulated
import numpy as np
import pytest
from cases import BACKWARD_KERNELS, KERNELS, numpy_dtype
from emulated import attention, attention_backward
from emulator import EmulatorError, available
from test_emulator_catches import plant
from tolerance import _worst

from cuflash import reference
from cuflash.planning import source, wgmma_gradients
from cuflash.planning.problem import Device
from cuflash.reference import bounds
from cuflash.reference.dense import Dense, visible_sum

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

H200 = Device(90, multiprocessors=2)
TYPES = {"simt": "float32", "mma": "float16", "wgmma": "bfloat16"}
EACH_KERNEL = pytest.mark.parametrize(("algo", "engine"), [k for k in KERNELS if k[1:] != ("fa2",)])
EACH_BACKWARD_KERNEL = pytest.mark.parametrize(("algo", "engine"), BACKWARD_KERNELS)
SHARE, CAP = 0.75, 1.5
SINKS = np.array([[-np.inf, 0.7], [150.0, -3.0]])  # of two batch entries with two heads each

# ------------------------------------------------------------------------------------ the clients
# As (text, what stands there instead): regular expressions.
EMPTY = {
    "sink_score": r"(sink_score\(const P& p, const Head& head\) \{)\s*if constexpr[^;]*;"
                  r"\s*return -infinity<.*?;",
    "store_dscore": r"(store_dscore\(const P&) *(, const Head&) *(, int q, int k,"
                    r"\s*Accumulator dscore\) \{)",
}  # fmt: skip
DROPOUT = {"dropout_p": 1 - SHARE, "seed": 7 << 32}
SINK = [
    (EMPTY["sink_score"], r"\1 const Accumulator sinks[] = {-infinity<Accumulator>(), "
     r"Accumulator(0.7), Accumulator(150), Accumulator(-3)}; return sinks[head.index];"),
]  # fmt: skip
# The bias, and behind it the place for its gradient, lie where q_offset points, which no kernel
# reads unless the shift is given. It is added behind softcap.
BIAS = [
    ("STORES_DSCORE = false", "STORES_DSCORE = true"),
    (r"(int list;)[^}]*?\};", r"\1 const float* bias; float* dbias; };"),
    (r"(head\.list = list;)", r"\1 const i64 pairs = i64(p.query_length) * p.key_length; "
     r"head.dbias = (float*)p.q_offset + (i64(p.head_count) + index) * pairs; "
     r"head.bias = head.dbias - p.head_count * pairs;"),
    (r"return (tanh\(score\));",
     r"const bool exists = q >= 0 && q < located.query_length && k < located.key_length; return \1 "
     r"+ Accumulator(exists ? located.bias[(long long)q * p.key_length + k] : 0.0f) / "
     r"p.capture_softcap;"),
    (EMPTY["store_dscore"], r"\1 p\2 head\3 head.dbias[i64(q) * p.key_length + k] += dscore;"),
]  # fmt: skip


def dropped(shape):
    """What DROPOUT makes of the probabilities: 0, or 1 over the share that is kept."""
    return reference.dropout_keep(DROPOUT["seed"], shape, DROPOUT["dropout_p"]) / SHARE


@pytest.fixture
def client(monkeypatch):
    """Gives a hook its body, and kernels an array."""
    cached = source.kernel_source

    def install(changes, bugs=(), buffer=None):
        found = plant(monkeypatch, *changes, *bugs)
        if buffer is not None:
            # Head has two pointers more, and the compiler asserts the size of what holds it.
            monkeypatch.setattr(wgmma_gradients, "HEAD_BYTES", wgmma_gradients.HEAD_BYTES + 16)
            cached.cache_clear()

            def launch(plan, params, tables, memory, *rest, right=emulated._launch):
                params["q_offset"] = memory.place(buffer)
                return right(plan, params, tables, memory, *rest)

            monkeypatch.setattr(emulated, "_launch", launch)
        return found

    yield install
    cached.cache_clear()


# ---------------------------------------------------------------------------------- what is right
class Hooked:
    """Attention with a bias behind softcap, dropout and sinks, and its bounds, in float64.

    `kept` is what dropout multiplies P by. The bounds are those of `reference.forward_bound` and
    `reference.backward_bound`, of P after dropout where P meets V or dout. A bias b is divided by
    the score's unit, and the sum of the two is rounded: 2 u_acc |b|. A sink s adds exp(s - lse)
    to l, and the exponent is rounded: u_acc (|s| + 2 |lse|).
    """

    def __init__(self, q, k, v, softcap=None, bias=0.0, kept=1.0, sinks=-np.inf, **mask):
        self.dtype, self.softcap = np.result_type(q, k, v).name, softcap
        self.u, self.u_acc, exact = bounds.precision(self.dtype)
        dense = Dense.of(q, k, v, exact, softcap=softcap, **mask)
        errors = bounds.score_errors(dense, self.u_acc)
        scores = dense.scale * (dense.q @ dense.k.mT)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        visible = reference.visible_keys(scores.shape, **mask)
        scores = np.where(visible, scores + bias, -np.inf)
        sinks = np.asarray(sinks)[..., None, None]
        lengths = mask.get("q_lengths")
        if lengths is not None:  # rows beyond do not exist
            exist = np.arange(q.shape[-2])[:, None] < lengths[:, None, None, None]
            sinks = np.where(exist, sinks, -np.inf)
        with np.errstate(all="ignore"):
            lse = np.logaddexp(np.logaddexp.reduce(scores, axis=-1, keepdims=True), sinks)
            weights = np.where(visible & (lse > -np.inf), np.exp(scores - lse), 0)
            self.kept = np.broadcast_to(kept, weights.shape)
            out = visible_sum(weights * self.kept, dense.v, visible)
        self.dense = dense._replace(visible=visible, weights=weights, out=out, lse=lse[..., 0])
        self.sigma_x, self.sigma = (
            errors.before,
            errors.behind + 2 * self.u_acc * np.abs(bias).max(),
        )
        self.sums = self.u_acc * (8 + np.sqrt(visible.sum(axis=-1, keepdims=True)))
        rounded = np.where(np.isfinite(sinks), np.abs(sinks) + 2 * np.abs(lse), 0)
        self.sums = self.sums + self.u_acc * rounded

    @property
    def weighted(self):
        """P kept times |V|."""
        d = self.dense
        return visible_sum(d.weights * self.kept, np.abs(d.v), d.visible)

    def assert_forward(self, result):
        d, under = self.dense, bounds.UNDERFLOW[self.dtype]
        with np.errstate(all="ignore"):
            error = self.u * (self.weighted + np.abs(d.out))
            error += (2 * self.sigma + self.sums) * self.weighted
            error += under * visible_sum(self.kept * d.visible, np.abs(d.v), d.visible)
            lse_error = ((self.sigma + self.sums) * np.maximum(1, np.abs(d.lse))[..., None])[..., 0]
            bound = reference.Bound(
                d.out, d.lse, 2 * (error + bounds.TINY[self.dtype]), 2 * lse_error
            )
        results = {"out": result.out, "lse": result.lse}
        ratios = dict(zip(results, bound.ratios(**results), strict=True))
        return _worst(bound, results, ratios, ("lse", "out"), result.plan)

    def inputs(self, dtype):
        """out and lse in the types of a forward pass."""
        return self.dense.out.astype(dtype), self.dense.lse.astype(np.float32)

    @np.errstate(invalid="ignore")  # of rows without weight
    def assert_backward(self, result, dscore, dout, names=("dv", "dq", "dk", "dscore")):
        """dq, dk, dv, and the derivative by the modified score, or some of these."""
        d, u, u_acc = self.dense, self.u, self.u_acc
        dout, under = dout.astype(d.v.dtype), bounds.TINY[self.dtype]
        delta = (dout * d.out).sum(axis=-1, keepdims=True)
        dP = np.where(d.visible, dout @ d.v.mT, 0) * self.kept
        by_modified = np.where(d.visible, d.weights * (dP - delta), 0)
        dS = by_modified * d.slope

        rho = 2 * self.sigma + self.sums + 6 * u_acc * np.maximum(1, np.abs(d.lse))[..., None]
        dot = (math.sqrt(dout.shape[-1]) + 2) * u_acc
        dP_error = self.kept * dot * (np.abs(dout) @ np.abs(d.v).mT) + 2 * u_acc * np.abs(dP)
        channels = self.sums * self.weighted + (u + dot) * np.abs(d.out) + under
        mean = ((u + 2 * self.sigma) * d.weights + under) * np.abs(dP)
        delta_error = mean.sum(axis=-1, keepdims=True)
        delta_error = delta_error + (np.abs(dout) * channels).sum(axis=-1, keepdims=True)
        by_modified_error = d.weights * (dP_error + delta_error)
        by_modified_error += np.abs(by_modified) * (rho + 4 * u_acc)
        by_modified_error = np.where(d.visible, by_modified_error, 0)
        cap = self.softcap
        slope_error = 0 if cap is None else 2 * d.slope * self.sigma_x / cap + 20 * u_acc
        dS_error = by_modified_error * d.slope + np.abs(by_modified) * slope_error
        dS_error = np.where(d.visible, dS_error + np.abs(dS) * u + under, 0)
        W = d.weights * self.kept
        W_error = np.where(d.visible, W * (rho + u) + under * (self.kept > 0), 0)

        expected, limits = {"dscore": by_modified}, {"dscore": by_modified_error}
        for name, factor, pairs, error, rows, count in (
            ("dq", d.scale, dS, dS_error, d.k, d.visible),
            ("dk", d.scale, dS.mT, dS_error.mT, d.q, d.visible.mT),
            ("dv", 1.0, W.mT, W_error.mT, dout, d.visible.mT),
        ):
            sums = u_acc * (8 + np.sqrt(count.sum(axis=-1, keepdims=True)))
            expected[name] = factor * visible_sum(pairs, rows, count)
            error, size = (visible_sum(x, abs(rows), count) for x in (error, abs(pairs)))
            limits[name] = factor * (error + sums * size)
            limits[name] += u * np.abs(expected[name]) + under
        got = {"dq": result.dq, "dk": result.dk, "dv": result.dv}
        if dscore is not None:
            got["dscore"] = dscore
        for name in names:
            if name not in got:
                continue
            ratio = bounds.ratio_of(got[name], expected[name], 2 * limits[name] + 2.0**-126)
            assert (ratio <= 1).all(), f"{name}: {ratio.max():.2f} times its bound\n{result.plan}"


def random(rng, dtype, *shape):
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def operands(engine, n=0, m=0, dim=32):
    """q, k, v and dout of two batch entries with two heads each, of several tiles."""
    rng, dtype = np.random.default_rng(0), TYPES[engine]
    n, m = (n or 200, m or 300) if engine == "wgmma" else (n or 133, m or 170)
    q, dout = random(rng, dtype, 2, 2, 2, n, dim)
    k, v = random(rng, dtype, 2, 2, 2, m, dim)
    return q, k, v, dout


def bias_of(q, k):
    """A bias for each pair, and zeros where its gradient is to be added up."""
    buffer = np.zeros((2, *q.shape[:-1], k.shape[-2]), np.float32)
    buffer[0] = np.random.default_rng(1).standard_normal(buffer.shape[1:])
    return buffer


# ----------------------------------------------------------------------------------------- forward
def forward_is_right(client, kind, algo, engine, bugs=(), mode="check"):
    """The pass with a client, and bugs; raises where something is wrong."""
    q, k, v, _ = operands(engine)
    options, hooked, changes, buffer = {"causal": True}, {}, [], None
    dropout = DROPOUT if "dropout" in kind else {}
    if dropout:
        hooked["kept"] = dropped((*q.shape[:-1], k.shape[-2]))
    if "sinks" in kind:
        changes, hooked["sinks"] = [*changes, *SINK], SINKS
        options = {"causal": "top_left", "window": (90, 0),  # the last rows see no key
                   "q_lengths": np.int32([q.shape[-2] - 5, q.shape[-2]]),
                   "kv_lengths": np.int32([k.shape[-2], 30])}  # fmt: skip
    if "bias" in kind:
        buffer = bias_of(q, k)
        changes, hooked["bias"], options["softcap"] = [*changes, *BIAS], buffer[0], CAP
    if "nonfinite" in kind:  # seen whole, and by some rows of a tile
        v[0, 0, 3, 7], v[0, 1, 80, 3], v[1, 0, -20, 5] = np.inf, -np.inf, np.nan
    found = client(changes, bugs, buffer)
    given = {"algo": algo, "engine": engine, "device": H200, "mode": mode, **dropout}
    result = attention(q, k, v, **given, **options)
    assert all(found), "a kernel has not this text any more"
    return Hooked(q, k, v, **hooked, **options).assert_forward(result)


def mode_of(kind):
    """One client alone runs unchecked: what is checked of several together holds for it."""
    return "check" if " " in kind else "fast"


KINDS = ["dropout nonfinite", "sinks", "bias", "dropout sinks bias"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
@EACH_KERNEL
def test_forward(client, kind, algo, engine):
    forward_is_right(client, kind, algo, engine, mode=mode_of(kind))


# ---------------------------------------------------------------------------------------- backward
def backward_is_right(client, kind, algo, engine, bugs=(), mode="check"):
    q, k, v, dout = operands(engine)
    options, hooked, changes, buffer = {"causal": True}, {}, [], None
    dropout = DROPOUT if "dropout" in kind else {}
    if dropout:
        hooked["kept"] = dropped((*q.shape[:-1], k.shape[-2]))
    if "sinks" in kind:
        hooked["sinks"] = SINKS  # lse alone tells of them
    if "bias" in kind:
        buffer = bias_of(q, k)
        changes, hooked["bias"], options["softcap"] = [*changes, *BIAS], buffer[0], CAP
    if "lengths" in kind:
        options["q_lengths"] = np.int32([q.shape[-2] - 5, q.shape[-2]])
        options["kv_lengths"] = np.int32([k.shape[-2], 30])
    names = ("dv", "dq", "dk", "dscore")
    if "nonfinite" in kind:  # 0 times an infinite dP is nobody's concern: dS is not compared
        dout[0, 0, 3, 7], dout[1, 1, 80, 3], names = np.inf, -np.inf, ("dv",)
    expected = Hooked(q, k, v, **hooked, **options)
    found = client(changes, bugs, buffer)
    given = {"algo": algo, "engine": engine, "mode": mode, **dropout}
    inputs = expected.inputs(q.dtype)
    result = attention_backward(dout, q, k, v, *inputs, **given, **options)
    assert any(found) or not (changes or bugs), "no kernel has this text any more"
    expected.assert_backward(result, None if buffer is None else buffer[1], dout, names)


BACKWARD_KINDS = ["dropout nonfinite", "sinks", "bias", "dropout sinks bias lengths"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", BACKWARD_KINDS)
@EACH_BACKWARD_KERNEL
def test_backward(client, kind, algo, engine):
    backward_is_right(client, kind, algo, engine, mode=mode_of(kind))


# ------------------------------------------------------- hooks that are called at the wrong place
# (what is wrong, text, what stands there instead, algo and engine, kind). Regular expressions, of
# texts whose hooks have a client.
HIDE_DROPPED = r"""
const auto hide = [&](auto& S) {
    Accumulator kept[Tile::ROWS][Tile::COLUMNS];
    for (auto& row : kept) for (auto& x : row) x = Accumulator(1);
    drop_probabilities(kept, tile, p, head, slab.q_begin, k_begin);
    for (int i = 0; i < Tile::ROWS; ++i) for (int j = 0; j < Tile::COLUMNS; ++j)
        if (kept[i][j] == Accumulator(0)) S[i][j] = -infinity<Accumulator>();
};
hide(S_regs); \1"""
WRONG_FORWARD = [
    ("dropped keys are not in the sum", r"(if \(update\(softmax)", HIDE_DROPPED, "fa1 simt",
     "dropout"),
    *(("nothing is dropped", r"drop_probabilities\(S_regs.*?;", "", " ".join(kernel), "dropout")
      for kernel in KERNELS),
    *(("the share is forgotten", r"total \* kept_share\(p\)", "total", kernel, "dropout")
      for kernel in ("fa2 mma", "fa3 wgmma")),
    ("infinite values are not dropped", r" \|\|\s*dropped\b", "", "fa2 mma",
     "dropout nonfinite"),
    ("infinite values are not dropped", r" \|\|\s*dropped\b", "", "fa1 wgmma",
     "dropout nonfinite"),
    ("the sink is not in lse", r"has_sink \? add_exponentials\(sum\(\), sink\) :", "",
     "fa3 wgmma", "sinks"),
    ("the sink is not in the sum", r"if \(has_sink\)", "if (false)", "fa2 mma", "sinks"),
    ("rows beyond the length have a sink", r"(has_sink\(sink != .*?\(\)) && .*?\),",
     r"\1),", "fa1 mma",
     "sinks"),
    ("rows that see nothing have no sink", r"has_sink\(sink !=",
     "has_sink(!empty && sink !=", "fa1 simt",
     "sinks"),
    ("the bias of the next query", r"(score_of\(S\[i\]\[j\],.*?query_of\(row_begin)", r"\1 + 1",
     "fa2 simt", "bias"),
]  # fmt: skip
WRONG_BACKWARD = [
    ("dP is not dropped", r"kept\.has\(i, j\) \? (dP\[i\]\[j\]) : Accumulator\(0\)", r"\1",
     "fa2 mma", "dropout"),
    ("infinite gradients are not dropped", r"if \(DROPS && !keep[^;]* weights.*?;", "",
     "fa1 mma", "dropout nonfinite"),
    ("dP is not divided by the share", r"return p\.kept_share \* delta", "return delta", "fa2 simt",
     "dropout"),
    ("dV sees what is dropped", r"if \(!kept\.has\(i, j\)\) P\[i\]\[j\] = Accumulator\(0\);", "",
     "fa1 mma", "dropout"),
    ("dS is without delta where P is dropped", r"(Accumulator dS = P)",
     r"if (!kept.has(i, j)) P[i][j] = Accumulator(0); \1", "fa2 mma", "dropout"),
    ("dV is not divided by the share", r" \+ p\.kept_share_log2", "", "fa1 simt", "dropout"),
    ("dV is not divided by the share", r" \+ p\.kept_share_log2", "", "fa3 wgmma", "dropout"),
    ("lanes give away the wrong words", r"odd \? of_even : of_odd, 4", "of_odd, 4",
     "fa2 mma", "dropout"),
    ("dscore comes behind the slope",
     r"(if constexpr \(STORES_DSCORE\) .*?shown\(\)\);\s*\})\s*(if constexpr .*?;)", r"\2 \1",
     "fa2 mma", "bias"),
    ("pairs that do not exist have a dscore", r"if \(q < head\.query_length && k < .*?\)(?=\s+sto)",
     "", "fa2 mma", "bias lengths"),
    ("the bias of the next query", r"(score_of\(.*?column_place\(tile, q_begin)", r"\1 + 1",
     "fa2 simt", "bias"),
]  # fmt: skip


def each_of(bugs):
    rows = [
        pytest.param(*bug[1:], id=f"{bug[0].replace(' ', '-')}-{bug[3].replace(' ', '-')}")
        for bug in bugs
    ]
    return pytest.mark.parametrize(("text", "wrong", "kernel", "kind"), rows)


@pytest.mark.one_in(4)
@each_of(WRONG_FORWARD)
def test_bugs_planted_in_forward(client, text, wrong, kernel, kind):
    with pytest.raises((EmulatorError, AssertionError), match="bound|NaN|RACE|BOUNDS"):
        forward_is_right(client, kind, *kernel.split(), [(text, wrong)], mode="fast")


@pytest.mark.one_in(4)
@each_of(WRONG_BACKWARD)
def test_bugs_planted_in_backward(client, text, wrong, kernel, kind):
    mode = "check" if "lengths" in kind else "fast"
    with pytest.raises((EmulatorError, AssertionError), match="bound|NaN|RACE|BOUNDS"):
        backward_is_right(client, kind, *kernel.split(), [(text, wrong)], mode=mode)

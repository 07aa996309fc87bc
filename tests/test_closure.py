"""What traced functions find outside of themselves, and that it is read at each call."""

import functools
import gc
import sys
import types
import weakref

import numpy as np
import pytest

import cuflash
from cuflash import BlockMask
from cuflash.scores import trace
from cuflash.scores.closure import Closure
from cuflash.scores.trace import as_score_mod

RATE, TABLE, KIND, WIDTHS = 0.5, np.arange(9.0), "near", (1, 4)


class Layer:
    def __init__(self, rate):
        self.rate = rate


def value(function):
    """The score that a function makes of one, as it is traced."""
    return float(as_score_mod(function).evaluate(2.0, 1, 1, 5, 3, 4))


@pytest.fixture
def traces(monkeypatch):
    """What is traced while the test runs."""
    found = []

    def counted(closure, *given):
        found.append(closure.function)
        return real(closure, *given)

    real = trace.trace
    monkeypatch.setattr(trace, "trace", counted)
    return found


# ----------------------------------------------------------------- what changes between two calls
def rated(x):
    return x * RATE


def rated_and_more(x):
    return rated(x) + 1


def by_function(score, batch, head, q, k):
    return score - rated(k)


def by_function_of_function(score, batch, head, q, k):
    return score - rated_and_more(k)


def by_inner_function(score, batch, head, q, k):
    return (lambda x: score - x * RATE)(k)


def by_comprehension(score, batch, head, q, k):
    return score + sum([x * RATE for x in (q, k)])


def by_names_of_module(score, batch, head, q, k):
    return score - k * globals()["RATE"]


def by_string(score, batch, head, q, k):
    return score + k if KIND == "near" else score - k


def by_tuple(score, batch, head, q, k):
    for width in WIDTHS:
        score = score + np.minimum(k, width)
    return score


def by_import(score, batch, head, q, k):
    import settings  # a module of the test

    return score - settings.rate * k


IN_MODULE = [
    (by_function, "RATE", 2.0), (by_function_of_function, "RATE", 2), (by_string, "KIND", "far"),
    (by_inner_function, "RATE", 2.0), (by_comprehension, "RATE", np.float32(2)),
    (by_tuple, "WIDTHS", (2, 4)), (by_tuple, "WIDTHS", [2, 4]), (by_names_of_module, "RATE", 2.0),
    (by_function, "rated", lambda x: x * TABLE[2]),
]  # fmt: skip


def assert_seen(function, change):
    """That a change of what a function finds is seen at the next call."""
    before = value(function)
    assert before == value(function) == function(2.0, 1, 1, 5, 3)
    change()
    assert value(function) == value(function) == function(2.0, 1, 1, 5, 3) != before


@pytest.mark.parametrize(("function", "name", "other"), IN_MODULE)
def test_names_of_the_module(monkeypatch, function, name, other):
    assert_seen(function, lambda: monkeypatch.setitem(globals(), name, other))


def held_by_object():
    layer = Layer(0.5)
    return lambda s, b, h, q, k: s - layer.rate * k, lambda: setattr(layer, "rate", 2.0)


def held_by_list():
    rates = [0.5]
    return lambda s, b, h, q, k: s - rates[0] * k, lambda: rates.insert(0, 2.0)


def held_by_dict():
    rates = {"own": 0.5}
    return lambda s, b, h, q, k: s - rates["own"] * k, lambda: rates.update(own=2.0)


def held_by_array_in_tuple():
    pair = np.ones(3), 1
    return lambda s, b, h, q, k: s - pair[0][2] * k, lambda: pair[0].fill(7)


def held_by_module():
    module = types.ModuleType("settings")
    module.rate = 0.5
    return lambda s, b, h, q, k: s - module.rate * k, lambda: setattr(module, "rate", 2.0)


def held_by_partial():
    layer = Layer(0.5)
    part = functools.partial(lambda x, of: x * of.rate, of=layer)
    return lambda s, b, h, q, k: s - part(k), lambda: setattr(layer, "rate", 2.0)


def held_by_method():
    class Bias(Layer):
        def __call__(self, x):
            return x * self.rate

    bias = Bias(0.5)
    return lambda s, b, h, q, k: s - bias(k), lambda: setattr(bias, "rate", 2.0)


def held_by_function():
    def own(x):
        return x * own.rate

    own.rate = 0.5
    return lambda s, b, h, q, k: s - own(k), lambda: setattr(own, "rate", 2.0)


def held_by_default():
    def mod(s, b, h, q, k, rate=0.5):
        return s - rate * k

    return mod, lambda: setattr(mod, "__defaults__", (2.0,))


def held_by_default_of_function():
    def rated(k, rate=0.5):
        return rate * k

    return lambda s, b, h, q, k: s - rated(k), lambda: setattr(rated, "__defaults__", (2.0,))


def held_by_default_object():
    layer = Layer(0.5)

    def mod(s, b, h, q, k, of=layer):
        return s - of.rate * k

    return mod, lambda: setattr(layer, "rate", 2.0)


def held_by_keyword():
    def mod(s, b, h, q, k, *, rate=0.5):
        return s - rate * k

    return mod, lambda: mod.__kwdefaults__.update(rate=2.0)


def held_by_code():
    def mod(s, b, h, q, k):
        return s - k

    return mod, lambda: setattr(mod, "__code__", (lambda s, b, h, q, k: s + k).__code__)


HELD = [
    held_by_object, held_by_list, held_by_dict, held_by_array_in_tuple, held_by_module,
    held_by_partial, held_by_method, held_by_function, held_by_default,
    held_by_default_of_function, held_by_default_object, held_by_keyword, held_by_code,
]  # fmt: skip


@pytest.mark.parametrize("make", HELD)
def test_what_holds_a_number(make):
    assert_seen(*make())


def test_a_module_that_the_function_imports(monkeypatch):
    settings = types.ModuleType("settings")
    settings.rate = 0.5
    monkeypatch.setitem(sys.modules, "settings", settings)
    assert_seen(by_import, lambda: setattr(settings, "rate", 2.0))


def test_attention_sees_it():
    layer, (q, k, v) = Layer(0.25), np.random.default_rng(0).standard_normal((3, 2, 9, 4))

    def mod(score, batch, head, q, k):
        return score - layer.rate * rated(abs(q - k))

    for layer.rate in (0.25, 4.0):
        bias = -layer.rate * RATE * abs(np.arange(9)[:, None] - np.arange(9))
        out = cuflash.attention(q, k, v, score_mod=mod)
        np.testing.assert_allclose(out, cuflash.attention(q, k, v, bias=bias))


def test_gradients_are_of_what_the_result_was_made_of():
    """Closures of a loop find what its variable is last."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 30, 3, 8))
    calls = [
        cuflash.attention_vjp,
        functools.partial(cuflash.attention_varlen_vjp, cu_seqlens_q=[0, 30]),
    ]
    for call in calls:
        made = []
        for factor in (1.0, 2.0):
            mod = lambda score, batch, head, q, k: score * factor + TABLE[0]  # noqa: B023, E731
            made.append(call(q, k, v, score_mod=mod)[1])
        for vjp, scale in zip(made, (8**-0.5, 2 * 8**-0.5)):
            expected = call(q, k, v, scale=scale)[1](dout)
            for x, y in zip(vjp(dout), expected):
                np.testing.assert_allclose(x, y, atol=1e-12)


def test_a_name_without_a_value():
    def mod(score, batch, head, q, k):
        return score + later(k)

    with pytest.raises(NameError, match="later"):
        value(mod)

    def later(x):
        return x * RATE

    assert value(mod) == 3.5


def test_a_builtin_function_that_the_module_replaces(monkeypatch):
    def mod(score, batch, head, q, k):
        return score + abs(k - q)

    monkeypatch.setitem(globals(), "abs", lambda x: x * 2)
    assert value(mod) == -2
    monkeypatch.delitem(globals(), "abs")
    assert value(mod) == 4


# ---------------------------------------------------------------------- names of what is captured
def ramp(width):
    def rise(distance):
        return np.minimum(distance, width)

    return rise


def test_closures_of_one_function_have_numbers_of_their_own():
    near, far = ramp(1), ramp(2)

    def mod(score, batch, head, q, k):
        return near(k) + 10 * far(k) + 100 * near(q)

    made = as_score_mod(mod)
    assert sorted(x[::2] for x in made.text.numbers) == [("width", 2), ("width_2", 1)]
    assert value(mod) == 121
    near, far = far, near
    assert value(mod) == 212
    far = near
    assert value(mod) == 222


def test_names_of_the_function_itself_come_first():
    near = ramp(1)

    def mod(score, batch, head, q, k):
        return near(k) * width

    width = 7
    made = as_score_mod(mod)
    assert [x[::2] for x in made.text.numbers] == [("width", 7), ("width_2", 1)]


def test_an_array_that_two_modules_name_is_one():
    """It has one gradient."""
    table, (q, k, v) = np.zeros(9), np.random.default_rng(0).standard_normal((3, 9, 4))
    other = {"table": table}
    exec("def of_query(q):\n    return table[q]", other)
    of_query = other["of_query"]
    options = {"score_mod": lambda score, batch, head, q, k: score + table[k] * of_query(q)}
    assert list(as_score_mod(options["score_mod"]).arrays) == ["table"]
    table += np.linspace(0, 1, 9)
    out, vjp = cuflash.attention_vjp(q, k, v, **options, wrt=("table",))
    same = cuflash.ScoreMod("score + table[k] * table[q]", table=table)
    expected = cuflash.attention_vjp(q, k, v, score_mod=same, wrt=("table",))[1]
    for a, b in zip(vjp(out), expected(out)):
        np.testing.assert_array_equal(a, b)


def test_what_an_expression_does_not_read_is_no_capture():
    words, deep = np.array(["a", "b"]), False

    def unused(x):
        return words[x] if deep else x

    def mod(score, batch, head, q, k, switch=0):
        return score + (unused(k) if switch else k)

    assert as_score_mod(mod).text == cuflash.ScoreMod("(score + k)").text


T, k = np.zeros(3, complex), np.zeros(3)


def test_names_of_attributes_are_no_names_of_the_module():
    held = types.SimpleNamespace(T=0.5, k=2)
    assert value(lambda s, b, h, i, j: s + held.T * j * held.k) == 2 + 3


def test_functions_that_find_each_other():
    def even(n, x):
        return x * RATE if n == 0 else odd(n - 1, x)

    def odd(n, x):
        return even(n - 1, -x)

    assert value(lambda s, b, h, q, k: s + even(4, k)) == 3.5


def test_functions_of_numpy_and_math_are_not_followed():
    from math import exp, pi

    from numpy import inf, isscalar, minimum, where

    def mod(score, batch, head, q, k):
        return where(k < 5, minimum(score, 1) * exp(2) * pi * isscalar(1), -inf)

    closure = Closure(mod)
    assert closure.is_settled
    assert set(closure.captures) == {"pi", "inf"}
    assert value(mod) == np.exp(2) * np.pi


# ----------------------------------------------------------------------------------- how often
def test_a_function_is_traced_again_only_where_it_may_be_another(traces):
    rate, kind, sizes, table, rates = 0.5, "near", (1, (2, None)), np.zeros(9), [0.5]

    def mod(score, batch, head, q, k, more=2):
        score = score + rated(k) * rate + table[k] + abs(q) + sizes[0] + more
        return score if kind == "near" else -score

    def by_list(score, batch, head, q, k):
        return score * rates[0]

    for rate in (1, 2, 3):
        table = np.full(9, rate)
        assert value(mod) == 2 + 1.5 * rate + rate + 5 + 1 + 2
    assert len(traces) == 1
    kind = "far"
    assert value(mod) == value(mod) == -(2 + 1.5 * rate + rate + 5 + 1 + 2)
    assert len(traces) == 2
    del traces[:]
    assert value(by_list) == value(by_list) == 1
    assert len(traces) == 2


def test_what_holds_its_own_function_is_not_kept():
    class Own(Layer):
        def __init__(self):
            self.rate = rate = 0.5
            self.mod = lambda score, batch, head, q, k: score * rate + 0 * self.number(k)
            self.plain = lambda score, batch, head, q, k: score + self_number(k) * rate

            def self_number(k):
                return k if self is None else -k

        def number(self, k):
            return k

    own = Own()
    assert value(own.mod) == 1
    assert value(own.plain) == 0.5
    seen = weakref.ref(own)
    del own
    gc.collect()
    assert seen() is None


# ------------------------------------------------------------------------------------- errors
def indexing(table, k):
    return table[k]


LAYER, TABLES = Layer(np.arange(9.0)), {"own": np.arange(9.0)}
REFUSED = [
    (lambda s, b, h, q, k: s + LAYER.rate[k], "LAYER.rate.k.*; an array that values index has a"),
    (lambda s, b, h, q, k: s + TABLES["own"][q, k], "an index.*TABLES.*; an array that values"),
    (lambda s, b, h, q, k: s + indexing(LAYER.rate, k),
     "an index of one, in line [0-9]+ of .*test_closure.py: return table.k.; an array"),
    (lambda s, b, h, q, k, t=TABLE: s + t[k], "an index.* t.k.*; an array that values index has a"),
    (lambda s, b, h, q, k: s + WIDTHS[k], "a value as an index.*WIDTHS.k.*; an array that values"),
    (lambda s, b, h, q, k: s + LAYER.rate, "a ndarray stands in its arithmetic, in line .*LAYER"),
    (lambda s, b, h, q, k: s + {1: 2}[k], "a value as a key, in line"),
    (lambda s, b, h, q, k: s + sum(q for _ in range(RATE)), "as an index.*range.*default of an ar"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "message"), REFUSED, ids=[x[1] for x in REFUSED])
def test_what_cannot_be_followed_is_an_error_with_its_line(function, message):
    q = np.zeros((9, 4))
    with pytest.raises(TypeError, match=f"score_mod <lambda> cannot be traced: .*{message}"):
        cuflash.attention(q, q, q, score_mod=function)


# -------------------------------------------------------------------------------------- masks
DOCUMENTS = np.repeat(np.arange(4), 25)


def of_one_document(q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def test_functions_that_a_mask_finds():
    mask = BlockMask.from_function(
        lambda b, h, q, k: of_one_document(q, k) & (k <= q), (100, 100), 16
    )
    assert mask.predicate.text == "((held_0[q] == held_0[k]) & (k <= q))"
    same = np.tri(100, dtype=bool) & (DOCUMENTS[:, None] == DOCUMENTS)
    np.testing.assert_array_equal(mask.to_dense(), same)

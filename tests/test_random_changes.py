"""What tests/random_changes.py makes of problems is drawn, and shows what goes wrong there."""

import itertools

import emulator
import numpy as np
import pytest
import random_cases
import random_changes
import test_kernels
import test_packed
from random_changes import OF_BATCHES, OF_PACKED, is_backward
from random_draws import Draw
from test_emulator_catches import must_be_caught

SMALL = 1 << 16  # queries times keys of all heads, which the emulator works on for a second


@pytest.mark.parametrize("packed", [False, True])
def test_each_change_is_drawn(packed):
    """Forward and backward, but for what is of gradients or of forward passes alone."""
    of_one = {
        "_in_planes": {True}, "_with_wide_gradients": {True}, "_with_split_padded_rows": {False},
    }  # fmt: skip
    changes = OF_PACKED if packed else OF_BATCHES
    wanted = {(x.__name__, y) for x in changes for y in of_one.get(x.__name__, {False, True})}
    for seed in range(600):
        case = random_cases.plain_packed_case(seed) if packed else random_cases.plain_case(seed)
        draw = Draw(seed, 3)
        for change in changes:
            other = change(case, draw)
            if other is not case and random_changes.is_served(other):
                wanted.discard((change.__name__, is_backward(case)))
                case = other
        if not wanted:
            break
    assert not wanted


def first(make, is_wanted):
    """The first small problem that is wanted, on mma."""
    for seed in itertools.count():
        case = make(seed)
        if case.engine == "mma" and not case.copies and is_wanted(case) and 0 < _size(case) < SMALL:
            return case


def _size(case):
    if hasattr(case, "queries"):
        return case.heads[0] * sum(map(np.multiply, case.queries, case.keys))
    return np.prod(case.leading) * case.q[-2] * case.k[-2]


def sinks_of_entries(case):
    """A forward pass with a sink for each head of several entries: gradients are given lse."""
    shape = np.shape(case.options.get("sinks"))
    return len(shape) == 2 and shape == case.leading and shape[0] > 1 and not is_backward(case)


def drops_in_sequences(case):
    return "dropout_p" in case.options and np.count_nonzero(case.queries) > 1


@pytest.mark.skipif(emulator.available() is not None, reason=str(emulator.available()))
@pytest.mark.parametrize(("text", "wrong", "make", "is_wanted"), [
    pytest.param(r"read_sink\(p, batch_of\(p, head\)", "read_sink(p, 0", random_cases.random_case,
                 sinks_of_entries, id="sinks of the first entry"),
    pytest.param(r"one\.high \^ u32\(head\.batch\)", "one.high",
                 random_cases.random_packed_case, drops_in_sequences,
                 id="what the first sequence drops"),
])  # fmt: skip
def test_planted_bugs(monkeypatch, text, wrong, make, is_wanted):
    case = first(make, is_wanted)
    if make is random_cases.random_case:
        check = test_kernels.check_random
    else:
        check = test_packed.check_backward if case.backward else test_packed.check_forward
    check(case)
    must_be_caught(monkeypatch, text, wrong, lambda: check(case))

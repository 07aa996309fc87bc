"""Bands: their dense form against the definition, and their shortcuts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuflash import reference
from cuflash.masks.band import ALIGNMENTS, MAX_SHIFT, Band, integers_of, window_sides

lengths = st.integers(0, 12)
widths = st.none() | st.integers(-3, 15)
alignments = st.sampled_from(ALIGNMENTS) | st.integers(-20, 20)
bands = st.builds(Band, widths, widths, alignments)


def dense(band, n, m, shift):
    """The definition, a pair at a time."""

    def visible(q, k):
        left = band.left is None or k >= q + shift - band.left
        return left and (band.right is None or k <= q + shift + band.right)

    return np.array([[visible(q, k) for k in range(m)] for q in range(n)], bool).reshape(n, m)


@given(bands, lengths, lengths)
def test_dense_form_and_count(band, n, m):
    shift = {"bottom_right": m - n, "top_left": 0}.get(band.alignment, band.alignment)
    expected = dense(band, n, m, shift)
    np.testing.assert_array_equal(band.to_dense(n, m), expected)
    assert band.count(n, m) == expected.sum()
    assert band.is_open == (band.left is None and band.right is None)


@given(bands, lengths, lengths, st.integers(-15, 15))
def test_a_shift_of_ones_own(band, n, m, shift):
    np.testing.assert_array_equal(band.to_dense(n, m, shift), dense(band, n, m, shift))


@given(bands, lengths, lengths, st.integers(-15, 15), st.data())
def test_ranges_hold_what_is_visible_and_covers_is_exact(band, n, m, shift, data):
    full = dense(band, n, m, shift)
    q0 = data.draw(st.integers(0, n))
    q1 = data.draw(st.integers(q0, n))
    begin, end = band.key_range(q0, q1, shift, m)
    assert 0 <= begin <= end <= m
    seen = full[q0:q1].any(axis=0)
    assert not seen[:begin].any()
    assert not seen[end:].any()
    k0 = data.draw(st.integers(0, m))
    k1 = data.draw(st.integers(k0, m))
    begin, end = band.query_range(k0, k1, shift, n)
    assert 0 <= begin <= end <= n
    seen = full[:, k0:k1].any(axis=1)
    assert not seen[:begin].any()
    assert not seen[end:].any()
    if q0 < q1 and k0 < k1:
        assert band.covers(q0, q1, k0, k1, shift) == full[q0:q1, k0:k1].all()


@pytest.mark.parametrize("causal", [False, True, *ALIGNMENTS])
@pytest.mark.parametrize("window", [None, 0, 2, (1, None), (None, 3), [2, 2]])
def test_options(causal, window):
    band = Band.from_options(causal, window)
    for n, m in ((5, 8), (8, 5), (4, 4)):
        expected = reference.visible_keys((n, m), causal=causal, window=window)
        np.testing.assert_array_equal(band.to_dense(n, m), expected)


def test_windows_of_any_integers():
    for two in (2, np.int8(2), np.array(2), np.array(2, np.uint64)):
        for window, sides in ((two, (2, 2)), ((two, None), (2, None)), ([None, two], (None, 2))):
            assert window_sides(window) == sides
            assert {type(side) for side in window_sides(window)} <= {int, type(None)}
    for wrong in (np.array([2]), np.array(2.0), np.array(True), "2", (2, np.array([3]))):
        with pytest.raises(TypeError, match="window=.*: widths are integers or None; give one or"):
            window_sides(wrong)

    class OnDevice:
        __cuda_array_interface__ = None

        def __index__(self):
            raise AssertionError("a device's value is not read back")

    with pytest.raises(TypeError, match="widths are integers or None"):
        window_sides(OnDevice())


def test_a_negative_width_is_no_open_side():
    for window in (-1, (-1, -1), (3, -1)):
        with pytest.raises(ValueError, match=r"not negative; None leaves a side open, as -1 does"):
            window_sides(window)
    with pytest.raises(ValueError, match=r"widths are not negative$"):
        window_sides(-2)


def test_integers_of_any_size():
    least, greatest = -(1 << 63), (1 << 63) - 1
    for values, expected in (
        (3, 3), ([], []), ([[]], [[]]), (1 << 63, greatest), (1 << 70, greatest), (-1 << 70, least),
        ([1 << 64, 5], [greatest, 5]), ([1 << 63, -1], [greatest, -1]),
        (np.uint64(1 << 63), greatest), ([np.int64(4), 1 << 90], [4, greatest]),
    ):  # fmt: skip
        got = integers_of("numbers", values)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, expected)
    for other in (1.5, [1.0, 2.0], True, [1, None], [1 << 70, True], "3"):
        assert integers_of("numbers", other).dtype.kind not in "iu"


@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("window", [None, (1, None), (3, 2)])
@pytest.mark.parametrize("q_offset", [0, -2, 3, 100, -100, MAX_SHIFT, -MAX_SHIFT, np.int8(-1)])
def test_an_offset_is_the_shift(causal, window, q_offset):
    band = Band.from_options(causal, window, q_offset)
    assert band.shift(5, 8) == band.shift(8, 5) == q_offset
    for n, m in ((5, 8), (8, 5)):
        expected = reference.visible_keys((n, m), causal=causal, window=window, q_offset=q_offset)
        np.testing.assert_array_equal(band.to_dense(n, m), expected)
        assert band.count(n, m) == expected.sum()


def test_an_array_of_offsets_is_not_the_bands():
    assert Band.from_options(True, None, np.arange(3)) == Band.from_options(True)
    for q_offset in (0, np.arange(3)):
        with pytest.raises(ValueError, match="causal='top_left' stands for q_offset=0: give one"):
            Band.from_options("top_left", None, q_offset)


@pytest.mark.parametrize("q_offset", [MAX_SHIFT + 1, -MAX_SHIFT - 1, 2**70, np.uint64(2**63)])
def test_an_offset_that_is_too_far_off(q_offset):
    message = rf"q_offset={q_offset}: give -536870912 to 536870912 \(2\^29\)"
    with pytest.raises(ValueError, match=message):
        Band.from_options(True, None, q_offset)


def test_drawing():
    assert Band(1, 0).draw(3, 4) == "■■··\n·■■·\n··■■"
    assert Band(0, 0, "top_left").draw(2, 3) == "■··\n·■·"
    assert Band(1, 0, 1).draw(3, 4) == "■■··\n·■■·\n··■■"


def test_bands_are_values():
    assert Band.from_options(True) == Band(right=0) == Band.from_options("bottom_right")
    assert hash(Band(1, 2)) == hash(Band(1, 2))

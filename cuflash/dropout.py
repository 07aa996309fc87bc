"""Dropout: which softmax weights are kept, as `kernels/seams/dropout.cuh` works it out."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .operands.checks import checked_integer

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDS = 7  # of Philox
QUERY_BLOCK, KEY_BLOCK = 32, 128  # queries and keys of which bits are made together
WARP_QUERIES = 16  # of a block: those of a warp on tensor cores
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 2**32
_POWERS = [pow(0xAC564B05, n, _WORD) for n in range(32)]  # of a multiplier of L'Ecuyer's (1999)
_SIZES = 2**15  # that the bits of a weight may have
SEED_WANTED = "give an integer from 0 to 2^64 - 1, or an array of one uint64"


def philox(
    counter: Sequence[NDArray[Any] | int], seed: int, rounds: int = ROUNDS
) -> tuple[NDArray[np.uint64], ...]:
    """Philox4x32 [1]_: four words of 32 random bits for each counter, which is four words as well.

    Parameters
    ----------
    counter : sequence of 4 arrays of int
        Below 2^32; they broadcast.
    seed : int
        Below 2^64.
    rounds : int

    References
    ----------
    .. [1] J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as
       1, 2, 3", 2011.
    """
    low, high = np.uint64(_WORD - 1), np.uint64(32)
    a, b, c, d = (np.asarray(x, np.uint64) for x in counter)
    keys = [seed % _WORD, seed // _WORD]
    for _ in range(rounds):
        first, second = np.uint64(_FACTORS[0]) * a, np.uint64(_FACTORS[1]) * c
        a, b = (second >> high) ^ b ^ np.uint64(keys[0]), second & low
        c, d = (first >> high) ^ d ^ np.uint64(keys[1]), first & low
        keys = [(key + step) % _WORD for key, step in zip(keys, _STEPS)]
    return a, b, c, d


def checked_share(value: Any) -> float:
    """`dropout_p` as a float.

    Raises
    ------
    TypeError, ValueError
        If it is no number, or not from 0 to 1, 1 excluded.
    """
    kind: type[Exception] = TypeError
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        if 0 <= value < 1 and float(value) < 1:  # one nearer to 1 than doubles are becomes 1
            return float(value)
        kind = ValueError
    raise kind(f"dropout_p={reprlib.repr(value)}: give a number from 0 to 1, 1 excluded")


def checked_seed(value: Any) -> int:
    """A seed that is no array as an int.

    Raises
    ------
    TypeError, ValueError
        If it is no integer, or has more than 64 bits.
    """
    number = checked_integer("seed", value, SEED_WANTED)
    if not 0 <= number < 2**64:
        raise ValueError(f"seed={reprlib.repr(value)}: {SEED_WANTED}")
    return number


class PlacedSeed(NamedTuple):
    """The seed of a call whose operands are part of a larger one's.

    Its query 0, key 0 and head 0 are these of the larger call. Queries begin at multiples of
    QUERY_BLOCK, keys of KEY_BLOCK, since kernels make the bits of so many together.
    """

    seed: Any  # an int; None where an array on the device has it
    query: int = 0
    key: int = 0
    head: int = 0

    @property
    def first_numbers(self) -> tuple[int, int, int]:
        """What kernels add to the number of a query, of two neighbouring keys, and of a head."""
        return self.query // 4, self.key // 32, self.head


class Dropout(NamedTuple):
    """Dropout of one call: a weight is dropped with the probability `p`.

    `first` are query, key and head of a larger call at which its operands begin.
    """

    p: float
    seed: int
    first: tuple[int, int, int] = (0, 0, 0)

    @property
    def bound(self) -> tuple[int, bool]:
        """What the random bits of a weight are held against, of which there are 15, and whether it
        is kept if they are below, not if they are at least that. It is 2^14 at most: kernels take
        bits for numbers of half precision.
        """
        dropped = min(math.floor(self.p * _SIZES + 0.5), _SIZES - 1)
        return (_SIZES - dropped, True) if 2 * dropped > _SIZES else (dropped, False)

    @property
    def scale(self) -> float:
        """What weights that are kept are multiplied by."""
        return 1 / (1 - self.p)

    def keeps(self, place: tuple[int, int], queries: range, keys: range) -> NDArray[np.bool_]:
        """Which weights of a tile are kept; `place` is its batch entry and head.

        Of each block of 32 queries and 128 keys a counter makes the bits of the queries r, r + 8,
        r + 16 and r + 24 with the keys c, c + 1 and these + 8, + 16, ... + 120, for r < 8 and an
        even c < 8. Of four words two are for the first 64 keys. They make 32 others, of which two
        make the bits of two weights: the lower half is for the key c, the upper one for c + 1.
        """
        query, key, head = self.first
        queries = range(queries.start + query, queries.stop + query)
        keys = range(keys.start + key, keys.stop + key)
        place = place[0], place[1] + head
        rows = np.arange(queries.start // QUERY_BLOCK, -(-queries.stop // QUERY_BLOCK))
        columns = np.arange(keys.start // KEY_BLOCK, -(-keys.stop // KEY_BLOCK))
        of_query = rows[:, None] * 8 + np.arange(8)
        of_key = columns[:, None] * 4 + np.arange(4)
        words = philox((of_query[..., None, None], of_key, place[1], place[0]), self.seed)
        # Axes: block, eight, query of the eight; block, half, eight, pair of keys, key of the pair.
        kept = np.empty((len(rows), 4, 8, len(columns), 2, 8, 4, 2), np.bool_)
        bound, below = self.bound
        for half, (factor, added) in enumerate((words[:2], words[2:])):
            made = [(np.uint64(power) * factor + added) % np.uint64(_WORD) for power in _POWERS]
            for number, (eight, key_eight) in enumerate(np.ndindex(4, 8)):
                pair = made[number ^ 1] + (made[number] >> np.uint64(16))
                for upper in range(2):
                    bits = pair >> np.uint64(16 * upper) & np.uint64(_SIZES - 1)
                    own = kept[:, eight, ..., half, key_eight, :, upper]
                    np.not_equal(bits >= np.uint64(bound), below, out=own)
        whole = kept.reshape(len(rows) * QUERY_BLOCK, len(columns) * KEY_BLOCK)
        top, left = queries.start % QUERY_BLOCK, keys.start % KEY_BLOCK
        return whole[top : top + len(queries), left : left + len(keys)]

"""How many bytes an algorithm moves between the chip and device memory, as the papers count them.

Every load and store of a tile counts, whatever a cache may serve: N queries, M keys, widths D and
Dv; a query tile "visits" each key tile that it sees. Lengths are taken as full, an array of offsets
as not given, and masks other than the band hide nothing.

    unfused  Q K V out, and 4 N M    S is written and read, then P
    fa1      K V once; at each visit Q again, and O, l, m read and written in the type of sums,
             but for a row's first visit (nothing to read) and its last (the result is written)
    fa2      Q, out and lse once; K and V at each visit, once for all heads that are packed in a
             tile; fa3 the same; of parts of the keys O and two numbers of each row are written and
             read

Backward, S and P are computed again from lse, and in both algorithms K, V, dK and dV move once;
at each visit Q and dout are read, two numbers of every row, and dQ in the type of sums is read and
written. Before, dout and out are read for those numbers; after, dQ is rounded. Unfused, P from the
forward pass is read twice, dP is written and read, dS written and read twice: 7 N M.

References
----------
.. [1] T. Dao et al., "FlashAttention", 2022, arXiv:2205.14135, Algorithms 0, 1, 3, 4; Theorem 2.
.. [2] T. Dao, "FlashAttention-2", 2023, arXiv:2307.08691, Algorithms 1, 2.
"""

from __future__ import annotations

from collections.abc import Iterable

from .problem import Problem


def moved(
    problem: Problem, keys_outside: bool, query_tiles: Iterable[tuple[int, int]], block_k: int,
    item: int, sums: int, heads: int = 1, parts: int = 0,
) -> int:  # fmt: skip
    """Bytes that are moved with these tiles; `item` and `sums` are the bytes of an element.

    `query_tiles` are the ranges of queries of a head's tiles, or of a group of so many packed
    `heads`; `parts` are those of the keys, 0 where none are merged.
    """
    n, m, d, dv = (
        problem.query_length, problem.key_length, problem.head_dim, problem.value_dim,
    )  # fmt: skip
    if problem.backward:
        visits = query_visits(problem, block_k)
        keys = 2 * m * (d + dv) * item
        at_visit = visits * ((d + dv) * item + (2 + 2 * d) * sums)
        around = n * ((2 * dv + d) * item + (1 + 2 + d) * sums)
        return problem.head_count * (keys + at_visit + around)
    keys, results = (d + dv) * item, n * (dv * item + sums)
    if keys_outside:
        visits = query_visits(problem, block_k)
        state = 2 * max(0, visits - n) * (dv + 2) * sums
        return problem.head_count * (m * keys + visits * d * item + state + results)
    visits = key_visits(problem, query_tiles) * (problem.head_count // heads)
    results += 2 * parts * n * (dv + 2) * sums
    return problem.head_count * (n * d * item + results) + visits * keys


def moved_unfused(problem: Problem, item: int) -> int:
    """Bytes that array operations move, with the whole matrix of scores in memory."""
    n, m, d, dv = (
        problem.query_length, problem.key_length, problem.head_dim, problem.value_dim,
    )  # fmt: skip
    if problem.backward:
        values = 7 * n * m + n * (2 * d + 2 * dv) + 2 * m * (d + dv)
    else:
        values = 4 * n * m + n * (d + dv) + m * (d + dv)
    return problem.head_count * values * item


def query_visits(problem: Problem, block_k: int) -> int:
    """Queries that see some key of a tile, summed over the key tiles of one head."""
    n, m, band = problem.query_length, problem.key_length, problem.band
    shift = band.shift(n, m)
    ranges = (band.query_range(k, min(k + block_k, m), shift, n) for k in range(0, m, block_k))
    return sum(end - begin for begin, end in ranges)


def key_visits(problem: Problem, query_tiles: Iterable[tuple[int, int]]) -> int:
    """Keys that some query of a tile sees, summed over the query tiles of one head."""
    m, band = problem.key_length, problem.band
    shift = band.shift(problem.query_length, m)
    ranges = (band.key_range(*queries, shift, m) for queries in query_tiles)
    return sum(end - begin for begin, end in ranges)

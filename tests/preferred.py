"""Plans with rows of the table that small problems would do without."""

import contextlib
import dataclasses

import pytest

from cuflash.calls import run
from cuflash.planning import plan as planning


@contextlib.contextmanager
def preferred(rows):
    """Whatever one of these rows serves has it, however small it is."""
    real = planning.best_variants

    def best_variants(row, *problem):
        return [(time - 1e9 * (row in rows), tile) for time, tile in real(row, *problem)]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planning, "best_variants", best_variants)
        patched.setattr(run, "_calls", {})
        _forget_plans()
        try:
            yield
        finally:
            _forget_plans()


def _forget_plans():
    planning._made.cache_clear()
    planning._chosen.cache_clear()


def assert_preferred(plan, rows):
    """Its row, whatever it packs and splits, is one of these if one serves."""
    served = [row for row in rows if not row.reject(plan.problem, plan.device)]
    row = dataclasses.replace(plan.tile, packed=1, span=0)
    assert (row in rows) == bool(served), plan

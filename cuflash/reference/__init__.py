"""The definition of attention that every engine is tested against: dense, in float64."""

from .append import append_kv
from .array_gradients import array_bounds
from .bounds import UNIT_ROUNDOFF, BackwardBound, Bound, backward_bound, forward_bound
from .definition import attention, attention_backward
from .dense import visible_keys
from .dropout import dropout_keep
from .merging import merge

__all__ = [
    "UNIT_ROUNDOFF",
    "BackwardBound",
    "Bound",
    "append_kv",
    "array_bounds",
    "attention",
    "attention_backward",
    "backward_bound",
    "dropout_keep",
    "forward_bound",
    "merge",
    "visible_keys",
]

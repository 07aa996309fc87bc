"""What other libraries' arguments are called here: said where one of them is given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")

_MASK = "mask= takes an array of bool, True where a query may attend, or a BlockMask"
_ADDEND = "bias= takes an array of float, which is added to scores"
_DROPOUT = "dropout_p= is the share of weights that are dropped, with seed= for which ones"
_NO_WEIGHTS = "weights are never in memory; return_lse=True gives each row's sum of exponentials"
_PACKED = "attention_varlen() takes packed sequences"
_STARTS = f"{_PACKED}: give cu_seqlens_q and cu_seqlens_k, the same array for both"
_LONGEST = f"{_PACKED}: give max_seqlen_q and max_seqlen_k, the same number for both"
_PAGES = "page_table= says which pages of k and v hold a batch entry's keys; in attention() alone"
_KERNEL = "algo= and engine= choose the kernel"
_ON_KEYS = "kv_lengths= says how many keys are valid"
_ON_QUERIES = "q_lengths= says how many queries are valid"
_POSITIONS = "leave the name out, or call it"
_CACHE = "caches are k and v; append_kv() writes to them, kv_lengths= says how many keys they hold"
_APART = "q, k and v are given one by one: views of one array, such as qkv[:, :, 0], are fine"
_LEFT = "mask=(positions >= start[:, None])[:, None, None] hides the keys before one"
_ROTARY = "rotate q and k beforehand, keys before they are written to a cache"

# Of PyTorch and its flex_attention, flash-attn, JAX, Keras, xformers, cuDNN and Triton's tutorial.
ELSEWHERE = {
    "query": f"{_POSITIONS} q",
    "key": f"{_POSITIONS} k",
    "value": f"{_POSITIONS} v",
    "is_causal": "causal=True ends the diagonal at the last query and key, causal='top_left' "
    "starts it at the first ones, as is_causal does in PyTorch and JAX",
    "attn_mask": f"{_MASK}; {_ADDEND}",
    "attention_mask": f"{_MASK}; {_ADDEND}",
    "attn_bias": _ADDEND,
    "attention_bias": _ADDEND,
    "logits_soft_cap": "softcap= bounds scores",
    "sink": "sinks= takes a score for each head",
    "s_aux": "sinks= takes a score for each head",
    "learnable_sink": "sinks= takes a score for each head",
    "block_mask": _MASK,
    "mask_mod": f"{_MASK}: BlockMask.from_function(mask_mod, ...)",
    "key_padding_mask": "kv_lengths= hides padding at the end, mask=seen[:, None, None] any keys "
    "that seen, of shape (B, M), is False for",
    "dropout": _DROPOUT,
    "dropout_rate": _DROPOUT,
    "p": _DROPOUT,
    "dropout_seed": _DROPOUT,
    "rng_state": _DROPOUT,
    "softmax_scale": "scale= is what q.k is multiplied by",
    "sm_scale": "scale= is what q.k is multiplied by",
    "window_size": "it is window=(left, right) here, with None, not -1, for an open side",
    "local_window_size": "it is window=(left, right) here, with None for an open side",
    "query_seq_lengths": _ON_QUERIES,
    "key_value_seq_lengths": _ON_KEYS,
    "seqused_k": _ON_KEYS,
    "seqused_q": _ON_QUERIES,
    "cache_seqlens": f"{_ON_KEYS}, those just appended included",
    "k_cache": _CACHE,
    "v_cache": _CACHE,
    "cache_batch_idx": "page_table=cache_batch_idx[:, None] makes each entry of the cache a page",
    "cache_leftpad": _LEFT,
    "leftpad_k": _LEFT,
    "rotary_cos": _ROTARY,
    "rotary_sin": _ROTARY,
    "rotary_interleaved": _ROTARY,
    "qkv": _APART,
    "kv": _APART,
    "num_splits": "split_keys= says how many keys a block works on, 0 for all of them",
    "cu_seqlens": _STARTS,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "max_seqlen": _LONGEST,
    "max_seqlen_q": _PACKED,
    "max_seqlen_k": _PACKED,
    "page_table": "pages have no gradients; those of a cache in one piece are attention's own",
    "block_table": _PAGES,
    "block_tables": _PAGES,
    "return_attn_probs": _NO_WEIGHTS,
    "need_weights": _NO_WEIGHTS,
    "return_residual": "return_lse=True returns the logarithm of each row's sum of exponentials",
    "return_softmax_lse": "return_lse=True returns it",
    "implementation": _KERNEL,
    "backend": _KERNEL,
    "op": _KERNEL,
    "deterministic": "the result always is; attention_backward takes deterministic=",
}


def explains_keywords(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """`function`, whose TypeError for an argument of another library says what to give instead.

    Its signature stays as it is: no other keyword is taken.
    """

    @functools.wraps(function)
    def call(*args: Params.args, **options: Params.kwargs) -> Result:
        try:
            return function(*args, **options)
        except TypeError as error:
            trace = error.__traceback__
            if trace is None or trace.tb_next is None:  # raised by the call itself, not inside
                _explain(function, options)
            raise

    return call


def takes_options_of(
    other: Callable[..., object], *, without: Iterable[str] = ()
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """A decorator for a function whose `**options` are the keywords of `other`, but for some.

    Its signature shows them, and what is no keyword of either is a TypeError.
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        own = inspect.signature(function)
        named = {name: x for name, x in own.parameters.items() if x.kind is not x.VAR_KEYWORD}
        forwarded = {
            name: x
            for name, x in inspect.signature(other).parameters.items()
            if x.kind is x.KEYWORD_ONLY and name not in named and name not in without
        }
        known = frozenset((*named, *forwarded))

        @functools.wraps(function)
        def call(*args: Params.args, **options: Params.kwargs) -> Result:
            if not known.issuperset(options):
                _explain(call, options)
                name = next(x for x in options if x not in known)
                raise TypeError(
                    f"{function.__name__}() got an unexpected keyword argument {name!r}"
                )
            return function(*args, **options)

        signature = own.replace(parameters=[*named.values(), *forwarded.values()])
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def _explain(function: Callable[..., object], options: Iterable[str]) -> None:
    """Raise a TypeError for the first keyword that is another library's, if there is one."""
    known = inspect.signature(function).parameters
    for name in options:
        if name not in known and name in ELSEWHERE:
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {name!r}: "
                f"{ELSEWHERE[name]}"
            ) from None

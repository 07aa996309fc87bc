"""`precompile`: kernels compiled before the first call that needs them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from .calls.arguments import Arguments, Options, split_dropout, split_scores
from .calls.arrays import as_integers, as_mask, as_window, of_batch, split_offset
from .calls.call import BackwardCall, Call, ForwardCall
from .calls.packed import packed_specs, starts_specs
from .calls.run import launch_module
from .calls.suited import best_call
from .extras import compiling
from .keywords import explains_keywords
from .operands.checks import checked_truth
from .operands.dtypes import ITEM_BYTES
from .operands.spec import Spec
from .planning.copies import CopyPlan, plan_copies
from .planning.launches import Launch
from .planning.plan import Plan, choice_for_gradients
from .progress import progress_bar
from .scores.wanted import as_names

if TYPE_CHECKING:
    from .masks.block_mask import BlockMask
    from .scores.score_mod import ScoreMod
    from .typing import (
        Algo,
        AnyArray,
        Causal,
        Dtypes,
        Engine,
        Integer,
        Integers,
        Names,
        Real,
        ScoreFunction,
        Shapes,
        Window,
    )

Triple: TypeAlias = tuple[tuple[int, ...], ...]  # shapes of q, k and v


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that :func:`precompile` has compiled, or found compiled.

    Attributes
    ----------
    name : str
    plan : Plan
        The first of the plans that launch it.
    seconds : float
        How long it took, on the wall clock; little where it was compiled before.
    """

    name: str
    plan: Plan = field(repr=False)
    seconds: float


@explains_keywords
def precompile(
    shapes: Shapes | Iterable[Shapes],
    dtype: Dtypes,
    *,
    device: int | None = None,
    backward: bool = False,
    aligned: bool = True,
    progress: bool = True,
    algo: Algo | None = None,
    engine: Engine | None = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | AnyArray | None = None,
    bias: AnyArray | Real | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    softcap: Real | None = None,
    alibi_slopes: AnyArray | Real | None = None,
    sinks: AnyArray | Real | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    q_offset: Integers | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dropout_p: Real = 0.0,
    seed: Integer | AnyArray | None = None,
    split_keys: int | None = None,
    page_table: AnyArray | None = None,
    cu_seqlens_q: Integers | None = None,
    cu_seqlens_k: Integers | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = True,
    wrt: Names = (),
) -> list[CompiledKernel]:
    """Compile what :func:`attention` or, with `cu_seqlens_q`, :func:`attention_varlen` needs for
    operands of these shapes and types.

    Otherwise the first call of a kind does so. CuPy keeps the kernels on disk for other processes,
    in `~/.cupy/kernel_cache` or where `CUPY_CACHE_DIR` says. No memory is taken for operands.

    Parameters
    ----------
    shapes : tuple of int, triple of them, or iterable of such
        The shapes of q, k and v: one tuple of sizes for all three, or three such tuples in a
        tuple. Several problems come as a list or any other iterable of these.
    dtype : dtype or iterable of dtype
        float16, bfloat16, float32 or float64, by name or as NumPy's or ml_dtypes' own, for all
        three operands. Of several, each is compiled for every shape.
    device : int, optional
        Number of the CUDA device, which has to be there; by default the current one.
    backward : bool
        Compile the kernels of :func:`attention_backward` as well, as :func:`attention_vjp`
        calls it; of packed sequences, those of their functions.
    aligned : bool
        Operands and results start on multiples of 16 bytes, and rows lie such multiples apart
        where a row of the shape has so many bytes. New arrays are like that, and views of these
        that swap axes, such as `x.swapaxes(1, 2)`, or leave out heads or positions run the same
        kernels. False: for arrays that are not.
    progress : bool
        Show how many kernels are compiled, where stderr is a terminal: by tqdm, if it is
        installed.
    algo, engine, causal, window, mask, softcap, scale, enable_gqa, split_keys
        As given to :func:`attention`.
    dropout_p, seed
        As given to :func:`attention`. The kernels of one `dropout_p` above 0 are those of all, and
        serve all seeds; none has to be given.
    bias, score_mod, alibi_slopes, sinks, q_lengths, kv_lengths, q_offset, page_table
        As given to :func:`attention`. Of arrays only shape, strides and type count, so that those
        of `numpy.empty` do.
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        As given to :func:`attention_varlen`, for whose operands the shapes then are, such as
        (Tq, H, D). Of offsets, too, only shape and type count.
    deterministic, wrt
        As given to :func:`attention_backward`.

    Returns
    -------
    list of CompiledKernel
        Every kernel that is needed, once, with the seconds that it took.

    Raises
    ------
    ModuleNotFoundError
        Where CuPy is not installed.
    ValueError, TypeError, NotImplementedError
        As :func:`plan`, and for what is no shape, type or device. Then nothing is compiled.
    RuntimeError
        If CUDA finds no device, or a kernel does not compile.

    Notes
    -----
    Lengths, the batch, the number of key heads, the tokens and the number of packed sequences,
    `causal` and `window` only decide which tiles are best, so that the kernels of one shape serve
    many. Another device, another version of CuPy, of its compiler or of cuflash needs others.

    Operands in rarer layouts, such as rows in reverse order, axes repeated by a stride of 0 or
    more than three leading axes of irregular strides, may run other kernels: their first call
    compiles these.

    Examples
    --------
    A model in bfloat16, with grouped heads, for training:

    >>> import cuflash
    >>> q, kv = (4, 32, 4096, 128), (4, 8, 4096, 128)
    >>> kernels = cuflash.precompile(
    ...     (q, kv, kv), "bfloat16", causal=True, enable_gqa=True, backward=True
    ... )  # doctest: +SKIP
    >>> [kernel.name for kernel in kernels]  # doctest: +SKIP
    ['hopper_forward', 'backward_rows', 'hopper_backward', 'hopper_sum_dq']

    Prompts of two lengths and steps of decoding over a cache, of which lengths say how much is
    valid:

    >>> import numpy as np
    >>> shapes = [((1, 32, n, 128), (1, 8, 8192, 128), (1, 8, 8192, 128)) for n in (1, 512, 4096)]
    >>> kernels = cuflash.precompile(
    ...     shapes, "bfloat16", causal=True, enable_gqa=True, kv_lengths=np.zeros(1, np.int32)
    ... )  # doctest: +SKIP

    Up to 16,384 tokens of 64 packed sequences, none of them longer than 4,096:

    >>> kernels = cuflash.precompile(
    ...     (16384, 32, 128), "bfloat16", causal=True, backward=True,
    ...     cu_seqlens_q=np.zeros(65, np.int32), max_seqlen_q=4096,
    ... )  # doctest: +SKIP
    """
    triples, dtypes = _triples(shapes), _dtypes(dtype)
    backward, aligned, progress = (
        checked_truth(name, x)
        for name, x in (("backward", backward), ("aligned", aligned), ("progress", progress))
    )
    offset, offsets = split_offset(q_offset)
    text, scored = split_scores(np.empty(0), score_mod, bias, sinks, alibi_slopes)
    share, _, seeds = split_dropout(np.empty(0), dropout_p, seed, needs_seed=False)
    scored |= seeds
    options = Options(
        algo, engine, causal, as_window(window), offset, softcap, scale, enable_gqa,
        split_keys=split_keys, score_mod=text, dropout_p=share,
    )  # fmt: skip
    integers: dict[str, Any] = {**of_batch(q_lengths, kv_lengths, offsets, np.empty(0))}
    if page_table is not None:
        if backward:
            raise ValueError("page_table goes with backward=False: pages have no gradients")
        integers["page_table"] = as_integers("page_table", page_table)
    arguments = Arguments(ForwardCall.operands, integers | scored, as_mask(mask))
    kinds: list[tuple[type[Call], Options]] = [(ForwardCall, options)]
    if backward:
        chosen_algo, chosen_engine = choice_for_gradients(algo, engine)
        of_gradients = options._replace(
            algo=chosen_algo, engine=chosen_engine, deterministic=deterministic, split_keys=None,
            wrt=as_names(wrt),
        )  # fmt: skip
        kinds.append((BackwardCall, of_gradients))
    elif as_names(wrt):
        raise ValueError("wrt goes with backward=True: a forward call has no gradients")
    others_of_packed = cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if cu_seqlens_q is None and any(x is not None for x in others_of_packed):
        raise ValueError("cu_seqlens_k, max_seqlen_q and max_seqlen_k go with cu_seqlens_q")
    with compiling():
        launch = launch_module()
    number = launch.device_number(device)
    facts, others = launch.device_facts(number), arguments.specs()

    def plans() -> Iterator[tuple[Plan, Plan | CopyPlan]]:
        for triple in triples:
            for element in dtypes:
                specs = (Spec.contiguous(shape, element) for shape in triple)
                given, longest = dict(zip("qkv", specs)), None
                if cu_seqlens_q is not None:
                    is_paged = page_table is not None
                    starts, longest = starts_specs(cu_seqlens_q, *others_of_packed, is_paged)
                    given = packed_specs(given, is_paged) | starts
                given |= others
                for kind, asked in kinds:
                    call = best_call(
                        kind, given, asked._replace(longest=longest), facts, arguments.mask_kind,
                        frozenset() if aligned else frozenset(kind.matrices), arguments.predicate,
                        arguments.mask_evenness,
                    )  # fmt: skip
                    if not call.is_empty:
                        yield call.plan, call.plan
                        launches, _ = plan_copies(call.reads | call.writes)
                        yield from ((call.plan, plan) for _, plan, _ in launches)

    kernels = _distinct(plans(), launch.compiler_input)
    with progress_bar(len(kernels), "kernel", progress) as step:
        times = launch.compile_each([x[1:] for x in kernels], number, step)
    return [CompiledKernel(x.name, plan, time) for (plan, _, x), time in zip(kernels, times)]


def _distinct(
    plans: Iterable[tuple[Plan, Plan | CopyPlan]], key: Callable[[Plan | CopyPlan, Launch], object]
) -> list[tuple[Plan, Plan | CopyPlan, Launch]]:
    """The plans' kernels in their order, those of one key once."""
    found: dict[object, tuple[Plan, Plan | CopyPlan, Launch]] = {}
    for of_call, plan in plans:
        for kernel in plan.kernels:
            found.setdefault(key(plan, kernel), (of_call, plan, kernel))
    return list(found.values())


def _triples(shapes: object) -> list[Triple]:
    """The shapes of q, k and v of each problem."""
    one = _triple(shapes)
    if one is not None:
        return [one]
    wanted = "give a tuple of sizes, three of these for q, k and v, or a list of such"
    try:
        triples = [_triple(x) for x in shapes]  # type: ignore[attr-defined]
    except TypeError:
        raise TypeError(f"shapes={shapes!r}: {wanted}") from None
    if None in triples:
        raise TypeError(f"shapes={shapes!r}: {wanted}")
    return [x for x in triples if x is not None]


def _triple(given: object) -> Triple | None:
    """Shapes of q, k and v, or None; a tuple of sizes stands for all three."""
    if not isinstance(given, tuple):
        return None
    is_one = not any(isinstance(x, tuple) for x in given)
    try:
        shapes = tuple(tuple(map(operator.index, x)) for x in ((given,) * 3 if is_one else given))
    except TypeError:
        return None
    if len(shapes) != 3:
        raise ValueError(
            f"{given} holds {len(shapes)} shapes: a tuple holds those of q, k and v; give several "
            "problems as a list"
        )
    if any(size < 0 for shape in shapes for size in shape):
        raise ValueError(f"{given} is no shape: sizes are 0 or more")
    return shapes


def _dtypes(given: Any) -> list[np.dtype[Any]]:
    """The element types, each one that attention takes."""
    try:
        several = [given] if isinstance(given, (str, type, np.dtype)) else list(given)
        dtypes = [np.dtype(getattr(ml_dtypes, x, x) if isinstance(x, str) else x) for x in several]
        if not {x.name for x in dtypes} <= set(ITEM_BYTES):
            raise TypeError
    except TypeError:
        supported = ", ".join(ITEM_BYTES)
        raise TypeError(f"dtype={given!r}: attention takes {supported}") from None
    return dtypes

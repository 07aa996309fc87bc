"""Attention and its gradients as they are defined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from ..operands.checks import checked_truth
from ..scores.wanted import as_names
from .array_gradients import array_gradients
from .dense import Dense, own_sum, row_sums, score_gradient, visible_sum

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from typing_extensions import Unpack

    from ..masks.block_mask import BlockMask
    from ..scores.score_mod import ScoreMod
    from ..typing import Causal, Names, Real, ScoreFunction, Window
    from .dense import Float, Floats, Options, Scoring


@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Floats: ...  # fmt: skip
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Floats, Floats]: ...  # fmt: skip
@overload
def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: bool, **options: Unpack[Options]
) -> Floats | tuple[Floats, Floats]: ...


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | ArrayLike | None = None,
    bias: ArrayLike | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    softcap: Real | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dropout_p: Real = 0.0,
    seed: int | None = None,
    page_table: ArrayLike | None = None,
    return_lse: bool = False,
    dtype: Float = np.float64,
) -> Floats | tuple[Floats, Floats]:
    """Attention of `q` over `k` and `v`, as :func:`cuflash.attention` defines it.

    Parameters
    ----------
    q, k, v : array_like, shapes (..., N, D), (..., M, D) and (..., M, E)
        Leading axes broadcast as in `numpy.matmul`.
    causal, window, mask, bias, score_mod, softcap, alibi_slopes, sinks
        As in :func:`cuflash.attention`.
    q_lengths, kv_lengths, q_offset, scale, enable_gqa, dropout_p, seed, return_lse
        As in :func:`cuflash.attention`.
    page_table
        As in :func:`cuflash.attention`. Keys on pages that are none are hidden, as on a GPU.
    dtype : scalar type, default numpy.float64
        Of the arithmetic and the results; `numpy.longdouble` checks float64 results.

    Returns
    -------
    out : ndarray, shape (..., N, E)
    lse : ndarray, shape (..., N)
        Natural logarithm of the sum of exp(score); only with `return_lse`.

    Notes
    -----
    With `s = score_mod(softcap(scale * q.k)) + alibi + bias` and j over the keys that query i sees,
    ``lse[i] = log(exp(sink) + sum_j exp(s[i, j]))`` and
    ``out[i] = sum_j exp(s[i, j] - lse[i]) v[j]``. With dropout that sum is over the j that
    :func:`dropout_keep` keeps, divided by ``1 - dropout_p``.
    A score of -inf has weight zero, as a hidden key has; a row without any weight gives 0 and
    -inf. What hidden keys and values hold has no influence, NaN included.

    Examples
    --------
    >>> attention([[1.0], [0.0]], [[0.0], [0.0]], [[2.0], [4.0]], causal=True)
    array([[2.],
           [3.]])
    """
    dense = Dense.of(
        *(q, k, v, dtype),
        bias=bias,
        score_mod=score_mod,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        scale=scale,
        enable_gqa=enable_gqa,
        causal=causal,
        window=window,
        mask=mask,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_offset=q_offset,
        dropout_p=dropout_p,
        seed=seed,
        page_table=page_table,
    )
    return (dense.out, dense.lse) if checked_truth("return_lse", return_lse) else dense.out


@overload
def attention_backward(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dlse: ArrayLike | None = None,
    dtype: Float = np.float64, **options: Unpack[Scoring],
) -> tuple[Floats, Floats, Floats]: ...  # fmt: skip
@overload
def attention_backward(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, *, dlse: ArrayLike | None = None,
    wrt: Names, dtype: Float = np.float64, **options: Unpack[Scoring],
) -> tuple[Floats, ...]: ...  # fmt: skip


def attention_backward(
    dout: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    dlse: ArrayLike | None = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: BlockMask | ArrayLike | None = None,
    bias: ArrayLike | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    softcap: Real | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    scale: Real | None = None,
    enable_gqa: bool = False,
    dropout_p: Real = 0.0,
    seed: int | None = None,
    wrt: Names = (),
    dtype: Float = np.float64,
) -> tuple[Floats, ...]:
    """Gradients of :func:`attention`, as :func:`cuflash.attention_backward` defines them.

    Parameters
    ----------
    dout : array_like, shape (..., N, E)
        Gradient of some number with respect to the output.
    q, k, v : array_like, shapes (..., N, D), (..., M, D) and (..., M, E)
        As given to :func:`attention`.
    dlse : array_like, shape (..., N), optional
        Gradient of the same number with respect to `lse`, by default 0.
    causal, window, mask, bias, score_mod, softcap, alibi_slopes, sinks
        As given to :func:`attention`.
    q_lengths, kv_lengths, q_offset, scale, enable_gqa, dropout_p, seed
        As given to :func:`attention`.
    wrt : tuple of str
        Of which arrays that scores depend on gradients are wanted, too, as in
        :func:`cuflash.attention_backward`.
    dtype : scalar type, default numpy.float64
        Of the arithmetic and the results; `numpy.longdouble` checks float64 results.

    Returns
    -------
    dq, dk, dv : ndarray
        In the shapes of `q`, `k` and `v`, summed over the heads that share them; behind them
        those of `wrt`, in the shapes of these arrays.

    Notes
    -----
    With s as in :func:`attention`, ``x = scale * q.k``, softmax weights P, D of dropout (0 or
    ``1 / (1 - dropout_p)``; 1 without) and products by element, "*", ::

        dV    = (P * D)^T dout
        dP    = D * (dout V^T)
        delta = sum(dout * out, axis=-1) - dlse
        dS    = P * (dP - delta) * ds/dx
        dQ    = scale dS K
        dK    = scale dS^T Q

    An array that scores read gets the sum of ``P * (dP - delta)`` times the derivative of s by that
    element, a sink that of ``-exp(sink - lse) * delta``.

    P and dS are 0 where a query does not see a key, and in rows without any weight (lse is
    -inf). What such queries and keys hold has no influence, nor have their `dout` and `dlse`.
    A key adds nothing to dQ where its dS is 0, be it infinite: so one whose score is -inf, which
    has weight zero.

    Examples
    --------
    >>> dq, dk, dv = attention_backward([[1.0]], [[1.0]], [[0.0], [0.0]], [[2.0], [4.0]])
    >>> dk
    array([[-0.5],
           [ 0.5]])
    """
    shapes = [np.shape(x) for x in (q, k, v)]
    dense = Dense.of(
        *(q, k, v, dtype),
        bias=bias,
        score_mod=score_mod,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        scale=scale,
        enable_gqa=enable_gqa,
        causal=causal,
        window=window,
        mask=mask,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        q_offset=q_offset,
        dropout_p=dropout_p,
        seed=seed,
    )
    grad = np.asarray(dout).astype(dtype)
    with np.errstate(all="ignore"):
        dS = score_gradient(dense, grad, row_sums(dense, grad, dlse))
        dv = visible_sum(dense.kept_weights.mT, grad, dense.visible.mT)
        dq = dense.scale * visible_sum(dS, dense.k, dS != 0)
        dk = dense.scale * visible_sum(dS.mT, dense.q, dense.visible.mT)
        q_shape, k_shape, v_shape = shapes
        others = array_gradients(dense, grad, dlse, as_names(wrt))
    return own_sum(dq, q_shape), own_sum(dk, k_shape), own_sum(dv, v_shape), *others

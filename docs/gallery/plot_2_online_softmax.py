r"""
The online softmax, step by step
================================

Attention of one query is a mean of the values, weighted by the softmax of its scores. This page
computes it in five ways: naive, safe, online, with the values, and in tiles. Each is a small
change of the one before, and the last one is the algorithm of ``cuflash.attention``, with which
it is compared.

For one query with scores :math:`s_1, \dots, s_M` and values :math:`v_1, \dots, v_M`

.. math::

   out = \frac{\sum_j e^{s_j} v_j}{\sum_j e^{s_j}},
   \qquad
   lse = \log \sum_j e^{s_j}.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash

rng = np.random.default_rng(0)
scores = 4 * rng.standard_normal(64).astype(np.float32)
v = rng.standard_normal((64, 16)).astype(np.float32)

# %%
# 1. Naive
# --------
#
# The formula as it stands.


def naive(scores, v):
    """Softmax by its formula, then the mean."""
    weights = np.exp(scores)
    return weights / weights.sum() @ v


print(naive(scores, v)[:3])

# %%
# It is right as long as the exponentials are numbers. In float32 :math:`e^{89}` is none, and scores
# of that size are no rarity. All are infinite then, and infinity over infinity is not a number:

with np.errstate(over="ignore", invalid="ignore"):
    print(naive(scores + 100, v)[:3])

# %%
# 2. Safe
# -------
#
# The same number taken from all scores changes no weight, since numerator and denominator are both
# multiplied by :math:`e^{-m}`. With the largest score as :math:`m` no exponential is larger than 1.


def safe(scores, v):
    """Softmax of the distances to the largest score."""
    m = scores.max()
    weights = np.exp(scores - m)
    return weights / weights.sum() @ v


print(safe(scores, v)[:3], safe(scores + 100, v)[:3])

# %%
# But the scores are passed over three times: for the maximum, for the sum, for the mean. Where they
# do not fit into fast memory they have to be stored, or computed again.
#
# 3. Online
# ---------
#
# The maximum and the sum can be had in one pass. Let :math:`m` be the largest score so far and
# :math:`l` the sum of :math:`e^{s_j - m}` so far. With a larger score :math:`m'` the terms of the
# sum were taken with the wrong :math:`m`, all by the same factor, and one product mends them all:
#
# .. math::
#
#    l' = l\, e^{m - m'} + e^{s - m'}


def online_sum(scores):
    """The largest score, the sum of exponentials, and how both got there."""
    m, total, history = np.float32(-np.inf), np.float32(0), []
    for s in scores:
        new = max(m, s)
        total = total * np.exp(m - new) + np.exp(s - new)
        m = new
        history.append((m, total))
    return m, total, np.array(history)


m, total, history = online_sum(scores)
print(m == scores.max(), np.isclose(total, np.exp(scores - scores.max()).sum()))

# %%
# Each time that the maximum rises, the sum is scaled down:

figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 4.5))
upper.plot(scores, ".", color="0.6", label="score")
upper.step(range(64), history[:, 0], where="post", label="m, the largest so far")
lower.step(range(64), history[:, 1], where="post", color="C1", label="l, the sum so far")
lower.set_xlabel("scores seen")
for ax in (upper, lower):
    ax.legend()
figure.tight_layout()

# %%
# 4. Online, with the values
# --------------------------
#
# The sum of the weighted values has the same factor, so it can come along. Now each score is used
# once and forgotten, and so are each key and value: what is kept is :math:`m`, :math:`l` and one
# row of output. The division comes last.


def online(scores, v):
    """One pass: the output and the log-sum-exp."""
    m, l = np.float32(-np.inf), np.float32(0)
    out = np.zeros(v.shape[-1], np.float32)
    for s, value in zip(scores, v):
        new = max(m, s)
        rescale, weight = np.exp(m - new), np.exp(s - new)
        l = l * rescale + weight
        out = out * rescale + weight * value
        m = new
    return out / l, m + np.log(l)


out, lse = online(scores + 100, v)
print(out[:3], np.allclose(out, safe(scores + 100, v), atol=1e-6))

# %%
# 5. In tiles
# -----------
#
# Hardware multiplies matrices, not numbers. So take a tile of queries and a tile of keys at a
# time: the scores of the tile are one product, the maxima and sums of its rows are vectors, and
# the values are added by a second product. The loop over keys does for tiles what the loop before
# did for single scores. This is the forward pass of FlashAttention-2 (its Algorithm 1): the
# matrix of all scores never exists.


def tiled(q, k, v, block_q=16, block_k=16, causal=False):
    """Attention of one head, tile by tile."""
    n, m_keys = len(q), len(k)
    scale = np.float32(1 / np.sqrt(q.shape[-1]))
    out, lse = np.zeros((n, v.shape[-1]), np.float32), np.zeros(n, np.float32)
    for i in range(0, n, block_q):
        Q = q[i : i + block_q]
        m = np.full(len(Q), -np.inf, np.float32)  # of each row: the largest score so far,
        l = np.zeros(len(Q), np.float32)  # the sum of exponentials,
        O = np.zeros((len(Q), v.shape[-1]), np.float32)  # and of weighted values
        for j in range(0, m_keys, block_k):
            S = scale * (Q @ k[j : j + block_k].T)
            if causal:
                queries, keys = i + np.arange(len(Q)), j + np.arange(S.shape[1])
                S[keys > queries[:, None] + m_keys - n] = -np.inf
            new = np.maximum(m, S.max(axis=1))
            origin = np.where(new == -np.inf, 0, new)  # of rows that have seen nothing yet
            rescale, P = np.exp(m - origin), np.exp(S - origin[:, None])
            l = l * rescale + P.sum(axis=1)
            O = O * rescale[:, None] + P @ v[j : j + block_k]
            m = new
        out[i : i + block_q] = O / l[:, None]
        lse[i : i + block_q] = m + np.log(l)
    return out, lse


q, k, v = rng.standard_normal((3, 96, 64), dtype=np.float32)
out, lse = tiled(q, k, v, causal=True)

# %%
# 6. The library's own
# --------------------
#
# ``cuflash.attention`` walks the same tiles. On NumPy arrays it is these loops; on a GPU each
# tile of queries is a thread block's, and a loop over tiles of keys is the body of
# ``fa2_forward.cu``. How far apart may they be? ``cuflash.reference.forward_bound`` derives that
# for each element, beside the result in float64; a ratio below 1 is within the bound.

bound = cuflash.reference.forward_bound(q, k, v, np.float32, causal=True)
candidates = {
    "this page": (out, lse),
    'algo="fa2"': cuflash.attention(q, k, v, algo="fa2", causal=True, return_lse=True),
    'algo="fa1"': cuflash.attention(q, k, v, algo="fa1", causal=True, return_lse=True),
}
for name, result in candidates.items():
    ratios = bound.ratios(*result)
    print(f"{name:12s} error / bound: out {ratios[0].max():.3f}, lse {ratios[1].max():.3f}")
    assert max(x.max() for x in ratios) < 1

# %%
# FlashAttention-1 has the two loops the other way round: tiles of keys outside, tiles of queries
# inside, so that ``O``, ``l`` and ``m`` of all queries travel to memory and back in each round.
# :ref:`sphx_glr_gallery_pages_plot_3_traffic.py` counts what that costs.
#
# What the kernels do beyond this page, all of it exact:
#
# - The maximum need not be the true one. Any number near it keeps exponentials small, so kernels
#   raise it only when they have to, and save the products with ``rescale``.
# - Exponentials are powers of 2, with ``scale * log2(e)`` in one multiply-add.
# - Tiles that a mask hides as a whole are skipped.
#
# :doc:`/numerics` has the order of operations and the bounds; :doc:`/reading-kernels` leads through
# the kernels.

"""
The memory traffic of fa1, fa2 and unfused attention
====================================================

The papers' claim is about bytes, not about arithmetic: attention is faster when the matrix of
scores never goes to memory and back. Every plan of cuflash counts its bytes, by the papers'
formulas with its own tiles. No GPU is needed for that: the plans of this page are for an H200
that is not here. These are counts; :doc:`/io` compares them with a GPU's own counters.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash

H200 = cuflash.Device(90, "NVIDIA H200", multiprocessors=132)


def plan(tokens, dim, algo, **options):
    """The plan of 16 heads of halves."""
    x = np.broadcast_to(np.float16(0), (1, 16, tokens, dim))  # takes no memory
    return cuflash.plan(x, x, x, algo=algo, engine="mma", device=H200, **options)


# %%
# What is counted
# ---------------
#
# Every load and store of a tile, for :math:`N` queries and as many keys of head dim :math:`d`. A
# tile of queries "visits" the tiles of keys that it sees.
#
# - **Unfused**: the scores are written, read by the softmax, written again as weights and read by
#   the second product. That is :math:`4 N^2` numbers beside the operands.
# - **fa1**: keys and values move once. At each visit the queries are read, and the state of their
#   rows, :math:`O`, :math:`l` and :math:`m`, is read and written.
# - **fa2**: the queries and the result move once. At each visit a tile of keys and values is read.
#   There is no state in memory.
#
# With tiles of :math:`B_k` keys in fa1 and :math:`B_q` queries in fa2, in numbers,
#
# .. math::
#
#    unfused \approx 4 N^2, \qquad
#    fa1 \approx \frac{N}{B_k}\, N\, (d + 2 (d + 2)), \qquad
#    fa2 \approx \frac{N}{B_q}\, N\, 2 d.
#
# All three grow with :math:`N^2`. What differs is the factor: tiles of hundreds of rows divide it.

p = plan(4096, 64, "fa2")
print(f"fa1 moves {plan(4096, 64, 'fa1').traffic / 1e9:.3f} GB,")
print(f"fa2 moves {p.traffic / 1e9:.3f} GB, unfused {p.unfused_traffic / 1e9:.3f} GB")

# %%
# Over the number of tokens
# -------------------------

lengths = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
for ax, dim in zip(axes, (64, 128)):
    plans = {algo: [plan(n, dim, algo) for n in lengths] for algo in ("fa1", "fa2")}
    ax.loglog(lengths, [x.unfused_traffic for x in plans["fa2"]], "o-", label="unfused")
    for algo, found in plans.items():
        ax.loglog(lengths, [x.traffic for x in found], "o-", label=algo)
    ax.set(title=f"head dim {dim}", xlabel="tokens", xticks=lengths[::2])
    ax.set_xticklabels([str(n) for n in lengths[::2]])
    ax.minorticks_off()
    ax.grid(alpha=0.3)
axes[0].set_ylabel("bytes, 16 heads of halves")
axes[0].legend()
figure.tight_layout()

# %%
# At head dim 64 fa1 has tiles of 512 keys and moves fewer bytes than fa2 with its 128 queries. At
# 128 its state is twice as wide and the tiles half as long, and fa2 moves fewer. For
# short problems the plan takes tiles of 64 queries, so that all multiprocessors have work: there
# the lines of fa2 bend.
#
# The other reason for fa2 is not in the picture: fa1 has one thread block for each head, so with
# few heads most of a GPU waits.
#
# Causal, and gradients
# ---------------------
#
# A causal mask hides half of the visits. Gradients compute the scores again from the log-sum-exp of
# each row; unfused, seven matrices of scores move.

table = [
    ("forward", {}),
    ("forward, causal", {"causal": True}),
    ("backward", {"backward": True}),
    ("backward, causal", {"backward": True, "causal": True}),
]
print(f"{'GB, 4096 tokens, head dim 128':30s} {'fa1':>7s} {'fa2':>7s} {'unfused':>8s}")
for name, options in table:
    fa1, fa2 = (plan(4096, 128, algo, **options) for algo in ("fa1", "fa2"))
    print(
        f"{name:30s} {fa1.traffic / 1e9:7.3f} {fa2.traffic / 1e9:7.3f}"
        f" {fa2.unfused_traffic / 1e9:8.3f}"
    )

# %%
# A cross-check
# -------------
#
# The forward formula of fa2, counted here by hand: queries, result and log-sum-exp once, and for
# each tile of queries all keys and values.

n, dim, heads, half = 4096, 128, 16, 2
p = plan(n, dim, "fa2")
tiles = -(-n // p.block_q)
counted = heads * (n * (dim + dim) * half + n * 4 + tiles * n * 2 * dim * half)
print(p.traffic, counted)
assert p.traffic == counted

"""
Every mask as a picture
=======================

Which keys each query sees: a row is a query, a column a key, and a filled square is a key that
the query sees. :func:`cuflash.reference.visible_keys` is the definition of all options that hide
keys, and the pictures of this page are drawn from it.
"""

import matplotlib.pyplot as plt
import numpy as np

import cuflash
from cuflash.reference import visible_keys


def draw(pictures, columns=3):
    """Draw pairs of a title and a mask: dark where a query sees a key."""
    rows = -(-len(pictures) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(9, 3.1 * rows), squeeze=False)
    for ax in axes.flat[len(pictures) :]:
        ax.remove()
    for ax, (title, mask) in zip(axes.flat, pictures):
        queries, keys = mask.shape
        grid = {"edgecolors": "0.8", "linewidth": 0.6} if keys < 30 else {}
        ax.pcolormesh(mask[::-1], cmap="Blues", vmin=0, vmax=1.3, **grid)
        ax.set(aspect="equal", xticks=[], yticks=[])
        ax.set_title(title, fontsize=11)
        ax.set_xlabel(f"{keys} keys")
        ax.set_ylabel(f"{queries} queries")
    figure.tight_layout()


# %%
# Causal, and its two alignments
# ------------------------------
#
# With as many queries as keys there is one diagonal. With more keys than queries, as in decoding
# with a cache, ``causal=True`` lets the last query see the last key. ``"top_left"`` lines up the
# first ones. With fewer keys the first queries see nothing under ``causal=True``: their result is
# 0.

shapes = (8, 8), (6, 10), (10, 6)
draw(
    [
        (f"causal={causal!r}", visible_keys(shape, causal=causal))
        for causal in (True, "top_left")
        for shape in shapes
    ]
)

# %%
# Windows, and the position of the first query
# --------------------------------------------
#
# ``window=(left, right)`` counts keys to either side of the diagonal, and ``None`` leaves a side
# open. ``q_offset`` says where the diagonal begins: the first query's position among the keys.

options = [
    ((9, 9), {"window": (2, 1)}),
    ((9, 9), {"window": (2, 0)}),
    ((9, 9), {"window": (None, 2)}),
    ((5, 9), {"causal": True, "q_offset": 1}),
    ((5, 9), {"causal": True, "q_offset": -2}),
    ((5, 9), {"window": (1, 1), "q_offset": 0}),
]
draw(
    [
        (
            ", ".join(f"{name}={value}" for name, value in given.items()),
            visible_keys(shape, **given),
        )
        for shape, given in options
    ]
)

# %%
# Lengths of a padded batch
# -------------------------
#
# ``q_lengths`` and ``kv_lengths`` say how much of each batch entry is valid. The diagonal of
# ``causal=True`` then ends at the last valid query and key. Above, prompts of 10, 6 and 3 tokens;
# below, two new tokens of each over a cache.

lengths = np.array([10, 6, 3])
prompts = visible_keys((3, 1, 10, 10), causal=True, q_lengths=lengths, kv_lengths=lengths)
cache = visible_keys((3, 1, 2, 10), causal=True, kv_lengths=lengths)
draw(
    [(f"{n} valid tokens", mask[0]) for n, mask in zip(lengths, prompts)]
    + [(f"2 queries, {n} valid keys", mask[0]) for n, mask in zip(lengths, cache)]
)

# %%
# Patterns of blocks
# ------------------
#
# A :class:`cuflash.BlockMask` is any pattern, known by blocks. These are its ready-made ones, of
# 192 queries and keys in blocks of 16. Kernels skip blocks that are empty, and look at single
# elements only in blocks that are neither empty nor full.

shape, size = (192, 192), {"block_size": 16}
causal = cuflash.BlockMask.causal(shape, **size)
documents = cuflash.BlockMask.documents(np.repeat([0, 1, 2], [70, 100, 22]), **size)
window = cuflash.BlockMask.sliding_window(shape, (40, 0), **size)
patterns = {
    "causal": causal,
    "sliding_window (40, 0)": window,
    "documents 70, 100, 22": documents,
    "prefix 48": cuflash.BlockMask.prefix(shape, 48, **size),
    "global_local 24, 2 tokens": cuflash.BlockMask.global_local(shape, 24, 2, **size),
    "dilated 64, every 8th": cuflash.BlockMask.dilated(shape, 64, 8, **size),
    "documents & window": documents & window,
    "documents | window": documents | window,
    "~documents": ~documents,
}
draw([(name, mask.to_dense()) for name, mask in patterns.items()])

# %%
# The kinds of the blocks
# -----------------------
#
# The same masks as kernels know them: white blocks are skipped, light ones are looked at element by
# element, dark ones need no look. The share of blocks that are not empty is the share of the time.

draw(
    [
        (f"{name}\n{mask.block_density:.0%} of blocks", mask.kinds / 2)
        for name, mask in patterns.items()
    ]
)

# %%
# Masks of a function, one for each head
# --------------------------------------
#
# ``from_function`` takes any rule. Here each head looks back twice as far as the one before.

heads = cuflash.BlockMask.from_function(
    lambda b, h, q, k: (k <= q) & (q - k < 24 << h), (3, 192, 192), block_size=16
)
draw([(f"head {h}", mask) for h, mask in enumerate(heads.to_dense())])

# %%
# The same picture in text is what ``print`` shows:

print(documents & window)

# %%
# Do these pictures tell the truth? Attention with a mask equals attention over what it shows:

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 192, 64))
for name, mask in patterns.items():
    out = cuflash.attention(q, k, v, mask=mask)
    scores = np.where(mask.to_dense(), q @ k.swapaxes(-1, -2) / 8, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v
    assert np.allclose(out, expected), name

"""What a plan is made for: a device's facts, and one call's shapes and options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..masks.band import Band
from ..masks.predicate import NOT_COMPUTED, MaskForm
from ..operands.checks import checked_integer
from ..operands.dtypes import ACCUMULATORS, ITEM_BYTES, result_dtype
from ..operands.layout import LENGTHS, Layout
from ..operands.spec import Spec
from ..scores.score import UNCHANGED, ScoreForm
from .array_gradients import Wanted

# Shared memory one block may use, by compute capability (CUDA C programming guide, table of
# technical specifications).
SHARED_BYTES = {
    70: 98304, 72: 98304, 75: 65536, 80: 166912, 86: 101376, 87: 166912, 88: 101376, 89: 101376,
    90: 232448, 100: 232448, 103: 232448, 110: 232448, 120: 101376, 121: 101376,
}  # fmt: skip
LEAST_ARCH = 70
# The operands that products read, by direction.
READ = {False: ("q", "k", "v"), True: ("q", "k", "v", "dout")}
# Those of them that lie in memory as planes where float32 is multiplied as these (planes.py).
PLANED = {False: ("k", "v"), True: READ[True]}


@dataclass(frozen=True)
class Device:
    """What the plan needs to know of a machine.

    Parameters
    ----------
    arch : int
        Compute capability times ten (90 for an H200), from 70 on; 0 for the CPU.
    name : str
        For printing.
    multiprocessors : int
        Number of streaming multiprocessors.
    shared_bytes : int, optional
        Shared memory that one block may use; by default that of the architecture.
    cache_bytes : int
        Size of the L2 cache.
    has_features : bool
        Whether its own instructions (sm_90a) can be compiled: by NVRTC 12.9 and later.

    Raises
    ------
    TypeError, ValueError
        For what is no number of that kind.

    Examples
    --------
    >>> Device(90, "NVIDIA H200", multiprocessors=132).shared_bytes
    232448
    """

    arch: int
    name: str = ""
    multiprocessors: int = 100
    shared_bytes: int = 0
    cache_bytes: int = 32 << 20
    has_features: bool = True

    def __post_init__(self) -> None:
        arch = "compute capability times ten, as 90 for an H200, or 0 for the CPU"
        self._check_integer("arch", 0, arch)
        if self.arch and not LEAST_ARCH <= self.arch <= 999:
            raise ValueError(f"arch={self.arch}: give {arch}; GPUs are served from 70 on")
        self._check_integer("multiprocessors", 1, "how many there are, 1 or more")
        self._check_integer("shared_bytes", 0, "bytes of one block, or 0 for the architecture's")
        self._check_integer("cache_bytes", 0, "bytes, 0 or more")
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r}: give a string")
        if not isinstance(self.has_features, bool):
            raise TypeError(f"has_features={self.has_features!r}: give True or False")
        if not self.shared_bytes:
            object.__setattr__(self, "shared_bytes", SHARED_BYTES.get(self.arch, 49152))

    def _check_integer(self, name: str, least: int, wanted: str) -> None:
        """Make a field an int, or raise where it is none or less than `least`."""
        value: Any = getattr(self, name)
        number = checked_integer(name, value, f"give an integer, {wanted}")
        if number < least:
            raise ValueError(f"{name}={value!r}: give {wanted}")
        object.__setattr__(self, name, number)

    @property
    def is_hopper(self) -> bool:
        """Whether it is of the one compute capability that the engine `wgmma` runs on."""
        return self.arch == 90

    @property
    def is_cpu(self) -> bool:
        """Whether this is the CPU."""
        return self.arch == 0

    def __str__(self) -> str:
        return "CPU" if self.is_cpu else f"{self.name or 'GPU'} (sm_{self.arch})"


CPU = Device(0, "CPU", multiprocessors=1)


@dataclass(frozen=True)
class Problem:
    """One call's shapes and options, without its arrays.

    Parameters
    ----------
    dtype : str
        Of the operands and the result: float16, bfloat16, float32 or float64.
    leading : tuple of int
        The broadcast leading axes; grouped heads are two axes, (key heads, group).
    heads : int
        How many of the trailing entries of `leading` belong to one batch entry.
    query_length, key_length, head_dim, value_dim : int
        N, M, D and Dv.
    band : Band
        Causal mask and window.
    score : ScoreForm
        How scores are changed.
    q_lengths, kv_lengths : str
        Integer type of the lengths, empty where there are none.
    q_offset : str
        Integer type of the shifts, empty where the band says what they are.
    aligned : bool
        Whether every row of q, k, v and out (and of the gradients) starts on a multiple of 16
        bytes.
    unmappable : str
        Why tensor maps cannot describe q, k, v and, in backward, dout, or an empty string.
    backward : bool
        The gradients of q, k and v instead of out.
    deterministic : bool
        Whether gradients must be the same bits each time.
    summed : tuple of int
        How many heads share one row of q, k and v, whose gradient sums over them.
    group : int
        How many heads in a row share their keys, values and mask; in backward where no others do,
        in forward those of one batch entry. Else 1.
    mask : str
        "blocks" (a BlockMask), "elements" (an array of bool), or empty for none.
    mask_form : MaskForm
        What shows the elements of blocks that are partial, where kernels evaluate that.
    mask_lists : int
        How many different masks it holds, for heads to share.
    mask_evenness : float
        Visible blocks of a mean row or column of the mask per those of the longest.
    split_keys : int, optional
        Keys of a part; 0 for keys in one piece. By default the plan decides.
    page_size : int
        Keys of a page, of which a table gives each batch entry its own; 0 for keys in a row.
    page_table : str
        Integer type of that table, empty where there is none.
    dropout : bool
        Whether weights are dropped.
    joins : bool
        Whether the result is merged with that of other keys which is in its place.
    sequences : int, optional
        How many sequences lie one behind another in the rows of a head: N and M count the tokens of
        all. None where a head has one.
    longest : tuple of int
        Then, the most queries and keys of a sequence.
    offsets : str
        And the integer type of what says where sequences begin.
    wrt : tuple of Wanted
        Gradients that are asked for beside those of q, k and v.
    own_heads : tuple of int
        Heads of q, k, v and, in backward, dout, where those that share rows count once; by default
        none do.
    """

    dtype: str
    leading: tuple[int, ...]
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    heads: int = 1
    band: Band = Band()
    score: ScoreForm = UNCHANGED
    q_lengths: str = ""
    kv_lengths: str = ""
    q_offset: str = ""
    aligned: bool = True
    unmappable: str = ""
    backward: bool = False
    deterministic: bool = True
    summed: tuple[int, int, int] = (1, 1, 1)
    group: int = 1
    mask: str = ""
    mask_form: MaskForm = NOT_COMPUTED
    mask_lists: int = 1
    mask_evenness: float = 1.0
    split_keys: int | None = None
    page_size: int = 0
    page_table: str = ""
    dropout: bool = False
    joins: bool = False
    sequences: int | None = None
    longest: tuple[int, int] = (0, 0)
    offsets: str = ""
    wrt: tuple[Wanted, ...] = ()
    own_heads: tuple[int, ...] = ()

    @property
    def has_planes(self) -> bool:
        """Whether kernels may take the operands in planes (planes.py)."""
        return self.dtype == "float32"

    def heads_of(self, operand: str) -> int:
        """Heads of q, k, v or dout: those that share rows count once."""
        names = READ[self.backward]
        return self.own_heads[names.index(operand)] if self.own_heads else self.head_count

    @property
    def cuts_all(self) -> bool:
        """Whether keys may be hidden in any tile: by an array of bool, or by scores."""
        return self.mask == "elements" or self.score.hides

    @property
    def has_near_scores(self) -> bool:
        """Whether kernels have fewer instructions for scores near 0: a softcap of halves."""
        return self.score.is_tanh and ITEM_BYTES[self.dtype] == 2

    @property
    def likely_shift(self) -> int:
        """Key q + shift is on the diagonal of query q where lengths are full. One that is given
        counts as the bottom right one: the row that is chosen must not depend on it.
        """
        if self.shift_is_given:
            return self.key_length - self.query_length
        return self.band.shift(self.query_length, self.key_length)

    @property
    def seen_keys(self) -> tuple[int, int]:
        """Half-open range of the keys that then some query of a head sees."""
        return self.band.key_range(0, self.query_length, self.likely_shift, self.key_length)

    @property
    def extents(self) -> tuple[int, int]:
        """The queries and keys of a head, or the most that one packed sequence may have."""
        return self.longest if self.is_packed else (self.query_length, self.key_length)

    @property
    def hides_lengths(self) -> bool:
        """Whether only the device knows, or each call says anew, how many keys queries see."""
        return bool(
            self.kv_lengths or self.is_packed or (self.shift_is_given and not self.band.is_open)
        )

    @property
    def is_packed(self) -> bool:
        """Whether the rows of a head are those of several sequences."""
        return self.sequences is not None

    @property
    def starts(self) -> tuple[str, ...]:
        """The operands that say where packed sequences begin; keys in pages are not packed."""
        if self.sequences is None:
            return ()
        return ("cu_seqlens_q",) if self.page_size else ("cu_seqlens_q", "cu_seqlens_k")

    @property
    def regions(self) -> int:
        """How many spans the rows of a head are cut into: one for each sequence, and one for what
        is before the first. What is behind the last one belongs to its.
        """
        return 1 if self.sequences is None else self.sequences + 1

    @property
    def mask_is_stored(self) -> bool:
        """Whether it has bits of a mask."""
        return bool(self.mask) and not self.mask_form.text

    @property
    def mask_alone(self) -> bool:
        """Whether a mask of blocks alone says what is visible: no band and no lengths."""
        same = not (self.q_lengths or self.kv_lengths or self.is_packed)
        return self.mask == "blocks" and self.band.is_open and same

    @property
    def typical(self) -> Problem:
        """What is planned for: of packed sequences a batch of as many, which share the tokens."""
        if self.sequences is None:
            return self
        count = max(1, self.sequences)
        longest = self.query_length, self.key_length
        queries, keys = (min(-(-n // count), most) for n, most in zip(longest, self.longest))
        if self.page_size:
            keys = self.key_length
        return replace(
            self,
            leading=(count, *self.leading),
            own_heads=tuple(count * heads for heads in self.own_heads),
            query_length=queries,
            key_length=keys,
            sequences=None,
        )

    @property
    def rounded(self) -> Problem:
        """What a forward row is chosen for: the same with lengths rounded up, so that of a cache
        that grows there are few. Gradients, whose rows have limits, are not rounded.
        """
        lengths = self.query_length, self.key_length, *self.longest
        queries, keys, *longest = map(_rounded, lengths)
        if self.backward or (queries, keys, *longest) == lengths:
            return self
        return replace(
            self, query_length=queries, key_length=keys, longest=(longest[0], longest[1])
        )

    @property
    def head_count(self) -> int:
        """B * H: heads of the whole batch."""
        return math.prod(self.leading)

    @property
    def accumulator(self) -> str:
        """The type that sums are held in."""
        return ACCUMULATORS[self.dtype]

    @property
    def shift_is_given(self) -> bool:
        """Whether the caller says where the diagonal lies, by a number or an array of them."""
        return bool(self.q_offset) or isinstance(self.band.alignment, int)

    @property
    def flops(self) -> int:
        """Of the products, per pair of query and key that the band shows; no more is hidden here.
        Packed sequences count as if they were equally long.

        Forward q.k and P v; backward q.k, dS k and dS q over D, and P dout and dout.v over Dv.
        """
        batch = self.typical
        pairs = self.band.count(batch.query_length, batch.key_length) * batch.head_count
        if self.backward:
            return 2 * (3 * self.head_dim + 2 * self.value_dim) * pairs
        return 2 * (self.head_dim + self.value_dim) * pairs

    def __str__(self) -> str:
        lead = "x".join(map(str, self.leading)) or "1"
        text = f"{self.dtype} heads {lead}, queries {self.query_length}, keys {self.key_length}, "
        text += f"head dim {self.head_dim}"
        if self.value_dim != self.head_dim:
            text += f", value dim {self.value_dim}"
        if not self.band.is_open:
            text += f", {self.band}"
        if self.mask:
            text += f", mask of {self.mask}"
        if self.mask_form.text:
            text += f" that show {self.mask_form.text}"
        if self.score.stages:
            text += f", score {self.score}"
        text += ", sinks" if self.score.sink else ""
        text += ", dropout" if self.dropout else ""
        text += ", joined with other keys' result" if self.joins else ""
        for name in ("q_lengths", "kv_lengths", "q_offset"):
            if getattr(self, name):
                text += f", {name}"
        if self.page_size:
            text += f", pages of {self.page_size}"
        if self.is_packed:
            text += f", {self.sequences} packed sequences"
        if self.backward:
            text += ", backward" if self.deterministic else ", backward in any order"
        if self.wrt:
            text += f", gradients of {', '.join(x.name for x in self.wrt)}"
        return text if self.aligned else text + ", rows not aligned to 16 bytes"


EXACT_LENGTHS = 256  # of so few each one counts: heads that are packed multiply queries


def _rounded(length: int) -> int:
    """A length; of more than EXACT_LENGTHS a multiple of 16 that is at most 1/32 longer or 15 rows.
    Tiles, whose sizes are multiples of 16, are as many up to 1,024 rows.
    """
    if length <= EXACT_LENGTHS:
        return length
    step = max(16, 1 << ((length - 1).bit_length() - 6))
    return -(-length // step) * step


MAP_AXES = 3  # leading axes of a tensor map, beside rows and columns


def _unmappable(layout: Layout, queries: int, keys: int, backward: bool) -> str:
    """Why tensor maps cannot describe q, k, v and, in backward, dout, or an empty string."""
    if len(layout.axes) > MAP_AXES:
        return f"tensor maps have {MAP_AXES} leading axes, these fold into {len(layout.axes)}"
    lengths = {"q": queries, "k": keys, "v": keys} | ({"dout": queries} if backward else {})
    for name, length in lengths.items():
        rows, steps = layout.rows[name], layout.axis_strides[name]
        if min((rows, *steps)) < 0:
            return f"tensor maps have no negative strides, {name} has"
        if rows == 0 and length > 1:
            return f"tensor maps repeat no rows, {name} does"
    if layout.pages is not None and layout.pages.pool_size > 1:
        for name, step in (("k", layout.pages.k_stride), ("v", layout.pages.v_stride)):
            if step <= 0:
                return f"tensor maps take pages in ascending order, {name} has others"
    return ""


def own_strides(layout: Layout, operand: str) -> tuple[tuple[int, ...], int]:
    """Strides along the axes in heads of an operand that share no rows, and how many there are."""
    strides, count = [], 1
    for size, step in reversed(list(zip(layout.axes, layout.axis_strides[operand]))):
        strides.append(count if step else 0)
        count *= size if step else 1
    return tuple(strides[::-1]), count


def _group(layout: Layout, names: tuple[str, ...]) -> int:
    """How many heads in a row share the operands of these names."""
    if not layout.axes:
        return 1
    shared = not any(layout.axis_strides[name][-1] for name in names if name in layout.strides)
    return layout.axes[-1] if shared else 1


def _forward_group(layout: Layout, heads: int) -> int:
    """How many heads in a row share keys, values and mask, all of one batch entry."""
    group = _group(layout, ("k", "v", "mask", *LENGTHS))
    if group < 2 or heads % group:
        return 1
    return group if all(layout.axis_strides[name][-1] for name in ("q", "out", "lse")) else 1


def _backward_group(layout: Layout) -> int:
    """How many heads in a row share keys, values and mask, if all that share them are in a row."""
    group = _group(layout, ("dk", "dv", "mask"))
    return group if layout.summed[1:] == (group, group) else 1


def make_problem(
    layout: Layout, q: Spec, k: Spec, v: Spec, *, band: Band, score: ScoreForm,
    lengths: dict[str, str], mask: str = "", mask_form: MaskForm = NOT_COMPUTED,
    mask_evenness: float = 1.0,
    page_size: int = 0, page_table: str = "",
    aligned: bool, backward: bool = False, deterministic: bool = True,
    split_keys: int | None = None, dropout: bool = False, joins: bool = False, offsets: str = "",
    wrt: tuple[Wanted, ...] = (),
) -> Problem:  # fmt: skip
    """The problem that a layout and the options pose."""
    heads = layout.out_shape[-3] if len(layout.out_shape) > 2 else 1
    return Problem(
        dtype=result_dtype(q.dtype, k.dtype, v.dtype).name,
        leading=layout.leading,
        heads=heads,
        query_length=q.shape[-2],
        key_length=k.shape[-2],
        head_dim=q.shape[-1],
        value_dim=v.shape[-1],
        band=band,
        score=score,
        q_lengths=lengths.get("q_lengths", ""),
        kv_lengths=lengths.get("kv_lengths", ""),
        q_offset=lengths.get("q_offset", ""),
        aligned=aligned,
        unmappable=_unmappable(layout, q.shape[-2], k.shape[-2], backward),
        backward=backward,
        deterministic=deterministic,
        summed=layout.summed if backward else (1, 1, 1),
        group=_backward_group(layout) if backward else _forward_group(layout, heads),
        mask=mask,
        mask_form=mask_form,
        mask_lists=layout.mask.lists if layout.mask else 1,
        mask_evenness=mask_evenness,
        split_keys=split_keys,
        page_size=page_size,
        page_table=page_table,
        dropout=dropout,
        joins=joins,
        sequences=layout.packing.sequences if layout.packing else None,
        longest=layout.packing.longest if layout.packing else (0, 0),
        offsets=offsets,
        wrt=wrt,
        own_heads=tuple(own_strides(layout, name)[1] for name in READ[backward]),
    )

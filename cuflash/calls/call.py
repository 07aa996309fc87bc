"""Kinds of call: what is checked and planned once for arguments of one form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from ..dropout import Dropout, PlacedSeed
from ..masks.band import Band
from ..masks.predicate import NOT_COMPUTED, MaskForm, Predicate
from ..numpy_engine import walks
from ..numpy_engine.merge import merge_parts
from ..numpy_engine.tiles import head_masks
from ..operands.checks import (
    check_out,
    check_page_numbers,
    check_pools,
    check_read,
    checked_integer,
    checked_truth,
)
from ..operands.dtypes import result_dtype
from ..operands.layout import Layout, Packing, check_shapes, make_layout, unpaged
from ..operands.spec import Spec, check_apart, clearance, conformed
from ..planning.array_gradients import wanted_of
from ..planning.copies import Move
from ..planning.plan import Plan, make_plan
from ..planning.problem import Device, make_problem
from ..scores.captured import captured_views, is_score_operand, make_score
from ..scores.score import checked_scale
from ..scores.wanted import Target, make_target, operand_given, titles_of
from .arguments import Options
from .arrays import OF_BATCH
from .packed import sequences_of, tokens_first
from .suited import (
    has_whole_chunks,
    is_read_in_chunks,
    is_suited,
    suited,
    with_whole_chunks,
)

SPLIT_STEP = 16  # keys
# A result, what it must not overlap, and their specs; bytes meet where low < distance < high, which
# stand in the middle.
Apart: TypeAlias = tuple[str, str, int, int, tuple[Spec, Spec]]
# Axes behind the leading ones; 2 of all others.
_TRAILING = {"lse": 1, "dlse": 1, "page_table": 1, "seed": 0, **dict.fromkeys(OF_BATCH, 0)}


class Copy(NamedTuple):
    """An operand that an engine reads or writes as an array of this spec, not the caller's own."""

    operand: str
    spec: Spec


def checked_split(value: object) -> int | None:
    """`split_keys` as an int or None.

    Raises
    ------
    TypeError, ValueError
        If it is not a number of keys, or not a multiple of 16.
    """
    if value is None:
        return None
    wanted = f"give a multiple of {SPLIT_STEP}, 0 for keys in one piece, or None"
    number = checked_integer("split_keys", value, wanted)
    if number < 0 or number % SPLIT_STEP:
        raise ValueError(f"split_keys={value!r}: {wanted}")
    return number


def apart_of(pairs: Iterable[tuple[str, str]], given: dict[str, Spec]) -> tuple[Apart, ...]:
    """Those of the pairs of which both are given."""
    return tuple(
        (a, b, *clearance(given[a], given[b]), (given[a], given[b]))
        for a, b in pairs
        if a in given and b in given
    )


def keep_apart(pairs: tuple[Apart, ...], addresses: dict[str, int]) -> None:
    """Raise a ValueError for a result that overlaps what it must not."""
    for a, b, low, high, specs in pairs:
        if low < (distance := addresses[b] - addresses[a]) < high:
            check_apart(a, b, *specs, distance)


class Call:
    """All that repeats from call to call of one kind: layout, plan and, on a GPU, the launch.

    Subclasses say which arrays there are, which of them are written, and what is expected of them.

    Attributes
    ----------
    layout : Layout
    page_size : int
        Keys of a page, 0 where k and v have none.
    plan : Plan
    scale : float
    dropout_p : float
    score : Score
    captured : tuple of Captured
        The arrays that it reads.
    targets : tuple of Target
        Those whose gradients are asked for.
    mask_held : tuple
        What the mask's function reads, where kernels evaluate it. Another mask's arrays may hold
        something else.
    titles : dict of str to str
        What errors call the results.
    results : tuple of Copy
        What is returned, and the spec of the array that is made where the caller gives none.
    copied : tuple of Copy
        What is read from a copy.
    staged : tuple of Copy
        What an engine cannot write itself: it writes elsewhere, and that is copied.
    own : dict of str to Spec
        The caller's arrays, and results as they are made.
    unsuited : tuple of Copy
        What tensor cores take from copies or by way of them in less time.
    apart : tuple of Apart
    tokens_first : frozenset of str
        Operands of packed sequences: the caller's arrays have tokens ahead of heads, specs have
        heads ahead of tokens.
    launch : function or None
        Of a GPU's kernels, once they are compiled.
    copies : object
        What then makes copies, where there are any.
    """

    __slots__ = (
        "apart", "captured", "copied", "copies", "dropout_p", "has_lists", "is_empty", "launch",
        "layout", "lse_dtype", "mask_held", "out_dtype", "own", "page_size", "plan", "results",
        "scale", "score", "staged", "targets", "titles", "tokens_first", "unsuited",
        "workspace_bytes",
    )  # fmt: skip
    operands: ClassVar[tuple[str, ...]]  # in the order of the kernels' pointers
    matrices: ClassVar[tuple[str, ...]]  # those among them whose rows kernels load in chunks
    written: ClassVar[dict[str, str]]  # the results among them, and what errors call these
    empty_values: ClassVar[tuple[float, ...]]  # of the results where there is no query or no key
    backward: ClassVar[bool]

    def __init__(
        self, given: dict[str, Spec], options: Options, device: Device, mask_kind: str,
        unaligned: frozenset[str], predicate: Predicate | None = None, mask_evenness: float = 1.0,
        copies: frozenset[str] = frozenset(),
    ):  # fmt: skip
        inputs = q, k, v = given["q"], given["k"], given["v"]
        table = given.get("page_table")
        self.page_size = 0
        starts = given.get("cu_seqlens_q")
        sequences = None if starts is None else starts.shape[0] - 1
        if table is not None:
            check_pools(q, k, v, table, "kv_lengths" in given, sequences)
            self.page_size = k.shape[-2]
            k, v = (unpaged(x, table, sequences is not None) for x in (k, v))
        check_shapes(q, k, v)
        packing, longest = None, (q.shape[-2], k.shape[-2])
        self.tokens_first: frozenset[str] = frozenset()
        self.unsuited: tuple[Copy, ...] = ()
        if sequences is not None:
            self.tokens_first = tokens_first(is_paged=table is not None)
            packing = Packing.of(sequences, longest, options.longest or (None, None))
            longest = packing.longest
        self.out_dtype = result_dtype(q.dtype, k.dtype, v.dtype)
        self.lse_dtype = np.dtype("float64" if self.out_dtype == np.float64 else "float32")
        offset = given.get("q_offset", options.q_offset)
        band = Band.from_options(options.causal, options.window, offset)
        accumulator = self.lse_dtype.name
        self.dropout_p = options.dropout_p
        self.scale = 1.0 / math.sqrt(q.shape[-1])
        if options.scale is not None:
            self.scale = checked_scale(options.scale, accumulator)
        lengths = {name: given.get(name) for name in OF_BATCH}
        mask = given.get("mask")
        gqa = checked_truth("enable_gqa", options.enable_gqa)
        broadcast = {
            **lengths, "mask": mask, "page_table": table, "enable_gqa": gqa, "packing": packing,
        }  # fmt: skip
        self.titles = self.written | titles_of(options.wrt)
        wanted = {
            own: operand_given(name, options.score_mod, given)
            for own, name in zip(titles_of(options.wrt), options.wrt)
        }
        specs = self._specs(given, inputs, broadcast, mask_kind, device, wanted, unaligned, copies)
        self.layout = self._layout(specs, broadcast)
        self.score, self.captured = make_score(
            options.score_mod, options.softcap, given | dict(self.copied),
            self.layout.score_shape, longest[1], self.scale, accumulator,
            band.right is not None and band.right <= 0,
        )  # fmt: skip
        self.targets = tuple(
            make_target(name, self.score.form, specs[own], self.layout.score_shape, longest[1])
            for own, name in zip(wanted, options.wrt)
        )
        if self.targets:
            placed = {x.operand: x.leading for x in self.targets if x.kind != "scattered"}
            self.layout = self._layout(specs, broadcast | {"placed": placed})
            self._stage_scattered(specs, device)
        if mask and mask_kind == "blocks" and mask.shape[-2:] != longest:
            raise ValueError(
                f"mask is a BlockMask of shape {mask.shape}: it must have {longest[0]} queries "
                f"and {longest[1]} keys"
            )
        rows = (spec for name, spec in specs.items() if name in self.matrices)
        problem = make_problem(
            self.layout,
            *(x.with_columns(specs[name].shape[-1]) for name, x in zip("qkv", (q, k, v))),
            band=band,
            score=self.score.form,
            lengths={name: spec.dtype.name for name, spec in lengths.items() if spec is not None},
            mask=mask_kind,
            mask_form=self._mask_form(predicate, mask, device),
            mask_evenness=mask_evenness if self.backward else 1.0,
            page_size=self.page_size,
            page_table=table.dtype.name if table else "",
            aligned=unaligned <= copies | {"bias"} and all(x.rows_are_aligned() for x in rows),
            backward=self.backward,
            deterministic=checked_truth("deterministic", options.deterministic),
            split_keys=checked_split(options.split_keys),
            dropout=self.dropout_p > 0,
            joins=options.joins,
            offsets=starts.dtype.name if starts else "",
            wrt=tuple(wanted_of(x, specs[x.operand], self.layout) for x in self.targets),
        )
        self.plan: Plan = make_plan(problem, device, options.algo, options.engine)
        if not device.is_cpu:
            self.plan = self.plan.with_copies((*self.copied, *self.staged))
        self.mask_held = predicate.held if predicate and problem.mask_form.text else ()
        self.has_lists = mask_kind == "blocks"
        self.is_empty = 0 in self.layout.out_shape or k.shape[-2] == 0
        self.workspace_bytes = 0 if self.is_empty else self.plan.workspace_bytes
        self.launch: Callable[..., None] | None = None
        self.copies: Any = None

    @property
    def reads(self) -> dict[str, Move]:
        """What is copied ahead of the kernels."""
        return {name: Move(self.own[name], spec) for name, spec in self.copied}

    @property
    def writes(self) -> dict[str, Move]:
        """What is copied behind them."""
        return {name: Move(spec, self.own[name]) for name, spec in self.staged}

    def _mask_form(
        self, predicate: Predicate | None, mask: Spec | None, device: Device
    ) -> MaskForm:
        """What kernels evaluate of a mask."""
        if predicate is None or mask is None or device.is_cpu:
            return NOT_COMPUTED
        size = mask.shape[-4] if len(mask.shape) > 3 else 1
        return predicate.for_entries(size, math.prod(self.layout.score_shape[:-2]))

    @property
    def wrt(self) -> tuple[str, ...]:
        """The arrays whose gradients are asked for."""
        return tuple(x.name for x in self.targets)

    def _specs(
        self, given: dict[str, Spec], inputs: tuple[Spec, Spec, Spec], broadcast: dict[str, Any],
        mask_kind: str, device: Device, wanted: dict[str, Spec], unaligned: frozenset[str],
        copies: frozenset[str],
    ) -> dict[str, Spec]:  # fmt: skip
        """The spec of each array that an engine is given, and what has to be done for that."""
        read = (conformed(spec, self.out_dtype) for spec in inputs)
        expected = self._expected(inputs, make_layout(*read, **broadcast))
        expected |= {name: Spec.contiguous(x.shape, x.dtype) for name, x in wanted.items()}
        made = {
            name: Spec.contiguous(self._turned(name, spec).shape, spec.dtype)
            for name, spec in expected.items()
        }
        for name, spec in expected.items():
            if name in given:
                self._check(name, given[name], spec)
        known = {name: given.get(name, self._turned(name, spec)) for name, spec in made.items()}
        specs = {name: self._seen(name, spec, device) for name, spec in known.items()}
        if not device.is_cpu:
            self.unsuited = self._unsuited(specs, given.get("bias"), unaligned, device)
        suits = {name: spec for name, spec in self.unsuited if name in copies}
        specs |= {name: spec for name, spec in suits.items() if name in specs}
        self.own = given | known
        self.results = tuple(Copy(name, made[name]) for name in self.titles)
        named = (*self.operands, *wanted)
        changed = [name for name in named if name in suits or specs.get(name) != known.get(name)]
        scored = {name: spec for name, spec in given.items() if is_score_operand(name)}
        whole = {
            name: suits.get(name, conformed(x, x.dtype, rows=False)) for name, x in scored.items()
        }
        self.copied = tuple(
            Copy(name, specs[name])
            for name in changed
            if name not in self.titles and (name in given or name in self.matrices)
        ) + tuple(Copy(name, x) for name, x in whole.items() if name in suits or x != scored[name])
        self.staged = tuple(Copy(name, specs[name]) for name in self.titles if name in changed)
        others = [*expected, *OF_BATCH, "page_table", "seed", *scored]
        others += ["mask"] if mask_kind == "elements" else []
        self.apart = apart_of(self._pairs(others), given)
        return specs

    def _unsuited(
        self, specs: dict[str, Spec], bias: Spec | None, unaligned: frozenset[str], device: Device
    ) -> tuple[Copy, ...]:
        """What tensor cores do not take as it is, and as what they do."""
        found = [
            Copy(name, suited(spec))
            for name, spec in specs.items()
            if name in self.matrices and (name in unaligned or not is_suited(spec, device))
        ]
        if bias is not None and is_read_in_chunks(bias, device):
            if "bias" in unaligned or not has_whole_chunks(bias):
                found.append(Copy("bias", with_whole_chunks(bias)))
        return tuple(found)

    def _stage_scattered(self, specs: dict[str, Spec], device: Device) -> None:
        """On GPUs, gradients at indices that are worked out go to arrays in C order first."""
        for target in self.targets if not device.is_cpu else ():
            own = specs[target.operand]
            dense = Spec.contiguous(own.shape, own.dtype)
            if target.kind == "scattered" and own.strides != dense.strides:
                self.staged += (Copy(target.operand, dense),)

    def _pairs(self, names: Iterable[str]) -> list[tuple[str, str]]:
        """Pairs of a result and what it must not overlap."""
        written = list(self.titles)
        read = [name for name in names if name not in written]
        pairs = [(result, other) for result in written for other in read]
        return pairs + [(a, b) for i, a in enumerate(written) for b in written[:i]]

    def heads_first(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The caller's arrays, as views with the axes that specs have."""
        turned = self.tokens_first
        return {name: x.swapaxes(0, 1) if name in turned else x for name, x in arrays.items()}

    def _turned(self, name: str, spec: Spec) -> Spec:
        """From the axes of the caller's array to those of specs, or back."""
        return spec.heads_first() if name in self.tokens_first else spec

    def _check(self, name: str, spec: Spec, expected: Spec) -> None:
        spec, expected = self._turned(name, spec), self._turned(name, expected)
        if name in self.titles:
            check_out(self.titles[name], spec, expected.shape, expected.dtype)
        elif name not in "qkv":
            check_read(name, spec, expected.shape, expected.dtype, exact=name == "lse")

    def _expected(self, inputs: tuple[Spec, Spec, Spec], shapes: Layout) -> dict[str, Spec]:
        """What arrays of the caller must be like, all but lengths and mask."""
        raise NotImplementedError

    def _seen(self, name: str, spec: Spec, device: Device) -> Spec:
        """The spec of the array that an engine is given for the operand `spec`."""
        raise NotImplementedError

    def _layout(self, specs: dict[str, Spec], broadcast: dict[str, Any]) -> Layout:
        raise NotImplementedError

    def run_host(self, arrays: dict[str, Any], mask: Any, seed: int | PlacedSeed | None) -> None:
        """Run on NumPy arrays that are ready to be read and written."""
        raise NotImplementedError

    def _host_options(
        self, arrays: dict[str, Any], mask: Any, seed: int | PlacedSeed | None
    ) -> dict[str, Any]:
        """What the NumPy engine is told beside its arrays."""
        dropout = None
        if self.dropout_p:
            placed = seed if isinstance(seed, PlacedSeed) else PlacedSeed(seed)
            number = int(arrays["seed"].item()) if placed.seed is None else placed.seed
            dropout = Dropout(self.dropout_p, number, (placed.query, placed.key, placed.head))
        if mask is not None:
            layout, problem = self.layout, self.plan.problem
            keys = problem.longest[1] if problem.is_packed else problem.key_length
            mask = head_masks(mask, layout, keys)
        captured = captured_views(self.captured, arrays)
        return {
            "scale": self.scale, "score": self.score, "captured": captured, "mask": mask,
            "dropout": dropout,
        }  # fmt: skip

    def _walk(self, walk: Callable[..., None], arrays: dict[str, Any], **options: Any) -> None:
        """Call a function of the NumPy engine: of packed sequences once for each."""
        if self.layout.packing is None:
            walk(self.plan, *self._spread(arrays), **options)
            return
        for number, own in enumerate(sequences_of(arrays, bool(self.page_size))):
            walk(self.plan, *self._spread(own), **options, sequence=number)

    def _spread(self, arrays: dict[str, Any]) -> list[Any]:
        """Views of the operands, broadcast to the problem's leading axes by stride 0."""
        views = []
        for name in self.operands:
            x = arrays.get(name)
            if x is not None:
                steps = [s * x.dtype.itemsize for s in self.layout.strides[name]]
                tail = len(x.shape) - _TRAILING.get(name, 2)
                leading = self.layout.leading
                if self.page_size and name in ("k", "v"):  # pages stand where batch entries do
                    others = 0 if self.layout.packing else 1
                    leading = (len(x), *leading[others:])
                    steps = [x.strides[0], *steps[others:]]
                shape, strides = leading + x.shape[tail:], (*steps, *x.strides[tail:])
                x = np.lib.stride_tricks.as_strided(x, shape, strides)
            views.append(x)
        return views


class ForwardCall(Call):
    """Calls of `attention`."""

    __slots__ = ()
    operands = ("q", "k", "v", "out", "lse", *OF_BATCH)
    matrices = ("q", "k", "v", "out")
    written: ClassVar = {"out": "out", "lse": "lse (the second of out)"}
    empty_values = (0, -np.inf)
    backward = False

    def _expected(self, inputs: tuple[Spec, Spec, Spec], shapes: Layout) -> dict[str, Spec]:
        return {
            **dict(zip("qkv", inputs)),
            "out": Spec.contiguous(shapes.out_shape, self.out_dtype),
            "lse": Spec.contiguous(shapes.lse_shape, self.lse_dtype),
        }

    def _seen(self, name: str, spec: Spec, device: Device) -> Spec:
        if name == "lse" or (name == "out" and device.is_cpu):
            return spec
        if name in ("k", "v") and self.page_size and device.is_cpu:  # gathered tile by tile
            return conformed(spec, spec.dtype, rows=False)
        return conformed(spec, self.out_dtype)  # a kernel's rows are contiguous

    def _layout(self, specs: dict[str, Spec], broadcast: dict[str, Any]) -> Layout:
        return make_layout(*(specs[x] for x in ("q", "k", "v", "out", "lse")), **broadcast)

    def run_host(self, arrays: dict[str, Any], mask: Any, seed: int | PlacedSeed | None) -> None:
        """Run on NumPy arrays that are ready to be read and written."""
        options = self._host_options(arrays, mask, seed)
        if self.page_size:
            table, lengths = arrays["page_table"], arrays["kv_lengths"]
            length = self.plan.problem.key_length
            valid = np.clip(np.broadcast_to(lengths, len(table)), 0, length)
            check_page_numbers(table, map(range, valid), len(arrays["k"]), self.page_size)
            options["page_table"] = table
        if self.layout.packing is not None:  # tokens of no sequence
            for (name, _), value in zip(self.results, self.empty_values):
                if name in arrays:
                    arrays[name][...] = value
        earlier = {}
        if self.plan.problem.joins:
            earlier = {name: arrays[name].copy() for name in ("out", "lse")}
        self._walk(walks.forward, arrays, **options)
        if earlier:
            outs, lses = ([x, arrays[name]] for name, x in earlier.items())
            merge_parts(outs, lses, arrays["out"], arrays["lse"])


class BackwardCall(Call):
    """Calls of `attention_backward`."""

    __slots__ = ()
    operands = (
        "dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv", *OF_BATCH,
    )  # fmt: skip
    matrices = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
    written: ClassVar = {
        f"d{name}": f"d{name} (the {number} of grads_out)"
        for name, number in zip("qkv", ("first", "second", "third"))
    }
    empty_values = (0, 0, 0)
    backward = True

    def _expected(self, inputs: tuple[Spec, Spec, Spec], shapes: Layout) -> dict[str, Spec]:
        matrix = Spec.contiguous(shapes.out_shape, self.out_dtype)
        row = Spec.contiguous(shapes.lse_shape, self.lse_dtype)
        return {
            **dict(zip("qkv", inputs)),
            **dict.fromkeys(("dout", "out"), matrix),
            **dict.fromkeys(("lse", "dlse"), row),
            **{f"d{x}": Spec.contiguous(own.shape, own.dtype) for x, own in zip("qkv", inputs)},
        }

    def _seen(self, name: str, spec: Spec, device: Device) -> Spec:
        if name in ("lse", "dlse"):
            return conformed(spec, self.lse_dtype, rows=False)
        if name in self.titles and device.is_cpu:  # the sums themselves
            return conformed(spec, self.lse_dtype, rows=False)
        if name not in self.matrices:
            return conformed(spec, spec.dtype, rows=False)
        return conformed(spec, self.out_dtype)

    def _layout(self, specs: dict[str, Spec], broadcast: dict[str, Any]) -> Layout:
        gradients = {name: specs[name] for name in ("dout", "dlse", *self.written)}
        operands = (specs[x] for x in ("q", "k", "v", "out", "lse"))
        return make_layout(*operands, gradients=gradients, **broadcast)

    def run_host(self, arrays: dict[str, Any], mask: Any, seed: int | PlacedSeed | None) -> None:
        """Run on NumPy arrays that are ready to be read and written."""
        for name, _ in self.results:
            arrays[name][...] = 0
        gradients = {x.name: (x, self._gradient(x, arrays)) for x in self.targets}
        options = self._host_options(arrays, mask, seed)
        self._walk(walks.backward, arrays, **options, gradients=gradients)

    def _gradient(self, target: Target, arrays: dict[str, Any]) -> Any:
        """A gradient as heads add to it: with leading axes as operands have them, those of packed
        sequences behind one of the sequences, queries and keys; or as it is.
        """
        x = arrays[target.operand]
        if target.kind == "scattered":
            return x
        problem, leading = self.plan.problem, self.plan.problem.leading
        steps = (*self.layout.strides[target.operand], *target.steps)
        lengths = problem.query_length, problem.key_length
        if problem.sequences is not None:
            leading, lengths = (problem.sequences, *leading), problem.longest
            steps = (self.layout.entry_strides[target.operand], *steps)
        shape = (*leading, *(n if step else 1 for n, step in zip(lengths, target.steps)))
        return np.lib.stride_tricks.as_strided(x, shape, [s * x.itemsize for s in steps])

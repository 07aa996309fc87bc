"""Rows of a comparison: measured, marked, averaged and printed. against_peers.py says of what."""

from __future__ import annotations

import statistics

from benchmarks import gpu as bench
from benchmarks.gpu import Problem

FA2 = "torch FA2", "FLASH_ATTENTION"
EFFICIENT = "torch efficient", "EFFICIENT_ATTENTION"
CUDNN = "cuDNN", "CUDNN_ATTENTION"
NAMES = {  # in docs/performance.md
    "FA3": "FlashAttention-3", "FA4": "FlashAttention-4", FA2[0]: "torch FlashAttention-2",
}  # fmt: skip
WIDTHS, LENGTHS = (64, 128, 256), (1024, 4096, 16384)  # of the field's grid
LONG = LENGTHS[1:]  # of the problems of the grid that the mean is taken over
FASTEST = "the fastest"  # of several peers, in a row
IDENTITY = "group", "problem", "name", "peer", "unit"  # keys of what a row is about


class Session:
    """What all groups share: the timer, what is asked for, the ceilings, and the rows found."""

    def __init__(self, timer, milliseconds: float, quick=False, widths=(), lengths=()):
        self.timer, self.milliseconds = timer, milliseconds
        self.quick, self.widths, self.lengths = quick, widths, lengths
        self.ceilings: dict[str, float] = {}
        self.rows: list[dict] = []

    def asked(self, cases) -> list[tuple]:
        """The cases, each a shape and more, whose length and head dim the command line asks for."""

        def is_asked(length, width):
            return length in (self.lengths or [length]) and width in (self.widths or [width])

        return [case for case in cases if is_asked(*case[0][2:])]

    def field(self) -> list[tuple]:
        """Shape and mask of what is asked for of the field's grid: 16k tokens of 2048 features."""
        return self.asked(
            ((16384 // length, 2048 // width, length, width), causal)
            for width in WIDTHS
            for length in ((4096,) if self.quick else LENGTHS)
            for causal in (False, True)
        )

    def keep(self, rows: list[dict]) -> None:
        """Add rows, in place of those of the same figures that an earlier command found."""
        known = {identity(row) for row in rows}
        self.rows = [row for row in self.rows if identity(row) not in known] + rows

    def compare(self, group, problem: Problem, name, call, peers, note="") -> None:
        """Time `call` of cuflash and its peers; a row per peer.

        `peers` are (name, function or None where it is absent, target ratio or None).
        """
        contenders = {name: call, **{peer: function for peer, function, _ in peers}}
        pairs = [(name, peer, target) for peer, _, target in peers]
        self.compare_pairs(group, problem, contenders, pairs, note)

    def compare_pairs(self, group, problem: Problem, contenders, pairs, note="") -> list[dict]:
        """Time all contenders in turn; a row per pair. Returns the rows.

        `contenders` are functions by name, None where one is absent; `pairs` are (name of a call
        of cuflash, name of its peer, target ratio or None). A tuple of names stands for the
        fastest of these peers.
        """
        results, reasons = {}, {}
        for name, function in contenders.items():
            try:
                if function is None:
                    raise ModuleNotFoundError("torch is not installed")
                for operand in problem.results:
                    bench.spoil(operand)
                results[name] = bench.all_values(function())
                bench.need_gpu().cuda.Device().synchronize()
            except Exception as error:
                results.pop(name, None)
                reasons[name] = bench.in_words(error)
        times = {}
        if any(name in results for name, _, _ in pairs):
            columns = self.timer.measure([contenders[x] for x in results], self.milliseconds)
            times = dict(zip(results, columns))
        rows = []
        for name, peer, target in pairs:
            row = {"group": group, "problem": problem.label, "shape": problem.shape, "name": name}
            row.update(peer=peer, target=target, note=note)
            if isinstance(peer, tuple):
                peer, absent = fastest(peer, times)
                words = [peer, absent and f"without {', '.join(absent)}"]
                row.update(peer=FASTEST, absent=absent, note=", ".join(filter(None, words)))
            if name not in times:
                row.update(reason=reasons[name], mark="FAILED")
            else:
                row.update(self._rate(problem, times[name]))
                if peer in times:
                    same = peer not in problem.others
                    error = problem.error(results[peer], results[name]) if same else 0.0
                    row.update(_ratio(problem, times[name], times[peer], error, target))
                else:
                    row.update(mark="n/a", reason=reasons.get(peer, "there is none"))
            rows.append(row)
        self.keep(rows)
        return rows

    def _rate(self, problem: Problem, times) -> dict:
        """Columns about a call of cuflash by itself."""
        median = statistics.median(times)
        tflops = problem.flops / median / 1e6
        top = self.ceilings.get("fp32" if problem.dtype == "fp32" else "bf16")
        return {"us": median, "tflops": tflops, "ceiling": top and tflops / top}

    def add(self, group, problem, name, value, target, unit, note="", **more) -> None:
        """A row of a figure where less is better."""
        row = {"group": group, "problem": problem, "name": name, "value": value, "target": target}
        row.update(
            unit=unit, note=note, mark="n/a" if value is None else mark(target, value), **more
        )
        self.keep([row])

    def add_memory(self, group, problem: Problem, name, call, plan, limit) -> None:
        """A row of the memory that a call takes at its peak; `plan` is a function."""
        try:
            call()  # compiles
            peak, planned = self.timer.taken_bytes(call)[0], plan()
            as_planned = -(-planned.workspace_bytes // 512) * 512 == peak  # the pool's chunks
            note = "as planned" if as_planned else f"planned {planned.workspace_bytes}"
            parts = ", ".join(part for part, _ in planned.workspace)
            self.add(group, problem.label, name, peak, limit, "bytes", f"{note}: {parts or 'none'}")
        except Exception as error:
            self.add(group, problem.label, name, None, limit, "bytes", bench.in_words(error))


def versus_torch(s: Session, group, problem: Problem, engine, peer, target, note="") -> None:
    """Time fa2 on an engine, or without one what the plan chooses, and a kernel of torch's."""
    name, backend = peer
    if engine is None:
        mine, call = problem.chosen(), problem.ours(None)
    else:
        mine, call = f"fa2 {engine}", problem.ours("fa2", engine)
    with bench.only(backend):
        s.compare(group, problem, mine, call, [(name, problem.torch_fused(), target)], note)


def identity(row: dict) -> tuple:
    """What a row is about."""
    return tuple(row.get(key) for key in IDENTITY)


def fastest(peers, times) -> tuple[str | None, list[str]]:
    """The fastest of these peers, or None, and those that have no times."""
    there, absent = ([x for x in peers if (x in times) == timed] for timed in (True, False))
    return min(there, key=lambda x: statistics.median(times[x]), default=None), absent


def _ratio(problem: Problem, times, peer_times, error: float, target: float | None) -> dict:
    """Columns about a call of cuflash and its peer."""
    ratios = sorted(b / a for a, b in zip(times, peer_times))
    ratio, median = bench.paired_ratio(peer_times, times), statistics.median(peer_times)
    found = {
        "error": error,
        "peer_us": median,
        "peer_tflops": problem.flops / median / 1e6,
        "ratio": ratio,
        "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
        "pairs": len(ratios),
        "mark": mark(ratio, target),
    }
    if not error < problem.tolerance:
        found.update(mark="WRONG", reason=f"they differ by {error:.2g}")
    return found


def mark(value: float, target: float | None) -> str:
    """Whether a value reaches at least its target."""
    if target is None:
        return "info"
    return "pass" if value >= target else "SHORT"


def mean_rows(rows: list[dict], name: str, cells: int, label="geometric mean", targets=None):
    """A row for each peer: the geometric mean of its ratios, under the name given.

    `targets`, by peer, are for the mean over all `cells`: a part of them is not held to it.
    """
    found = []
    for peer in dict.fromkeys(row["peer"] for row in rows):
        mine = [row for row in rows if row["peer"] == peer]
        ratios = [row["ratio"] for row in mine if "ratio" in row and row["mark"] != "WRONG"]
        mean = {"group": mine[0]["group"], "problem": label, "name": name, "peer": peer}
        target = (targets or {}).get(peer) if len(ratios) == cells else None
        mean.update(target=target, mark="n/a", note=f"{len(ratios)} of {cells}")
        if lacking := sum(bool(row.get("absent")) for row in mine):
            mean["note"] += f", {lacking} without a peer"
        if ratios:
            mean["ratio"] = statistics.geometric_mean(ratios)
            mean["mark"] = mark(mean["ratio"], target)
        found.append(mean)
    return found


def report(title: str, rows: list[dict]) -> None:
    """Print a group's rows."""
    values, rows = ([r for r in rows if ("value" in r) == is_value] for is_value in (True, False))
    if rows:
        _report_ratios(title, rows)
    if values or not rows:
        header = ["problem", "kernel", "value", "at most", "unit", "", "note"]
        keys = ("problem", "name", "value", "target", "unit", "mark", "note")
        bench.print_table(title, [[r[key] for key in keys] for r in values], header)


def _report_ratios(title: str, rows: list[dict]) -> None:
    table = [
        [
            r["problem"], r["name"], r.get("us"), r.get("tflops"),
            None if r.get("ceiling") is None else round(100 * r["ceiling"]),
            r["peer"], r.get("peer_us"), r.get("peer_tflops"), r.get("ratio"),
            "" if r.get("target") is None else f"{r['target']:.2f}", r["mark"], r["note"],
        ]
        for r in rows
    ]  # fmt: skip
    ours, theirs = ["us", "TFLOP/s", "%top"], ["us", "TFLOP/s", "ratio", "at least"]
    header = ["problem", "kernel", *ours, "peer", *theirs, "", ""]
    bench.print_table(title, table, header)
    reasons: dict[str, list[str]] = {}
    for r in rows:
        if r.get("reason"):
            reasons.setdefault(f"{r['mark']}: {r['peer']}: {r['reason']}", []).append(r["problem"])
    for reason, problems in reasons.items():
        print(f"  {reason} [{problems[0] if len(problems) == 1 else f'{len(problems)} rows'}]")


def markdown(rows: list[dict]) -> str:
    """The rows with a peer as docs/performance.md has them: a line for each problem and kernel."""
    lines = {}
    for row in rows:
        again = "absent" in row  # the fastest of several peers, which have rows of their own
        if "ratio" in row and row["mark"] != "WRONG" and not again:
            found = lines.setdefault((row["group"], row["problem"], row["name"]), [])
            found.append(row)
    text = ["| problem (B, H, N, D) | cuflash | peer | ratio |", "|---|---|---|---|"]
    for (group, problem, name), found in lines.items():
        speed = ""
        if "us" in found[0]:
            us, tflops = found[0]["us"], found[0]["tflops"]
            is_rate = group not in ("small", "decode", "blocks", "backward_blocks")
            speed = f", {tflops:.{int(tflops < 10)}f} TFLOP/s" if is_rate else _time(us)
        peers = "; ".join(NAMES.get(row["peer"], row["peer"]) for row in found)
        ratios = "; ".join(f"{row['ratio']:.2f}" for row in found)
        label = problem.replace(",", ", ").replace(" density ", ", visible ")
        text.append(f"| {label} | {name}{speed} | {peers} | {ratios} |")
    return "\n".join(text) + "\n"


def _time(us: float) -> str:
    return f", {us:.1f} us" if us < 100 else f", {us / 1e3:.2f} ms"

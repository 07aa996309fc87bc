"""Pictures and the report of a comparison, from the rows of its table."""

from __future__ import annotations

import math

COLOURS = {
    "fa3 wgmma": "#1b1b3a", "fa2 wgmma": "#00a0b8", "fa2 mma": "#1f5fa8", "fa2 simt": "#6fa8dc",
    "fa2 numpy": "#1f5fa8", "fa1 wgmma": "#8ab817", "fa1 mma": "#2e8b57", "fa1 simt": "#93c9a8",
    "fa1 numpy": "#2e8b57", "unfused": "#8c8c8c", "torch FA2": "#d9822b", "torch cuDNN": "#a23b72",
    "torch efficient": "#e3b23c", "torch math": "#c9c9c9",
}  # fmt: skip
OTHER = "#444444"  # what a later version adds


def draw(folder, experiments, rows) -> list[str]:
    """Write a picture of rates and one of memory per experiment; returns the files' names."""
    import matplotlib

    matplotlib.use("Agg")
    files = []
    for name, experiment in experiments.items():
        mine = [row for row in rows if row["experiment"] == name]
        if any(row["tflops"] != "" for row in mine):
            files.append(f"{name}.png")
            _draw_rates(folder / files[-1], experiment, mine)
        if experiment.over_length:
            files.append(f"{name}-memory.png")
            _draw_memory(folder / files[-1], experiment, mine)
    return files


def _panels(rows):
    """The rows of each panel: one direction, mask, type and head dim."""
    panels = {}
    for row in rows:
        kind = row["backward"], row["causal"], row["dtype"], row["width"]
        panels.setdefault(kind, []).append(row)
    return dict(sorted(panels.items()))


def _contenders(rows, column: str) -> list[str]:
    """Those with a figure in the column, in the rows' order."""
    return list(dict.fromkeys(row["contender"] for row in rows if row[column] != ""))


def _place(row, over: str) -> int:
    return row["batch"] * row["heads"] if over == "heads" else row["length"]


def _grid(panels):
    """A figure with axes for each panel, head dims across."""
    from matplotlib.figure import Figure

    across = len({(dtype, width) for _, _, dtype, width in panels})
    across = across if len(panels) % across == 0 else len(panels)
    down = len(panels) // across
    figure = Figure(figsize=(1.2 + 3.6 * across, 0.8 + 2.6 * down), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False, sharey=True).ravel()


def _title(panel) -> str:
    backward, causal, dtype, width = panel
    return f"{dtype}, head dim {width}" + ", causal" * causal + ", backward" * backward


def _draw_rates(path, experiment, rows) -> None:
    """Bars over length or number of heads, a colour for each contender."""
    panels, names = _panels(rows), _contenders(rows, "tflops")
    unit, factor = ("TFLOP/s", 1) if max(r["tflops"] or 0 for r in rows) > 5 else ("GFLOP/s", 1e3)
    figure, axes = _grid(panels)
    for axis, (panel, mine) in zip(axes, panels.items()):
        places = sorted({_place(row, experiment.over) for row in mine})
        for number, name in enumerate(names):
            found = [r for r in mine if r["contender"] == name and r["tflops"] != ""]
            if not found:
                continue
            at = [
                places.index(_place(r, experiment.over)) + (number + 0.5) / len(names) * 0.8 - 0.4
                for r in found
            ]
            heights = [factor * r["tflops"] for r in found]
            colour = COLOURS.get(name, OTHER)
            bars = axis.bar(at, heights, 0.8 / len(names), color=colour, label=name)
            axis.bar_label(bars, fmt="%.3g", fontsize=5, padding=1)
        axis.set_xticks(range(len(places)), [_short(place) for place in places])
        axis.set_title(_title(panel), fontsize=9)
        axis.set_xlabel("B * H" if experiment.over == "heads" else "N", fontsize=8)
        axis.set_ylabel(unit, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    _finish(figure, axes, experiment.title, path)


def _draw_memory(path, experiment, rows) -> None:
    """Lines over length, on logarithmic axes."""
    panels, names = _panels(rows), _contenders(rows, "extra_bytes")
    figure, axes = _grid(panels)
    for axis, (panel, mine) in zip(axes, panels.items()):
        for name in names:
            found = [r for r in mine if r["contender"] == name and r["extra_bytes"] != ""]
            found.sort(key=lambda r: r["length"])
            mebibytes = [r["extra_bytes"] / 2**20 for r in found]
            lengths = [r["length"] for r in found]
            axis.plot(lengths, mebibytes, "o-", ms=3, color=COLOURS.get(name, OTHER), label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set_ylim(bottom=-0.02)
        lengths = sorted({row["length"] for row in mine})
        axis.set_xticks(lengths, [_short(length) for length in lengths])
        axis.set_title(_title(panel), fontsize=9)
        axis.set_xlabel("N", fontsize=8)
        axis.set_ylabel("MiB beyond operands and result", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    _finish(figure, axes, experiment.title, path)


def _finish(figure, axes, title: str, path) -> None:
    figure.suptitle(title, fontsize=10)
    handles = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    columns = int(figure.get_figwidth() / 1.4)  # inches of an entry
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=8,
        frameon=False,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


def _short(number: int) -> str:
    """Such as 16k."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def report(command: str, facts, experiments, rows, pictures) -> str:
    """The comparison as Markdown: environment, a table per experiment, and the pictures."""
    lines = [
        "# Comparison", "", f"    {command}", "",
        ", ".join(f"{key} {value}" for key, value in facts.items()) + ".", "",
        "Contenders alternate call by call, on a GPU behind the same L2 flush. In brackets: the "
        "median over pairs of calls of the contender's time / the first one's. Memory is the peak "
        "during a call beyond operands and result.",
    ]  # fmt: skip
    for name, experiment in experiments.items():
        mine = [row for row in rows if row["experiment"] == name]
        lines += ["", f"## {experiment.title}", ""]
        if experiment.timed:
            lines += [*_table(mine, "tflops", _rate), ""]
        if experiment.over_length:
            lines += ["MiB:", "", *_table(mine, "extra_bytes", _mebibytes)]
        lines += _reasons(mine)
        for picture in pictures:
            if picture in (f"{name}.png", f"{name}-memory.png"):
                lines += ["", f"![{experiment.title}]({picture})"]
    return "\n".join(lines) + "\n"


def _rate(row) -> str:
    rate = row["tflops"]
    digits = max(0, 2 - math.floor(math.log10(rate)))
    unit = "" if rate >= 1 else " GFLOP/s"
    text = f"{rate:.{digits}f}" if rate >= 1 else f"{1e3 * rate:.{max(0, digits - 3)}f}"
    return f"{text}{unit} ({row['ratio']:.2f})"


def _mebibytes(row) -> str:
    return f"{row['extra_bytes'] / 2**20:.2f}"


def _table(rows, column: str, cell) -> list[str]:
    """A line per problem, a column per contender; TFLOP/s unless a cell says otherwise."""
    names = _contenders(rows, column)
    title = "problem (B, H, N, D)" + (", TFLOP/s" if column == "tflops" else "")
    lines = [f"| {' | '.join([title, *names])} |", "|---" * (len(names) + 1) + "|"]
    for problem, found in by_problem(rows).items():
        cells = [cell(found[x]) if x in found and found[x][column] != "" else "–" for x in names]
        lines.append(f"| {' | '.join([problem, *cells])} |")
    return lines


def by_problem(rows) -> dict[str, dict]:
    """The rows of each problem by contender."""
    from .compare import Work

    problems = {}
    for row in rows:
        work = Work(*(row[field] for field in Work._fields))
        problems.setdefault(str(work), {})[row["contender"]] = row
    return problems


def _reasons(rows) -> list[str]:
    """Why contenders have no figures."""
    reasons = {}
    for row in rows:
        if row["reason"]:
            reasons.setdefault((row["contender"], row["reason"]), []).append(row)
    lines = [f"- {name}: {why} ({len(found)} problems)" for (name, why), found in reasons.items()]
    return ["", *lines] if lines else []

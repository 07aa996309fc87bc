"""Pictures and the report of a comparison, from the rows of its table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .experiments import Experiment, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    Row = dict[str, Any]  # a line of results.csv
    Panel = tuple[bool, bool, str, int]  # direction, mask, type and head dim
    Panels = dict[Panel, list[Row]]
    Place = Callable[[Row], tuple[int, ...]]
    Line = tuple[list[int], list[float]]  # lengths, and MiB there

COLOURS = {
    "fa3 wgmma": "#1b1b3a", "fa2 wgmma": "#00a0b8", "fa2 mma": "#1f5fa8", "fa2 simt": "#6fa8dc",
    "fa2 numpy": "#1f5fa8", "fa1 wgmma": "#8ab817", "fa1 mma": "#2e8b57", "fa1 simt": "#93c9a8",
    "fa1 numpy": "#2e8b57", "unfused": "#8c8c8c", "torch FA2": "#d9822b", "torch cuDNN": "#a23b72",
    "torch efficient": "#e3b23c", "torch math": "#c9c9c9",
}  # fmt: skip
OTHER = "#444444"  # what a later version adds
BAR_INCHES = 0.1  # of a bar: more than the height of its figure, 6 points, which stands upright
LETTER_INCHES = 0.07  # of labels of 8 points


def draw(folder: Path, experiments: Mapping[str, Experiment], rows: Iterable[Row]) -> list[str]:
    """Write a picture of rates and one of memory per experiment; returns the files' names."""
    import matplotlib

    matplotlib.use("Agg")
    files: list[str] = []
    for name, experiment in experiments.items():
        mine = [row for row in rows if row["experiment"] == name]
        figures: dict[str, Any] = {}
        if any(row["tflops"] != "" for row in mine):
            figures[f"{name}.png"] = picture_of_rates(experiment, mine)
        if experiment.over_length:
            figures[f"{name}-memory.png"] = picture_of_memory(experiment, mine)
        for file, figure in figures.items():
            figure.savefig(folder / file, dpi=120)
        files += figures
    return files


def _panels(rows: Iterable[Row]) -> Panels:
    """The rows of each panel: one direction, mask, type and head dim."""
    panels: Panels = {}
    for row in rows:
        kind = row["backward"], row["causal"], row["dtype"], row["width"]
        panels.setdefault(kind, []).append(row)
    return dict(sorted(panels.items()))


def _contenders(rows: Iterable[Row], column: str) -> list[str]:
    """Those with a figure in the column, in the rows' order."""
    return list(dict.fromkeys(row["contender"] for row in rows if row[column] != ""))


def _places(panels: Panels, over: str) -> tuple[str, Place]:
    """What the axes count, and a function of a row that says where the row is on them.

    Over the length that is N, or (B, H, N) where a panel has a length several times.
    """
    if over == "heads":
        return "B * H", lambda row: (row["batch"] * row["heads"],)
    for rows in panels.values():
        sizes = {(row["batch"], row["heads"], row["length"]) for row in rows}
        if len(sizes) > len({length for _, _, length in sizes}):
            return "B, H, N", lambda row: (row["batch"], row["heads"], row["length"])
    return "N", lambda row: (row["length"],)


def _grid(panels: Panels, panel_width: float = 3.6) -> tuple[Any, Any]:
    """A figure with axes for each panel, head dims across."""
    from matplotlib.figure import Figure

    across = len({(dtype, width) for _, _, dtype, width in panels})
    across = across if len(panels) % across == 0 else len(panels)
    down = len(panels) // across
    size = 1.2 + panel_width * across, 0.8 + 2.6 * down
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False, sharey=True).ravel()


def _title(panel: Panel) -> str:
    backward, causal, dtype, width = panel
    return f"{dtype}, head dim {width}" + ", causal" * causal + ", backward" * backward


def picture_of_rates(experiment: Experiment, rows: list[Row]) -> Any:
    """Bars over length or number of heads, a colour for each contender."""
    panels, names = _panels(rows), _contenders(rows, "tflops")
    unit, factor = _rate_unit(rows)
    over, place = _places(panels, experiment.over)
    most = max(len({place(row) for row in mine}) for mine in panels.values())
    letters = max(len(_label(place(row))) for row in rows)
    inches = max((len(names) + 2) * BAR_INCHES, (letters + 2) * LETTER_INCHES)
    figure, axes = _grid(panels, max(3.6, 0.6 + most * inches))
    for axis, (panel, mine) in zip(axes, panels.items()):
        places = sorted({place(row) for row in mine})
        for number, name in enumerate(names):
            found = [r for r in mine if r["contender"] == name and r["tflops"] != ""]
            if not found:
                continue
            at = [places.index(place(r)) + (number + 0.5) / len(names) * 0.8 - 0.4 for r in found]
            heights = [factor * r["tflops"] for r in found]
            colour = COLOURS.get(name, OTHER)
            bars = axis.bar(at, heights, 0.8 / len(names), color=colour, label=name)
            labels = [_three_digits(height) for height in heights]
            axis.bar_label(bars, labels, fontsize=6, padding=2, rotation=90)
        axis.set_xticks(range(len(places)), [_label(where) for where in places])
        axis.set_title(_title(panel), fontsize=9)
        axis.set_xlabel(over, fontsize=8)
        axis.set_ylabel(unit, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.margins(y=0.18)  # the figures on the bars are within it
        axis.spines[["top", "right"]].set_visible(False)
    _finish(figure, axes, experiment.title)
    return figure


def picture_of_memory(experiment: Experiment, rows: list[Row]) -> Any:
    """Lines over length, on logarithmic axes."""
    panels, names = _panels(rows), _contenders(rows, "extra_bytes")
    figure, axes = _grid(panels)
    for axis, (panel, mine) in zip(axes, panels.items()):
        lines: dict[str, Line] = {}
        for name in names:
            found = [r for r in mine if r["contender"] == name and r["extra_bytes"] != ""]
            found.sort(key=lambda r: r["length"])
            lines[name] = [r["length"] for r in found], [r["extra_bytes"] / 2**20 for r in found]
        above = {name: _lines_on_top(name, lines) for name in lines}
        step = 8 / max(4, *above.values())  # points, for a line below others to be seen
        for name, line in lines.items():
            width = 1.5 + step * above[name]
            colour = COLOURS.get(name, OTHER)
            axis.plot(*line, "o-", lw=width, ms=width + 1.5, color=colour, label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.margins(y=0.06)  # of what all panels show: they share this axis, and set no limits
        lengths = sorted({row["length"] for row in mine})
        axis.set_xticks(lengths, [_short(length) for length in lengths])
        axis.set_title(_title(panel), fontsize=9)
        axis.set_xlabel("N", fontsize=8)
        axis.set_ylabel("MiB beyond operands and result", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
    _finish(figure, axes, experiment.title)
    return figure


def _lines_on_top(name: str, lines: Mapping[str, Line]) -> int:
    """How many of the later lines show nearly the same."""
    lengths, mebibytes = lines[name]
    later = list(lines.values())[list(lines).index(name) + 1 :]
    return sum(
        other == lengths and np.allclose(values, mebibytes, rtol=0.2, atol=0.02)
        for other, values in later
    )


def _finish(figure: Any, axes: Any, title: str) -> None:
    figure.suptitle(title, fontsize=10)
    handles: dict[str, Any] = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels())}
    columns = int(figure.get_figwidth() / 1.4)  # inches of an entry
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=columns, fontsize=8,
        frameon=False,
    )  # fmt: skip


def _label(place: Iterable[int]) -> str:
    return ", ".join(map(_short, place))


def _short(number: int) -> str:
    """Such as 16k."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)


def _rate_unit(rows: Iterable[Row]) -> tuple[str, float]:
    """The unit of all rates of a table and a picture, and how many of it a TFLOP/s is."""
    return ("TFLOP/s", 1) if max(r["tflops"] or 0 for r in rows) >= 1 else ("GFLOP/s", 1e3)


def _three_digits(x: float) -> str:
    """A positive number, such as 0.0123 or 1230."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}"


def report(
    command: str,
    facts: Mapping[str, str],
    experiments: Mapping[str, Experiment],
    rows: Sequence[Row],
    pictures: Iterable[str],
) -> str:
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
            lines += [*_rates(mine), ""]
        if experiment.over_length:
            lines += _memory(mine)
        lines += _reasons(mine)
        for picture in pictures:
            if picture in (f"{name}.png", f"{name}-memory.png"):
                lines += ["", f"![{experiment.title}]({picture})"]
    return "\n".join(lines) + "\n"


def _rates(rows: Sequence[Row]) -> list[str]:
    """The table of rates, all in the unit that its head names."""
    unit, factor = _rate_unit(rows)

    def cell(row: Row) -> str:
        return f"{_three_digits(factor * row['tflops'])} ({row['ratio']:.2f})"

    return _table(rows, "tflops", unit, cell)


def _memory(rows: Sequence[Row]) -> list[str]:
    return _table(rows, "extra_bytes", "MiB", lambda row: f"{row['extra_bytes'] / 2**20:.2f}")


def _table(rows: Sequence[Row], column: str, unit: str, cell: Callable[[Row], str]) -> list[str]:
    """A line per problem, a column per contender."""
    names = _contenders(rows, column)
    lines = [f"| {' | '.join([f'problem (B, H, N, D), {unit}', *names])} |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for problem, found in by_problem(rows).items():
        cells = [cell(found[x]) if x in found and found[x][column] != "" else "–" for x in names]
        lines.append(f"| {' | '.join([problem, *cells])} |")
    return lines


def by_problem(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """The rows of each problem by contender."""
    problems: dict[str, dict[str, Row]] = {}
    for row in rows:
        work = Work(*(row[field] for field in Work._fields))
        problems.setdefault(str(work), {})[row["contender"]] = row
    return problems


def _reasons(rows: Iterable[Row]) -> list[str]:
    """Why contenders have no figures."""
    reasons: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["reason"]:
            reasons.setdefault((row["contender"], row["reason"]), []).append(row)
    lines = [f"- {name}: {why} ({len(found)} problems)" for (name, why), found in reasons.items()]
    return ["", *lines] if lines else []

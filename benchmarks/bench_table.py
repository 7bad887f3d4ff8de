"""The figures of `bench.py` as Markdown tables, to print or to write into docs/benchmarks.md.

Contract: the page depends on the figures alone, so the same file gives the same page on any machine.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from timing import exponent

Figures = dict[str, Any]
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
NAMES = {
    "ddp": "DDP",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "tp": "TP + SP",
    "fsdp-tp": "FSDP x TP",
    "ep-fsdp": "MoE, EP x FSDP",
}
DEFAULT = "inductor overlap + pre-bucketing"
"""The peer's variant when a user switches it on."""
STEPS = (
    "step",
    "layers",
    "bound, ms",
    "no pass",
    "naive",
    "Inductor",
    "Inductor's best",
    "Weft's planner",
    "Weft `auto`",
    "step, Weft's planner : Inductor's best",
    "launches, captured → Inductor's best / Weft",
    "peak, Inductor's best / Weft",
    "pass s, Inductor / Weft's planner / `auto`",
    "times as fast",
)


def page(found: Figures) -> str:
    """All tables as Markdown, each with a heading."""
    parts = [about(found)]
    if rows := rows_of(found, "steps"):
        parts += ["### Steps above their bounds", textwrap.fill(summary(rows), 120), steps(rows)]
        if failures := failed_variants(rows):
            parts.append("Where Inductor's scheduler fails:\n\n" + "\n".join(f"- {line}" for line in failures))
        parts += ["### Pass time and its growth", growth(rows)]
        if any(row.get("whole") for row in rows):
            parts += ["### The whole call against Inductor's pass", whole(rows)]
    if rows := rows_of(found, "rewrites"):
        parts += ["### Rewrites against Inductor's post-grad passes", textwrap.fill(REWRITES, 120), rewrites(rows)]
    for each in rows_of(found, "merging"):
        parts += ["### Merging, compared with Inductor's bucketing", *merging(each)]
    for each in rows_of(found, "graph"):
        parts += ["### Dependencies, compared with torch's sort", textwrap.fill(DEPENDENCIES, 120), graph(each)]
    if found.get("failed"):
        lines = (f"- {name}: {wrong}" for name, wrong in found["failed"].items())
        parts.append("What could not be measured:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def rows_of(found: Figures, section: str) -> list[Any]:
    """The outcomes of one section, sorted by name so that the order of arrival is irrelevant; steps by parallelism."""
    rows = [outcome for _, outcome in sorted(found.get(section, {}).items())]
    if section == "steps":
        order = list(NAMES)
        rows.sort(key=lambda row: (order.index(row["parallel"]), math.prod(row["mesh"].values()), row["layers"]))
    return rows


def about(found: Figures) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    command = "make bench-full" if found["full"] else "make bench"
    told = (
        f"`{command}`, {found['date']}, commit {found['commit']}, {versions}, {found['machine']}; {found['jobs']} "
        f"processes, {found['wall_s'] / 60:.0f} minutes of wall time, {found['processor_s'] / 60:.0f} of CPU time."
    )
    return f"{told} {found['note']}".rstrip()


def best(row: Figures, start: str) -> tuple[str, Figures] | None:
    """The shortest step of the contestants with this prefix."""
    ran = [(name, each) for name, each in row["results"].items() if name.startswith(start) and not each["error"]]
    return min(ran, key=lambda pair: pair[1]["step_ms"], default=None)


def seconds(result: Figures | None) -> float | None:
    return statistics.median(result["seconds"]) if result and not result["error"] and result["seconds"] else None


def inductor_seconds(row: Figures) -> float | None:
    """Pass time of the peer's default; if it fails, of the variant with the shortest step."""
    run = best(row, "inductor")
    return seconds(row["results"].get(DEFAULT)) or (seconds(run[1]) if run else None)


def name_of(row: Figures) -> str:
    ranks = " x ".join(str(size) for size in row["mesh"].values() if size > 1)
    return f"{NAMES[row['parallel']]}, {ranks}"


def steps(rows: Sequence[Figures]) -> str:
    return table(STEPS, map(_step, rows))


def _step(row: Figures) -> list[str]:
    results = row["results"]
    naive, run = best(row, "naive"), best(row, "inductor")
    planner, auto = results.get("weft planner"), results.get("weft auto")
    cells = [name_of(row), str(row["layers"]), f"{row['bound_ms']:.2f}", _gap(results["no pass"])]
    cells += [_gap(naive[1]) if naive else "", _gap(results.get(DEFAULT))]
    cells += [f"{_gap(run[1])} ({run[0].removeprefix('inductor ')})" if run else "fails", _gap(planner), _gap(auto)]
    if run is None or planner is None or planner["error"]:
        return [*cells, "", "", "", "", ""]
    cells += [
        f"{planner['step_ms'] / run[1]['step_ms']:.3f}",
        f"{results['no pass']['launches']} → {run[1]['launches']} / {planner['launches']}",
        f"{run[1]['peak']:+.1%} / {planner['peak']:+.1%}",
    ]
    times = inductor_seconds(row), seconds(planner), seconds(auto)
    if not row["timed"] or None in times:
        return [*cells, "", ""]
    return [*cells, " / ".join(f"{each:.2f}" for each in times), f"{times[0] / times[1]:.1f}"]


def _gap(result: Figures | None) -> str:
    return "" if result is None else "fails" if result["error"] else f"{result['gap'] * 100:.2f} %"


def summary(rows: Sequence[Figures]) -> str:
    """A summary of the table in numbers."""
    pairs = [(row, best(row, "inductor"), row["results"].get("weft planner")) for row in rows]
    both = [(row, run[1], mine) for row, run, mine in pairs if run and mine and not mine["error"]]
    ratios = [mine["step_ms"] / run["step_ms"] for _, run, mine in both]
    times = [
        theirs / ours
        for row, _, mine in both
        if row["timed"] and (theirs := inductor_seconds(row)) and (ours := seconds(mine))
    ]
    if not ratios:
        return "No step ran with both planners."
    told = (
        f"The step of Weft's planner is shorter than Inductor's best in {sum(ratio < 1 for ratio in ratios)} of "
        f"{len(ratios)} rows, by less than 0.1 % in {sum(0.999 < ratio < 1 for ratio in ratios)} of them. "
        f"The ratio of the two step times is {min(ratios):.3f} to {max(ratios):.3f} "
        f"(geometric mean {statistics.geometric_mean(ratios):.3f})."
    )
    if times:
        mean = statistics.geometric_mean(times)
        told += (
            f" The pass of Weft's planner is {min(times):.1f} to {max(times):.1f} times as fast as Inductor's "
            f"(geometric mean {mean:.1f})."
        )
    return f"{told} {losses(rows)}"


def losses(rows: Sequence[Figures]) -> str:
    """The steps in which another contestant beats Weft's planner."""
    lost: list[str] = []
    for row in rows:
        mine = row["results"].get("weft planner")
        for start, whose in (("inductor", "Inductor's best"), ("naive", "the naive order")):
            run = best(row, start)
            if run and mine and not mine["error"] and run[1]["step_ms"] < mine["step_ms"]:
                ratio = mine["step_ms"] / run[1]["step_ms"]
                lost.append(f"{name_of(row)}, {row['layers']} layers: {ratio:.3f} of {whose}")
    none = "The naive order never beats Weft's planner either."
    return f"**Where Weft's step is longer**: {'; '.join(lost)}." if lost else none


def failed_variants(rows: Sequence[Figures]) -> list[str]:
    return [
        f"{name_of(row)}, {row['layers']} layers, {name.removeprefix('inductor ')}: `{result['error']}`"
        for row in rows
        for name, result in row["results"].items()
        if result["error"]
    ]


def growth(rows: Sequence[Figures]) -> str:
    """Pass seconds by layers, one line for each parallelism, and the exponents fitted to them."""
    timed = [row for row in rows if row["timed"]]
    counts = sorted({row["layers"] for row in timed})
    head = ["parallelism", "nodes", *(f"{count} layers, Inductor / Weft's planner" for count in counts)]
    head += ["growth, Inductor", "growth, Weft's planner"]
    lines: list[list[str]] = []
    for parallel in NAMES:
        mine = sorted((row for row in timed if row["parallel"] == parallel), key=lambda row: row["layers"])
        if not mine:
            continue
        pairs = {row["layers"]: (inductor_seconds(row), seconds(row["results"].get("weft planner"))) for row in mine}
        cells = [NAMES[parallel], " to ".join(str(row["nodes"]) for row in (mine[0], mine[-1]))]
        cells += [" / ".join(f"{s:.2f}" if s else "fails" for s in pairs[n]) if n in pairs else "" for n in counts]
        cells += [_power([row["nodes"] for row in mine], [pair[k] for pair in pairs.values()]) for k in (0, 1)]
        lines.append(cells)
    return table(head, lines)


def whole(rows: Sequence[Figures]) -> str:
    """Seconds of `weft.optimize` with its evidence, beside the pass of the peer on the same graph."""
    head = ["step", "layers", "nodes", "Inductor's pass, s"]
    for what in ("planner alone", "`auto`"):
        head += [f"{what}: `weft.optimize` + evidence, s", f"{what}: times as fast"]
    lines: list[list[str]] = []
    for row in rows:
        theirs = inductor_seconds(row)
        if not row.get("whole"):
            continue
        cells = [name_of(row), str(row["layers"]), str(row["nodes"]), f"{theirs:.2f}" if theirs else "fails"]
        for pipeline in ("schedule-overlap", "auto"):
            mine = row["whole"][pipeline]
            ratio = f"{theirs / (mine['call_s'] + mine['evidence_s']):.1f}" if theirs else ""
            cells += [f"{mine['call_s']:.2f} + {mine['evidence_s']:.2f}", ratio]
        lines.append(cells)
    return table(head, lines)


def _power(sizes: Sequence[int], times: Sequence[float | None]) -> str:
    known = [each for each in times if each]
    found = exponent(sizes, known) if len(known) == len(sizes) else None
    return f"N^{found:.2f}" if found is not None else ""


REWRITES = (
    "*Same* means only the rewrites that Inductor makes by default; *all* adds some of Weft's others ([Speed of "
    "rewrites](rewrites.md#speed))."
)


def rewrites(rows: Sequence[Figures]) -> str:
    head = ("step", "nodes", "nodes left by Inductor", "by Weft, same", "by Weft, all")
    head += ("seconds: Inductor / Weft, same / Weft, all", "times as fast: same / all")
    lines = (
        [
            row["scenario"],
            *(str(row[key]) for key in ("nodes", "inductor_nodes", "weft_nodes", "weft_more_nodes")),
            " / ".join(f"{row[key]:.2f}" for key in ("inductor_s", "weft_s", "weft_more_s")),
            " / ".join(f"{row['inductor_s'] / row[key]:.1f}" for key in ("weft_s", "weft_more_s")),
        ]
        for row in rows
    )
    return table(head, lines)


def merging(found: Figures) -> list[str]:
    head = ("graph", "nodes", "launches, captured → Inductor / Weft", "s, Inductor / Weft", "times as fast")
    rows = (
        [
            row["scenario"],
            str(row["nodes"]),
            f"{row['collectives']} → {row['inductor_launches']} / {row['weft_launches']}",
            f"{row['inductor_s']:.2f} / {row['weft_s']:.2f}",
            f"{row['ratio']:.1f}",
        ]
        for row in found["rows"]
    )
    sizes = found["growth"]["sizes"]
    exponent = f"N^{found['growth']['exponent']:.2f}"
    told = f"In other graphs of {sizes[0]} to {sizes[-1]} all-gathers, Weft's time grows as {exponent}."
    return [table(head, rows), told]


DEPENDENCIES = (
    "All passes of Weft share one analysis of dependencies. The table compares the time to build this analysis "
    "with the time of torch's stable topological sort of the same graph. It also shows the memory that the analysis "
    "takes, and the time to move 1000 nodes."
)


def graph(rows: Sequence[Figures]) -> str:
    head = ("nodes", "dependencies, s", "torch's stable sort, s", "ratio", "bytes per node", "1000 moves, s")
    lines = (
        [
            str(row["nodes"]),
            f"{row['dag_s']:.3f}",
            f"{row['torch_sort_s']:.3f}",
            f"{row['dag_over_sort']:.2f}",
            f"{row['dag_bytes_per_node']:.0f}",
            f"{row['commit_1000_moves_s']:.2f}",
        ]
        for row in rows
    )
    return table(head, lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def fill(path: Path, made: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace the text between the marks of a file."""
    before, _, rest = path.read_text().partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"{path} has no {begin} ... {end}")
    path.write_text(f"{before}{begin}\n\n{made}\n\n{end}{after}")

"""`weft sweep`: graphs on several clusters, with several pipelines and limits, as a table and a plot."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.cli.dask_executor import DaskOption, dask_executor
from weft.errors import compose

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from weft.report.sweep import Cell
    from weft.retention.policies import RetentionPolicy

SHARD = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", re.ASCII)
NO_LIMIT = "none"
RANGE = re.compile(r"([^:]+):([^:]+)(?::([1-9][0-9]{0,8}))?", re.ASCII)
POINTS, MAX_POINTS = 7, 1000
"""Number of limits that a range has if it does not say, and the most that it may have."""
FINE = 100
"""Limits inside of a range are whole GiB, MiB or KiB where that moves them by at most 1/100 of their distance."""

Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help=f"{usage.SOURCE_HELP} Several are compared in one table. With --merge: the files of all shards.",
    ),
]
ClustersOption = Annotated[
    list[str] | None,
    typer.Option("--cluster", metavar="NAME|FILE", help="A preset such as h100-8x8, or a TOML file. Repeatable."),
]
PipelinesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pipeline", metavar="SPEC", help="A preset, or passes separated by commas. Repeatable; the default is auto."
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE,...",
        help=(
            "Memory limits for a step, such as 20GiB,24GiB,none. A range LOW:HIGH:POINTS stands for evenly spaced "
            f"limits (by default {POINTS}), and adds rows for policies that people set by hand."
        ),
    ),
]
BucketOption = Annotated[
    str | None,
    typer.Option("--bucket-bytes", metavar="SIZE,...", help="Size limits of buckets, such as 16MiB,none."),
]
JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, help="Number of combinations that run at once, each in its own process.")
]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Run only every N-th combination, from the I-th on; I from 1 to N."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Save the combinations here, one line of JSON each."),
]
MergeOption = Annotated[
    bool, typer.Option("--merge", help="Run nothing; join files that -o or --json wrote, of one sweep or several.")
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.svg", help="Plot the steps as bars, and against each parameter.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one line of JSON for each combination instead of a table.")
]


def sweep(
    arguments: Arguments,
    cluster: ClustersOption = None,
    pipeline: PipelinesOption = None,
    memory_limit: MemoryOption = None,
    bucket_bytes: BucketOption = None,
    effort: usage.EffortOption = usage.Effort.DEFAULT,
    jobs: JobsOption = 1,
    dask: DaskOption = None,
    shard: ShardOption = None,
    output: OutputOption = None,
    merge: MergeOption = False,
    plot: PlotOption = None,
    tokens: usage.TokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Optimize and simulate graphs for every combination of clusters, pipelines and limits. Needs no GPU.

    A combination that fails is a row with its error, and the exit status is 1. A combination whose worker dies is run
    again. A memory limit that is too small is not a failure: its row shows the smallest peak that was found.

    With a range of memory limits, the table also has rows for policies that people set by hand, such as checkpointing
    every block. For them, a zoo:MODEL is captured with other options for checkpointing and resharding; any other graph
    is rewritten so that backward keeps more or less.
    """
    usage.check_files((output, plot), (*arguments, *(cluster or ())))
    if plot is not None and plot.suffix.lower() != ".svg":
        raise usage.UsageError(
            compose(str(plot), "plots are drawn as SVG", do=f"write --plot {plot.with_suffix('.svg')}")
        )
    if merge:
        given = {
            "--cluster": cluster,
            "--pipeline": pipeline,
            "--memory-limit": memory_limit,
            "--bucket-bytes": bucket_bytes,
            "--effort": effort is not usage.Effort.DEFAULT,
            "--shard": shard,
            "--jobs": jobs > 1,
            "--dask": dask,
            "--tokens": tokens,
        }
        _refuse_beside_merge([option for option, value in given.items() if value])
        from weft.report.sweep import merge as join

        cells = join(arguments)
    else:
        axes = Axes(
            cluster or [],
            pipeline or ["auto"],
            parse_limits(memory_limit),
            parse_sizes(bucket_bytes, "--bucket-bytes"),
            has_policies=":" in (memory_limit or ""),
        )
        cells = _run(arguments, axes, effort, jobs, dask, parse_shard(shard), tokens)
    _tell(cells, output, plot, as_json)
    if any(cell.has_failed for cell in cells):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Axes:
    """The axes of the sweep."""

    clusters: list[str]
    pipelines: list[str]
    memory_limits: list[int | None]
    bucket_bytes: list[int | None]
    has_policies: bool
    """Whether policies made by hand are compared, because the memory limits are a range."""

    def check(self) -> None:
        """Refuse missing and repeated values."""
        if not self.clusters:
            raise usage.UsageError(compose("sweep", "no cluster is given", do="give one or more: --cluster h100-8x8"))
        given = {
            "--cluster": self.clusters,
            "--pipeline": self.pipelines,
            "--memory-limit": self.memory_limits,
            "--bucket-bytes": self.bucket_bytes,
        }
        for option, values in given.items():
            for twice in (value for i, value in enumerate(values) if value in values[:i]):
                raise usage.UsageError(compose("sweep", f"{option} {twice} is given twice", do="give it once"))


def parse_limits(text: str | None) -> list[int | None]:
    """Memory limits separated by commas, each as in `parse_sizes` or a range of several."""
    option, found = "--memory-limit", list[int | None]()
    for word in (text or NO_LIMIT).split(","):
        found += parse_range(word.strip(), option) if ":" in word else [_parse_size(word, option)]
    return found


def parse_range(text: str, option: str) -> list[int]:
    """Limits from LOW to HIGH at equal distances, both included."""
    found = RANGE.fullmatch(text)
    if found is None:
        what, do = f"{text!r} is not a range of sizes", f"write LOW:HIGH:POINTS, as in {option} 30GiB:90GiB:{POINTS}"
        raise usage.UsageError(compose(option, what, do=do))
    low, high = (usage.parse_size(size, option) for size in found.group(1, 2))
    num_points = int(found[3] or POINTS)
    if low >= high:
        raise usage.UsageError(compose(option, f"the range {text!r} does not grow", do="write the smaller limit first"))
    most = min(MAX_POINTS, high - low + 1)
    if not 2 <= num_points <= most:
        what = f"the range {text!r} has {num_points} points, expected 2 to {most}"
        raise usage.UsageError(compose(option, what, do=f"write {found[1]}:{found[2]}:{min(POINTS, most)}"))
    return [low, *(_inner_limits(low, high, num_points)), high]


def _inner_limits(low: int, high: int, num_points: int) -> list[int]:
    distance, rest = divmod(high - low, num_points - 1)
    exact = [low + (high - low) * k // (num_points - 1) for k in range(1, num_points - 1)]
    unit = next(size for size in (1 << 30, 1 << 20, 1 << 10, 1) if size == 1 or size * FINE <= distance)
    return [limit // unit * unit for limit in exact] if rest else exact


def parse_sizes(text: str | None, option: str) -> list[int | None]:
    """Sizes separated by commas; `none`, or no text at all, means unlimited."""
    return [_parse_size(word, option) for word in (text or NO_LIMIT).split(",")]


def _parse_size(word: str, option: str) -> int | None:
    return None if word.strip().lower() == NO_LIMIT else usage.parse_size(word.strip(), option)


def parse_shard(text: str | None) -> tuple[int, int]:
    """The number of the shard, and the number of shards."""
    if text is None:
        return 1, 1
    found = SHARD.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise usage.UsageError(
            compose("sweep", f"{text!r} is not a shard", do="write I/N with I from 1 to N: --shard 1/4")
        )
    return int(found[1]), int(found[2])


def _refuse_beside_merge(given: list[str]) -> None:
    if given:
        what = f"--merge runs nothing, so {' and '.join(given)} {'has' if len(given) == 1 else 'have'} no effect"
        raise usage.UsageError(compose("sweep", what, do=f"leave {' and '.join(given)} off"))


def _run(
    sources: list[str],
    axes: Axes,
    effort: usage.Effort,
    jobs: int,
    dask: str | None,
    shard: tuple[int, int],
    tokens: int | None,
) -> list[Cell]:
    for twice in (source for i, source in enumerate(sources) if source in sources[:i]):
        raise usage.UsageError(compose("sweep", f"{twice} is given twice", do="give it once"))
    axes.check()
    with usage.progress("importing torch"):
        from weft.cli.source import load_source
        from weft.cost.cluster import Cluster
        from weft.passes.pipeline import Pipeline
        from weft.report.sweep import SweepAxes, SweptGraph, run_tasks, shard_of, tasks_of

    for name in axes.clusters:
        Cluster.load(name)
    for spec in axes.pipelines:
        Pipeline.parse(spec)
    with usage.activity(f"reading {sources[0]}") as tell:
        graphs: list[SweptGraph] = []
        for source in sources:
            tell(f"reading {source}")
            module = load_source(source)
            graphs.append(SweptGraph(source, module, _policies(source, tell) if axes.has_policies else {}))
        tell("preparing the cells")
        swept = SweepAxes(axes.clusters, axes.pipelines, axes.memory_limits, axes.bucket_bytes)
        tasks = tasks_of(graphs, swept, tokens, effort.value)
    mine = shard_of(tasks, *shard)
    cells: list[Cell] = []
    doing = f"{len(tasks)} cells"
    with dask_executor(dask) as (executor, _), usage.progress_bar(doing) as told:
        for cell in run_tasks(mine, executor, jobs):
            cells.append(cell)
            told(doing, len(cells), len(mine))
    return cells


def _policies(source: str, tell: Callable[[str], object]) -> dict[str, GraphModule | RetentionPolicy]:
    """The policies to compare with: captured from the zoo, or carried out on the graph."""
    from weft.retention.policies import RetentionPolicy

    if not source.startswith("zoo:"):
        return {policy.value: policy for policy in RetentionPolicy}
    from weft.cli.zoo_source import load_policies

    found: dict[str, GraphModule | RetentionPolicy] = {}
    tell("capturing the policies")
    for name, module in load_policies(source):
        tell(f"captured {name}")
        found[name] = module
    return found


def _tell(cells: list[Cell], output: Path | None, plot: Path | None, as_json: bool) -> None:
    from weft.report.sweep_plot import plot as draw
    from weft.report.sweep_table import sweep_text

    lines = "".join(f"{cell.to_json()}\n" for cell in cells)
    if output is not None:
        usage.write(lines, output)
    if plot is not None:
        usage.write(draw(cells), plot)
    if as_json:
        usage.write(lines, None)
    else:
        usage.show(usage.with_units(sweep_text(cells)))

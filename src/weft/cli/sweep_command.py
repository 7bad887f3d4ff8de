"""`weft sweep`: one graph on several clusters, with several pipelines and limits, as a table and a plot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.errors import compose

if TYPE_CHECKING:
    from weft.report.sweep import Cell

SHARD = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", re.ASCII)
NO_LIMIT = "none"

Arguments = Annotated[
    list[str], typer.Argument(metavar="SOURCE", help=f"{usage.SOURCE_HELP} With --merge: the files of all shards.")
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
        help="Memory limits for a step, such as 20GiB,24GiB,none. Each gives a cell.",
    ),
]
BucketOption = Annotated[
    str | None,
    typer.Option(
        "--bucket-bytes", metavar="SIZE,...", help="Size limits of buckets, such as 16MiB,none. Each gives a cell."
    ),
]
JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, help="Number of cells that run at once, each in its own process.")
]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Run only every N-th cell, from the I-th on; I from 1 to N."),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the cells here, one line of JSON each.")
]
MergeOption = Annotated[bool, typer.Option("--merge", help="Run nothing; join the files that -o or --json wrote.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.svg", help="Plot the steps as bars, and against each parameter.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON for each cell instead of a table.")]


def sweep(
    arguments: Arguments,
    cluster: ClustersOption = None,
    pipeline: PipelinesOption = None,
    memory_limit: MemoryOption = None,
    bucket_bytes: BucketOption = None,
    effort: usage.EffortOption = usage.Effort.DEFAULT,
    jobs: JobsOption = 1,
    shard: ShardOption = None,
    output: OutputOption = None,
    merge: MergeOption = False,
    plot: PlotOption = None,
    tokens: usage.TokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Optimize and simulate a graph on every cluster with every pipeline under every limit. Needs no GPU.

    A cell that fails is a row with its error, and the exit status is 1. If no order meets a memory limit, the row shows
    the limit that would fit.
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
            "--tokens": tokens,
        }
        _refuse_beside_merge([option for option, value in given.items() if value])
        from weft.report.sweep import merge as join

        cells = join(arguments)
    else:
        axes = Axes(
            cluster or [],
            pipeline or ["auto"],
            parse_sizes(memory_limit, "--memory-limit"),
            parse_sizes(bucket_bytes, "--bucket-bytes"),
        )
        cells = _run(arguments, axes, effort, jobs, parse_shard(shard), tokens)
    _tell(cells, output, plot, as_json)
    if any(cell.error is not None for cell in cells):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Axes:
    """The axes of the sweep."""

    clusters: list[str]
    pipelines: list[str]
    memory_limits: list[int | None]
    bucket_bytes: list[int | None]

    @property
    def num_cells(self) -> int:
        return len(self.clusters) * len(self.pipelines) * len(self.memory_limits) * len(self.bucket_bytes)

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


def parse_sizes(text: str | None, option: str) -> list[int | None]:
    """Sizes separated by commas; `none`, or no text at all, means unlimited."""
    words = [word.strip() for word in (text or NO_LIMIT).split(",")]
    return [None if word.lower() == NO_LIMIT else usage.parse_size(word, option) for word in words]


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
    sources: list[str], axes: Axes, effort: usage.Effort, jobs: int, shard: tuple[int, int], tokens: int | None
) -> list[Cell]:
    if len(sources) != 1:
        raise usage.UsageError(compose("sweep", f"{len(sources)} sources are given", do="give one, or --merge"))
    axes.check()
    with usage.progress("importing torch"):
        from weft.cli.source import load_source
        from weft.cost.cluster import Cluster
        from weft.passes.pipeline import Pipeline
        from weft.report.sweep import sweep as run

    for name in axes.clusters:
        Cluster.load(name)
    for spec in axes.pipelines:
        Pipeline.parse(spec)
    with usage.progress(f"reading {sources[0]}"):
        module = load_source(sources[0])
    num_cells = len(range(shard[0] - 1, axes.num_cells, shard[1]))
    with usage.progress_bar(f"{axes.num_cells} cells", num_cells) as advance:
        return run(
            module,
            axes.clusters,
            axes.pipelines,
            memory_limits=axes.memory_limits,
            bucket_bytes=axes.bucket_bytes,
            effort=effort.value,
            jobs=jobs,
            shard=shard,
            tokens_per_step=tokens,
            done=lambda cell: advance(),
        )


def _tell(cells: list[Cell], output: Path | None, plot: Path | None, as_json: bool) -> None:
    from weft.report.sweep import sweep_text
    from weft.report.sweep_plot import plot as draw

    lines = "".join(f"{cell.to_json()}\n" for cell in cells)
    if output is not None:
        usage.write(lines, output)
    if plot is not None:
        usage.write(draw(cells), plot)
    if as_json:
        usage.write(lines, None)
    else:
        usage.show(sweep_text(cells))

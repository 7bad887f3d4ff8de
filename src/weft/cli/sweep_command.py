"""`weft sweep`: one graph on several clusters by several pipelines, as a table and a plot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.errors import compose

if TYPE_CHECKING:
    from weft.report.sweep import Cell

SHARD = re.compile(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", re.ASCII)

Arguments = Annotated[
    list[str], typer.Argument(metavar="SOURCE", help=f"{usage.SOURCE_HELP} With --merge: the files of all shards.")
]
ClustersOption = Annotated[
    list[str] | None,
    typer.Option("--cluster", metavar="NAME|FILE", help="A preset such as h100-8x8, or a TOML file. Several times."),
]
PipelinesOption = Annotated[
    list[str] | None,
    typer.Option("--pipeline", metavar="SPEC", help="A preset, or passes with commas. Several times; else auto."),
]
JobsOption = Annotated[int, typer.Option("--jobs", min=1, help="Cells that run at once, each in its own process.")]
ShardOption = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Run only every N-th cell, from the I-th on; I from 1 to N."),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the cells here, one line of JSON each.")
]
MergeOption = Annotated[bool, typer.Option("--merge", help="Run nothing: join the files that -o or --json wrote.")]
PlotOption = Annotated[Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the steps as bars.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one line of JSON for each cell instead of a table.")]


def sweep(
    arguments: Arguments,
    cluster: ClustersOption = None,
    pipeline: PipelinesOption = None,
    jobs: JobsOption = 1,
    shard: ShardOption = None,
    output: OutputOption = None,
    merge: MergeOption = False,
    plot: PlotOption = None,
    tokens: usage.TokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Optimize and simulate a graph on every cluster by every pipeline. Needs no GPU.

    A cell that fails is a row with its error, and the exit status is 1.
    """
    usage.check_files((output, plot))
    if merge:
        given = {"--cluster": cluster, "--pipeline": pipeline, "--shard": shard, "--jobs": jobs > 1, "--tokens": tokens}
        _refuse_beside_merge([option for option, value in given.items() if value])
        from weft.report.sweep import merge as join

        cells = join(arguments)
    else:
        cells = _run(arguments, cluster or [], pipeline or ["auto"], jobs, parse_shard(shard), tokens)
    _tell(cells, output, plot, as_json)
    if any(cell.error is not None for cell in cells):
        raise typer.Exit(1)


def parse_shard(text: str | None) -> tuple[int, int]:
    """Which shard of how many."""
    if text is None:
        return 1, 1
    found = SHARD.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise usage.UsageError(
            compose("sweep", f"{text!r} is no shard", do="write I/N with I from 1 to N: --shard 1/4")
        )
    return int(found[1]), int(found[2])


def _refuse_beside_merge(given: list[str]) -> None:
    if given:
        what = f"--merge runs nothing, and {' and '.join(given)} {'is' if len(given) == 1 else 'are'} given"
        raise usage.UsageError(compose("sweep", what, do=f"leave {' and '.join(given)} off"))


def _run(
    sources: list[str],
    clusters: list[str],
    pipelines: list[str],
    jobs: int,
    shard: tuple[int, int],
    tokens: int | None,
) -> list[Cell]:
    if len(sources) != 1:
        raise usage.UsageError(compose("sweep", f"{len(sources)} sources are given", do="give one, or --merge"))
    if not clusters:
        raise usage.UsageError(compose("sweep", "no cluster is given", do="give one or more: --cluster h100-8x8"))
    for option, given in (("--cluster", clusters), ("--pipeline", pipelines)):
        for twice in (name for i, name in enumerate(given) if name in given[:i]):
            raise usage.UsageError(compose("sweep", f"{option} {twice} is given twice", do="give it once"))
    with usage.progress("importing torch"):
        from weft.cli.source import load_source
        from weft.cost.cluster import Cluster
        from weft.passes.pipeline import Pipeline
        from weft.report.sweep import sweep as run

    for name in clusters:
        Cluster.load(name)
    for spec in pipelines:
        Pipeline.parse(spec)
    with usage.progress(f"reading {sources[0]}"):
        module = load_source(sources[0])
    num_cells = len(range(shard[0] - 1, len(clusters) * len(pipelines), shard[1]))
    with usage.progress_bar(f"{len(clusters)} clusters x {len(pipelines)} pipelines", num_cells) as advance:
        return run(
            module, clusters, pipelines, jobs=jobs, shard=shard, tokens_per_step=tokens, done=lambda cell: advance()
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

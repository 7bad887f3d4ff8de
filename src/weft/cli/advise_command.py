"""`weft advise`: which layout to train a model with on a cluster."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.cli.dask_executor import DaskOption, dask_executor
from weft.errors import compose

if TYPE_CHECKING:
    from weft.advice.models import TrainedModel

TOKENS = re.compile(r"([0-9]+)([KMG]?)", re.ASCII | re.IGNORECASE)
LAYOUT_OPTIONS = ("parallel", "ranks", "mesh", "batch", "reshard", "checkpoint", "accumulate", "reduce")
"""Options of a zoo source that the advice chooses itself."""

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="zoo:llama-8b, zoo:llama-8b?sequence=8192, or package.module:function, which is imported and called.",
    ),
]
ClusterOption = Annotated[
    str, typer.Option("--cluster", metavar="NAME|FILE", help="A preset such as h100-8x8, or a TOML file.")
]
BatchOption = Annotated[
    str,
    typer.Option("--batch-tokens", metavar="N", help="Tokens of a step on all ranks: 4194304, or 4M (powers of 1024)."),
]
MemoryOption = Annotated[
    str | None,
    typer.Option("--memory-limit", metavar="SIZE", help="Memory of one rank, such as 70GiB; default: the device's."),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Number of processes; default: one for each core.")
]
PageOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE.html", help="Write a page with table and plot here.")
]


def advise(
    model: ModelArgument,
    cluster: ClusterOption,
    batch_tokens: BatchOption,
    memory_limit: MemoryOption = None,
    workers: WorkersOption = None,
    dask: DaskOption = None,
    output: PageOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Rank the layouts of a model on a cluster: meshes, resharding, checkpointing and microbatches. Needs no GPU.

    Does not plan layouts whose lower bound is above the best step. Exit status 1 if no layout fits.
    """
    usage.check_files((output,), (cluster,))
    num_tokens = parse_tokens(batch_tokens)
    limit_bytes = usage.parse_optional_size(memory_limit, "--memory-limit")
    with usage.progress("importing torch"):
        from weft.advice.advisor import advise as find
        from weft.advice.page import page_of
        from weft.advice.recipe import recipe_lines

    trained = trained_model(model)
    with usage.progress_bar("listing layouts") as told, dask_executor(dask) as (executor, num_dask):
        found = find(
            trained,
            cluster,
            num_tokens,
            memory_limit_bytes=limit_bytes,
            executor=executor,
            workers=workers or num_dask or os.cpu_count() or 1,
            told=told,
        )
    if output is not None:
        usage.write(page_of(found), output)
    lines = [*found.lines(), "", *recipe_lines(found, found.best)]
    usage.write(found.to_json() + "\n" if as_json else "\n".join(lines) + "\n", None)


def parse_tokens(text: str) -> int:
    """A number of tokens such as 4194304, 4096K or 4M; K, M and G are powers of 1024."""
    found = TOKENS.fullmatch(text.strip()[:30])
    number = int(found[1]) * 1024 ** ("KMG".find(found[2].upper()) + 1 if found[2] else 0) if found is not None else 0
    if number < 1:
        raise usage.UsageError(
            compose("--batch-tokens", f"{text!r} is not a number of tokens", do="write 4194304 or 4M")
        )
    return number


def trained_model(source: str) -> TrainedModel:
    """The model that a source names."""
    from weft.advice.models import ZooModel, model_of
    from weft.cli.zoo_source import OPTIONS, PREFIX, parse_zoo

    if not source.startswith(PREFIX):
        if ":" in source:
            return model_of(source)
        do = f"write {PREFIX}{source}, or package.module:function"
        raise usage.UsageError(compose(source, "it is not a model", do=do))
    name, options = parse_zoo(source)
    chosen = next((key for key in options if key in LAYOUT_OPTIONS or (key in OPTIONS and key != "layers")), None)
    if chosen is not None:
        what = "the advice chooses the layout" if chosen in LAYOUT_OPTIONS else f"{chosen} has no effect here"
        raise usage.UsageError(compose(source, what, do=f"leave {chosen!r} out"))
    changes = {"num_layers" if key == "layers" else key: value for key, value in options.items()}
    return ZooModel(name, tuple(changes.items()))

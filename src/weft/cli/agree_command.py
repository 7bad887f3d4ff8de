"""`weft agree`: whether the graphs of all ranks can run together."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.errors import compose

if TYPE_CHECKING:
    from weft.verification.agreement.agreement import Agreement


class CommunicationBackend(StrEnum):
    """The library that will run the collectives."""

    NCCL = "nccl"
    GLOO = "gloo"


def agree(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="One graph per rank, in rank order, or the folder that weft.agreement or TORCH_TRACE wrote.",
        ),
    ],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Total number of ranks, divided evenly among the graphs.")
    ] = None,
    backend: Annotated[
        CommunicationBackend, typer.Option(help="gloo allows any interleaving of groups; nccl does not.")
    ] = CommunicationBackend.NCCL,
    as_json: usage.JsonOption = False,
) -> None:
    """Check that all ranks launch the same collectives, that each send has its receive, and that no ranks deadlock.

    With fewer graphs than ranks, each graph stands for several consecutive ranks. For example, four graphs for 16 ranks
    are four pipeline stages. Exit status 0: the ranks agree; 1: they do not.
    """
    with usage.progress("importing torch"):
        from weft.verification.agreement.agreement import check
        from weft.verification.agreement.rank_record import FolderBoard, check_published

    board = FolderBoard(sources[0])
    is_folder = len(sources) == 1 and Path(sources[0]).is_dir()
    run = board.last_run() if is_folder else None
    if run is not None:
        found = check_published(board, board.runs[run], run)
    elif is_folder:
        from weft.frontends.trace_log import read_ranks

        with usage.progress(f"reading the logs in {sources[0]}"):
            logged = read_ranks(sources[0])
        found = check(logged, backend=backend.value)
    else:
        num_ranks = ranks or len(sources)
        if num_ranks % len(sources):
            what = f"{num_ranks} ranks cannot be divided evenly among {len(sources)} graphs"
            raise usage.UsageError(compose("agree", what, do="give one graph, or one for each rank"))
        from weft.cli.source import load_source

        with usage.progress(f"reading {len(sources)} graphs"):
            known = {source: load_source(source) for source in dict.fromkeys(sources)}
        share = num_ranks // len(sources)
        with usage.progress(f"checking {num_ranks} ranks"):
            found = check([known[sources[rank // share]] for rank in range(num_ranks)], backend=backend.value)
    if as_json:
        usage.write(json.dumps(_record(found), indent=1, sort_keys=True) + "\n", None)
    else:
        usage.show(str(found))
    raise typer.Exit(0 if found.holds else 1)


def _record(found: Agreement) -> dict[str, object]:
    findings = [
        {**asdict(finding), "where": [{"rank": at.rank, "node": at.node} for at in finding.where]}
        for finding in found.findings
    ]
    return {**asdict(found), "holds": found.holds, "findings": findings}

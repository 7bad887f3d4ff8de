"""`weft verify`: check that two graphs compute the same on every rank."""

from __future__ import annotations

import json
import math
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli import usage
from weft.errors import compose

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from weft.verification.comparison import Difference, Verdict

EXAMPLE = "dp=2,tp=2"
AXIS = re.compile(r"([^=,\s]+)=([1-9][0-9]{0,8})", re.ASCII)


class RankBackend(StrEnum):
    """How the ranks run: the values of `backend` in `weft.verify`."""

    VIRTUAL = "virtual"
    GLOO = "gloo"


def verify(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help=usage.SOURCE_HELP)],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The graph to compare it with, in any of these forms.")],
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks that run both graphs.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar=EXAMPLE, help="Mesh axes with their sizes; the last varies fastest.")
    ] = None,
    backend: Annotated[
        RankBackend | None, typer.Option(help="virtual: all ranks in this process; gloo: one process for each.")
    ] = None,
    proof: Annotated[
        bool,
        typer.Option(
            "--proof", help="Prove equality instead of running the graphs; needs no data and works at any size."
        ),
    ] = False,
    as_json: usage.JsonOption = False,
) -> None:
    """Compare the values of two graphs on every rank, or prove that they are equal.

    Exit status 0: equal, or proved; 1: different, or not proved.
    """
    axes = None if mesh is None else parse_mesh(mesh)
    if axes is not None and ranks not in (None, math.prod(axes.values())):
        what = f"the mesh {mesh} has {math.prod(axes.values())} ranks, --ranks is {ranks}"
        raise usage.UsageError(compose("verify", what, do="leave --ranks off"))
    if proof and (ranks is not None or backend is not None):
        option = "--ranks" if ranks is not None else "--backend"
        raise usage.UsageError(
            compose("verify", f"{option} has no effect on a proof, which runs nothing", do=f"leave {option} off")
        )
    with usage.progress("importing torch"):
        from weft.api import verify as compare
        from weft.cli.source import load_source

    with usage.progress(f"reading {before} and {after}"):
        sides = load_source(before), load_source(after)
    _check_groups(sides, ranks, axes, proof)
    if proof:
        with usage.progress(f"proving {len(sides[0].graph.nodes)} nodes equal"):
            holds, text, record = _prove(sides[0], sides[1], axes)
    else:
        with usage.progress("running both on every rank"):
            verdict = compare(sides[0], sides[1], ranks, mesh=axes, backend=(backend or RankBackend.VIRTUAL).value)
        holds, text, record = verdict.equal, str(verdict), _record(verdict)
    if as_json:
        usage.write(json.dumps(record, indent=1, sort_keys=True) + "\n", None)
    else:
        usage.show(text)
    raise typer.Exit(0 if holds else 1)


def parse_mesh(text: str) -> dict[str, int]:
    """Axes and sizes from `dp=2,tp=2`."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        found = AXIS.fullmatch(part.strip())
        if found is None or found[1] in axes:
            what = f"{part!r} is not an axis with a size" if found is None else f"axis {found[1]!r} is given twice"
            raise usage.UsageError(compose(f"--mesh {text}", what, do=f"write {EXAMPLE}"))
        axes[found[1]] = int(found[2])
    return axes


def _check_groups(
    sides: tuple[GraphModule, GraphModule], ranks: int | None, axes: dict[str, int] | None, proof: bool
) -> None:
    """Refuse a number of ranks that does not fit the groups of the graphs. A proof reports that itself."""
    from weft.graph.groups import read_groups

    num_ranks = ranks if axes is None else math.prod(axes.values())
    for group in (group for side in sides for group in read_groups(side)):
        given = (axes or {}).get(group.name)
        if given is not None and group.size not in (0, given):
            what = f"group {group.name!r} has {group.size} ranks in the graph, {given} in the mesh"
            raise usage.UsageError(compose("verify", what, do="capture the graph for this mesh"))
        if given is not None or proof:
            continue
        if group.size == 0:
            do = f"give it: --mesh {group.name}=8"
            raise usage.UsageError(compose("verify", f"the size of group {group.name!r} is unknown", do=do))
        if num_ranks is not None and group.ranks is None and num_ranks % (group.size * group.stride):
            what = (
                f"groups {group.name!r} of {group.size} ranks with stride {group.stride} do not tile {num_ranks} ranks"
            )
            do = f"use a multiple of {group.size * group.stride} ranks"
            raise usage.UsageError(compose("verify", what, do=do))


def _prove(before: GraphModule, after: GraphModule, axes: dict[str, int] | None) -> tuple[bool, str, dict[str, Any]]:
    """Bitwise if possible, otherwise in real arithmetic."""
    from weft.verification.symbolic.equivalence import prove

    proof = exact = prove(before, after, groups=axes)
    if not exact:
        proof = prove(before, after, groups=axes, reassociates=True)
    text = str(proof)
    if proof and not exact:
        text += f"; bitwise: {exact}"
    record: dict[str, Any] = {
        "proved": proof.proved,
        "exact": exact.proved,
        "difference": (proof if not proof else exact).difference or None,
        "num_values": proof.num_values,
    }
    return proof.proved, text, record


def _record(verdict: Verdict) -> dict[str, Any]:
    return {
        "equal": verdict.equal,
        "bitwise": verdict.bitwise,
        "num_ranks": verdict.num_ranks,
        "backend": verdict.backend,
        "tolerance": verdict.tolerance,
        "difference": None if verdict.difference is None else _difference(verdict.difference),
    }


def _difference(found: Difference) -> dict[str, Any]:
    """Values as text: JSON has no NaN."""
    largest = found.max_abs_difference
    return {
        "rank": found.rank,
        "position": found.position,
        "index": None if found.index is None else list(found.index),
        "before": str(found.before),
        "after": str(found.after),
        "max_abs_difference": largest if largest is not None and math.isfinite(largest) else None,
    }

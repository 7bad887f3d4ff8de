"""`weft cluster`: list the presets, show a cluster, or write a file for one that differs from a preset."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.usage import JsonOption, UsageError, show
from weft.errors import compose

if TYPE_CHECKING:
    from weft.cost.cluster import Cluster

cluster = typer.Typer(help="List presets, show a cluster, or describe one of your own.", no_args_is_help=True)
EXAMPLE_BYTES = 1 << 30
PICTURE = """\
rails = true: each rank has its own adapter     rails = false: the ranks of a node share one
  node 0      node 1                              node 0      node 1
  rank 0 ==== rank 8                              rank 0 \\    / rank 8
  rank 1 ==== rank 9                              rank 1 -====- rank 9
   ...         ...                                 ...   /    \\  ...
"""


@cluster.command("list")
def list_presets(as_json: JsonOption = False) -> None:
    """List the presets, each with its device and its links."""
    from weft.cost.cluster import Cluster
    from weft.cost.cluster_file import presets

    found = [Cluster.load(name) for name in presets()]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=1, default=str))
        return
    width = max(len(each.name) for each in found)
    for each in found:
        links = ", ".join(f"{level.name} {_rate(level.link.bandwidth_gbps)}" for level in each.levels)
        typer.echo(f"{each.name.ljust(width)}  {each.device.name or 'no device'}; {links}")
    typer.echo("Any number of nodes works, as in h100-16x8. A rate is what one rank sends.")


@cluster.command("show")
def show_cluster(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A preset such as h100-16x8, or a file.")],
    as_json: JsonOption = False,
) -> None:
    """Show a cluster: its levels, its device, and the time of some collectives."""
    from weft.cost.cluster import Cluster

    found = Cluster.load(name)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1, default=str))
        return
    for line in described(found):
        show(line)


def described(found: Cluster) -> list[str]:
    """A cluster in lines for people."""
    from weft.graph.groups import Group
    from weft.graph.ops import Kind
    from weft.quantities import duration_text, size_text

    device = found.device
    peaks = ", ".join(f"{dtype} {peak:g}" for dtype, peak in device.peak_tflops)
    memory = size_text(device.memory_bytes) if device.memory_bytes else "of unknown size"
    lines = [
        f"{found.name}: {found.num_nodes} x {found.ranks_per_node} = {found.num_ranks} ranks",
        f"device {device.name or '(not described)'}: memory {memory}, {_rate(device.memory_gbps or 0.0)}",
        f"peak TFLOP/s: {peaks or 'not described'}",
    ]
    for level in found.levels:
        whose = "each rank has this link" if level.rails or level.num_ranks <= found.ranks_per_node else "shared"
        lines.append(
            f"level {level.name}: blocks of {level.num_ranks} ranks, {_rate(level.link.bandwidth_gbps)} for one rank "
            f"({_bits(level.link.bandwidth_gbps)}; {whose}), latency {duration_text(level.link.latency_us)}, "
            f"{duration_text(level.link.hop_us)} for each hop"
        )
    sizes = dict.fromkeys([found.ranks_per_node, found.num_ranks])
    for size in (size for size in sizes if size > 1):
        group = Group("all", size)
        times = ", ".join(
            f"{kind.value.replace('_', '-')} {duration_text(found.collective_us(kind, group, EXAMPLE_BYTES))}"
            for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
        )
        lines.append(f"{size_text(EXAMPLE_BYTES)} over {size} ranks: {times}")
    if found.num_nodes > 1 and found.ranks_per_node > 1:
        lines += ["", *PICTURE.rstrip().splitlines()]
    return lines


@cluster.command("new")
def new(
    base: Annotated[str, typer.Option("--from", help="The preset that it resembles, such as h100-16x8.")],
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.", min=1)] = None,
    nic: Annotated[str | None, typer.Option(help="Rate of one network adapter, such as 400Gbit or 50GB/s.")] = None,
    nics_per_node: Annotated[int | None, typer.Option(help="Network adapters of one node.", min=1)] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write; default: stdout.")] = None,
) -> None:
    """Write the file of a cluster that resembles a preset."""
    from weft.cost.cluster import Cluster

    text = cluster_of(base, nodes, nic, nics_per_node)
    made = Cluster.read(str(output or base), text.encode())  # what is written can be read
    if output is None:
        typer.echo(text, nl=False)
        return
    from weft.files import write_whole

    write_whole(output, text)
    show(f"{output}: {made.num_ranks} ranks; look at it with: weft cluster show {output}", err=True)


def cluster_of(base: str, nodes: int | None, nic: str | None, nics_per_node: int | None) -> str:
    """The text of the file."""
    from weft.cost.cluster_file import preset_table
    from weft.cost.stated_quantities import RATES, quantity

    table = preset_table(base)
    lines = [f'base = "{base}"', 'name = "ours"']
    if nodes is not None:
        lines.append(f"num_nodes = {nodes}")
    ranks = table["ranks_per_node"]
    outer = [level["name"] for level in table["levels"] if level["spans"] == "cluster"]
    if nic is None and nics_per_node is None:
        return "\n".join(lines) + "\n"
    if nic is None:
        raise UsageError(compose("--nics-per-node", "the rate of an adapter is missing", do="add --nic 400Gbit"))
    gbps = quantity(nic, RATES)
    if gbps is None:
        raise UsageError(compose("--nic", f"{nic!r} is not a rate", do="write 400Gbit or 50GB/s"))
    if not outer:
        raise UsageError(compose("--nic", f"{base} has no level between nodes", do="start from h100-8x8, for example"))
    count = ranks if nics_per_node is None else nics_per_node
    return "\n".join(
        [
            *lines,
            "",
            "[[levels]]",
            f'name = "{outer[-1]}"',
            f"# {count} adapters of {nic} for the {ranks} ranks of a node: the part of one rank.",
            f'bandwidth = "{gbps * count / ranks:g} GB/s"',
            "rails = true",
            "",
        ]
    )


def _rate(gbps: float) -> str:
    return f"{gbps:g} GB/s"


def _bits(gbps: float) -> str:
    return f"{gbps * 8:g} Gbit/s"

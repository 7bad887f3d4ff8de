"""`weft demo`: a whole training step of an 8B decoder on 64 GPUs, optimized, proved and drawn, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.usage import Effort, EffortOption, JsonOption, MemoryOption, parse_optional_size, progress, writing

if TYPE_CHECKING:
    from weft.api import Result

CLUSTER = "h100-8x8"
NUM_RANKS = 64
SMALL_RANKS = 4
INDENT = 2
LEGEND = """\
before: the captured step, which waits for each collective at once.
exposed: communication that the GPUs wait for. hidden: communication while they compute.
bound: no order of this step is faster, however its collectives are merged. gap: the step's distance from the bound."""
PASTE = """\
model = torch.compile(model, backend="weft", options={"weft.cluster": "h100-8x8"})
...
print(weft.run_report())"""


def demo(
    as_json: JsonOption = False,
    layers: Annotated[int, typer.Option(min=1, help="Number of decoder layers.")] = 32,
    output: Annotated[Path, typer.Option(help="Folder for report.html and trace.json.")] = Path(),
    memory_limit: MemoryOption = None,
    effort: EffortOption = Effort.DEFAULT,
) -> None:
    """Capture a training step of an 8B decoder under FSDP on 64 ranks, optimize it, prove it equal, and draw it.

    Needs no GPU, no cluster and no arguments; takes about a minute.
    """
    from weft.api import optimize
    from weft.zoo import load

    limit = parse_optional_size(memory_limit, "--memory-limit")
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    shown = f"{layers} layer{'s' if layers > 1 else ''}"
    with progress(f"capturing {shown} of llama-8b under FSDP on {NUM_RANKS} ranks"):
        module = load("llama-8b", "fsdp", ranks=NUM_RANKS, layers=layers)
    with progress(f"optimizing {len(module.graph.nodes)} nodes for {CLUSTER} and proving the result equal"):
        result = optimize(module, CLUSTER, memory_limit_bytes=limit, effort=effort.value, verify="equivalence")
    with progress(f"comparing values of the debug preset on {SMALL_RANKS} ranks"):
        small = optimize(load("llama-debug", "fsdp", ranks=SMALL_RANKS), CLUSTER, verify="values")
    with progress("simulating both graphs"):
        title = f"llama-8b, {shown}, FSDP on {NUM_RANKS} ranks"
        with writing(output):
            result.report.save_html(output / "report.html", title=title)
            result.report.save_trace(output / "trace.json")
    if as_json:
        found = {"report": json.loads(result.report.to_json()), "values": small.report.witnesses[-1]}
        typer.echo(json.dumps(found, indent=1))
    else:
        _show(result, small, title, output)


def _show(result: Result, small: Result, title: str, output: Path) -> None:
    from rich.console import Console

    typer.secho(f"\n{title}: one step on {CLUSTER}, simulated", bold=True)
    result.report.show_summary(Console(), indent=INDENT)
    typer.echo(f"\n{_indented(LEGEND)}")
    _section("passes", "\n".join(result.report.pass_lines()))
    checks = [
        *(f"the whole step: {witness}" for witness in result.report.witnesses),
        f"llama-debug on {SMALL_RANKS} virtual ranks: {small.report.witnesses[-1]}",
    ]
    _section("checked", "\n".join(checks))
    _section("written", f"{output / 'report.html'}\n{output / 'trace.json'}")
    _section("in a training script", PASTE)


def _section(title: str, text: str) -> None:
    typer.secho(f"\n{title}", bold=True)
    typer.echo(_indented(text))


def _indented(text: str) -> str:
    return "\n".join(f"{' ' * INDENT}{line}".rstrip() for line in text.rstrip().splitlines())

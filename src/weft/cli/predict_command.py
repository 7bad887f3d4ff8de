"""`weft predict`: throughput, utilisation and memory of a training step on a described cluster, with error bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import usage
from weft.cli.simulate_command import Root, RootOption

if TYPE_CHECKING:
    from weft.prediction.prediction import Prediction


Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help=f"{usage.SOURCE_HELP} Several graphs run one after the other. A zoo:MODEL includes its optimizer "
        "(part=step).",
    ),
]
ClusterOption = Annotated[str, typer.Option("--cluster", metavar="NAME|FILE", help="A preset or a TOML file.")]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="RUNTIME",
        help="The runtime that executes the step, such as fsdp2; default: the captured order.",
    ),
]
AttentionOption = Annotated[
    str | None, typer.Option("--attention", metavar="KERNEL", help="The attention kernel: flash2, flash3 or cudnn.")
]


def predict(
    sources: Sources,
    cluster: ClusterOption,
    runtime: RuntimeOption = None,
    root: RootOption = Root.SPLIT,
    compiled: Annotated[bool, typer.Option("--compiled", help="The whole step is compiled.")] = False,
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Each repeated block is compiled; the rest is eager.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Nothing is compiled.")] = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="The whole step is compiled and replayed as CUDA graphs.")
    ] = False,
    attention: AttentionOption = None,
    tokens: usage.TokensOption = None,
    assume: usage.AssumeOption = None,
    output: usage.OutputOption = None,
    as_json: usage.JsonOption = False,
) -> None:
    """Predict a training step: tokens/s, step time, MFU, memory and exposed communication, with error bars."""
    from weft.errors import compose

    asked = {"compiled": compiled, "blocks": blocks, "eager": eager, "cuda-graphs": cuda_graphs}
    chosen = [name for name, is_asked in asked.items() if is_asked]
    if len(chosen) > 1:
        what = f"{' and '.join(f'--{name}' for name in chosen)} exclude each other"
        raise usage.UsageError(compose("predict", what, do="give one of them"))
    usage.check_files((output,), (*sources, cluster))
    with usage.progress("importing torch"):
        from weft import api
        from weft.cli.source import load_source
        from weft.cost.cluster import Cluster

    described = Cluster.load(cluster)
    with usage.progress(f"reading {', '.join(sources)}"):
        modules = [load_source(with_optimizer(source)) for source in sources]
    with usage.progress(f"predicting {sum(len(module.graph.nodes) for module in modules)} nodes"):
        found = api.predict(
            modules,
            described,
            runtime=runtime,
            root=root.value,
            execution=chosen[0] if chosen else None,
            attention=attention,
            tokens_per_step=tokens,
            sizes=usage.sizes_of(assume),
        )
    text = found.to_json() if as_json else "\n".join(lines_of(found))
    usage.write(text + "\n", output)


def with_optimizer(source: str) -> str:
    """A model of the zoo as a whole training step, unless the source names the part."""
    if not source.startswith("zoo:") or "part=" in source:
        return source
    return f"{source}{'&' if '?' in source else '?'}part=step"


def lines_of(found: Prediction) -> list[str]:
    """The prediction as text."""
    from weft.quantities import count_text, duration_text, share_text, size_text
    from weft.report.plain_text import plain_line, table

    memory, step, peak = found.memory, found.step_error.text, found.peak_error.text
    spread = found.step_us * (found.step_error.share or 0)
    rows = [
        ("tokens/s per GPU", _text(found.tokens_per_second_per_gpu, count_text), step),
        ("step", duration_text(found.step_us), step),
        ("  of a rank of average speed", duration_text(found.simulated_us), ""),
        ("  waiting for the slowest rank", duration_text(found.waiting_us), ""),
        ("exposed communication", duration_text(found.exposed_us), f"± {duration_text(spread)}" if step else ""),
        ("MFU", _text(found.mfu, share_text), step),
        ("HFU", _text(found.hfu, share_text), step),
        ("peak reserved", size_text(memory.reserved_bytes), peak),
        ("peak allocated", size_text(memory.allocated_bytes), peak),
        *((f"  {part}", size_text(num_bytes), "") for part, num_bytes in memory.parts.items()),
        ("outside of the allocator", size_text(sum(memory.outside.values())), ""),
        *((f"  {part}", size_text(num_bytes), "") for part, num_bytes in memory.outside.items()),
        ("memory of the device", size_text(memory.needed_bytes), ""),
    ]
    ran = ", ".join(filter(None, (found.runtime, found.kind.execution, found.attention)))
    too_large = memory.does_not_fit
    return [
        *([too_large, ""] if too_large else []),
        plain_line(f"{found.num_ranks} ranks on {found.cluster}, {ran}"),
        "",
        *map(plain_line, table(rows)),
        "",
        plain_line(f"error bar of times: {found.step_error.basis}"),
        plain_line(f"error bar of memory: {found.peak_error.basis}"),
        f"ranks differ by {share_text(found.straggler_sigma)} (standard deviation, assumed)",
        *(f"note: {note}" for note in found.notes),
    ]


def _text(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)

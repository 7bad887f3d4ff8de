"""Baseline: the step that people run today, to judge an optimized one by.

The graph before an optimization is usually a captured step in its synchronous order, which no runtime executes. The
baseline is that step as the runtime that fits its parallelism runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from weft.cost.cluster import Cluster
from weft.graph.dag import collector_paused
from weft.graph.groups import read_groups
from weft.graph.versions import analyses_kept, dag_of
from weft.passes.presets import recognise
from weft.passes.runtimes import RUNTIMES, notes_on, run_as
from weft.quantities import duration_text, size_text
from weft.simulation.build import program_of
from weft.simulation.simulator import simulate

FITTING = {"ddp": "ddp", "fsdp": "fsdp2", "hsdp": "hsdp", "fsdp-tp": "fsdp2", "moe": "fsdp2"}
"""The runtime of each preset. Tensor parallelism alone runs in the captured order."""


@dataclass(frozen=True)
class Baseline:
    """A captured step as a runtime executes it, simulated."""

    runtime: str
    step_us: float
    exposed_us: float
    peak_bytes: int
    num_collectives: int
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The runtime for people."""
        return RUNTIMES[self.runtime].title

    def sentence(self, after_us: float) -> str:
        """Text for a report whose optimized step takes `after_us`."""
        change = (after_us / self.step_us - 1) * 100 if self.step_us else 0.0
        return (
            f"As {self.title} runs it, the step takes {duration_text(self.step_us)} ({duration_text(self.exposed_us)} "
            f"exposed, peak {size_text(self.peak_bytes)}); after is {change:+.1f} % against that"
        )


@collector_paused()
@analyses_kept()
def baseline_of(
    module: GraphModule, cluster: Cluster, groups: Mapping[str, int | Sequence[Sequence[int]]] | None = None
) -> Baseline | None:
    """The baseline of a captured step; None if no runtime fits it, or if the runtime would leave it as it is."""
    table = read_groups(module, groups)
    name = FITTING.get(recognise(dag_of(module.graph), table))
    if name is None:
        return None
    emulated = run_as(module, name, cluster=cluster, groups=groups)
    if not emulated.changed:
        return None
    timeline = simulate(program_of(emulated.module, table, cluster))
    return Baseline(
        name,
        timeline.step_us,
        timeline.exposed_us,
        timeline.peak_bytes,
        len(timeline.collectives),
        tuple(notes_on(module, name)),
    )

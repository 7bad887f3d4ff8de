"""Decide which values backward finds in memory, which it gathers or computes again, and which it fetches from the host.

Why: a step that does not fit needs fewer values at once. Recomputing a norm costs little and frees much; a weight that
is gathered once and kept costs memory but no second gather. Which of these pays depends on what else is kept, and on
the communication that the order of the step can hide.

Before::

    a = silu(x)
    b = mm(a, w)
    ...
    dw = mm(at, db)

After::

    a = silu(x)
    b = mm(a, w)
    ...
    a_again = silu(x)
    dw = mm(a_again_t, db)

With `offload=true`, a value may also move to pinned host memory::

    a = silu(x)
    a_offload = weft.offload.default(a)
    b = mm(a, w)
    a_offloaded = weft.wait_copy.default(a_offload, a)
    ...
    a_fetch = weft.fetch.default(a_offloaded, device='cuda')
    a_fetched = weft.wait_copy.default(a_fetch, a_offloaded)
    dw = mm(a_fetched_t, db)

Similar values, such as the same tensor of each layer, are decided together, and split by layers only at the limit. Each
choice is planned as a whole step with its order and its buckets (`retention/decider.py`), as `schedule-overlap` does
afterwards. The given graph is among the choices, so the step is never longer than without this pass. If nothing fits,
the pass raises an error with the smallest peak found and the step that it costs. Without a memory limit, the pass does
nothing. With one, `weft.optimize` runs it before the `schedule-overlap` of a preset; if a step does not fit the device
without a limit, the device's memory is the limit.

Declines: values that draw random numbers, are returned or written, or whose inputs are overwritten before backward;
collectives of groups whose ranks hold different graphs; values between forward and backward if the graph is only one of
the two.
Numerics: exact. Bytes on the wire: more for gathers that run again, fewer for gathers that are kept. Memory: within the
limit once the result is scheduled.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Graph

from weft.errors import MemoryLimitError, compose
from weft.graph.edit import Edit
from weft.passes.base import NamedNodes, Numerics, Pass
from weft.passes.communication.schedule_overlap import KINDS, OTHERS
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Repeat, Retention, Step
from weft.quantities import duration_text, size_text
from weft.retention.decider import Decider, Trial
from weft.retention.out_of_reach import out_of_reach
from weft.retention.repeats import repeat


@dataclass(frozen=True)
class DecideMemory(Pass):
    """Keep, gather again, recompute or offload what backward needs, for the shortest step within the memory limit."""

    numerics = Numerics.EXACT
    reorders_launches = True
    keeps_memory_limit = True

    merge: Literal["all", "gathers", "none"] = "all"
    """The collectives that `schedule-overlap` may merge afterwards."""
    max_bucket_bytes: int | None = None
    """Maximum bytes of one bucket of `schedule-overlap`."""
    offload: bool = False
    """Whether values may also be offloaded to the pinned host memory that the cluster describes."""

    def plan(self, graph: Graph, context: Context) -> Step:
        limit = context.memory_limit_bytes
        if limit is None:
            return self.step((), ())
        host_memory = context.target_cluster.device.host_memory if self.offload else None
        decider = Decider(graph, context, limit, KINDS[self.merge] - OTHERS, self.max_bucket_bytes, host_memory)
        best = decider.decide()
        if best.peak_bytes > limit:
            raise MemoryLimitError(self._refusal(best, limit), best.peak_bytes)
        table = decider.table(best.choice)
        action = replace(best.action, table=table) if best.action is not None else Repeat((), table=table)
        decisions = self._decisions(decider, table)
        if self.offload and host_memory is None:
            name = context.target_cluster.name
            sentence = f"nothing is offloaded: cluster {name} describes no host memory ([device.host_memory])"
            decisions.append(self.decision(Reason.UNSUPPORTED_FORM, sentence))
        return self.step([action] if table else [], decisions)

    def _refusal(self, best: Trial, limit: int) -> str:
        what = (
            f"found no order that fits in {limit} bytes; the smallest peak found is {best.peak_bytes}, "
            f"with a step of {duration_text(best.step_ns / 1000)}"
        )
        return compose(self.name(), what, do=f"allow {best.peak_bytes} bytes")

    def _decisions(self, decider: Decider, table: tuple[Retention, ...]) -> list[Decision]:
        found = [self.decision(Reason.APPLIED, _sentence(row), row.group) for row in table if row.is_new]
        sites = decider.sites
        reasons = Counter(sites.why_fixed[s] for s in sites.needed if s in sites.why_fixed and sites.num_bytes[s])
        for why, count in sorted(reasons.items()):
            first = next(s for s in sites.needed if sites.why_fixed.get(s) == why)
            name = decider.dag.nodes[first].name
            sentence = f"{name} and {count - 1} more stay: {why}" if count > 1 else f"{name} stays: {why}"
            found.append(self.decision(Reason.UNSUPPORTED_FORM, sentence, name))
        already = out_of_reach(decider.graph, decider.program)
        return [*found, *([self.decision(Reason.UNSUPPORTED_FORM, already)] if already else [])]

    def apply(self, edit: Edit, step: Step) -> None:
        nodes = NamedNodes(edit.graph.nodes)
        others = tuple(action for action in step.actions if not isinstance(action, Repeat))
        super().apply(edit, replace(step, actions=others))  # refuses the actions of other passes
        for action in step.actions:
            if isinstance(action, Repeat):
                repeat(edit, nodes, action)


def _sentence(row: Retention) -> str:
    size = size_text(row.num_bytes)
    if row.choice == "kept":
        why = "instead of making them again" if row.given == "made again" else "to make others from them"
        return f"{row.group}: keeps {row.num_values} values, {size}, {why}"
    work = f"{duration_text(row.work_us)} {'of copies' if row.choice == 'offloaded' else 'more work'}"
    return f"{row.group}: {row.choice}, {row.num_values} values, {size}, for {work}"

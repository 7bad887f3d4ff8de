"""Every collective of a graph with the decisions about it, as data and as text.

    explanation = explain(module, weft.optimize(module).report)
    explanation.collectives[0].outcomes
    print(explanation)

A decision belongs to a collective if it names its launch, one of its waits, or a node that an earlier decision put in
their place, such as a bucket. The text fits a screen: if it would be longer, alike layers are folded (`folded.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from torch.fx import GraphModule

from weft.graph.collective import Collective, collectives
from weft.graph.groups import GroupTable, read_groups
from weft.graph.origins import CollectiveOrigin, origins_of
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Evidence
from weft.quantities import duration_text, share_text
from weft.report.collective_record import CollectiveDecision, CollectiveRecord
from weft.report.folded import folded_lines
from weft.report.layers import ExposedLayers, layer_lines
from weft.report.plain_text import plain_line, table
from weft.report.report import Report
from weft.simulation.timeline import NS_PER_US

SCREEN = 60
"""Maximum number of lines of an explanation; a longer one is folded."""
FOLDED = "`weft explain SOURCE NAME` shows the collectives of a layer, a module or a launch; --json shows all"


@dataclass(frozen=True)
class ReasonTotal:
    """Number of collectives and decisions with one reason, and their cost."""

    reason: Reason
    num_collectives: int
    """With a decision for this reason."""
    num_decisions: int
    """Each counted once, however many collectives it is about."""
    exposed_us: float = 0.0
    """Time for which these are still exposed, each bucket counted once."""
    gain_us: float = 0.0

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """The cells of a table."""
        exposed, gain = (duration_text(us) if self.exposed_us else "" for us in (self.exposed_us, self.gain_us))
        return self.reason.value, str(self.num_collectives), str(self.num_decisions), exposed, gain


@dataclass(frozen=True)
class BoundGap:
    """The step of a plan against the lower bound that is proved."""

    cluster: str
    step_us: float
    bound_us: float
    gap: float
    """step / bound - 1."""
    bound: str
    """The name of the bound, and its argument."""
    bound_of: Literal["before", "after"] = "before"
    """The graph for which the bound holds, in any order and with any merging."""

    def lines(self) -> list[str]:
        """Two sentences."""
        step, bound = duration_text(self.step_us), duration_text(self.bound_us)
        graph = "original graph" if self.bound_of == "before" else "rewritten graph, which has less work"
        above = f"{share_text(self.gap)} above the lower bound of {bound} for the {graph}"
        told = f"the step takes {step} on {self.cluster}, {above}"
        return [plain_line(told), plain_line(f"proof of the bound: {self.bound}")]


@dataclass(frozen=True)
class Explanation:
    """All collectives, in the order of their launches."""

    collectives: tuple[CollectiveRecord, ...]
    totals: tuple[ReasonTotal, ...]
    """By reason, in the order in which `Reason` lists them."""
    unconsidered: tuple[str, ...]
    """The collectives without a decision."""
    verdict: BoundGap | None = None
    """How good the outcome is, if it is for a cluster."""
    exposed: tuple[ExposedLayers, ...] = ()
    """The exposed communication by layer, if it is for a cluster."""
    why: str = ""
    """Why the step takes so long, in one sentence, if it is for a cluster."""
    modules: Mapping[str, str] = field(default_factory=dict[str, str])
    """The modules of the nodes that decisions name."""

    def to_json(self) -> str:
        """The explanation as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def of(self, name: str) -> tuple[CollectiveRecord, ...]:
        """The collectives of a layer or a module, or the one whose launch has this name."""
        return tuple(record for record in self.collectives if record.name == name or record.is_of(name))

    def __str__(self) -> str:
        lines = [line for record in self.collectives for line in record.lines(self.modules)]
        if not lines:
            return "the graph has no collectives"
        rest = ["", *self._totals(), *(["", *self.verdict.lines()] if self.verdict is not None else [])]
        head = [line for line in (plain_line(self.why), *(layer_lines(self.exposed) if self.exposed else ())) if line]
        head = [*head, ""] if head else []
        if len(head) + len(lines) + len(rest) > SCREEN:
            room = SCREEN - len(head) - len(rest) - 1
            lines = [*folded_lines(self.collectives, self.modules, room), FOLDED]
        return "\n".join([*head, *lines, *rest])

    def _totals(self) -> list[str]:
        rows = [("reason", "collectives", "decisions", "exposed", "could save up to")]
        rows += [total.row for total in self.totals]
        if self.unconsidered:
            rows.append(("not considered", str(len(self.unconsidered)), "0", "", ""))
        columns = 5 if any(total.exposed_us for total in self.totals) else 3
        return table([row[:columns] for row in rows])


def explain(
    module: GraphModule,
    report: Report,
    evidence: Evidence | None = None,
    groups: GroupTable | None = None,
) -> Explanation:
    """Sort the decisions of a report by the collectives of the module that it was made for.

    `evidence` comes from the plan. `groups` is the table of the module, if it is known already.
    """
    records, decisions = _collectives(module, report, groups if groups is not None else read_groups(module), None)
    return Explanation(
        records,
        tuple(total for reason in Reason if (total := _total(reason, records, decisions)).num_decisions),
        tuple(record.name for record in records if not record.outcomes),
        None if evidence is None else _verdict(evidence),
        modules=report.modules,
    )


def records_of(
    module: GraphModule,
    report: Report,
    groups: GroupTable,
    originals: Mapping[str, CollectiveOrigin] | None = None,
) -> tuple[CollectiveRecord, ...]:
    """The collectives of a module, each with the decisions about it.

    `originals` are the origins in the original graph by the name of the launch, if the module was made from it.
    """
    return _collectives(module, report, groups, originals)[0]


def _collectives(
    module: GraphModule, report: Report, groups: GroupTable, originals: Mapping[str, CollectiveOrigin] | None
) -> tuple[tuple[CollectiveRecord, ...], list[list[Decision]]]:
    """The collectives of a module, and the decisions about each."""
    found = list(collectives(module.graph))
    decisions = _by_collective(module, found, report)
    origins = origins_of(module.graph, originals)
    records = (
        _record(each, groups, chosen, origins[each.launch.name]) for each, chosen in zip(found, decisions, strict=True)
    )
    return tuple(records), decisions


def _verdict(evidence: Evidence) -> BoundGap:
    times = evidence.step_ns / NS_PER_US, evidence.bound_ns / NS_PER_US
    return BoundGap(evidence.cluster, *times, evidence.gap, evidence.bound, evidence.bound_of)


def _by_collective(module: GraphModule, found: list[Collective], report: Report) -> list[list[Decision]]:
    """The decisions about each collective, in the order of the passes."""
    names = {node.name for node in module.graph.nodes}
    owners: dict[str, dict[int, None]] = {}
    for i, collective in enumerate(found):
        for node in (collective.launch, *collective.waits):
            owners.setdefault(node.name, {})[i] = None
    decisions: list[list[Decision]] = [[] for _ in found]
    for decision in _in_order(report):
        concerned = {i: None for name in decision.nodes for i in owners.get(name, ())}
        for i in concerned:
            decisions[i].append(decision)
        for name in decision.nodes if decision.applied else ():
            if name not in names:
                owners.setdefault(name, {}).update(concerned)
    return decisions


def _in_order(report: Report) -> list[Decision]:
    order: dict[str, int] = {}
    for i, record in enumerate(report.passes):
        order.setdefault(record.spec.partition("{")[0], i)
    return sorted([*report.applied, *report.declined], key=lambda d: order.get(d.pass_name, len(order)))


def _record(
    collective: Collective, groups: GroupTable, decisions: list[Decision], origins: tuple[CollectiveOrigin, ...]
) -> CollectiveRecord:
    name = groups.canonical(collective.group_argument)
    group = groups.groups.get(name)
    sent, received = collective.input_bytes, collective.output_bytes
    return CollectiveRecord(
        name=collective.launch.name,
        kind=collective.kind.value,
        group=name,
        num_ranks=group.size if group is not None else 0,
        num_bytes=None if sent is None or received is None else max(sent, received),
        outcomes=tuple(
            CollectiveDecision(d.pass_name, d.reason, d.sentence, d.nodes, d.blocking, d.exposed_us, d.gain_us)
            for d in sorted(decisions, key=lambda decision: decision.exposed_us <= 0)
        ),
        origins=origins,
    )


def _total(reason: Reason, records: tuple[CollectiveRecord, ...], decisions: list[list[Decision]]) -> ReasonTotal:
    num_collectives = sum(any(outcome.reason is reason for outcome in record.outcomes) for record in records)
    # By identity: a pass that runs twice may make the same decision twice.
    num_decisions = len({id(decision) for chosen in decisions for decision in chosen if decision.reason is reason})
    once = dict.fromkeys(outcome for record in records for outcome in record.outcomes if outcome.reason is reason)
    exposed, gain = sum(each.exposed_us for each in once), sum(each.gain_us for each in once)
    return ReasonTotal(reason, num_collectives, num_decisions, exposed, gain)

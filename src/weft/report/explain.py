"""What became of every collective of a graph, as data: the decisions of a report, told by collective.

    explanation = explain(module, weft.optimize(module).report)
    explanation.collectives[0].outcomes

A decision belongs to a collective if it names its launch, one of its waits, or a node that an earlier decision has put
in their place, such as a bucket.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from torch.fx import GraphModule

from weft.graph.collective import Collective, collectives
from weft.graph.groups import GroupTable, read_groups
from weft.plan.decision import Decision, Reason
from weft.plan.plan import Evidence
from weft.report.report import Report
from weft.simulation.timeline import NS_PER_US


@dataclass(frozen=True)
class Outcome:
    """One decision about a collective."""

    pass_name: str
    reason: Reason
    sentence: str
    nodes: tuple[str, ...]
    blocking: str | None
    """The node that stands in the way, or behind which it was put."""
    exposed_us: float = 0.0
    """For how long it is still exposed, where the decision says so; of a bucket as a whole."""
    gain_us: float = 0.0
    """What lifting the block would make the step shorter, at most."""

    @property
    def applied(self) -> bool:
        return self.reason is Reason.APPLIED


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective of the graph as it was, and every decision about it."""

    name: str
    kind: str
    group: str
    num_ranks: int
    """Of the group; 0 where it is unknown."""
    num_bytes: int | None
    """Of the full tensor: gathered, or not yet scattered; None where it is unknown."""
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class ReasonTotal:
    """How often a reason was given, and what it costs."""

    reason: Reason
    num_collectives: int
    """About which a decision has this reason."""
    num_decisions: int
    """Each counted once, however many collectives it is about."""
    exposed_us: float = 0.0
    """For how long these are still exposed, each bucket counted once."""
    gain_us: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """The step of a plan and the bound that is proved."""

    cluster: str
    step_us: float
    bound_us: float
    gap: float
    """step / bound - 1."""
    bound: str
    """What the bound is called, and what it rests on."""
    bound_of: Literal["before", "after"] = "before"
    """The graph for which the bound holds, in any order and with any merging."""


@dataclass(frozen=True)
class Explanation:
    """All collectives, in the order of their launches."""

    collectives: tuple[CollectiveRecord, ...]
    totals: tuple[ReasonTotal, ...]
    """By reason, in the order of the list of reasons."""
    unconsidered: tuple[str, ...]
    """The collectives about which nothing was decided."""
    verdict: Verdict | None = None
    """How good the outcome is, where it is for a cluster."""

    def to_json(self) -> str:
        """The explanation as JSON."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def explain(module: GraphModule, report: Report, evidence: Evidence | None = None) -> Explanation:
    """Tell the decisions of a report by the collectives of the module that it was made for.

    `evidence` is that of the plan.
    """
    table = read_groups(module)
    found = list(collectives(module.graph))
    decisions = _by_collective(module, found, report)
    records = tuple(_record(each, table, chosen) for each, chosen in zip(found, decisions, strict=True))
    return Explanation(
        records,
        tuple(total for reason in Reason if (total := _total(reason, records, decisions)).num_decisions),
        tuple(record.name for record in records if not record.outcomes),
        None if evidence is None else _verdict(evidence),
    )


def _verdict(evidence: Evidence) -> Verdict:
    times = evidence.step_ns / NS_PER_US, evidence.bound_ns / NS_PER_US
    return Verdict(evidence.cluster, *times, evidence.gap, evidence.bound, evidence.bound_of)


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


def _record(collective: Collective, table: GroupTable, decisions: list[Decision]) -> CollectiveRecord:
    name = table.canonical(collective.group_argument)
    group = table.groups.get(name)
    sent, received = collective.input_bytes, collective.output_bytes
    return CollectiveRecord(
        name=collective.launch.name,
        kind=collective.kind.value,
        group=name,
        num_ranks=group.size if group is not None else 0,
        num_bytes=None if sent is None or received is None else max(sent, received),
        outcomes=tuple(
            Outcome(d.pass_name, d.reason, d.sentence, d.nodes, d.blocking, d.exposed_us, d.gain_us) for d in decisions
        ),
    )


def _total(reason: Reason, records: tuple[CollectiveRecord, ...], decisions: list[list[Decision]]) -> ReasonTotal:
    num_collectives = sum(any(outcome.reason is reason for outcome in record.outcomes) for record in records)
    # By identity: a pass that runs twice may decide the same twice.
    num_decisions = len({id(decision) for chosen in decisions for decision in chosen if decision.reason is reason})
    once = dict.fromkeys(outcome for record in records for outcome in record.outcomes if outcome.reason is reason)
    exposed, gain = sum(each.exposed_us for each in once), sum(each.gain_us for each in once)
    return ReasonTotal(reason, num_collectives, num_decisions, exposed, gain)

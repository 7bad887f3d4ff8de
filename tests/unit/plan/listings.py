"""What the tests of planning share: listings of a few lines, and the decisions that a pass makes for them."""

from __future__ import annotations

from torch.fx import GraphModule, Node

import weft
from weft.graph.collective import Collective
from weft.graph.dag import Dag
from weft.passes.pipeline import Pipeline, Run
from weft.plan.decision import Decision
from weft.plan.plan import Merge

GROUP = "group('dp', size=2)"


def graph(inputs: str, *lines: str, returns: str = "", head: str = GROUP) -> GraphModule:
    body = "".join(f"    {line}\n" for line in (*lines, f"return [{returns}]"))
    return weft.parse(f"{head}\n\ndef graph({inputs}):\n{body}")


def node(module: GraphModule, name: str) -> Node:
    return next(node for node in module.graph.nodes if node.name == name)


def collective(module: GraphModule, name: str) -> Collective:
    return Collective(node(module, name))


def dag_of(module: GraphModule) -> Dag:
    return Dag(module.graph)


def gathers(count: int, size: int = 4, *, group: str = "dp") -> GraphModule:
    """As many independent gathers, `ag0`, `ag1`, ..., each used at once."""
    lines = [
        line
        for i in range(count)
        for line in (f"ag{i} = all_gather(p{i}, 2, '{group}')", f"w{i} = wait(ag{i})", f"r{i} = neg(w{i})")
    ]
    inputs = ", ".join(f"p{i}: f32[{size}]" for i in range(count))
    return graph(inputs, *lines, returns=", ".join(f"r{i}" for i in range(count)))


def run(module: GraphModule, spec: str) -> Run:
    return Pipeline.parse(spec).run(module)


def merges(module: GraphModule, spec: str) -> list[Merge]:
    """What is merged, in order."""
    (entry,) = run(module, spec).log
    return [action for action in entry.step.actions if isinstance(action, Merge)]


def buckets(module: GraphModule, spec: str) -> list[tuple[str, ...]]:
    """The launches of each bucket."""
    return [merge.launches for merge in merges(module, spec)]


def decisions(module: GraphModule, spec: str) -> list[Decision]:
    (entry,) = run(module, spec).log
    return list(entry.step.decisions)


def reasons(module: GraphModule, spec: str) -> list[str]:
    """One line `reason: sentence` for each decision."""
    return [f"{decision.reason.value}: {decision.sentence}" for decision in decisions(module, spec)]

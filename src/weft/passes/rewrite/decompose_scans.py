"""Turn scans and maps into loops that write each iteration's results in place.

Why: a scan keeps the results of all iterations until it joins them at the end, and most compilers cannot lower it. A
while_loop over a counter writes into buffers that are allocated once, and compilers support it.

Before::

    found: (f32[4], f32[5, 4]) = scan(body, [h], [x], [w])

After::

    found_count: i64[()] = full([], 0, dtype=i64)
    found_result0: f32[5, 4] = empty.memory_format([5, 4], dtype=f32)
    found_loop: (i64[()], f32[4], f32[5, 4]) = while_loop(again, round, (found_count, h, found_result0), (x, w))

The counter is a tensor on the device of the scanned inputs. Nested scans become nested loops.

Declines: iterations with side effects; an unknown number of iterations; inputs that are not contiguous; results that
are not tensors, or are not used item by item.
Numerics: exact. Memory: the results of one iteration less.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from weft.graph.dag import Dag
from weft.graph.edit import Edit
from weft.graph.operator_effects import profile_of
from weft.passes.base import NamedNodes, Numerics, Pass
from weft.plan.context import Context
from weft.plan.decision import Decision, Reason, Refusal
from weft.plan.plan import Loop, Step
from weft.rewriting.control_flow import is_scan, put_loops, read_scan
from weft.rewriting.nested import all_nested_graphs


@dataclass(frozen=True)
class DecomposeScans(Pass):
    """Turn scans and maps into loops."""

    numerics = Numerics.EXACT

    def plan(self, graph: Graph, context: Context) -> Step:
        actions: list[Loop] = []
        decisions: list[Decision] = []
        taken: list[tuple[str, ...]] = []
        for path, found in ((), graph), *all_nested_graphs(graph):
            is_inside = any(path[: len(outer)] == outer for outer in taken)
            scans = list(filter(is_scan, found.nodes))
            dag = Dag(found if scans else ())
            for node in scans:
                scan = _why_not_copy(node, dag) or read_scan(node)
                if isinstance(scan, Refusal):
                    decisions.append(self.decision(scan.reason, scan.sentence, node.name, blocking=scan.blocking))
                    continue
                sentence = f"turned {node.name} into a loop of {scan.num_rounds} iterations"
                decisions.append(self.decision(Reason.APPLIED, sentence, node.name))
                taken.append((*path, str(scan.body_path)))
                actions += [] if is_inside else [Loop(node.name, path)]
        return self.step(actions, decisions)

    def apply(self, edit: Edit, step: Step) -> None:
        paths: dict[tuple[str, ...], list[str]] = {}
        for action in step.actions:
            if isinstance(action, Loop):
                paths.setdefault(action.path, []).append(action.call)
        for path, calls in paths.items():
            inner = edit.inside(path) if path else edit
            nodes = NamedNodes(inner.graph.nodes)
            put_loops(inner, [nodes[call] for call in calls])


def _why_not_copy(node: Node, dag: Dag) -> Refusal | None:
    """Why the loop's results cannot replace those of the scan: a loop returns copies, and a scan may return views."""
    i = dag.index[node]
    if not profile_of(node).joins or not dag.effects.memory.written.intersection(dag.effects.held(i)):
        return None
    sentence = f"{node.name} stays: a result may share memory with an input, and one of them is written"
    return Refusal(Reason.MUTATED, sentence)

"""Lower bounds: no order of a program, and no merging of its collectives, takes less.

Contract: a bound holds over every legal order of operations, any positions of launches and waits, any order of each
queue and, where latencies are known, any merging of collectives of one queue. It ignores packing and operations
that drain the stream: those only make a step longer. So does memory, unless a limit is given:
then a bound holds only for orders whose peak is at most that. It does not cover moves that change the operations
themselves: chunked fusion with matmuls, other compute, fewer bytes. The largest bound wins; it comes with a certificate
that `weft.bounds.checker` recomputes from the program alone, each time, before the bound is returned.

    compute           all compute
    communication     all collectives of a link
    critical path     the longest path, collectives included
    heads and tails   the same with what resources force before and behind (`heads`)
    one machine       Jackson's bound per resource on those heads and tails (`machines`)
    idle cut          compute between two collectives that cannot hide, or others behind them on their queues (`cuts`)
    drag cut          compute before a collective that is not hidden by holding back what has its own (`drags`)
    memory            storages that a limit forces to be held one after the other (`held`)

Where overlap slows compute, all of these but the last are found by two other clocks too (`tasks`): in the time that
compute takes by itself, where collectives are shorter, and in the time that some link is busy, which says what overlap
costs at least. These two add up. Where compute slows collectives, they are found by a fourth clock, in the time that
collectives take by themselves, where compute is shorter; a share of all compute is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.bounds import checker
from weft.bounds.certificate import (
    Certificate,
    certificate_of,
    cut_claim,
    drag_claim,
    machine_claim,
    memory_claim,
    proof_of,
    task_claim,
)
from weft.bounds.drag_cuts import DragCut, best_drag
from weft.bounds.earliest_starts import Heads, find_heads, path_heads
from weft.bounds.idle_cuts import CutEnd, IdleCut, best_cut
from weft.bounds.memory_limit import memory_forced
from weft.bounds.one_machine import OneMachine, machines_of, one_machine
from weft.bounds.problem import COMPUTE, Clock, MergingAssumption, Tasks, overlap_cost, tasks_of, timed, wire_cost
from weft.graph.dag import collector_paused
from weft.simulation.program import Program


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step of a program, made by `lower_bound` and proved by `weft.bounds.checker`."""

    bound_ns: int
    name: str
    """Of the bound that won."""
    rests_on: str
    """What it rests on, in a sentence."""
    certificate: Certificate
    candidates: dict[str, int]
    """Every bound that was tried, by name."""
    leaves_out: tuple[str, ...]
    """Moves that it does not hold over."""


LEAVES_OUT = ("chunked fusion of collectives with matmuls", "changes of compute", "splitting collectives")
NO_MERGING = "merging collectives"


@dataclass(frozen=True)
class BoundCandidate:
    """One bound, before its certificate is written."""

    name: str
    value: int
    rests_on: str
    claim: dict[str, object]
    heads: Heads
    tails: Heads
    head_levels: dict[int, int]
    """By node, the head that it needs."""
    tail_levels: dict[int, int]
    clock: Clock = Clock.WALL
    """By work or wire: with what overlap costs."""


def lower_bound(
    program: Program, merging: MergingAssumption | None = None, *, memory_limit_bytes: int | None = None
) -> Bound:
    """The largest of all bounds. Merging is allowed by default where the program knows latencies.

    With a memory limit it holds for the orders whose peak is at most that; refused where there can be none.
    """
    if merging is None:
        merging = MergingAssumption.ALLOWED if program.latency_ns else MergingAssumption.EXCLUDED
    with collector_paused():
        tasks = tasks_of(program, merging)
        found = candidates(program, tasks)
        busy = busiest(program, tasks) if program.slowdown_ppm else None
        if busy and (cost := overlap_cost(program, busy.value)):
            found += slowed(program, tasks, Clock.WORK, cost)
        if cost := wire_cost(program):
            found += slowed(program, tasks, Clock.WIRE, cost)
        if memory_limit_bytes is not None:
            found += of_memory(program, tasks, merging, memory_limit_bytes)
        best = max(found, key=lambda candidate: candidate.value)
        bound_ns = max(0, best.value - program.launch_gap_ns)
        overlap = proof(program, tasks, busy) if busy and best.clock is Clock.WORK else None
        values = dict[str, int]()
        for each in found:
            values[each.name] = max(values.get(each.name, 0), each.value - program.launch_gap_ns)
        rests = proof(program, tasks, best)
        certificate = certificate_of(bound_ns, merging, tasks.chains, best.clock, rests, overlap)
        checker.check(program, certificate)  # a bound that it does not prove is never returned
        return Bound(
            bound_ns,
            best.name,
            best.rests_on,
            certificate,
            values,
            LEAVES_OUT if merging is MergingAssumption.ALLOWED else (*LEAVES_OUT, NO_MERGING),
        )


def proof(program: Program, tasks: Tasks, candidate: BoundCandidate) -> dict[str, object]:
    """The claim of a bound with the sets that its heads and tails rest on."""
    tasks = timed(program, tasks, candidate.clock)
    heads = (tasks, candidate.heads, candidate.head_levels)
    return proof_of(candidate.claim, heads, (tasks.reversed(), candidate.tails, candidate.tail_levels))


def busiest(program: Program, tasks: Tasks) -> BoundCandidate:
    """How long some link is busy at least."""
    found = candidates(program, timed(program, tasks, Clock.BUSY))
    return replace(max(found, key=lambda candidate: candidate.value), clock=Clock.BUSY)


def slowed(program: Program, tasks: Tasks, clock: Clock, cost: int) -> list[BoundCandidate]:
    """The bounds in the time that compute, or collectives, take by themselves, with what overlap costs."""
    return [
        replace(each, value=each.value + cost, rests_on=f"{each.rests_on}; overlap costs {ms(cost)}", clock=clock)
        for each in candidates(program, timed(program, tasks, clock))
    ]


def candidates(program: Program, tasks: Tasks) -> list[BoundCandidate]:
    """Every bound, the simple ones first: the first of equals wins."""
    found: list[BoundCandidate] = []
    backwards = tasks.reversed()
    nothing = Heads([0] * len(tasks.preds), {}, {})
    machines = machines_of(tasks)
    for resource, machine in enumerate(machines):
        if machine.nodes:
            name = "compute" if resource == COMPUTE else f"communication: {program.links[resource - 1]}"
            found.append(of_machine(name, one_machine(machine, resource, nothing, nothing), nothing, nothing))
    found.append(of_task("critical path", program, tasks, path_heads(tasks), path_heads(backwards)))
    heads, tails = find_heads(tasks), find_heads(backwards)
    found.append(of_task("heads and tails", program, tasks, heads, tails))
    for resource, machine in enumerate(machines):
        if machine.nodes:
            name = f"one machine: {program.links[resource - 1] if resource else 'compute'}"
            found.append(of_machine(name, one_machine(machine, resource, heads, tails), heads, tails))
    cut = best_cut((tasks, heads), (backwards, tails), machines[COMPUTE])
    if cut is not None:
        found.append(of_cut(program, tasks, cut, heads, tails))
    above = max(candidate.value for candidate in found)
    drag = best_drag((tasks, heads), (backwards, tails), above)
    if drag is not None:
        found.append(of_drag(program, tasks, drag, heads, tails))
    return found


def of_machine(name: str, one: OneMachine, heads: Heads, tails: Heads) -> BoundCandidate:
    lead = min(heads.start[node] for node in one.nodes)
    trail = min(tails.start[node] for node in one.nodes)
    busy = one.value - lead - trail
    text = f"{len(one.nodes)} tasks take {ms(busy)} there, {ms(lead)} must be before them and {ms(trail)} behind"
    claim = machine_claim(one.resource, one.head, one.tail)
    levels = dict.fromkeys(one.nodes, one.head), dict.fromkeys(one.nodes, one.tail)
    return BoundCandidate(name, one.value, text, claim, heads, tails, *levels)


def of_task(name: str, program: Program, tasks: Tasks, heads: Heads, tails: Heads) -> BoundCandidate:
    def through(node: int) -> int:
        return heads.start[node] + tasks.duration[node] + tails.start[node]

    node = max(tasks.order, key=through, default=None)
    if node is None:
        return BoundCandidate(name, 0, "nothing takes time", task_claim(None), heads, tails, {}, {})
    text = f"{ms(heads.start[node])} before {name_of(program, node)}, {ms(tails.start[node])} behind it"
    levels = {node: heads.start[node]}, {node: tails.start[node]}
    return BoundCandidate(name, through(node), text, task_claim(node), heads, tails, *levels)


def of_cut(program: Program, tasks: Tasks, cut: IdleCut, heads: Heads, tails: Heads) -> BoundCandidate:
    ends = [side.node if side else None for side in (cut.first, cut.last)]
    shown = [f"{word} {name_of(program, node)}" for word, node in zip(("after", "before"), ends, strict=True) if node]
    text = f"all compute {' and '.join(shown)}, or others beside them on their queues"
    claim = cut_claim(ends[0], cut.first_drag, ends[1], cut.last_drag)
    head_levels, tail_levels = levels_of(tasks, heads, cut, cut.first), levels_of(tasks, tails, cut, cut.last)
    return BoundCandidate("idle cut", cut.value, text, claim, heads, tails, head_levels, tail_levels)


def of_drag(program: Program, tasks: Tasks, drag: DragCut, heads: Heads, tails: Heads) -> BoundCandidate:
    towards = heads if drag.is_last else tails
    compute = [node for node in tasks.on(COMPUTE) if towards.start[node] >= drag.head]
    before = dict.fromkeys(compute, drag.head) | {drag.node: min(drag.head, towards.start[drag.node])}
    behind = dict.fromkeys([drag.node, *(dragged for _, dragged, _ in drag.shares)], drag.tail)
    side, other = ("before", "late") if drag.is_last else ("after", "early")
    text = f"all compute {side} {name_of(program, drag.node)}; what is {other} drags others of its link along"
    claim = drag_claim(drag.node, drag.is_last, drag.head, drag.shares)
    levels = (before, behind) if drag.is_last else (behind, before)
    return BoundCandidate("drag cut", drag.value, text, claim, heads, tails, *levels)


def of_memory(program: Program, tasks: Tasks, merging: MergingAssumption, limit_bytes: int) -> list[BoundCandidate]:
    nothing = Heads([0] * len(tasks.preds), {}, {})
    forced = memory_forced(program, tasks, merging, limit_bytes)
    if forced is None:
        return []
    fit = "by their bytes" if forced.count is None else f"of which {forced.count} can be held at once"
    text = f"{forced.num_storages} storages {fit}, where at most {limit_bytes} bytes are in use"
    value = forced.value + program.launch_gap_ns  # it counts no gap behind the last kernel
    return [BoundCandidate("memory", value, text, memory_claim(limit_bytes, forced.count), nothing, nothing, {}, {})]


def levels_of(tasks: Tasks, heads: Heads, cut: IdleCut, side: CutEnd | None) -> dict[int, int]:
    """The heads that a cut needs: of its ends, of all compute, and of what is beside its end on the queue."""
    levels = {each.node: heads.start[each.node] for each in (cut.first, cut.last) if each is not None}
    compute = [node for node, resource in enumerate(tasks.resource) if resource == COMPUTE and tasks.duration[node]]
    levels |= dict.fromkeys(compute, min(heads.start[node] for node in compute))
    if side is not None:
        drag = cut.value - side.reach
        beside = [node for node in tasks.order if tasks.queue[node] == tasks.queue[side.node] and node not in levels]
        levels |= {
            node: drag - tasks.duration[node] for node in beside if heads.start[node] + tasks.duration[node] >= drag
        }
    return levels


def name_of(program: Program, node: int) -> str:
    return program.names[node % len(program.kinds)]


def ms(time_ns: int) -> str:
    return f"{time_ns / 1e6:.3f} ms"

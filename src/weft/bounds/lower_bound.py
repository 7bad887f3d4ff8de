"""Lower bounds on the step time: no order of a program, and no merging of its collectives, is faster.

Contract: a bound holds for every legal order of operations, any positions of launches and waits, any order of each
queue and, where latencies are known, any merging of collectives of one queue. It counts neither packing kernels nor the
draining of the stream by host reads; both only make a step longer. It ignores memory unless a limit is given: then it
holds for orders whose peak is within the limit. It does not hold for rewrites that change the operations: streaming a
collective through matmuls, other compute, fewer bytes. The largest bound wins. `weft.bounds.checker` recomputes its
certificate from the program alone before the bound is returned.

    compute           all compute
    communication     all collectives of a link
    critical path     the longest path, collectives included
    heads and tails   the longest path, with heads and tails raised by busy resources   `earliest_starts`
    one machine       Carlier's bound for each resource, on those heads and tails       `one_machine`
    idle cut          compute between two collectives that it cannot hide               `idle_cuts`
    drag cut          compute before a collective; delaying it delays other collectives `drag_cuts`
    memory            storages that a limit forces to live one after the other          `memory_limit`
    repeated work     all work of a resource, and what must run again within a limit    `repeated_work`

The last but one does not hold if values may be made again, and the last one only then. Where overlap slows compute or
collectives, all but `memory` are also computed by the other clocks of `problem`, and the cost of overlap is added.
`docs/bounds.md` introduces all of this with pictures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from weft.bounds import checker
from weft.bounds.certificate import (
    Certificate,
    again_claim,
    certificate_of,
    cut_claim,
    drag_claim,
    machine_claim,
    memory_claim,
    proof_of,
    task_claim,
)
from weft.bounds.choices import Choices
from weft.bounds.drag_cuts import NONE, DragCut, best_drag_cut
from weft.bounds.earliest_starts import Heads, find_heads, path_heads
from weft.bounds.idle_cuts import CutEnd, IdleCut, best_idle_cut
from weft.bounds.memory_limit import memory_bound
from weft.bounds.one_machine import OneMachine, around, machines_of, one_machine
from weft.bounds.problem import (
    COMPUTE,
    Clock,
    MergingAssumption,
    Tasks,
    overlap_cost,
    tasks_of,
    wire_cost,
    with_durations,
)
from weft.bounds.repeated_work import ForcedWork, Moments
from weft.graph.dag import collector_paused
from weft.quantities import duration_text, size_text
from weft.simulation.program import Program


@dataclass(frozen=True)
class Bound:
    """A lower bound on the step of a program, made by `lower_bound` and proved by `weft.bounds.checker`."""

    bound_ns: int
    name: str
    """The argument that gave the largest bound."""
    rests_on: str
    """The argument with its numbers, for people."""
    certificate: Certificate
    candidates: dict[str, int]
    """The bound of every argument that was tried, by name."""
    leaves_out: tuple[str, ...]
    """Rewrites that the bound does not cover."""


LEAVES_OUT = (
    "chunked fusion of collectives with matmuls",
    "changes of compute",
    "splitting collectives",
    "copies through symmetric memory in place of collectives",
)
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
    """By node, the head that the argument needs; the certificate proves no more than this."""
    tail_levels: dict[int, int]
    clock: Clock = Clock.WALL
    """The clock of the argument. By WORK and WIRE, `value` includes the cost of overlap."""


def lower_bound(
    program: Program | Choices, merging: MergingAssumption | None = None, *, memory_limit_bytes: int | None = None
) -> Bound:
    """The largest of all bounds. By default merging is allowed if the program knows latencies.

    With a memory limit, the bound holds for orders whose peak is within it. Raises if no order fits. Given choices, the
    bound holds for every mixture of them.
    """
    choices = program if isinstance(program, Choices) else None
    program = program.program if isinstance(program, Choices) else program
    if merging is None:
        merging = MergingAssumption.ALLOWED if program.latency_ns else MergingAssumption.EXCLUDED
    with collector_paused():
        tasks = tasks_of(program, merging)
        found = candidates(program, tasks)
        busy = link_busy_candidate(program, tasks) if program.slowdown_ppm else None
        slowdowns = {Clock.WORK: overlap_cost(program, busy.value) if busy else 0, Clock.WIRE: wire_cost(program)}
        for clock, cost in slowdowns.items():
            found += slowdown_candidates(program, tasks, clock, cost) if cost else []
        if memory_limit_bytes is not None and choices is None:
            found += memory_candidates(program, tasks, merging, memory_limit_bytes)
        elif memory_limit_bytes is not None and choices is not None:
            found += repeated_candidates(choices, tasks, memory_limit_bytes, found, slowdowns)
        best = max(found, key=lambda candidate: candidate.value)
        bound_ns = max(0, best.value - program.launch_gap_ns)
        overlap = proof_of_candidate(program, tasks, busy) if busy and best.clock is Clock.WORK else None
        values = dict[str, int]()
        for each in found:
            values[each.name] = max(values.get(each.name, 0), each.value - program.launch_gap_ns)
        rests = proof_of_candidate(program, tasks, best)
        certificate = certificate_of(bound_ns, merging, tasks.chains, best.clock, rests, overlap)
        checker.check(
            program if choices is None else choices, certificate
        )  # never return a bound that the checker cannot prove
        return Bound(
            bound_ns,
            best.name,
            best.rests_on,
            certificate,
            values,
            LEAVES_OUT if merging is MergingAssumption.ALLOWED else (*LEAVES_OUT, NO_MERGING),
        )


def proof_of_candidate(program: Program, tasks: Tasks, candidate: BoundCandidate) -> dict[str, object]:
    """The claim of a bound, with the sets that prove its heads and tails."""
    tasks = with_durations(program, tasks, candidate.clock)
    heads = (tasks, candidate.heads, candidate.head_levels)
    return proof_of(candidate.claim, heads, (tasks.reversed(), candidate.tails, candidate.tail_levels))


def link_busy_candidate(program: Program, tasks: Tasks) -> BoundCandidate:
    """A bound on the time during which some link is busy."""
    found = candidates(program, with_durations(program, tasks, Clock.BUSY))
    return replace(max(found, key=lambda candidate: candidate.value), clock=Clock.BUSY)


def slowdown_candidates(program: Program, tasks: Tasks, clock: Clock, cost: int) -> list[BoundCandidate]:
    """The bounds by a clock that undoes a slowdown, plus the cost of overlap."""
    return [
        replace(each, value=each.value + cost, rests_on=f"{each.rests_on}; overlap adds {time_text(cost)}", clock=clock)
        for each in candidates(program, with_durations(program, tasks, clock))
    ]


def candidates(program: Program, tasks: Tasks) -> list[BoundCandidate]:
    """Every bound by one clock. Simple arguments come first, because the first of equals wins."""
    found: list[BoundCandidate] = []
    backwards = tasks.reversed()
    nothing = Heads([0] * len(tasks.preds), {}, {})
    machines = machines_of(tasks)
    for resource, machine in enumerate(machines):
        if machine.nodes:
            name = "compute" if resource == COMPUTE else f"communication: {program.links[resource - 1]}"
            found.append(machine_candidate(name, one_machine(machine, resource, nothing, nothing), nothing, nothing))
    found.append(path_candidate("critical path", program, tasks, path_heads(tasks), path_heads(backwards)))
    heads, tails = find_heads(tasks), find_heads(backwards)
    found.append(path_candidate("heads and tails", program, tasks, heads, tails))
    for resource, machine in enumerate(machines):
        if machine.nodes:
            name = f"one machine: {program.links[resource - 1] if resource else 'compute'}"
            found.append(machine_candidate(name, one_machine(machine, resource, heads, tails), heads, tails))
    cut = best_idle_cut((tasks, heads), (backwards, tails), machines[COMPUTE])
    if cut is not None:
        found.append(idle_cut_candidate(program, tasks, cut, heads, tails))
    above = max(candidate.value for candidate in found)
    drag = best_drag_cut((tasks, heads), (backwards, tails), above)
    if drag is not None:
        found.append(drag_cut_candidate(program, tasks, drag, heads, tails))
    return found


def machine_candidate(name: str, one: OneMachine, heads: Heads, tails: Heads) -> BoundCandidate:
    busy = one.value - one.head - one.tail
    around = f"at least {time_text(one.head)} comes before them and {time_text(one.tail)} after"
    text = f"{len(one.nodes)} tasks take {time_text(busy)}, {around}"
    claim = machine_claim(one.resource, one.head, one.tail)
    levels = dict.fromkeys(one.nodes, one.head), dict.fromkeys(one.nodes, one.tail)
    return BoundCandidate(name, one.value, text, claim, heads, tails, *levels)


def path_candidate(name: str, program: Program, tasks: Tasks, heads: Heads, tails: Heads) -> BoundCandidate:
    def through(node: int) -> int:
        return heads.start[node] + tasks.duration[node] + tails.start[node]

    node = max(tasks.order, key=through, default=None)
    if node is None:
        return BoundCandidate(name, 0, "no operation takes time", task_claim(None), heads, tails, {}, {})
    before, after = time_text(heads.start[node]), time_text(tails.start[node])
    text = f"at least {before} before {name_of(program, node)} and {after} after it"
    levels = {node: heads.start[node]}, {node: tails.start[node]}
    return BoundCandidate(name, through(node), text, task_claim(node), heads, tails, *levels)


def idle_cut_candidate(program: Program, tasks: Tasks, cut: IdleCut, heads: Heads, tails: Heads) -> BoundCandidate:
    ends = [end.node if end else None for end in (cut.first, cut.last)]
    shown = [f"{word} {name_of(program, node)}" for word, node in zip(("after", "before"), ends, strict=True) if node]
    text = f"compute must run {' and '.join(shown)}, or it delays other collectives of their queues"
    claim = cut_claim(ends[0], cut.first_drag, ends[1], cut.last_drag)
    head_levels, tail_levels = cut_levels(tasks, heads, cut, cut.first), cut_levels(tasks, tails, cut, cut.last)
    return BoundCandidate("idle cut", cut.value, text, claim, heads, tails, head_levels, tail_levels)


def drag_cut_candidate(program: Program, tasks: Tasks, drag: DragCut, heads: Heads, tails: Heads) -> BoundCandidate:
    towards = heads if drag.is_last else tails
    compute = [node for node in tasks.on(COMPUTE) if towards.start[node] >= drag.head]
    start = drag.node if drag.through == NONE else drag.through
    before = dict.fromkeys(compute, drag.head) | {start: min(drag.head, towards.start[start])}
    behind = dict.fromkeys([drag.node, *(dragged for _, dragged, _ in drag.shares)], drag.tail)
    name = name_of(program, start)
    if drag.is_last:
        text = f"compute must run before {name}; compute after it would delay other collectives"
    else:
        text = f"compute must run after {name}; compute before it would need other collectives first"
    levels = (before, behind) if drag.is_last else (behind, before)
    return BoundCandidate("drag cut", drag.value, text, drag_claim(drag), heads, tails, *levels)


def memory_candidates(
    program: Program, tasks: Tasks, merging: MergingAssumption, limit_bytes: int
) -> list[BoundCandidate]:
    nothing = Heads([0] * len(tasks.preds), {}, {})
    forced = memory_bound(program, tasks, merging, limit_bytes)
    if forced is None:
        return []
    limit = size_text(limit_bytes)
    text = (
        f"the bytes x lifetimes of {forced.num_storages} storages must fit within {limit}"
        if forced.count is None
        else f"at most {forced.count} of {forced.num_storages} storages can live at once within {limit}"
    )
    value = forced.value + program.launch_gap_ns  # the argument counts no gap after the last kernel
    return [BoundCandidate("memory", value, text, memory_claim(limit_bytes, forced.count), nothing, nothing, {}, {})]


def repeated_candidates(
    choices: Choices, tasks: Tasks, limit_bytes: int, found: list[BoundCandidate], slowdowns: dict[Clock, int]
) -> list[BoundCandidate]:
    """The tasks of each resource by each clock, with the work that the limit forces to be repeated."""
    program, moments, made = choices.program, Moments(choices), list[BoundCandidate]()
    known_ns = max(candidate.value for candidate in found)
    for each in found:
        if not each.name.startswith("one machine"):
            continue
        timed, cost = with_durations(program, tasks, each.clock), slowdowns.get(each.clock, 0)
        resource = cast("int", each.claim["resource"])
        machine = machines_of(timed)[resource]
        for moment in moments.best:
            tails = {op: timed.duration[op] + each.tails.start[op] for op, _ in moment.demands}
            most = each.heads.start[moment.at], min(tails.values(), default=0)
            one = around(machine, resource, each.heads, each.tails, most)
            first = machine_candidate("repeated work", one, each.heads, each.tails)
            repeated = ForcedWork(moments, moment, timed, resource, each.clock)
            run = repeated.within(limit_bytes, first.value + cost, known_ns)
            if run is None:
                continue
            shown = f"{size_text(limit_bytes)} at {program.names[moment.at]}", time_text(run.work_ns)
            ends = {op: max(0, one.tail - timed.duration[op]) for op, _, _ in run.flows if op in tails}
            made.append(
                replace(
                    first,
                    value=run.step_ns,
                    claim=first.claim | again_claim(limit_bytes, run),
                    rests_on=f"{first.rests_on}; to fit into {shown[0]}, {shown[1]} of work run again",
                    head_levels=first.head_levels | {moment.at: one.head},
                    tail_levels=first.tail_levels | ends,
                    clock=each.clock,
                )
            )
    return made


def cut_levels(tasks: Tasks, heads: Heads, cut: IdleCut, end: CutEnd | None) -> dict[int, int]:
    """The heads that a cut needs: of its ends, of all compute, and of the collectives next to its end on the queue."""
    levels = {each.node: heads.start[each.node] for each in (cut.first, cut.last) if each is not None}
    compute = [node for node, resource in enumerate(tasks.resource) if resource == COMPUTE and tasks.duration[node]]
    levels |= dict.fromkeys(compute, min(heads.start[node] for node in compute))
    if end is not None:
        drag = cut.value - end.reach
        beside = [node for node in tasks.order if tasks.queue[node] == tasks.queue[end.node] and node not in levels]
        levels |= {
            node: drag - tasks.duration[node] for node in beside if heads.start[node] + tasks.duration[node] >= drag
        }
    return levels


def name_of(program: Program, node: int) -> str:
    return program.names[node % len(program.kinds)]


def time_text(time_ns: int) -> str:
    return duration_text(time_ns / 1000)

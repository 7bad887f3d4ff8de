"""Is the bound or the order at fault? Training steps in few blocks, solved by CP-SAT, with the cost of overlap.

    python benchmarks/fault.py [--scenarios tp-x8-nvlink,... ] [--layers 4] [--blocks 12] [--seconds 60]
                               [--no-overlap-costs]

Each step is contracted (`contract.py`). On that program, without memory and without merging: bound <= the solver's
proof <= the shortest known order <= Weft's order. The gap between bound and proof is the bound's fault, the gap between
the shortest known order and Weft's is the order's fault. The solver leaves the gap in the middle open.

The solver measures by the work clock of `weft.bounds.problem`, which makes overlap linear: compute takes its
undisturbed time, collectives and gaps take `1 / (1 + slowdown)` of theirs, and the step is the end plus the slowdown's
share of the time during which some link is busy. The solver's model has no gaps after launches. Its proof holds if
every queue has its own link. Queues on one link take turns in the solver and share the link in the simulator, so then
there is no proof. The simulator judges the solver's order.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from contract import contract
from scenarios import PREPARED, SCENARIOS, Scenario, capture

from weft.bounds.lower_bound import lower_bound
from weft.bounds.problem import MergingAssumption
from weft.graph.dag import Dag
from weft.graph.groups import read_groups
from weft.scheduling.search import Effort, search
from weft.simulation.build import program_of
from weft.simulation.program import MILLION, OpKind, Program
from weft.simulation.simulator import run

GRAIN_NS = 100
"""The solver's unit of time; durations are rounded down."""


@dataclass(frozen=True)
class Solved:
    """The solver's result for a program."""

    proved_ns: int | None
    """No order is shorter; None if the solver's model differs from the simulator's."""
    order: list[int]


@dataclass(frozen=True)
class Verdict:
    """One step, and how far each is from the next, all in nanoseconds."""

    name: str
    num_ops: int
    bound: str
    bound_ns: int
    proved_ns: int | None
    known_ns: int
    """The shortest order that any method found."""
    weft_ns: int

    def line(self) -> str:
        """A row of the table."""
        cells = [self.name, str(self.num_ops), f"{self.bound_ns / 1e6:.2f} ({self.bound})"]
        cells.append("-" if self.proved_ns is None else f"{self.proved_ns / 1e6:.2f}")
        cells += [f"{ns / 1e6:.2f}" for ns in (self.known_ns, self.weft_ns)]
        proved = self.bound_ns if self.proved_ns is None else max(self.bound_ns, self.proved_ns)
        shares = (proved / self.bound_ns, self.known_ns / proved, self.weft_ns / self.known_ns)
        return "| " + " | ".join([*cells, *(f"{share - 1:.2%}" for share in shares)]) + " |"


class Model:
    """A program as a constraint model."""

    def __init__(self, program: Program) -> None:
        from ortools.sat.python import cp_model

        self.cp_model: Any = cp_model
        self.model: Any = cp_model.CpModel()
        self.program = program
        self.takes = [self.units(op) for op in range(len(program.kinds))]
        self.horizon = sum(self.takes) + 1
        self.begin = [self.time() for _ in program.kinds]
        """For a launch, when its collective starts."""
        self.end: Any = self.time()
        self.on: dict[int, list[int]] = {}
        """By link (-1 for the stream), the operations that take time there."""
        self.overlaps: dict[tuple[int, int], Any] = {}
        for op in range(len(program.kinds)):
            self.add(op)
        for ops in self.on.values():
            size = [self.model.new_fixed_size_interval_var(self.begin[op], self.takes[op], "") for op in ops]
            self.model.add_no_overlap(size)

    def units(self, op: int) -> int:
        program = self.program
        slowed = MILLION + program.slowdown_ppm
        if program.kinds[op] is OpKind.LAUNCH:
            return program.duration_ns[op] * MILLION // slowed // GRAIN_NS
        gap = program.launch_gap_ns * MILLION // slowed if program.duration_ns[op] else 0
        return (program.duration_ns[op] + gap) // GRAIN_NS

    def time(self) -> Any:
        return self.model.new_int_var(0, self.horizon, "")

    def add(self, op: int) -> None:
        for before in self.needed(op):
            self.model.add(self.begin[op] >= self.begin[before] + self.takes[before])
        self.model.add(self.end >= self.begin[op] + self.takes[op])
        if self.takes[op]:
            self.on.setdefault(self.link(op), []).append(op)

    def needed(self, op: int) -> list[int]:
        """Operations that end before this one starts. To need an issued launch is to need its inputs."""
        program, found = self.program, list[int]()
        for pred in program.preds[op]:
            is_issued = program.kinds[pred] is OpKind.LAUNCH and pred not in program.waits_for[op]
            found += self.needed(pred) if is_issued else [pred]
        return found

    def link(self, op: int) -> int:
        queue = self.program.queue[op]
        return -1 if queue < 0 else self.program.queues[queue].link

    def busy(self) -> Any:
        """How long some link is busy: all collectives, minus their overlap."""
        links = [ops for link, ops in sorted(self.on.items()) if link >= 0]
        total = sum(self.takes[op] for ops in links for op in ops)
        beside: dict[int, list[Any]] = {}
        for first, second in combinations(links, 2):
            for one in first:
                for other in second:
                    overlap = self.model.new_int_var(0, min(self.takes[one], self.takes[other]), "")
                    is_any = self.model.new_bool_var("")
                    self.model.add(overlap == 0).only_enforce_if(~is_any)
                    for early, late in ((one, other), (other, one)):
                        end = self.begin[early] + self.takes[early]
                        self.model.add(overlap <= end - self.begin[late]).only_enforce_if(is_any)
                    self.overlaps[one, other] = overlap
                    beside.setdefault(one, []).append(overlap)
                    beside.setdefault(other, []).append(overlap)
        for op, overlaps in beside.items():
            self.model.add(sum(overlaps) <= self.takes[op])
        return total - sum(self.overlaps.values())

    def hint(self, order: list[int]) -> None:
        """Hint an order to the solver: each operation as early as possible."""
        free: dict[int, int] = {}
        begin = [0] * len(self.takes)
        for op in order:
            begin[op] = max((begin[pred] + self.takes[pred] for pred in self.needed(op)), default=0)
            if self.takes[op]:
                begin[op] = max(begin[op], free.get(self.link(op), 0))
                free[self.link(op)] = begin[op] + self.takes[op]
            self.model.add_hint(self.begin[op], begin[op])
        self.model.add_hint(self.end, max(at + ns for at, ns in zip(begin, self.takes, strict=True)))
        for (one, other), overlap in self.overlaps.items():
            ends = begin[one] + self.takes[one], begin[other] + self.takes[other]
            self.model.add_hint(overlap, max(0, min(ends) - max(begin[one], begin[other])))

    def solve(self, order: list[int], seconds: float) -> Solved:
        """The best order found within a time limit, starting from another one."""
        scale = MILLION if self.program.slowdown_ppm else 1
        self.model.minimize(scale * self.end + (self.program.slowdown_ppm * self.busy() if scale > 1 else 0))
        self.hint(order)
        solver: Any = self.cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_time_in_seconds = seconds
        if solver.solve(self.model) not in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            return Solved(None, order)
        proved = int(solver.best_objective_bound / scale * GRAIN_NS)
        used = [queue.link for queue in self.program.queues]
        is_exact = len(set(used)) == len(used) and len(used) <= 2
        return Solved(proved if is_exact else None, self.ordered([solver.value(begin) for begin in self.begin]))

    def ordered(self, begin: list[int]) -> list[int]:
        """The operations by time. A launch is issued after its inputs and after the earlier launches of its queue."""
        program = self.program
        launches = [op for op, kind in enumerate(program.kinds) if kind is OpKind.LAUNCH]
        places = {op: number for number, op in enumerate(sorted(launches, key=lambda op: (begin[op], op)))}
        issued, last = list(begin), dict[int, int]()
        for op in places:
            ready = [issued[p] + (0 if program.kinds[p] is OpKind.LAUNCH else self.takes[p]) for p in program.preds[op]]
            issued[op] = last[program.queue[op]] = max([last.get(program.queue[op], 0), *ready])
        done: set[int] = set()
        order: list[int] = []

        def put(op: int) -> None:
            if op not in done:
                done.add(op)
                for pred in program.preds[op]:
                    put(pred)
                order.append(op)

        timed = [op for op, kind in enumerate(program.kinds) if kind in (OpKind.COMPUTE, OpKind.LAUNCH)]
        for op in sorted(timed, key=lambda op: (issued[op], op not in places, places.get(op, 0), op)):
            put(op)
        for op in range(len(begin)):
            put(op)
        return [op for op in order if op != len(begin) - 1] + [len(begin) - 1]


def judge(name: str, program: Program, seconds: float, effort: Effort = "best") -> Verdict:
    """The bound, the solver and the planner on one program; the solver starts from the planner's order."""
    bound = lower_bound(program, MergingAssumption.EXCLUDED)
    weft, best = search(program), search(program, effort)
    solved = Model(program).solve(list(best.order), seconds)
    known = min(weft.step_ns, best.step_ns, run(program, solved.order).step_ns)
    return Verdict(name, len(program.kinds), bound.name, bound.bound_ns, solved.proved_ns, known, weft.step_ns)


def load(scenario: Scenario, layers: int, num_blocks: int, with_overlap_costs: bool) -> Program:
    module = capture(scenario, layers)
    program = program_of(Dag(module.graph), read_groups(module), scenario.cluster(with_overlap_costs))
    return contract(program, num_blocks)


HEAD = "| step | operations | bound ms | proved | shortest known | Weft | bound's fault | open | order's fault |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default=",".join(PREPARED), help="comma-separated names")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--overlap-costs", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    print(HEAD + "\n" + "|---" * HEAD.count(" | ") + "|---|", flush=True)
    for name in options.scenarios.split(","):
        program = load(SCENARIOS[name], options.layers, options.blocks, options.overlap_costs)
        print(judge(f"{name}, {options.layers} layers", program, options.seconds).line(), flush=True)


if __name__ == "__main__":
    main()

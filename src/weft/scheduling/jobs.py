"""Jobs: the units that the scheduler moves. A fused kernel stays whole; views and waits follow their job.

Contract: a job is a kernel on the compute stream, or a launch. A kernel with fused pointwise operators is one job:
cutting it would cost memory traffic. A job needs the jobs in `preds`, which must be issued before it, and the launches
in `comm_preds`, whose collectives must have ended. Views, inputs and waits do not belong to a job: `Emitter` puts them
where a schedule of jobs needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.graph.orders import topological
from weft.simulation.program import OpKind, Program

NO_JOB = -1
FUSED_SPAN = 100
"""Fused operations further apart than this many operations are separate jobs. Moving part of the backward pass next to
the forward kernel that it could fuse with would keep its result alive in between."""
NARROW_SPANS = (100, 30, 10, 3)
"""Distances for memory limits that leave no room for results which a job keeps alive on its way to a later place."""


class Needs(NamedTuple):
    """The jobs and launches that an operation outside all jobs depends on."""

    jobs: tuple[int, ...]
    launches: tuple[int, ...]
    """Jobs whose collectives must have ended."""


NOTHING = Needs((), ())


@dataclass(frozen=True)
class Jobs:
    """The jobs of a program, numbered in a legal order close to the order of the graph."""

    program: Program
    ops: tuple[tuple[int, ...], ...]
    """The operations of each job, in order."""
    duration: tuple[int, ...]
    """Time of a kernel on the stream, launch gap included, or of a collective on its queue, in nanoseconds."""
    queue: tuple[int, ...]
    """The queue of a launch; -1 for a kernel."""
    preds: tuple[tuple[int, ...], ...]
    comm_preds: tuple[tuple[int, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    """The jobs that need a job, through `preds` or `comm_preds`."""
    job_of: tuple[int, ...]
    """The job of each operation, or NO_JOB."""

    def __len__(self) -> int:
        return len(self.ops)


def jobs_of(program: Program, span: int | None = None) -> Jobs:
    """Cut a program into jobs. A fused kernel that would create a cycle is cut into its operations.

    With a `span`, operations that are further apart are separate jobs, fused or not.
    """
    unfused: frozenset[int] = frozenset()
    while True:
        jobs = _jobs(program, _members(program, unfused, FUSED_SPAN if span is None else span))
        order = topological(jobs.succs, [ops[0] for ops in jobs.ops])
        if len(order) == len(jobs):
            return _jobs(program, _folded(jobs, order, len(program.kinds) if span is None else span))
        stuck = set(range(len(jobs))).difference(order)
        unfused |= {op for job in stuck if len(jobs.ops[job]) > 1 for op in jobs.ops[job]}


def _folded(jobs: Jobs, order: list[int], span: int) -> list[list[int]]:
    """The operations of jobs in order. A chain of kernels without other consumers becomes one job.

    A read by the host ends a chain: behind it, kernels are late if the host has issued nothing else before.
    """
    ops: list[list[int]] = []
    number: dict[int, int] = {}
    drains = jobs.program.drains if jobs.program.host_ns else (False,) * len(jobs.program.names)
    for job in order:
        preds = jobs.preds[job]
        follows = jobs.queue[job] < 0 and len(preds) == 1 and not jobs.comm_preds[job] and jobs.queue[preds[0]] < 0
        follows = follows and not drains[jobs.ops[preds[0]][-1]]
        if follows and len(jobs.succs[preds[0]]) == 1 and jobs.ops[job][0] - jobs.ops[preds[0]][-1] <= span:
            number[job] = number[preds[0]]
            ops[number[job]] += jobs.ops[job]
        else:
            number[job] = len(ops)
            ops.append(list(jobs.ops[job]))
    return ops


def _jobs(program: Program, ops: list[list[int]]) -> Jobs:
    size = len(ops)
    job_of = [NO_JOB] * len(program.kinds)
    for job, members in enumerate(ops):
        for op in members:
            job_of[op] = job
    preds: list[dict[int, None]] = [{} for _ in range(size)]
    comm_preds: list[dict[int, None]] = [{} for _ in range(size)]
    needs: list[Needs] = [NOTHING] * len(program.kinds)
    for op, kind in enumerate(program.kinds):
        job = job_of[op]
        if job != NO_JOB:
            mine, landed = preds[job], comm_preds[job]
            for pred in program.preds[op]:
                other = job_of[pred]
                if other != NO_JOB:
                    mine[other] = None
                    continue
                need = needs[pred]
                for each in need.jobs:
                    mine[each] = None
                for each in need.launches:
                    landed[each] = None
            continue
        found = [needs[pred] if job_of[pred] == NO_JOB else Needs((job_of[pred],), ()) for pred in program.preds[op]]
        if kind is OpKind.WAIT:
            found.append(Needs((), tuple([job_of[launch] for launch in program.waits_for[op]])))
        needs[op] = _union(found)
    for job in range(size):
        preds[job].pop(job, None)
    succs: list[list[int]] = [[] for _ in range(size)]
    for job in range(size):
        mine, landed = preds[job], comm_preds[job]
        for pred in mine:
            succs[pred].append(job)
        for pred in landed:
            if pred not in mine:
                succs[pred].append(job)
    duration = [_duration(program, members) for members in ops]
    queue = [program.queue[members[-1]] for members in ops]
    return Jobs(
        program,
        tuple([tuple(members) for members in ops]),
        tuple(duration),
        tuple(queue),
        tuple([tuple(p) for p in preds]),
        tuple([tuple(p) for p in comm_preds]),
        tuple([tuple(s) for s in succs]),
        tuple(job_of),
    )


def _duration(program: Program, members: list[int]) -> int:
    """The time of a job, with a launch gap for each of its kernels."""
    ns = sum([program.duration_ns[op] for op in members]) if len(members) > 1 else program.duration_ns[members[0]]
    if not program.launch_gap_ns or program.kinds[members[0]] is not OpKind.COMPUTE:
        return ns
    kernels = {program.kernel[op] if program.kernel else op for op in members if program.duration_ns[op]}
    return ns + program.launch_gap_ns * len(kernels)


def _members(program: Program, unfused: frozenset[int], span: int) -> list[list[int]]:
    """The operations of each job: fused operations together, except those in `unfused` or too far apart."""
    by_kernel: dict[int, int] = {}
    ops: list[list[int]] = []
    for op, kind in enumerate(program.kinds):
        if kind is OpKind.NOTHING or (kind is OpKind.WAIT and program.waits_for[op]):
            continue
        kernel = program.kernel[op] if program.kernel and kind is OpKind.COMPUTE and op not in unfused else -1
        if kernel >= 0 and kernel in by_kernel and op - ops[by_kernel[kernel]][-1] <= span:
            ops[by_kernel[kernel]].append(op)
            continue
        if kernel >= 0:
            by_kernel[kernel] = len(ops)
        ops.append([op])
    return ops


def _union(found: Sequence[Needs]) -> Needs:
    if not found:
        return NOTHING
    if len(found) == 1:
        return found[0]
    jobs = dict.fromkeys(job for need in found for job in need.jobs)
    return Needs(tuple(jobs), tuple(dict.fromkeys(launch for need in found for launch in need.launches)))


class Emitter:
    """Expands a schedule of jobs to an order of all operations. Views follow inputs; the schedule places waits."""

    def __init__(self, jobs: Jobs) -> None:
        program = jobs.program
        self.jobs, self.program = jobs, program
        self.succs: list[list[int]] = [[] for _ in program.kinds]
        """The successors of each operation that are outside all jobs."""
        self.count = [len(preds) for preds in program.preds]
        self.last = len(program.kinds) - 1
        """The output."""
        for op, preds in enumerate(program.preds):
            if jobs.job_of[op] == NO_JOB and op != self.last:
                for pred in preds:
                    self.succs[pred].append(op)
        self.waits: dict[int, list[int]] = {}
        """The waits for each launch, by job."""
        for op, launches in enumerate(program.waits_for):
            for launch in launches:
                self.waits.setdefault(jobs.job_of[launch], []).append(op)

    def order(self, events: Iterable[int]) -> list[int]:
        """All operations in order, the output last. An event `job` runs or launches it, `~job` waits for it."""
        jobs, succs, waits_for = self.jobs, self.succs, self.program.waits_for
        count, job_of = list(self.count), jobs.job_of
        landed = [False] * len(jobs)
        order: list[int] = []

        def emit(op: int) -> None:
            stack = [op]
            while stack:
                op = stack.pop()
                count[op] = -1  # emit it once: it may follow the first wait, and the schedule may name it as well
                order.append(op)
                for succ in reversed(succs[op]):
                    count[succ] -= 1
                    if count[succ] == 0 and all(landed[job_of[launch]] for launch in waits_for[succ]):
                        stack.append(succ)

        for op in self._first():
            emit(op)
        for event in events:
            if event >= 0:
                for op in jobs.ops[event]:
                    if succs[op]:
                        emit(op)
                    else:
                        order.append(op)
            elif not landed[~event]:
                landed[~event] = True
                for op in self.waits.get(~event, ()):
                    if count[op] == 0 and all(landed[job_of[launch]] for launch in waits_for[op]):
                        emit(op)
        return [*order, self.last]

    def _first(self) -> list[int]:
        return [op for op, count in enumerate(self.count[:-1]) if count == 0 and self.jobs.job_of[op] == NO_JOB]

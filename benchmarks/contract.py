"""A training step in few blocks, small enough for an exact solver, with the structure that decides its length.

    program = contract(program, num_blocks=12)

The *spine* is the last job of the longest path and everything that it needs: forward, and the activation gradients of
backward. Runs of the spine become blocks; a run is cut after an equal share of work, and before it would need a
collective that it launches itself. Jobs off the spine (weight gradients, and jobs after their reductions) form one
block for each block of the spine that they depend on and each number of collectives between. Collectives of one queue
with the same blocks at both ends are one bucket. The cast of a shard counts as work of the block that needs the
gathered weight, so that the gather depends on nothing.

The blocks form a new program. Bound, solver and planner all use it, without memory and without merging.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weft.scheduling.jobs import Jobs, jobs_of
from weft.simulation.program import OpKind, Program


class Place(NamedTuple):
    """A block: a part of the spine, and the number of collectives between it and the block."""

    part: int
    depth: int
    """0 on the spine."""


GIVEN = Place(-1, 0)
"""Jobs that need no block."""


@dataclass
class Block:
    """Jobs that run as one."""

    work_ns: int = 0
    preds: set[Place] = field(default_factory=set[Place])
    launches: list[int] = field(default_factory=list[int])
    """Jobs that launch the collectives it needs."""


class Bucket(NamedTuple):
    """Collectives of one queue that start after the same blocks and are needed by the same blocks."""

    queue: int
    starts: frozenset[Place]
    """The blocks that it needs."""
    behind: frozenset[Bucket]
    """The buckets that it needs directly."""
    users: frozenset[Place]


def contract(program: Program, num_blocks: int) -> Program:
    """The program with its spine cut into about `num_blocks` blocks."""
    jobs = jobs_of(program)
    places = place(jobs, num_blocks)
    blocks: dict[Place, Block] = {}
    users: dict[int, set[Place]] = {}
    for job, at in places.items():
        if jobs.queue[job] < 0 and at != GIVEN:
            block = blocks.setdefault(at, Block())
            block.work_ns += jobs.duration[job]
            block.preds |= {places[pred] for pred in jobs.preds[job] if jobs.queue[pred] < 0} - {at, GIVEN}
            for launch in jobs.comm_preds[job]:
                users.setdefault(launch, set()).add(at)
    for job, at in places.items():
        if jobs.queue[job] < 0 and at == GIVEN:
            blocks[min(users[jobs.succs[job][0]])].work_ns += jobs.duration[job]
    members: dict[Bucket, list[int]] = {}
    bucket_of: dict[int, Bucket] = {}
    for job in range(len(jobs)):
        if jobs.queue[job] >= 0:
            starts = frozenset(places[pred] for pred in jobs.preds[job] if jobs.queue[pred] < 0) - {GIVEN}
            behind = frozenset(bucket_of[launch] for launch in jobs.comm_preds[job])
            bucket_of[job] = Bucket(jobs.queue[job], starts, behind, frozenset(users.get(job, ())))
            members.setdefault(bucket_of[job], []).append(job)
    return Writer(program, jobs, blocks, members).made()


def place(jobs: Jobs, num_blocks: int) -> dict[int, Place]:
    """The block of each job; a launch has the block of its inputs."""
    spine = spine_of(jobs)
    share = sum(jobs.duration[job] for job in spine if jobs.queue[job] < 0) // num_blocks
    places: dict[int, Place] = {}
    part = filled = 0
    for job in range(len(jobs)):
        needed = [places[pred] for pred in jobs.preds[job]]
        landed = [places[launch] for launch in jobs.comm_preds[job]]
        if jobs.queue[job] >= 0:
            places[job] = max([*needed, *landed], default=GIVEN)
        elif is_cast(jobs, job):
            places[job] = GIVEN
        elif job in spine:
            if filled >= share or any(at.part == part for at in landed):
                part, filled = part + 1, 0
            places[job] = Place(part, 0)
            filled += jobs.duration[job]
        else:
            behind = [*needed, *(Place(at.part, at.depth + (at.depth > 0)) for at in landed)]
            home = max((at.part for at in behind), default=0)
            places[job] = Place(home, max([1, *(at.depth for at in behind if at.part == home)]))
    return places


def is_cast(jobs: Jobs, job: int) -> bool:
    """Whether a job needs nothing and only feeds one collective."""
    if jobs.preds[job] or jobs.comm_preds[job] or len(jobs.succs[job]) != 1:
        return False
    launch = jobs.succs[job][0]
    return jobs.queue[launch] >= 0 and any(jobs.queue[user] < 0 for user in jobs.succs[launch])


def spine_of(jobs: Jobs) -> set[int]:
    """The end of the longest path and everything that it needs."""
    ends = [0] * len(jobs)
    for job in range(len(jobs)):
        before = (ends[pred] for pred in (*jobs.preds[job], *jobs.comm_preds[job]))
        ends[job] = max(before, default=0) + (jobs.duration[job] if jobs.queue[job] < 0 else 0)
    last = max((job for job in range(len(jobs)) if jobs.queue[job] < 0), key=lambda job: ends[job])
    spine, stack = {last}, [last]
    while stack:
        job = stack.pop()
        new = {*jobs.preds[job], *jobs.comm_preds[job]} - spine
        spine |= new
        stack += new
    return spine


class Writer:
    """Writes blocks and buckets as a program: gathers of inputs right before their first user, others at once."""

    def __init__(
        self, program: Program, jobs: Jobs, blocks: dict[Place, Block], members: dict[Bucket, list[int]]
    ) -> None:
        self.program, self.jobs = program, jobs
        self.rows: list[tuple[str, OpKind, int, int, list[int]]] = []
        self.op: dict[Place, int] = {}
        self.wait: dict[Bucket, int] = {}
        self.members = members
        for at in sorted(blocks):
            self.block(at, blocks[at])
            for bucket in members:
                if bucket not in self.wait and at in bucket.starts and self.op.keys() >= bucket.starts:
                    self.launch(bucket)
        for bucket in members:
            self.launch(bucket)
        self.add("output", OpKind.NOTHING, 0, [])

    def block(self, at: Place, block: Block) -> None:
        needed = [bucket for bucket in self.members if at in bucket.users]
        needs = [self.op[pred] for pred in block.preds] + [self.launch(bucket) for bucket in needed]
        work_ns = max(0, block.work_ns - self.program.launch_gap_ns)
        self.op[at] = self.add(f"block {at.part}.{at.depth}", OpKind.COMPUTE, work_ns, needs)

    def launch(self, bucket: Bucket) -> int:
        """A bucket's wait; launches the bucket if necessary."""
        if bucket not in self.wait:
            program = self.program
            needs = [self.op[at] for at in bucket.starts] + [self.launch(before) for before in bucket.behind]
            ops = [self.jobs.ops[job][-1] for job in self.members[bucket]]
            latency = [program.latency_ns[op] if program.latency_ns else 0 for op in ops]
            ns = max(latency) + sum(program.duration_ns[op] for op in ops) - sum(latency)
            launch = self.add(program.names[ops[0]], OpKind.LAUNCH, ns, needs, bucket.queue)
            self.wait[bucket] = self.add(f"wait for {program.names[ops[0]]}", OpKind.WAIT, 0, [launch])
        return self.wait[bucket]

    def add(self, name: str, kind: OpKind, ns: int, needs: list[int], queue: int = -1) -> int:
        self.rows.append((name, kind, ns, queue, sorted(set(needs))))
        return len(self.rows) - 1

    def made(self) -> Program:
        nothing = ((),) * len(self.rows)
        return Program(
            names=tuple(name for name, *_ in self.rows),
            kinds=tuple(kind for _, kind, *_ in self.rows),
            duration_ns=tuple(ns for _, _, ns, *_ in self.rows),
            preds=tuple(tuple(needs) for *_, needs in self.rows),
            queue=tuple(queue for *_, queue, _ in self.rows),
            waits_for=tuple(tuple(needs) if kind is OpKind.WAIT else () for _, kind, _, _, needs in self.rows),
            queues=self.program.queues,
            links=self.program.links,
            drains=(False,) * len(self.rows),
            launch_gap_ns=self.program.launch_gap_ns,
            slowdown_ppm=self.program.slowdown_ppm,
            collective_slowdown_ppm=self.program.collective_slowdown_ppm,
            allocates=nothing,
            uses=nothing,
        )

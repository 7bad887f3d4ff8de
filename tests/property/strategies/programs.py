"""Random programs, which is what the simulator and the bounds see of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from weft.simulation.program import OpKind, Program, Queue

SHARES = (0, 0, 100_000, 600_000)
"""Of the multiprocessors that copies take, in millionths."""


def random_program(rng: Random, max_ops: int = 40, is_plain: bool = False) -> Program:
    """A program of all sorts of operations, with memory; a plain one has a link per queue, no gap and no slowdown."""
    num_queues = rng.randint(1, 4)
    num_links = num_queues if is_plain else rng.randint(1, num_queues)
    wanted = [*[OpKind.COMPUTE] * rng.randint(2, 4), *[OpKind.LAUNCH] * rng.randint(1, 3), OpKind.NOTHING]
    density, longest = rng.choice((0.5, 1.0, 2.0)), rng.choice((30, 30, 300))
    kinds: list[OpKind] = []
    preds: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    durations: list[int] = []
    for op in range(rng.randint(max(1, max_ops // 3), max_ops)):
        launched = [before for before in range(op) if kinds[before] is OpKind.LAUNCH]
        kind = rng.choice([*wanted, *[OpKind.WAIT] * (2 * bool(launched))])
        needs = {other for other in range(op) if rng.random() < density / (op + 1)}
        needs |= {rng.randrange(op)} if op and rng.random() < 0.5 else set()
        landed = rng.sample(launched, rng.randint(1, min(2, len(launched)))) if kind is OpKind.WAIT else []
        is_timed = kind in (OpKind.COMPUTE, OpKind.LAUNCH)
        kinds.append(kind)
        preds.append(tuple(sorted(needs | {*landed})))
        waits.append(tuple(sorted(landed)))
        durations.append(rng.choice((0, 1, *[rng.randint(1, longest)] * 8)) if is_timed else 0)
    launches = [kind is OpKind.LAUNCH for kind in kinds]
    made = {op: rng.randint(1, 100) for op in range(len(kinds)) if rng.random() < 0.7}
    given = {op for op in made if kinds[op] is OpKind.NOTHING and rng.random() < 0.5}
    return Program(
        names=tuple(f"op{op}" for op in range(len(kinds))),
        kinds=tuple(kinds),
        duration_ns=tuple(durations),
        preds=tuple(preds),
        queue=tuple(rng.randrange(num_queues) if is_launch else -1 for is_launch in launches),
        waits_for=tuple(waits),
        queues=tuple(Queue(f"g{queue}", queue % num_links) for queue in range(num_queues)),
        links=tuple(f"link{link}" for link in range(num_links)),
        drains=tuple(rng.random() < 0.05 and kind is not OpKind.WAIT for kind in kinds),
        launch_gap_ns=0 if is_plain else rng.choice((0, 0, 1, 5)),
        slowdown_ppm=0 if is_plain else rng.choice((0, 0, 189_000, 1_000_000)),
        allocates=tuple(((op, made[op]),) if op in made else () for op in range(len(kinds))),
        uses=tuple(tuple(pred for pred in before if pred in made) for before in preds),
        kept=frozenset({*given, *(op for op in made if rng.random() < 0.1)}),
        given=frozenset(given),
        latency_ns=tuple(rng.randint(0, ns) if launch else 0 for ns, launch in zip(durations, launches, strict=True)),
        kernel=random_kernels(rng, kinds),
        collective_slowdown_ppm=0 if is_plain else Random(sum(durations)).choice((0, 0, 150_000, 1_000_000)),
    )


def random_gradients(rng: Random, max_layers: int = 3, is_plain: bool = False) -> Program:
    """Layers backwards: each may need a gathered weight, and has gradients that are reduced, maybe over two queues."""
    kinds: list[OpKind] = []
    preds: list[tuple[int, ...]] = []
    waits: list[tuple[int, ...]] = []
    queue: list[int] = []

    def add(kind: OpKind, needs: list[int], on: int = -1) -> int:
        kinds.append(kind)
        preds.append(tuple(needs))
        waits.append(tuple(needs) if kind is OpKind.WAIT else ())
        queue.append(on)
        return len(kinds) - 1

    last: list[int] = []
    for _ in range(rng.randint(1, max_layers)):
        if rng.random() < 0.5:
            last = [*last, add(OpKind.WAIT, [add(OpKind.LAUNCH, [], 0)])]
        for _ in range(rng.randint(1, 2)):
            gradient = add(OpKind.COMPUTE, last)
            reduced = add(OpKind.LAUNCH, [gradient], 1)
            if rng.random() < 0.3:
                add(OpKind.LAUNCH, [add(OpKind.WAIT, [reduced])], 2)
        last = [add(OpKind.COMPUTE, last)]
    if rng.random() < 0.5:
        add(OpKind.LAUNCH, last, 1)
    links = (0, 1, 2) if is_plain else rng.choice(((0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)))
    longest = {OpKind.COMPUTE: rng.choice((10, 30)), OpKind.LAUNCH: rng.choice((10, 30))}
    durations = [rng.randint(1, longest[kind]) if kind in longest else 0 for kind in kinds]
    latency = [
        rng.randint(0, ns // 2) if kind is OpKind.LAUNCH else 0 for kind, ns in zip(kinds, durations, strict=True)
    ]
    return Program(
        names=tuple(f"op{op}" for op in range(len(kinds))),
        kinds=tuple(kinds),
        duration_ns=tuple(durations),
        preds=tuple(preds),
        queue=tuple(queue),
        waits_for=tuple(waits),
        queues=tuple(Queue(f"g{number}", link) for number, link in enumerate(links)),
        links=tuple(f"link{link}" for link in sorted(set(links))),
        drains=(False,) * len(kinds),
        launch_gap_ns=0 if is_plain else rng.choice((0, 0, 1, 5)),
        slowdown_ppm=0 if is_plain else rng.choice((0, 0, 189_000, 1_000_000)),
        allocates=((),) * len(kinds),
        uses=((),) * len(kinds),
        latency_ns=tuple(latency),
        collective_slowdown_ppm=0 if is_plain else Random(sum(durations)).choice((0, 0, 150_000, 1_000_000)),
    )


def with_peer_copies(rng: Random, program: Program) -> Program:
    """The program with a second queue for each group, which gets about half of its launches, as copies."""
    size = len(program.queues)
    is_copy = [queue >= 0 and rng.random() < 0.5 for queue in program.queue]
    share = rng.choice(SHARES)
    rows = list(zip(is_copy, program.queue, program.latency_ns, strict=True))
    return replace(
        program,
        queues=(*program.queues, *(replace(queue, is_copies=True, is_host=False) for queue in program.queues)),
        queue=tuple(queue + size * copy for copy, queue, _ in rows),
        latency_ns=tuple(0 if copy else ns for copy, _, ns in rows),
        sm_share_ppm=tuple(copy * rng.choice((share, share // 2)) for copy in is_copy) if share else (),
    )


def random_kernels(rng: Random, kinds: Sequence[OpKind]) -> tuple[int, ...]:
    """One each, parts beside each other, or parts anywhere."""
    match rng.randrange(3):
        case 0:
            return ()
        case 1:
            starts = [op for op in range(len(kinds)) if op == 0 or rng.random() < 0.8]
            return tuple(max(start for start in starts if start <= op) for op in range(len(kinds)))
        case _:
            return tuple(rng.randint(-1, len(kinds) // 2) for _ in kinds)


def random_order(rng: Random, program: Program) -> list[int]:
    """An order that the edges allow."""
    left = [len(set(preds)) for preds in program.preds]
    succs: list[list[int]] = [[] for _ in left]
    for op, preds in enumerate(program.preds):
        for pred in set(preds):
            succs[pred].append(op)
    ready = [op for op, count in enumerate(left) if not count]
    order: list[int] = []
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for after in succs[order[-1]]:
            left[after] -= 1
            if not left[after]:
                ready.append(after)
    return order

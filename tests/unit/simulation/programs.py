"""Small programs written by hand, one operation per line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.simulation.program import OpKind, Program, Queue


@dataclass(frozen=True)
class Op:
    name: str
    kind: OpKind
    duration_ns: int = 0
    queue: str | None = None
    waits_for: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    drains: bool = False
    kernel: str | None = None
    makes: Mapping[str, int] | None = None
    uses: tuple[str, ...] = ()


def compute(name: str, duration_ns: int, needs: str = "", **rest: object) -> Op:
    return Op(name, OpKind.COMPUTE, duration_ns, needs=tuple(needs.split()), **rest)  # type: ignore[arg-type]


def launch(name: str, duration_ns: int, queue: str = "dp", needs: str = "", **rest: object) -> Op:
    return Op(name, OpKind.LAUNCH, duration_ns, queue, needs=tuple(needs.split()), **rest)  # type: ignore[arg-type]


def wait(launches: str, **rest: object) -> Op:
    names = tuple(launches.split())
    return Op(f"wait_{'_'.join(names)}", OpKind.WAIT, waits_for=names, needs=names, **rest)  # type: ignore[arg-type]


def view(name: str, needs: str = "", **rest: object) -> Op:
    return Op(name, OpKind.NOTHING, needs=tuple(needs.split()), **rest)  # type: ignore[arg-type]


def program(
    *ops: Op,
    links: Mapping[str, str] | None = None,
    gap_ns: int = 0,
    slowdown_ppm: int = 0,
    collective_slowdown_ppm: int = 0,
    kept: str = "",
    given: str = "",
) -> Program:
    """A program; `links` says which link each queue uses, one of its own where it says nothing."""
    number = {op.name: i for i, op in enumerate(ops)}
    queues = list(dict.fromkeys(op.queue for op in ops if op.queue is not None))
    names = list(dict.fromkeys((links or {}).get(queue, f"link of {queue}") for queue in queues))
    kernels = {name: i for i, name in enumerate(dict.fromkeys(op.kernel or op.name for op in ops))}
    storages = list(dict.fromkeys(s for op in ops for s in (*(op.makes or {}), *op.uses)))
    return Program(
        names=tuple(number),
        kinds=tuple(op.kind for op in ops),
        duration_ns=tuple(op.duration_ns for op in ops),
        preds=tuple(tuple(number[name] for name in op.needs) for op in ops),
        queue=tuple(-1 if op.queue is None else queues.index(op.queue) for op in ops),
        waits_for=tuple(tuple(number[name] for name in op.waits_for) for op in ops),
        queues=tuple(Queue(q, names.index((links or {}).get(q, f"link of {q}"))) for q in queues),
        links=tuple(names),
        drains=tuple(op.drains for op in ops),
        launch_gap_ns=gap_ns,
        slowdown_ppm=slowdown_ppm,
        collective_slowdown_ppm=collective_slowdown_ppm,
        allocates=tuple(tuple((storages.index(s), size) for s, size in (op.makes or {}).items()) for op in ops),
        uses=tuple(tuple(storages.index(s) for s in op.uses) for op in ops),
        kept=frozenset(storages.index(s) for s in (*kept.split(), *given.split())),
        given=frozenset(storages.index(s) for s in given.split()),
        kernel=tuple(kernels[op.kernel or op.name] for op in ops),
    )

"""Programs of many ranks as listings: 1F1B pipelines, and small random programs with one known fault."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

MESH = "group('pp', size={stages}, stride=4)\ngroup('dp', size=2, stride=2)\ngroup('tp', size=2)\n"
"""Per stage two data-parallel replicas of two tensor-parallel ranks."""


@dataclass
class Stage:
    """One stage of a pipeline in the order one forward, one backward."""

    number: int
    stages: int
    microbatches: int
    batched: bool = True
    """Whether a send and a receive that cross share one launch."""
    lines: list[str] = field(default_factory=list[str])
    waits: list[str] = field(default_factory=list[str])

    def listing(self) -> str:
        warm = min(self.stages - self.number - 1, self.microbatches)
        last = self.stages - 1
        for k in range(warm):
            self.exchange(receive=f"f{k}" if self.number else "")
            self.compute(f"f{k}")
            self.exchange(send=f"f{k}")
        if warm < self.microbatches:
            self.exchange(receive=f"f{warm}" if self.number else "")
        for j in range(self.microbatches - warm):
            self.compute(f"f{warm + j}")
            if self.number < last:
                self.exchange(send=f"f{warm + j}", receive=f"b{j}")
            self.compute(f"b{j}")
            more = j + 1 < self.microbatches - warm
            if self.number:
                self.exchange(send=f"b{j}", receive=f"f{warm + j + 1}" if more else "")
        for j in range(self.microbatches - warm, self.microbatches):
            self.exchange(receive=f"b{j}")
            self.compute(f"b{j}")
            self.exchange(send=f"b{j}" if self.number else "")
        self.lines += ["grad = all_reduce(w, 'sum', 'dp')", "done = wait(grad)", *self.waits]
        body = "".join(f"    {line}\n" for line in self.lines)
        return f"{MESH.format(stages=self.stages)}\ndef graph(x: f32[4, 4], w: f32[4, 4]):\n{body}    return [done]\n"

    def compute(self, name: str) -> None:
        first = name.startswith("f") and self.number == 0
        last = name.startswith("b") and self.number == self.stages - 1
        given = "x" if first else f"out_f{name[1:]}" if last else f"in_{name}"
        self.lines += [f"mm_{name} = mm({given}, w)", f"tp_{name} = all_reduce(mm_{name}, 'sum', 'tp')"]
        self.lines += [f"out_{name} = wait(tp_{name})"]

    def exchange(self, *, send: str = "", receive: str = "") -> None:
        """Send what was computed, receive what comes next; in one launch, or the send first."""
        ends = [("isend", send)] * bool(send) + [("irecv", receive)] * bool(receive)
        names = [name for _, name in ends]
        peers = [self.number + (1 if (name[0] == "f") == (kind == "isend") else -1) for kind, name in ends]
        tags = [int(name[0] == "b") for name in names]
        tensors = [f"out_{name}" if kind == "isend" else f"buffer_{name}" for kind, name in ends]
        self.lines += [f"buffer_{name} = clone(x)" for kind, name in ends if kind == "irecv"]
        if len(ends) == 2 and self.batched:
            batch = f"batch_{'_'.join(names)}"
            kinds = [kind for kind, _ in ends]
            self.lines += [f"{batch} = batch_p2p({kinds}, {peers}, {tags}, [{', '.join(tensors)}], 'pp')"]
            items = [f"item_{name}_{kind}" for kind, name in ends]
            self.lines += [f"{item} = {batch}[{number}]" for number, item in enumerate(items)]
        else:
            items = [f"{kind}_{name}" for kind, name in ends]
            for (kind, _), item, tensor, peer, tag in zip(ends, items, tensors, peers, tags, strict=True):
                self.lines += [f"{item} = {kind.removeprefix('i')}({tensor}, {peer}, {tag}, 'pp')"]
        for (kind, name), item in zip(ends, items, strict=True):
            if kind == "irecv":
                self.lines += [f"in_{name} = wait({item})"]
            else:
                self.waits += [f"sent_{name} = wait({item})"]


def pipeline(stages: int = 4, microbatches: int = 6, *, batched: bool = True) -> list[str]:
    """The listings of all ranks, four to a stage."""
    texts = [Stage(number, stages, microbatches, batched).listing() for number in range(stages)]
    return [texts[rank // 4] for rank in range(4 * stages)]


# Random programs of four ranks.

GROUPS = {"world": (4, 1), "tp": (2, 1), "dp": (2, 2), "twin": (2, 1)}
HEADER = "".join(f"group({name!r}, size={size}, stride={stride})\n" for name, (size, stride) in GROUPS.items())
NUM_RANKS = 4


@dataclass(frozen=True)
class Op:
    """What one rank does: a launch of a collective or of a transfer, or the wait for one."""

    kind: str
    name: str
    group: str = "world"
    reduction: str = "sum"
    rows: int = 2
    peer: int = 0
    tag: int = 0

    @property
    def lines(self) -> list[str]:
        match self.kind:
            case "wait":
                return [f"w_{self.name} = wait({self.name})"]
            case "send":
                return [
                    f"s_{self.name} = slice.Tensor(x, 0, 0, {self.rows})",
                    f"{self.name} = send(s_{self.name}, {self.peer}, {self.tag}, 'world')",
                ]
            case "recv":
                return [
                    f"v_{self.name} = slice.Tensor(x, 0, 0, {self.rows})",
                    f"b_{self.name} = clone(v_{self.name})",
                    f"{self.name} = recv(b_{self.name}, {self.peer}, {self.tag}, 'world')",
                ]
            case _:
                source = [f"v_{self.name} = slice.Tensor(x, 0, 0, {self.rows})"]
                size = GROUPS[self.group][0]
                call = f"all_reduce(v_{self.name}, {self.reduction!r}, {self.group!r})"
                if self.kind == "all_gather":
                    call = f"all_gather(v_{self.name}, {size}, {self.group!r})"
                return [*source, f"{self.name} = {call}"]


Program = list[Op]


def listing(program: Program) -> str:
    body = "".join(f"    {line}\n" for op in program for line in op.lines)
    return f"{HEADER}\ndef graph(x: f32[8, 2]):\n{body}    return [x]\n"


def random_programs(seed: int, num_ops: int = 8) -> list[Program]:
    """Programs that agree: one order of operations, of which every rank does its part and waits some time later."""
    draw = random.Random(seed)
    programs: list[Program] = [[] for _ in range(NUM_RANKS)]
    for number in range(num_ops):
        name, rows = f"c{number}", draw.choice([1, 2, 4])
        if draw.random() < 0.35:
            source, destination = draw.sample(range(NUM_RANKS), 2)
            tag = draw.choice([0, 1])
            programs[source].append(Op("send", name, rows=rows, peer=destination, tag=tag))
            programs[destination].append(Op("recv", name, rows=rows, peer=source, tag=tag))
            continue
        kind, group = draw.choice(["all_reduce", "all_gather"]), draw.choice(list(GROUPS))
        op = Op(kind, name, group, draw.choice(["sum", "max"]) if kind == "all_reduce" else "sum", rows)
        size, stride = GROUPS[group]
        first = draw.randrange(NUM_RANKS)
        for rank in range(NUM_RANKS):  # sometimes one of the groups of an axis only
            same = rank // (size * stride) == first // (size * stride) and rank % stride == first % stride
            if same or number % 2:
                programs[rank].append(op)
    return [_with_waits(draw, program) for program in programs]


def _with_waits(draw: random.Random, program: Program) -> Program:
    done = list(program)
    for op in program:
        place = done.index(op) + 1
        # A receive may be waited for before or behind what follows; most waits are near.
        done.insert(min(place + draw.choice([0, 0, 1, 2, 4]), len(done)), Op("wait", op.name))
    return done


def swap(program: Program, first: int, second: int) -> Program:
    """The program with two operations exchanged; a wait never comes before its launch."""
    changed = list(program)
    changed[first], changed[second] = changed[second], changed[first]
    return valid(changed)


def valid(program: Program) -> Program:
    """The program with every wait behind its launch."""
    launched: set[str] = set()
    late: list[Op] = []
    found: Program = []
    for op in program:
        if op.kind == "wait" and op.name not in launched:
            late.append(op)
            continue
        found.append(op)
        if op.kind != "wait":
            launched.add(op.name)
            found += [wait for wait in late if wait.name == op.name]
            late = [wait for wait in late if wait.name != op.name]
    return found


def drop(program: Program, name: str) -> Program:
    """The program without a launch and its wait."""
    return [op for op in program if op.name != name]


def resize(program: Program, name: str) -> Program:
    """The program with a launch of another size."""
    return [replace(op, rows=op.rows + 1) if op.name == name and op.kind != "wait" else op for op in program]


def mutate(programs: list[Program], seed: int) -> list[Program]:
    """The programs with one rank changed; what is changed need not matter."""
    draw = random.Random(seed)
    changed = [list(program) for program in programs]
    able = [rank for rank, program in enumerate(programs) if len(program) > 2]
    if not able:
        return changed
    rank = draw.choice(able)
    program = changed[rank]
    match draw.choice(["swap", "swap", "swap", "drop", "resize"]):
        case "swap":
            changed[rank] = swap(program, *draw.sample(range(len(program)), 2))
        case "drop":
            changed[rank] = drop(program, draw.choice(program).name)
        case _:
            changed[rank] = resize(program, draw.choice(program).name)
    return changed

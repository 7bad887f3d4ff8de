"""RealRanks: runs graphs on real processes that communicate over gloo.

Contract: one world of processes serves many runs. It starts on first use and communicates over the loopback only. Every
run has a timeout. When it expires, all ranks are killed, the error shows the node of each rank, and the next run
starts a new world. If a rank dies, the error names that rank, its exit code or signal, and the end of its log, and not
the connections that other ranks lost. No process and no file outlives the caller.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from torch.fx import GraphModule, Node

from weft.errors import VerificationError, compose
from weft.graph import ops
from weft.graph.groups import GroupTable, group_argument
from weft.graph.listings.writer import name_of, render
from weft.graph.operator_effects import attribute
from weft.verification.rank import Partition, RankResult, check_inputs, one_per_rank, partition_of, show
from weft.verification.real_ranks.messages import Answer, Job, Prepare, Progress, pack, unpack
from weft.verification.rendezvous import with_distinct_groups
from weft.verification.written_out import each_written_out

START_TIMEOUT_S = 120.0
"""Timeout for starting all processes. Each one imports torch, which takes seconds, or longer on a busy machine."""
GRACE_S = 0.5
"""Seconds that the other ranks have to report their own errors after the first error."""
MAX_LOG_LINES = 30
"""Number of lines shown from the log of a dead rank: enough for C++ errors and the stack of each Python thread."""


class _World:
    """The processes of one world, and the pipes to them."""

    def __init__(self, num_ranks: int, timeout_s: float) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-ranks-"))
        self.progress = Progress(self.folder / "progress", num_ranks)
        self.groups: set[tuple[str, tuple[int, ...]]] = set()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        self._stop = weakref.finalize(self, _stop, self.processes, self.pipes, self.folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # a fatal signal writes the stack to the log
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        }
        for rank in range(num_ranks):
            mine, theirs = Pipe()
            # gloo's own timeout is longer, so that this process ends the run; it knows the node of each rank.
            numbers = (rank, num_ranks, theirs.fileno(), int(timeout_s * 2 + START_TIMEOUT_S))
            with (self.folder / f"log{rank}").open("wb") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "weft.verification.real_ranks.worker",
                        *map(str, numbers),
                        str(self.folder),
                    ],
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a keyboard interrupt goes to the caller alone
                )
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def receive(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Answer | None]:
        """The answers of these ranks; None for a rank that died. Returns early after the first error."""
        answers: dict[int, Answer | None] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            waiting = {self.pipes[r]: r for r in ranks if r not in answers}
            for pipe in wait(list(waiting), timeout=max(deadline - time.monotonic(), 0)):
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    answers[rank] = None
                if (answer := answers[rank]) is None or answer.error:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def end_of(self, rank: int) -> str:
        """A phrase for how the process of a dead rank ended."""
        code = self.processes[rank].wait()
        if code >= 0:
            return f"rank {rank} ended with exit code {code}"
        known = -code in set(signal.Signals)
        return f"rank {rank} was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"

    def log_of(self, rank: int) -> list[str]:
        """The last lines of the log of a rank."""
        try:
            text = (self.folder / f"log{rank}").read_text(errors="replace")
        except OSError:
            return []
        # faulthandler ends with a list of all extension modules, which says nothing about the crash.
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Extension modules:")]
        return lines[-MAX_LOG_LINES:]

    def stop(self) -> None:
        self._stop()


def _stop(processes: list[subprocess.Popen[bytes]], pipes: list[Connection], folder: Path) -> None:
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


class RealRanks:
    """A world of `num_ranks` gloo processes. Use it as a context manager, or close it."""

    def __init__(self, num_ranks: int, timeout_s: float = 60.0) -> None:
        self.num_ranks, self.timeout_s = num_ranks, timeout_s
        self._world: _World | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; the next run starts them again."""
        if self._world is not None:
            self._world.stop()
            self._world = None

    def run(
        self,
        modules: GraphModule | Sequence[GraphModule],
        inputs: Sequence[Sequence[Any]],
        groups: GroupTable | Sequence[GroupTable],
        seed: int = 0,
    ) -> list[RankResult]:
        """Run one graph on as many ranks as there are lists of inputs, or one graph per rank."""
        return self.run_repeatedly(modules, inputs, groups, seed=seed, repeat=1)[0]

    def run_repeatedly(
        self,
        modules: GraphModule | Sequence[GraphModule],
        inputs: Sequence[Sequence[Any]],
        groups: GroupTable | Sequence[GroupTable],
        *,
        repeat: int,
        seed: int = 0,
    ) -> list[list[RankResult]]:
        """The results of several runs from the same inputs; a race shows as a difference between them."""
        num_ranks = len(inputs)
        if num_ranks > self.num_ranks:
            what = f"inputs were given for {num_ranks} ranks, but the world has {self.num_ranks}"
            raise VerificationError(compose("real ranks", what, do="use fewer ranks or a larger world"))
        graphs = one_per_rank(modules, GraphModule, num_ranks, "modules")
        tables = with_distinct_groups(one_per_rank(groups, GroupTable, num_ranks, "group tables"))
        graphs = each_written_out(graphs, tables)
        check_inputs(inputs, [sum(node.op == "placeholder" for node in graph.graph.nodes) for graph in graphs])
        parts = [_used_groups(graph, table, num_ranks) for graph, table in zip(graphs, tables, strict=True)]
        jobs = list(_jobs(graphs, inputs, tables, parts, seed, repeat))
        try:
            world = self._start()
            self._prepare(world, parts)
            answers = self._ask(world, dict(enumerate(jobs)), graphs, tables)
        except BaseException:  # messages in flight in an interrupted world would never be matched
            self.close()
            raise
        by_rank = [[RankResult(*unpack(packed)) for packed in answer.results] for answer in answers]
        return [[by_rank[r][k] for r in range(num_ranks)] for k in range(repeat)]

    def _start(self) -> _World:
        if self._world is not None:
            return self._world
        world = self._world = _World(self.num_ranks, self.timeout_s)
        ranks = range(self.num_ranks)
        ready = world.receive(ranks, START_TIMEOUT_S)
        dead = next((rank for rank, answer in ready.items() if answer is None), None)
        if dead is not None:
            what = f"{world.end_of(dead)} during its start"
            raise VerificationError(compose("real ranks", what, where=world.log_of(dead)))
        late = [r for r in ranks if r not in ready]
        if late:
            what = f"rank {late[0]} did not start in {START_TIMEOUT_S:g} s"
            raise VerificationError(compose("real ranks", what, where=world.log_of(late[0])))
        return world

    def _prepare(self, world: _World, used: Sequence[Mapping[str, tuple[str, Partition]]]) -> None:
        """Create the process groups that this world lacks; all ranks take part, in one order."""
        wanted = {(identity, part): None for groups in used for identity, parts in groups.values() for part in parts}
        missing = tuple(pair for pair in wanted if pair not in world.groups)
        if missing:
            self._ask(world, {rank: Prepare(missing) for rank in range(self.num_ranks)}, [], [])
            world.groups.update(missing)

    def _ask(
        self,
        world: _World,
        messages: Mapping[int, Job | Prepare],
        graphs: Sequence[GraphModule],
        tables: Sequence[GroupTable],
    ) -> list[Answer]:
        for rank, message in messages.items():
            with contextlib.suppress(OSError):  # the rank died; `receive` reports it
                world.pipes[rank].send(message)
        answers = world.receive(list(messages), self.timeout_s)
        dead = next((rank for rank, answer in answers.items() if answer is None), None)
        if dead is not None:
            name = world.progress.read(dead)
            where = [*_line(graphs, tables, dead, name), *world.log_of(dead)]
            what = f"{world.end_of(dead)} {f'at {name}' if name else 'before its first node'}"
            raise VerificationError(compose("real ranks", what, where=where))
        failed = {rank: answer for rank, answer in answers.items() if answer and answer.error}
        if failed:
            rank = min(failed, key=lambda rank: (_is_lost_connection(failed[rank].error), rank))
            answer = failed[rank]
            what = f"{answer.node or 'the set-up'} failed with {answer.error} (rank {rank})"
            raise VerificationError(compose("real ranks", what, where=_line(graphs, tables, rank, answer.node)))
        late = [rank for rank in messages if rank not in answers]
        if late:
            stands = [(rank, world.progress.read(rank)) for rank in late]
            where = [
                f"rank {rank} was at {name or 'its start'}"
                + "".join(f": {line}" for line in _line(graphs, tables, rank, name))
                for rank, name in stands
            ]
            do = "run the same graphs on the virtual cluster, which shows what each rank waits for"
            raise VerificationError(compose("real ranks", f"no answer in {self.timeout_s:g} s", where=where, do=do))
        return [answer for _, answer in sorted(answers.items()) if answer is not None]


def _is_lost_connection(error: str) -> bool:
    """Whether an error only says that another rank closed its connection; the cause is on that rank."""
    return "by peer" in error


def _line(graphs: Sequence[GraphModule], tables: Sequence[GroupTable], rank: int, name: str) -> list[str]:
    """The listing line of the node with this name, if there is one."""
    nodes: list[Node] = list(graphs[rank].graph.nodes) if graphs else []
    return [show(node, tables[rank])[0] for node in nodes if name_of(node) == name]


def _used_groups(graph: GraphModule, table: GroupTable, num_ranks: int) -> dict[str, tuple[str, Partition]]:
    """The groups of the launches of a graph, by canonical name: the identity and the partition of ranks of each."""
    launches = [n for n in graph.graph.nodes if n.op == "call_function" and ops.is_communication(n.target)]
    arguments = [argument for node in launches if (argument := group_argument(node)) is not None]
    groups = {table.canonical(argument): table.group(argument) for argument in arguments}
    return {name: (group.identity, partition_of(group, num_ranks)) for name, group in groups.items()}


def _jobs(
    graphs: Sequence[GraphModule],
    inputs: Sequence[Sequence[Any]],
    tables: Sequence[GroupTable],
    parts: Sequence[Mapping[str, tuple[str, Partition]]],
    seed: int,
    repeat: int,
) -> Iterator[Job]:
    """The job of each rank. Ranks that share a graph share its listing."""
    listings: dict[tuple[int, int], str] = {}
    for rank, (graph, given, table) in enumerate(zip(graphs, inputs, tables, strict=True)):
        key = (id(graph), id(table))
        if key not in listings:
            listings[key] = render(graph, table)
        mine = {
            name: (identity, next((p for p in partition if rank in p), ()))
            for name, (identity, partition) in parts[rank].items()
        }
        yield Job(listings[key], pack([_constants(graph), list(given)]), mine, seed, repeat)


def _constants(module: GraphModule) -> dict[str, Tensor]:
    """The tensors that the graph and its nested graphs take from their modules, by the names in the listing."""
    found: dict[str, Tensor] = {}
    for node in module.graph.nodes:
        value = attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, GraphModule):
            found |= _constants(value)
        elif isinstance(value, Tensor):
            found[str(node.target)] = value
    return found

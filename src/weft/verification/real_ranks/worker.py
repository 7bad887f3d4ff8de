"""One real rank: a process that receives jobs over a pipe and runs them on gloo. `RealRanks` starts it.

Contract: the process ends when the pipe closes, even in the middle of a job, so that it never outlives the caller.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.bucketing.pack import PACK
from weft.compat import run_gloo_in_order, storage_key
from weft.graph import ops
from weft.graph.groups import group_argument, runtime_name
from weft.graph.listings.text import parse
from weft.verification.rank import Rank, RankProgram, RankResult, tensors_in
from weft.verification.real_ranks.messages import Answer, Job, Packed, Prepare, Progress, pack, unpack

OPERATORS = (PACK,)
"""Weft's own operators that a listing may name; importing them registers them."""
WARM_UP = Job("def graph(x: f32[1]):\n    y = relu(x)\n    return [y]\n", pack([{}, [torch.ones(1)]]), {}, 0, 1)
"""Runs before the first real job, so that late imports of torch do not count against that job's timeout."""


class Worker:
    """The process groups of one rank; runs jobs on them."""

    def __init__(self, rank: int, progress: Progress) -> None:
        self.rank, self.progress = rank, progress
        self._runtime_names: dict[tuple[str, tuple[int, ...]], str] = {}
        self._at = ""

    def answer(self, message: Any) -> Answer:
        """Handle one message."""
        self._at = ""
        try:
            if isinstance(message, Prepare):
                return self._prepare(message)
            return Answer(self._run(message))
        except Exception as error:
            text = next(iter(str(error).strip().splitlines()), "")
            return Answer(error=f"{type(error).__name__}: {text}", node=self._at)
        finally:
            self.progress.mark(self.rank, "")

    def _prepare(self, message: Prepare) -> Answer:
        for identity, part in message.groups:
            group = dist.new_group(list(part))
            if self.rank in part:
                self._runtime_names[identity, part] = group.group_name  # type: ignore[union-attr]
        return Answer()

    def _run(self, job: Job) -> tuple[Packed, ...]:
        constants, inputs = unpack(job.tensors)  # a rank copies them before each step
        program = RankProgram(parse(job.listing, constants))
        names = {name: self._runtime_names[group] for name, group in job.groups.items()}
        results: list[Packed] = []
        with torch.no_grad():
            for _ in range(job.repeat):
                torch.manual_seed(job.seed + self.rank)
                result = self._step(Rank(self.rank, program, inputs), names)
                results.append(pack((result.outputs, result.inputs, dict(result.constants))))
        return tuple(results)

    def _step(self, rank: Rank, names: dict[str, str]) -> RankResult:
        open_: dict[int, Any] = {}
        """Tensors in flight by storage. Each is waited for once: a second wait for a send never returns on gloo."""
        for node in rank.program.nodes:
            self._at = node.name
            self.progress.mark(self.rank, node.name)
            if node.op == "output":
                outputs = rank.resolve(node.args[0])
                for tensor in open_.values():  # launches without a wait: the caller gets them complete
                    ops.op_names()["wait"](tensor)
                return rank.result(outputs)
            if node.op == "call_function" and ops.is_communication(node.target):
                bound: dict[str, Any] = rank.resolve(ops.bind(node))
                group = next(name for name in ops.GROUP_ARGUMENTS if name in bound)
                bound[group] = names[runtime_name(group_argument(node))]
                target: Any = node.target
                rank.values[node] = target(**bound)
                open_ |= {storage_key(tensor): tensor for tensor in tensors_in(rank.values[node])}
            else:
                rank.values[node] = rank.evaluate(node)
                if node.op == "call_function" and ops.is_wait(node.target):
                    for tensor in tensors_in(rank.values[node]):
                        open_.pop(storage_key(tensor), None)
            rank.release(node)
        return rank.result(None)


def main(arguments: list[str]) -> None:
    """Join the world and answer messages until the pipe closes."""
    rank, num_ranks, pipe, timeout_s = (int(argument) for argument in arguments[:4])
    folder = Path(arguments[4])
    torch.set_num_threads(1)
    connection = Connection(pipe)
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, messages, folder), daemon=True).start()
    run_gloo_in_order()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    worker = Worker(rank, Progress(folder / "progress", num_ranks))
    worker.answer(WARM_UP)
    connection.send(Answer())
    while True:
        connection.send(worker.answer(messages.get()))


def _listen(connection: Connection, messages: queue.SimpleQueue[Any], folder: Path) -> None:
    """Receive messages while the main thread works; end the process when the caller is gone, even if it hangs."""
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])

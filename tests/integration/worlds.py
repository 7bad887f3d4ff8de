"""Worlds: real gloo processes that run functions of the tests, one world for many tests.

    with World(2, folder) as world:
        losses = world.run(train, backend="weft_eager")      # one result per rank

A function is any module-level function of the tests that takes keywords; what it takes and returns must be picklable.
It runs on every rank with the process group set up. A world ends with the test session, on a timeout, and on an error.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self
from unittest import mock

REPOSITORY = Path(__file__).parents[2]
_PATHS = (str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", ""))
PYTHONPATH = os.pathsep.join(filter(None, _PATHS))
"""For processes that tests start: the sources beside these tests, whatever is installed."""
START_S = 120.0
CALL_S = 240.0
LAST_WORDS_S = 1.0
"""Others notice that a rank is gone, and say so, before it has ended."""


@dataclass
class World:
    """Processes of one world; they start with the first run."""

    num_ranks: int
    folder: Path
    """For the store, logs, and Inductor's caches, which the ranks of all worlds share."""
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _pipes: list[Connection] = field(default_factory=list)
    _starts: int = 0
    _references: dict[str, list[Any]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], **keywords: Any) -> list[Any]:
        """Call a function on all ranks; the results by rank."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, keywords))
        return self._answers(CALL_S)

    def reference(self, function: Callable[..., Any], **keywords: Any) -> list[Any]:
        """The results of a run without Weft. It depends on its keywords only, so many tests share one run."""
        key = repr((function.__module__, function.__qualname__, sorted(keywords.items())))
        if key not in self._references:
            self._references[key] = self.run(function, **keywords)
        return self._references[key]

    def close(self) -> None:
        """End all processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes, self._pipes = [], []

    @property
    def _home(self) -> Path:
        return self.folder / f"world{self.num_ranks}-{os.getpid()}-{self._starts}"

    def _start(self) -> None:
        self._starts += 1
        home = self._home
        home.mkdir(parents=True)
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": PYTHONPATH,
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        for rank in range(self.num_ranks):
            mine, theirs = Pipe()
            arguments = (rank, self.num_ranks, theirs.fileno(), home)
            with (home / f"log{rank}").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name, *map(str, arguments)],
                    cwd=REPOSITORY,
                    env=environment,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            theirs.close()
            self._processes.append(process)
            self._pipes.append(mine)
        self._answers(START_S)

    def _answers(self, timeout_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(found) < self.num_ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                self._fail(f"ranks {sorted(waiting.values())} gave no answer in {timeout_s:g} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    result, error = self._pipes[rank].recv()
                except (EOFError, OSError):
                    result, error = None, "it ended"
                if error:
                    self._fail(f"rank {rank}: {error}")
                found[rank] = result
        return [found[rank] for rank in range(self.num_ranks)]

    def _fail(self, what: str) -> NoReturn:
        time.sleep(LAST_WORDS_S)
        codes = [process.poll() for process in self._processes]
        self.close()
        logs = [(self._home / f"log{rank}").read_text(errors="replace") for rank in range(self.num_ranks)]
        ends = ["" if code is None else f", which ended with exit code {code}" for code in codes]
        told = [f"rank {rank}{end}: ...{text[-3000:]}" for rank, (end, text) in enumerate(zip(ends, logs, strict=True))]
        raise RuntimeError("\n".join([what, *told]))


def as_by_torchrun() -> AbstractContextManager[Any]:
    """Set the variables by which frameworks see that torchrun started a rank; the process group exists already."""
    import torch.distributed as dist

    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "1"}
    return mock.patch.dict(os.environ, variables)


def _serve(rank: int, num_ranks: int, pipe: Connection, home: Path) -> None:
    import torch
    import torch.distributed as dist

    from weft.compat import run_gloo_in_order

    torch.set_num_threads(1)
    run_gloo_in_order()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{home / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=CALL_S + START_S),
    )
    pipe.send((None, ""))
    while True:
        try:
            module, name, keywords = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # whoever started us is gone
        faulthandler.dump_traceback_later(CALL_S - 10)  # who is killed for being late has said where it stood
        try:
            pipe.send((getattr(importlib.import_module(module), name)(**keywords), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), Connection(int(sys.argv[3])), Path(sys.argv[4]))

"""Workers: the same function for many questions, in this process, in a pool, or on any executor such as dask's.

Contract: answers depend on their questions alone, so any worker may give them, in any order. A question whose worker
died is answered in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class InThisProcess(Executor):
    """Runs each call as it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The finished call."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def executor_for(given: Executor | None, workers: int) -> Generator[Executor]:
    """The given executor; without one, a pool of spawned processes, or this process for one worker."""
    if given is not None:
        yield given
    elif workers > 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            yield pool
    else:
        yield InThisProcess()


def answers(
    executor: Executor,
    workers: int,
    function: Callable[[Asked], Answer],
    questions: Sequence[Asked],
    is_wanted: Callable[[Asked], bool] = lambda _: True,
) -> Iterator[tuple[Asked, Answer]]:
    """Questions with their answers, as they arrive; at most `workers` are asked at once, in the given order.

    `is_wanted` is called right before a question is asked; one that is not wanted by then is not asked.
    """
    waiting = list(reversed(questions))
    asked: dict[Future[Answer], Asked] = {}
    try:
        while waiting or asked:
            while waiting and len(asked) < workers:
                question = waiting.pop()
                if is_wanted(question):
                    asked[_submit(executor, function, question)] = question
            if not asked:
                continue
            done, _ = wait(asked, return_when=FIRST_COMPLETED)
            for future in [each for each in asked if each in done]:
                question = asked.pop(future)
                yield question, _result(future, function, question)
    finally:
        for future in asked:
            future.cancel()


def _submit(executor: Executor, function: Callable[[Asked], Answer], question: Asked) -> Future[Answer]:
    try:
        return executor.submit(function, question)
    except BrokenExecutor:
        return InThisProcess().submit(function, question)


def _result(future: Future[Answer], function: Callable[[Asked], Answer], question: Asked) -> Answer:
    try:
        return future.result()
    except Exception:  # the worker died; a fault of the function itself is raised again here
        return function(question)

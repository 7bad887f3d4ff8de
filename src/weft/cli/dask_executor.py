"""The option `--dask`: the workers of a dask scheduler do the work of a command."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from weft.cli import usage
from weft.errors import compose

CONNECT_SECONDS = 10

DaskOption = Annotated[
    str | None,
    typer.Option("--dask", metavar="ADDRESS", help="Address of a dask scheduler, whose workers do the work."),
]


@contextmanager
def dask_executor(address: str | None) -> Generator[tuple[Executor | None, int]]:
    """The executor of a dask scheduler and its number of threads; None and 0 without an address."""
    if address is None:
        yield None, 0
        return
    try:
        from distributed import Client
    except ImportError:
        what = "it needs dask.distributed, which is missing"
        raise usage.UsageError(compose("--dask", what, do="pip install distributed")) from None
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise usage.UsageError(compose("--dask", f"{address} cannot be reached: {error}")) from None
    with client:
        scheduled: Any = client.nthreads()
        yield client.get_executor(), sum(scheduled.values())

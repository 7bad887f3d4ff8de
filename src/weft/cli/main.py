"""The command `weft`.

Artifacts go to stdout, messages to stderr. Exit status 0: done; 1: refused, or the graphs differ; 2: usage.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from weft.cli.advise_command import advise
from weft.cli.agree_command import agree
from weft.cli.apply_command import apply
from weft.cli.calibrate import calibrate
from weft.cli.cluster_command import cluster
from weft.cli.compare_command import compare
from weft.cli.demo import demo
from weft.cli.explain_command import explain
from weft.cli.optimize import optimize
from weft.cli.passes import passes
from weft.cli.predict_command import predict
from weft.cli.simulate_command import simulate
from weft.cli.sweep_command import sweep
from weft.cli.usage import SOURCE_HELP, cluster_warnings_as_notes, exit_status, show, with_units
from weft.cli.verify_command import verify
from weft.errors import RefusedError, WeftError
from weft.version import VERSION


def one_line_each(docstring: str | None) -> str:
    """A docstring with each paragraph on one line: the terminal wraps it, and would also keep its line breaks."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n"))


class Commands(TyperGroup):
    """The commands; errors of Weft are messages, not tracebacks."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run a command."""
        try:
            with cluster_warnings_as_notes():
                return super().invoke(ctx)
        except WeftError as error:
            show(with_units(str(error)) if isinstance(error, RefusedError) else str(error), err=True)
            raise typer.Exit(exit_status(error)) from None
        except BrokenPipeError:  # the reader has closed the pipe
            raise
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError) and "null byte" not in str(error):
                raise
            show(f"weft: {error}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands,
    help=f"Weave the communication of distributed PyTorch programs into their computation.\n\nSOURCE: {SOURCE_HELP}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (
    demo,
    advise,
    optimize,
    apply,
    explain,
    simulate,
    predict,
    verify,
    agree,
    sweep,
    passes,
    calibrate,
    compare,
):
    app.command(help=one_line_each(command.__doc__))(command)
app.add_typer(cluster, name="cluster")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"weft {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before a command."""


def main() -> None:
    """Run the command line."""
    try:
        app()
    finally:
        _flush()


def _flush() -> None:
    """Flush stdout now: a full disk at Python's own exit would print a traceback."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return
        show(f"weft: stdout cannot be written: {error.strerror}", err=True)
        raise SystemExit(1) from None

"""Shared by all commands: options, exit status, progress and output."""

from __future__ import annotations

import errno
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.errors import ClusterError, ClusterWarning, PipelineError, ReportError, WeftError, compose
from weft.files import write_whole
from weft.quantities import bytes_in


class UsageError(WeftError):
    """An argument of the command line that cannot be used."""


class Witness(StrEnum):
    """How the result is checked: the values of `verify` in `weft.optimize`."""

    STRUCTURE = "structure"
    EQUIVALENCE = "equivalence"
    VALUES = "values"
    OFF = "off"


class Effort(StrEnum):
    """How long to search: the values of `effort` in `weft.optimize`."""

    FAST = "fast"
    DEFAULT = "default"
    BEST = "best"


SOURCE_HELP = (
    "A listing, an archive, a TORCH_TRACE log (FILE:LINE for one of its graphs), an fx_graph_runnable text, "
    "or a model: zoo:llama-debug/fsdp-tp?layers=2&ranks=4, or zoo:llama-8b/fsdp-tp?mesh=dp:32,tp:2 with the size of "
    "each axis."
)
Source = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
ClusterOption = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME|FILE", help="A preset such as h100-8x8, or a TOML file.")
]
PipelineOption = Annotated[
    str,
    typer.Option(
        "--pipeline", metavar="SPEC", help="Passes, stages and presets separated by commas, such as clean,my-pass,auto."
    ),
]
VerifyOption = Annotated[
    Witness,
    typer.Option(
        "--verify", help="Check the structure of the result, prove equivalence, or compare values on virtual ranks."
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict", help="Fail if the graph prevents a rewrite that a pass named in --pipeline wanted to make."
    ),
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write here instead of to stdout.")
]
PlanOption = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="PATH", help="Save the plan in this file, or in this folder under a name made from its graph."
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=1,
        help="Tokens per step on all ranks, for tokens/s; known for a zoo:MODEL and its listings.",
    ),
]
AssumeOption = Annotated[
    str | None,
    typer.Option(
        "--assume",
        metavar="SIZES",
        help="Values for sizes that depend on data, to estimate times: balanced, zipf:1.2, or u0=512,u1=0.",
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory limit for the step, such as 24GiB; fails if no order fits.",
    ),
]
EffortOption = Annotated[Effort, typer.Option("--effort", help="How long to search for a shorter step.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def sizes_of(assume: str | None) -> dict[str, int] | str | None:
    """The value of `sizes` that --assume states."""
    if assume is None or "=" not in assume:
        return assume
    pairs = [part.partition("=") for part in assume.split(",")]
    if not all(name and number.isdecimal() for name, _, number in pairs):
        raise UsageError(compose("--assume", f"{assume!r} is not a list of sizes", do="write --assume u0=512,u1=0"))
    return {name: int(number) for name, _, number in pairs}


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
BYTES = re.compile(r"\b([0-9]{4,}) bytes\b")


def parse_size(text: str, option: str) -> int:
    """The bytes of a size such as 24GiB, as `quantities.bytes_in` reads it."""
    try:
        return bytes_in(text)
    except ValueError as error:
        raise UsageError(compose(option, str(error), do="write 24GiB, 24GB or a number of bytes")) from None


def parse_optional_size(text: str | None, option: str) -> int | None:
    """The bytes of a size, or None if no text is given."""
    return None if text is None else parse_size(text, option)


def with_units(text: str) -> str:
    """The message with a unit added to each long number of bytes, rounded up so that the figure suffices as a limit."""
    return BYTES.sub(lambda found: f"{found[0]} ({_rounded_up(int(found[1]))})", text)


def _rounded_up(num_bytes: int) -> str:
    unit = min((num_bytes.bit_length() - 1) // 10, len(UNITS) - 1)
    hundredths = -(-num_bytes * 100 >> 10 * unit)
    return f"{Decimal(hundredths) / 100:f} {UNITS[unit]}"


def exit_status(error: WeftError) -> int:
    """1: refused, or the graphs differ; 2: usage."""
    return 2 if isinstance(error, PipelineError | ClusterError | UsageError) else 1


def check_folder(path: Path | None) -> None:
    """Refuse a file that cannot be written before any work is done."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        what = "it is a folder" if path.is_dir() else "its folder does not exist"
        raise UsageError(compose(str(path), what, do="give a file in a folder that exists"))


def check_files(paths: Iterable[Path | None], inputs: Iterable[str | Path | None] = ()) -> None:
    """Refuse files that cannot be written, or that are the same as another one or as an input."""
    given = [path for path in paths if path is not None]
    read = [Path(name) for each in inputs if each is not None for name in (str(each), str(each).rpartition(":")[0])]
    for i, path in enumerate(given):
        check_folder(path)
        if any(_is_same(path, other) for other in given[:i]):
            raise UsageError(compose(str(path), "two outputs would be written there", do="give each its own file"))
        if any(_is_same(path, other) or (path.exists() and _is_same(path.parent, other)) for other in read):
            raise UsageError(compose(str(path), "it is an input, and would be overwritten", do="give another file"))


def _is_same(path: Path, other: Path) -> bool:
    """Whether two paths are one file, through any names and links; devices such as /dev/null may be used twice."""
    if path.exists() and not path.is_file() and not path.is_dir():
        return False
    if path.exists() and other.exists() and other.name:
        return path.samefile(other)
    return bool(other.name) and path.resolve() == other.resolve()


def write(text: str, path: Path | None) -> None:
    """Write the output to a file, or to stdout if none is given."""
    if path is None:
        show(text) if sys.stdout.isatty() else sys.stdout.write(text.encode(errors="replace").decode())
        return
    with writing(path):
        write_whole(path, text)


@contextmanager
def writing(path: Path) -> Generator[None, None, None]:
    """Turn write errors into messages that name the file. A full disk is not a usage error."""
    try:
        yield
    except (OSError, ReportError) as error:
        fault = error if isinstance(error, OSError) else error.__cause__
        is_full = isinstance(fault, OSError) and fault.errno in FULL
        text = str(error)
        if isinstance(error, OSError):
            text = compose(str(path), f"it cannot be written: {error.strerror or error}")
        raise (ReportError if is_full else UsageError)(text) from None


def show(text: str, *, err: bool = False) -> None:
    """Print without control characters: names may come from anywhere, and a terminal would obey them."""
    from weft.report.plain_text import plain

    typer.echo(plain(text), nl=not text.endswith("\n"), err=err)


@contextmanager
def cluster_warnings_as_notes() -> Generator[None, None, None]:
    """Print each warning about a cluster once, as a line on stderr, without a line of Weft's source."""
    shown, usual = set[str](), warnings.showwarning

    def show_once(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if not issubclass(category, ClusterWarning):
            usual(message, category, *rest)
        elif str(message) not in shown:
            shown.add(str(message))
            show(f"note: {message}", err=True)

    warnings.showwarning = show_once
    try:
        yield
    finally:
        warnings.showwarning = usual


@contextmanager
def progress(doing: str) -> Generator[None, None, None]:
    """Show the current activity on stderr, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    from weft.report.plain_text import plain_line

    with Console(stderr=True).status(escape(plain_line(doing))):
        yield


@contextmanager
def activity(doing: str) -> Generator[Callable[[str], object], None, None]:
    """Show the current activity on stderr, if it is a terminal; call the yielded function with each new one."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.markup import escape

    from weft.report.plain_text import plain_line

    with Console(stderr=True).status(escape(plain_line(doing))) as status:
        yield lambda text: status.update(escape(plain_line(text)))


@contextmanager
def progress_bar(doing: str) -> Generator[Callable[[str, int, int], object], None, None]:
    """A bar on stderr, if it is a terminal.

    Call the yielded function with the current activity, the number of finished parts, and that of all parts.
    """
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from weft.report.plain_text import plain_line

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(plain_line(doing)), total=None)
        yield lambda text, done, total: bar.update(
            task, description=escape(plain_line(text)), completed=done, total=total
        )

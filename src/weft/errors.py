"""The errors a caller can meet, and the one shape of their messages.

Contract: bad input raises a subclass of `WeftError`. Its text says who complains, what was found and what was expected,
where (a line of the listing with a caret and the user's source line), and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_LINE = 2000
"""Maximum number of characters of a message; longer ones are cut."""
MAX_WHERE = 100
"""Maximum number of lines in an excerpt, because a file may have a million faults."""


class WeftError(Exception):
    """Base of every error Weft raises on purpose."""


class GraphError(WeftError):
    """The graph breaks an invariant, or an edit would break one."""


class ListingError(WeftError):
    """A listing does not describe a graph."""


class PipelineError(WeftError):
    """An unknown pass or option, or a pipeline that does not parse."""


class ClusterError(WeftError):
    """A cluster is unknown, its file is malformed, or it has too few ranks."""


class ClusterWarning(UserWarning):
    """The file of a cluster leaves something open, or states a value that is probably meant otherwise."""


class PlanError(WeftError):
    """A plan file is malformed, or was made for another graph."""


class RefusedError(WeftError):
    """`strict` was set and the graph prevents a rewrite that a pass wanted to make, or a limit cannot be kept."""


class MemoryLimitError(RefusedError):
    """No order was found that fits into the memory limit."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message, least_bytes)
        self.least_bytes = least_bytes
        """A limit that would work: the lowest peak that was found."""

    def __str__(self) -> str:
        return str(self.args[0])


class CaptureError(WeftError):
    """A training step cannot be traced, or not in the way that was asked for."""


class ReadError(WeftError):
    """A file from elsewhere, such as a trace log, a runnable or an archive, is malformed or does not hold a graph."""


class ReportError(WeftError):
    """A report was asked for data that it does not have."""


class VerificationError(WeftError):
    """Two graphs cannot be compared, or running them broke a rule of communication."""


def compose(who: str, what: str, *, where: Sequence[str] = (), do: str = "") -> str:
    """Lay out a message: `who: what`, the indented excerpt, and what to do."""
    lines = [f"{who}: {what}" if who else what]
    lines += [f"    {line}" for line in where[:MAX_WHERE]]
    lines += [f"    ... and {len(where) - MAX_WHERE} more"] if len(where) > MAX_WHERE else []
    if do:
        lines.append(do)
    return "\n".join(line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ..." for line in lines)


def point_at(line: str, name: str, source: str = "") -> list[str]:
    """An excerpt: one line of a listing, and a caret line under `name` followed by the user's source line."""
    start = max(line.find(name), 0)
    caret = " " * start + "^" * max(len(name), 1)
    return [line, f"{caret}  {source}".rstrip()]


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?`, or the empty string if no name is similar."""
    matches = difflib.get_close_matches(name[:100], list(known), n=1)
    return f"did you mean {matches[0]!r}?" if matches else ""

"""SOURCE: the graph that a command works on. The content of a file decides how it is read.

Contract: nothing in a file is run. A name that is neither a file nor a model is a UsageError. For a file without a
graph, its reader raises an error that names the file.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from torch.fx import GraphModule

from weft.cli.usage import UsageError
from weft.errors import GraphError, ListingError, ReadError, compose
from weft.frontends import archive
from weft.frontends.printed.runnable import read_runnable
from weft.frontends.printed.text import open_bytes
from weft.frontends.trace_log import BEFORE_AUTOGRAD, PREFIX, LoggedGraph, read_log
from weft.graph.listings.text import parse

MAX_BYTES = 1 << 28
"""Largest text that is read; archives and logs are read piece by piece."""
MAX_SHOWN = 20
"""Number of graphs of a log that an error lists."""
ZIP = b"PK\x03\x04"
RUNNABLE = (re.compile(r"^class Repro\(", re.MULTILINE), re.compile(r"^def load_args\(", re.MULTILINE))
"""The marks of a runnable, in this order. Each is searched for by itself: one expression would try every pair."""
LISTING = re.compile(r"^(?:def graph|tokens_per_step|group|symbol|device|tensor)\(", re.MULTILINE)
GRAPH_OF_LOG = re.compile(r"(.+):(\d{1,9})")


def load_source(source: str) -> GraphModule:
    """The graph of a source."""
    if source.startswith("zoo:"):
        from weft.cli.zoo_source import load_zoo

        return load_zoo(source)
    try:
        return _load_path(source)
    except (ListingError, GraphError, ReadError) as error:
        if source in str(error):
            raise
        raise type(error)(f"{source}: {error}") from None


def _load_path(source: str) -> GraphModule:
    path, chosen = Path(source), GRAPH_OF_LOG.fullmatch(source)
    if path.is_dir():
        return _choose(path, None)
    if path.exists():
        return _load_file(path)
    if chosen is not None and Path(chosen[1]).is_file():
        return _choose(Path(chosen[1]), int(chosen[2]))
    do = "give a listing, an archive, a TORCH_TRACE log, an fx_graph_runnable text or zoo:MODEL"
    raise UsageError(compose(source, "there is no such file", do=do))


def _load_file(path: Path) -> GraphModule:
    try:
        with open_bytes(path) as file:
            head = file.read(1 << 16)
            if head.startswith(ZIP):
                return archive.load(path)
            if PREFIX.match(head):
                return _choose(path, None)
            content = head + file.read(MAX_BYTES + 1 - len(head))
    except (OSError, EOFError, zlib.error) as error:
        raise ReadError(compose(str(path), f"it cannot be read: {error}")) from None
    if len(content) > MAX_BYTES:
        raise ReadError(compose(str(path), f"it has more than {MAX_BYTES} bytes and is neither an archive nor a log"))
    text = content.decode(errors="replace")
    start = RUNNABLE[0].search(text)
    if start is not None and RUNNABLE[1].search(text, start.end()):
        return read_runnable(path)
    if LISTING.search(text):
        return parse(text)
    what = "it is not a listing, an archive, a TORCH_TRACE log or an fx_graph_runnable text"
    raise ReadError(compose(str(path), what, do="`weft optimize --help` lists the formats"))


def _choose(path: Path, line: int | None) -> GraphModule:
    """The graph of a log that starts at a line; without one, the only graph."""
    graphs = [graph for graph in read_log(path) if not any(part in graph.kind for part in BEFORE_AUTOGRAD)]
    found = [graph for graph in graphs if line is None or graph.line == line]
    if len(found) == 1:
        return found[0].load()
    shown = [*map(_describe, graphs[:MAX_SHOWN])]
    shown += [f"... and {len(graphs) - MAX_SHOWN} more"] if len(graphs) > MAX_SHOWN else []
    if not graphs:
        raise ReadError(compose(str(path), "the log has no graph of operators", do="compile with torch.compile"))
    what = f"the log has {len(graphs)} graphs" if line is None else f"no graph of the log is at line {line}"
    raise UsageError(compose(str(path), what, where=shown, do=f"choose one: {graphs[0].path}:{graphs[0].line}"))


def _describe(graph: LoggedGraph) -> str:
    rank = f", rank {graph.rank}" if graph.rank is not None else ""
    return f"{graph.path}:{graph.line}  {graph.kind} {graph.compile_id}, {graph.part}{rank}, {graph.num_lines} lines"

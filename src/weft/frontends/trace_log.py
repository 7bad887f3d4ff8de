"""Reading the structured logs of torch.compile: the graphs that a run compiled, each as a graph module.

A cluster writes them with `TORCH_TRACE=folder`, one file per rank. Each event is a line of JSON after a prefix; its
payload follows, indented by a tab:

    V0115 10:00:00.000000 77 torch/_inductor/compile_fx.py:1404] {"artifact": {"name": "inductor_post_grad_graph", ...
    >   class GraphModule(torch.nn.Module):
    >       def forward(self, x: "f32[2, 4][4, 1]cpu"):

Contract: a log is read line by line, and the text of a graph only when it is loaded, so at most one graph is in memory.
Nothing in a log is executed. A malformed line is a ReadError with its number; `strict=False` skips such lines.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

from torch.fx import GraphModule

from weft.errors import ReadError, compose
from weft.frontends.printed import runnable
from weft.frontends.printed.graph import GraphReader, Groups
from weft.frontends.printed.text import MAX_CHARACTERS, PrintedText, error, open_bytes
from weft.graph.about import ABOUT_KEY
from weft.graph.aliasing import APART_KEY
from weft.graph.listings.text import parse

PREFIX = re.compile(rb"[VDIWEC]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ [^\]\n]{1,400}\] ")
FILE_RANK = re.compile(r"rank_(\d{1,9})_")
VERSION = re.compile(rb'"pytorch_version": "([\w.+]{1,80})"')
HINT = re.compile(r"\d{1,18}")
MAX_LINE_BYTES = 1 << 26
MAX_LAUNCH_BYTES = 1 << 14
HEAD_BYTES = 400
RUNNABLE = "fx_graph_runnable"
LISTING = "weft_after"
"""The listing of the optimized graph, which Weft's backends log."""
EXECUTED = (LISTING, "inductor_post_grad_graph", "aot_forward_graph", "aot_backward_graph", "aot_inference_graph")
"""Kinds of graphs that a rank runs, in order of preference: the first that a compilation has is used."""
BEFORE_AUTOGRAD = ("dynamo", "pre_grad", "autograd", "ddp_split")
"""Substrings of the kinds whose graphs call torch functions rather than operators."""
# A log states the number of ranks of a group in launches and in the set-up of runnables.
GROUP_MARKS = (b"_c10d_functional", b"setup_fake_process_groups(")
LAUNCH = re.compile(rb"(?:all_gather_into_tensor|reduce_scatter_tensor)\w*\.default\(.*, (\d{1,9}), '([^']{1,80})'\)")
NAMED = re.compile(r"_c10d_functional\w*\.\w+(?:\.default)?\(.*'([^']{1,80})'\)")
SETUP = re.compile(rb"'([^']{1,80})': \{'size': (\d{1,9})")


@dataclass(frozen=True)
class LoggedGraph:
    """One graph in a log; its text stays in the file until it is loaded."""

    path: Path
    kind: str
    """The event or artifact: `aot_forward_graph`, `inductor_post_grad_graph`, `fx_graph_runnable`, ..."""
    compile_id: str
    """As torch writes it: `0/1` is the second compilation of the first frame, `0/1_2` its third attempt."""
    part: str
    """`backward` or `joint` where gradients are among its inputs, else `forward`."""
    rank: int | None
    line: int
    """Line number of the event in the file."""
    num_lines: int
    """Number of lines of the graph's text."""
    torch_version: str
    hints: Mapping[str, int] = field(repr=False)
    """Sizes of symbols, as the log states them."""
    group_sizes: Mapping[str, int] = field(repr=False)
    """Sizes of groups by run-time name, collected from all graphs of the log."""
    num_bytes: int = field(repr=False)
    offset: int = field(repr=False)
    checksum: str = field(repr=False)

    def text(self) -> str:
        """The text of the graph."""
        if self.num_bytes > 4 * MAX_CHARACTERS:
            what = f"the text of the graph has {self.num_bytes} bytes, the limit is {4 * MAX_CHARACTERS}"
            raise error(str(self.path), self.line, what)
        with open_bytes(self.path) as file:
            file.seek(self.offset)
            lines = file.read(self.num_bytes).split(b"\n")[: self.num_lines]
        payload = b"\n".join(line.removeprefix(b"\t").removesuffix(b"\r") for line in lines)
        try:
            return payload.decode()
        except UnicodeDecodeError as fault:
            number = self.line + 1 + payload[: fault.start].count(b"\n")
            raise error(str(self.path), number, "the line is not valid UTF-8") from None

    def load(self, *, groups: Groups | None = None, hints: Mapping[str, int] | None = None) -> GraphModule:
        """The graph module.

        `groups` gives the sizes or ranks of groups that the launches do not state, by their names in the log. `hints`
        gives sizes for symbols and overrides those of the log.
        """
        if any(part in self.kind for part in BEFORE_AUTOGRAD):
            what = f"graphs of kind {self.kind} call torch functions, not operators"
            raise error(str(self.path), self.line, what, do="load an aot_* or a *_post_grad_graph of the log")
        content = self.text()
        digest = hashlib.md5(content.encode(), usedforsecurity=False).hexdigest()
        advice = (
            ""
            if digest == self.checksum
            else "the log was truncated or edited: the checksum of this text does not match"
        )
        source = PrintedText(str(self.path), content, self.line + 1, advice=advice)
        merged = {**self.hints, **(hints or {})}
        if self.kind == LISTING:
            module = parse(content)
        elif self.kind == RUNNABLE:
            module = runnable.read_source(source, groups=groups, hints=merged)
        else:
            reader = GraphReader(source, hints=merged, groups=groups, sizes=self.group_sizes)
            module = reader.read(source.only_class())
            # AOTAutograd guarantees that inputs with different storages do not overlap.
            module.meta[APART_KEY] = self.kind.startswith("aot_") or "post_grad" in self.kind
        about = {"source": "trace log", "kind": self.kind, "compile_id": self.compile_id, "rank": self.rank}
        module.meta[ABOUT_KEY] = about | {"part": self.part, "torch": self.torch_version}
        return module


def read_log(path: str | Path, *, strict: bool = True) -> list[LoggedGraph]:
    """The graphs in a log, or in all logs of a folder, in the order in which they were compiled.

    `strict=False` skips malformed lines, such as the last line of a run that was killed.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return [graph for file in _logs_in(path) for graph in read_log(file, strict=strict)]
        with open_bytes(path) as file:
            return list(_Scan(path, file, strict).graphs())
    except (OSError, EOFError, ValueError, zlib.error) as fault:  # a NUL in the path is a ValueError
        do = "read_log(path, strict=False) reads the intact part of a truncated file" if strict else ""
        raise ReadError(compose(str(path), f"it cannot be read: {fault}", do=do)) from None


def _logs_in(folder: Path) -> list[Path]:
    """The logs in a folder and its subfolders, since each rank may have its own; logs of torchrun are left out."""
    files = sorted(file for file in folder.rglob("*") if file.name.endswith((".log", ".log.gz")))
    named = [file for file in files if file.name.startswith("dedicated_log_torch_trace_")]
    found = named or [file for file in files if file.parent == folder]
    if not found:
        do = "give the folder that TORCH_TRACE names, or one file"
        raise ReadError(compose(str(folder), "the folder has no *.log of TORCH_TRACE", do=do))
    return found


def read_ranks(path: str | Path) -> list[list[GraphModule]]:
    """The graphs that each rank of a run compiled and runs, by rank, from a folder with the logs of all ranks."""
    files: dict[int, Path] = {}
    graphs: dict[int, list[LoggedGraph]] = {}
    for file in _logs_in(Path(path)):
        logged = read_log(file)
        found = FILE_RANK.search(file.name)
        rank = int(found[1]) if found else next((graph.rank for graph in logged if graph.rank is not None), None)
        if rank is None or rank in files:
            known = (
                "the log does not say which rank wrote it"
                if rank is None
                else f"rank {rank} has another log, {files[rank]}"
            )
            do = "give the TORCH_TRACE folder of one run, with one log for each rank"
            raise ReadError(compose(str(file), known, do=do))
        files[rank], graphs[rank] = file, logged
    missing = [rank for rank in range(max(files) + 1) if rank not in files]
    if missing:
        what = f"it has logs of {len(files)} ranks, but none of rank {missing[0]}"
        raise ReadError(compose(str(path), what, do="give the folder with the logs of all ranks"))
    chosen = [_executed(graphs[rank]) for rank in range(len(files))]
    names = [{name for graph in several for name in NAMED.findall(graph.text())} for several in chosen]
    # If no log states the size of a group that every rank uses, the group has all ranks.
    world = dict.fromkeys(sorted(set.intersection(*names)), len(names))
    loaded: list[list[GraphModule]] = []
    for several in chosen:
        sized = {name for graph in several for name in graph.group_sizes}
        given = {name: size for name, size in world.items() if name not in sized}
        loaded.append([graph.load(groups=given) for graph in several])
    return loaded


def _executed(graphs: Sequence[LoggedGraph]) -> list[LoggedGraph]:
    """The graphs of each compilation that are executed, in the order of the log: forward before backward."""
    chosen: dict[tuple[str, str], LoggedGraph] = {}
    for graph in graphs:
        key = graph.compile_id, graph.part
        before = chosen.get(key)
        if graph.kind in EXECUTED and (
            before is None or EXECUTED.index(graph.kind) < EXECUTED.index(before.kind) or graph.kind == before.kind
        ):
            chosen[key] = graph
    return list(chosen.values())


@dataclass
class _Event:
    """An event of a log, and a summary of the text that follows it."""

    line: int
    record: dict[str, Any]
    offset: int
    num_lines: int = 0
    num_bytes: int = 0
    head: bytes = b""
    has_tangents: bool = False

    def add(self, raw: bytes) -> None:
        """Count a line of the text."""
        if len(self.head) < HEAD_BYTES:
            self.head += raw[1:HEAD_BYTES]
        # The names of the inputs are in the line of the function, or one per line after it.
        is_inputs = b"tangents" in raw and raw.lstrip().startswith((b"def forward(", b"def graph(", b"tangents"))
        self.has_tangents = self.has_tangents or is_inputs
        self.num_lines += 1
        self.num_bytes += len(raw)


class _Scan:
    """One walk over a log."""

    def __init__(self, path: Path, file: IO[bytes], strict: bool) -> None:
        self.path, self.file, self.strict = path, file, strict
        self.hints: dict[str, dict[str, int]] = {}
        self.group_sizes: dict[str, int] = {}
        self.version = ""
        found = FILE_RANK.search(path.name)
        self.rank = int(found[1]) if found else None

    def graphs(self) -> Iterator[LoggedGraph]:
        """The graphs of the events."""
        for event in self._events():
            version = VERSION.search(event.head) if not self.version else None
            self.version = version[1].decode() if version else self.version
            frame = _frame(event.record)
            _note_hint(self.hints.setdefault(frame, {}), event.record)
            kind = _kind(event.record)
            if kind in (RUNNABLE, LISTING) or (kind and event.head.lstrip().startswith(b"class ")):
                yield self._graph(kind, frame, event)

    def _graph(self, kind: str, frame: str, event: _Event) -> LoggedGraph:
        record = event.record
        attempt, rank, checksum = (record.get(key) for key in ("attempt", "rank", "has_payload"))
        part = "forward" if not event.has_tangents else "joint" if "joint" in kind else "backward"
        return LoggedGraph(
            path=self.path,
            kind=kind,
            compile_id=f"{frame}_{attempt}" if attempt else frame,
            part=part,
            rank=rank if isinstance(rank, int) else self.rank,
            line=event.line,
            num_lines=event.num_lines,
            torch_version=self.version,
            hints=dict(self.hints[frame]),
            group_sizes=self.group_sizes,
            num_bytes=event.num_bytes,
            offset=event.offset,
            checksum=str(checksum),
        )

    def _lines(self) -> Iterator[bytes]:
        try:
            while raw := self.file.readline(MAX_LINE_BYTES):
                yield raw
        except (EOFError, zlib.error, gzip.BadGzipFile):
            if self.strict:
                raise

    def _events(self) -> Iterator[_Event]:
        event: _Event | None = None
        offset = 0
        for number, raw in enumerate(self._lines(), 1):
            offset += len(raw)
            if raw.startswith(b"\t") and event is not None:
                event.add(raw)
                if len(raw) < MAX_LAUNCH_BYTES and any(mark in raw for mark in GROUP_MARKS):
                    self._note_groups(raw)
                continue
            record = self._record(number, raw)
            if record is None:
                continue
            if event is not None:
                yield event
            event = _Event(number, record, offset)
        if event is not None:
            yield event
        elif self.strict:
            do = "compile something with TORCH_TRACE=folder set"
            raise ReadError(compose(str(self.path), "it is not a trace log: it has no events", do=do))

    def _note_groups(self, raw: bytes) -> None:
        found = [(name, size) for size, name in LAUNCH.findall(raw)] + SETUP.findall(raw)
        for name, size in found:
            self.group_sizes.setdefault(name.decode(errors="replace"), int(size))

    def _record(self, number: int, raw: bytes) -> dict[str, Any] | None:
        """The JSON of an event; an empty record for a malformed line that is skipped, None for an empty line."""
        prefix = PREFIX.match(raw)
        what = ""
        if not raw.endswith(b"\n") and len(raw) >= MAX_LINE_BYTES:
            what = f"the line has more than {MAX_LINE_BYTES} bytes"
        elif not raw.strip():
            return None
        elif prefix is None:
            what = "expected an event, or text indented by a tab after one"
            what = "it is not a trace log: " + what if number == 1 else what
        else:
            try:
                record = json.loads(raw[prefix.end() :])
                if isinstance(record, dict):
                    return cast(dict[str, Any], record)
                what = "the event is not a JSON object"
            except (ValueError, RecursionError) as fault:
                cut = "" if raw.endswith(b"\n") else "; the file ends in the middle of the line"
                what = f"the event is not valid JSON: {str(fault)[:80]}{cut}"
        if not self.strict:
            return {}
        do = "give a file that TORCH_TRACE wrote" if number == 1 else "read_log(path, strict=False) skips it"
        raise error(str(self.path), number, what, raw[:400].decode(errors="replace").strip(), do=do)


def _kind(record: Mapping[str, Any]) -> str:
    kind = next(iter(record), "")
    inside = record.get(kind)
    name = inside.get("name") if kind in ("artifact", "graph_dump") and isinstance(inside, dict) else None
    return name if isinstance(name, str) else kind


def _frame(record: Mapping[str, Any]) -> str:
    """The id of a compilation as torch writes it: `0/1`, and `!2/0/1` by compiled autograd."""
    autograd, frame, count = (record.get(key) for key in ("compiled_autograd_id", "frame_id", "frame_compile_id"))
    parts = [f"!{autograd}"] if isinstance(autograd, int) else []
    parts += [f"{frame}/{count}"] if isinstance(frame, int) and isinstance(count, int) else []
    return "/".join(parts)


def _note_hint(hints: dict[str, int], record: Mapping[str, Any]) -> None:
    made = record.get("create_symbol")
    if isinstance(made, dict):
        symbol, value = (str(made.get(key)) for key in ("symbol", "val"))
        if HINT.fullmatch(value):
            hints[symbol] = int(value)

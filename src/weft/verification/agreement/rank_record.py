"""Statements of ranks: each rank publishes how it rewrote its graphs, where other ranks can read it.

    board = FolderBoard("/shared/run-17")                      # or StoreBoard(store)
    conflicts = publish(board, rank, num_ranks, statement)     # compares with earlier statements; never waits
    print(check_published(board, num_ranks))                   # after compilation: all ranks, all graphs

Contract: no collective and no wait. A rank writes its own page and reads the pages that exist at that moment. A long
part is written once, under its digest, by the rank that comes first. Pages of other runs are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self
from uuid import uuid4

from weft.errors import VerificationError, compose
from weft.verification.agreement.agreement import Agreement, check
from weft.verification.agreement.issue_order import IssuedLaunch, IssueOrder

DO = "give all ranks the same Weft, torch, cluster and options; or make one plan and apply it on all with weft.apply"


class Board(Protocol):
    """A store of texts by key that all ranks can access."""

    def write(self, key: str, text: str) -> None:
        """Store a text atomically."""

    def read(self, key: str) -> str | None:
        """The text, or None if the key does not exist now."""
        ...


@dataclass(frozen=True)
class FolderBoard:
    """A folder that all ranks can access."""

    folder: str | Path

    def write(self, key: str, text: str) -> None:
        path = Path(self.folder) / f"{key}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}-{uuid4().hex}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)  # a reader sees the whole file or none

    def read(self, key: str) -> str | None:
        try:
            return (Path(self.folder) / f"{key}.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None

    @property
    def runs(self) -> dict[str, int]:
        """The runs that left pages here, each with its number of ranks."""
        pages = [_read_page(self, path.stem) for path in sorted(Path(self.folder).glob("rank*.json"))]
        return {page.run: page.num_ranks for page in pages if page.num_ranks}

    def last_run(self) -> str | None:
        """The run whose pages are in this folder, in its last restart; None for an empty folder."""
        runs = self.runs
        if _run() or not runs:  # a process of a run reads only the pages of its run
            return _run() if _run() in runs else None
        names = {re.sub(r" \d+$", "", run) for run in runs}
        if len(names) > 1:
            what = f"{self.folder} holds pages of {len(names)} runs: {', '.join(map(repr, sorted(names)))}"
            raise VerificationError(compose("agreement", what, do="give each run a folder of its own"))
        return max(runs, key=lambda run: (len(run), run))


@dataclass(frozen=True)
class StoreBoard:
    """A store of torch.distributed: a TCPStore, FileStore, HashStore or PrefixStore."""

    store: Any
    prefix: str = "weft"

    def write(self, key: str, text: str) -> None:
        self.store.set(f"{self.prefix}/{key}", text)

    def read(self, key: str) -> str | None:
        texts = self.read_all([key])
        return texts[0] if texts is not None else None

    def read_all(self, keys: Sequence[str]) -> list[str] | None:
        """The texts in the order of the keys, or None unless all keys exist now."""
        names = [f"{self.prefix}/{key}" for key in keys]
        if not self.store.check(names):  # `get` alone would block
            return None
        values = self.store.multi_get(names) if self.store.has_extended_api() else map(self.store.get, names)
        return [value.decode() for value in values]

    def write_once(self, key: str, text: str) -> str:
        """Store a text unless the key exists; the text that the key has now."""
        return self.store.compare_set(f"{self.prefix}/{key}", "", text).decode()


@dataclass(frozen=True)
class Statement:
    """How one rank rewrote one graph; equal on all ranks that have the same graph."""

    name: str
    """The name of the graph within the run, such as `forward 0/0`."""
    graph: str
    """The digest of the graph before the rewrite."""
    plan: str
    """The digest of the plan."""
    result: str
    """The digest of the graph after the rewrite."""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The facts of the plan, such as versions and options."""
    decisions: tuple[str, ...] = ()
    order: IssueOrder = field(default_factory=lambda: IssueOrder(()))
    """The launches and waits of the new graph."""

    @property
    def digest(self) -> str:
        """A digest that is equal exactly if graph, plan and result are."""
        return hashlib.sha256(f"{self.graph} {self.plan} {self.result}".encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """The statement as JSON."""
        known = {key: value for key, value in vars(self).items() if key != "order"}
        return json.dumps(known | {"order": self.order.to_json()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a statement."""
        try:
            data = json.loads(text)
            order = IssueOrder.from_json(data.pop("order"))
            return cls(**data | {"decisions": tuple(data["decisions"]), "order": order})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            what = f"this is not the statement of a rank: {type(error).__name__}: {error}"
            raise VerificationError(compose("agreement", what, do="publish it again")) from None


@dataclass(frozen=True)
class Conflict:
    """Two ranks whose rewritten graphs cannot run together."""

    name: str
    ranks: tuple[int, int]
    differences: tuple[str, ...]

    def __str__(self) -> str:
        what = f"rank {self.ranks[0]} and rank {self.ranks[1]} disagree on graph {self.name!r}"
        return compose("agreement", what, where=self.differences, do=DO)


def publish(board: Board, rank: int, num_ranks: int, statement: Statement) -> list[Conflict]:
    """Add a statement to the page of a rank; returns conflicts with what other ranks have published about the graph."""
    text = statement.to_json()
    part = f"part-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if board.read(part) is None:
        board.write(part, text)
    mine = [entry for entry in _page(board, rank) if entry["name"] != statement.name]
    entry = {"name": statement.name, "digest": statement.digest, "part": part}
    page = {"run": _run(), "num_ranks": num_ranks, "graphs": [*mine, entry]}
    board.write(f"rank{rank}", json.dumps(page, indent=1))
    conflicts: list[Conflict] = []
    for other in range(num_ranks):
        for theirs in _page(board, other) if other != rank else ():
            if theirs["name"] != statement.name or theirs["digest"] == statement.digest:
                continue
            said = Statement.from_json(board.read(theirs["part"]) or "")
            conflicts += _conflict(statement, said, rank, other, num_ranks)
    return conflicts


def digests(board: Board, num_ranks: int) -> dict[int, dict[str, str]]:
    """For every rank the digests of the graphs that it has published so far, by name."""
    return {rank: {e["name"]: e["digest"] for e in _page(board, rank)} for rank in range(num_ranks)}


def check_published(board: Board, num_ranks: int, run: str | None = None) -> Agreement:
    """Check all graphs of all ranks, in the order in which each rank published them. `run`: None for this run."""
    silent = [rank for rank in range(num_ranks) if not _page(board, rank, run)]
    if silent:
        named = f"rank {silent[0]} has" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))} have"
        do = "check again when all ranks have compiled"
        raise VerificationError(compose("agreement", f"{named} published nothing yet", do=do))
    parts: dict[str, IssueOrder] = {}
    whole: dict[tuple[str, ...], IssueOrder] = {}
    orders: list[IssueOrder] = []
    for rank in range(num_ranks):
        keys = tuple(entry["part"] for entry in _page(board, rank, run))
        if keys not in whole:
            for key in keys:
                parts[key] = parts.get(key) or Statement.from_json(board.read(key) or "").order
            first, *rest = (parts[key] for key in keys)
            for order in rest:
                first = first.then(order)
            whole[keys] = first
        orders.append(whole[keys])
    return check(orders)


def _run() -> str:
    """An identifier of this run, if the launcher sets one: several runs may use the same folder."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return " ".join(os.environ.get(name, "") for name in names).strip()


class _Page(NamedTuple):
    """The page of one rank: its graphs, the number of ranks, and the run; empty if the page does not exist."""

    graphs: list[dict[str, str]]
    num_ranks: int
    run: str


def _page(board: Board, rank: int, run: str | None = None) -> list[dict[str, str]]:
    """The graphs on the page of a rank, if the page belongs to the run; None: this run."""
    page = _read_page(board, f"rank{rank}")
    return page.graphs if page.run == (_run() if run is None else run) else []


def _read_page(board: Board, key: str) -> _Page:
    try:
        page = json.loads(board.read(key) or "{}")
        graphs = [{key: str(entry[key]) for key in ("name", "digest", "part")} for entry in page["graphs"]]
        found = _Page(graphs, int(page["num_ranks"]), str(page["run"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return _Page([], 0, "")
    is_safe = all(re.fullmatch(r"part-[0-9a-f]{32}", entry["part"]) for entry in graphs)
    return found if is_safe else _Page([], 0, "")


def _conflict(mine: Statement, theirs: Statement, rank: int, other: int, num_ranks: int) -> list[Conflict]:
    """The conflict of two ranks, if any. Ranks with different graphs must agree only on the groups they share."""
    pairs = [(rank, mine), (other, theirs)]
    (low, first), (high, second) = sorted(pairs, key=lambda pair: pair[0])
    launches = _first_launch(first, second, low, high, num_ranks)
    if first.graph != second.graph and not launches:
        return []
    found = [
        f"{key}: {first.facts.get(key)!r} on rank {low}, {second.facts.get(key)!r} on rank {high}"
        for key in sorted({*first.facts, *second.facts})
        if first.facts.get(key) != second.facts.get(key)
    ]
    found += _first_decision(first.decisions, second.decisions, low, high) if first.graph == second.graph else []
    found += launches
    if not found:
        found = [f"plan: {first.plan} on rank {low}, {second.plan} on rank {high}"]
    return [Conflict(mine.name, (low, high), tuple(found))]


def _first_decision(first: Iterable[str], second: Iterable[str], low: int, high: int) -> list[str]:
    for number, (one, two) in enumerate(zip_longest(first, second), 1):
        if one != two:
            return [f"decision {number}: {one or 'none'!r} on rank {low}, {two or 'none'!r} on rank {high}"]
    return []


def _first_launch(first: Statement, second: Statement, low: int, high: int, num_ranks: int) -> list[str]:
    """The first launch that differs in a group that both ranks belong to."""
    theirs = {group.key: name for name, group in second.order.groups.items()}
    for name, group in first.order.groups.items():
        if group.key not in theirs or not group.size:
            continue
        parts = group.partition(num_ranks) if num_ranks % group.span == 0 else ()
        if not any(low in part and high in part for part in parts):
            continue
        pairs = zip_longest(first.order.sequences[name], second.order.sequences[theirs[group.key]])
        for number, (one, two) in enumerate(pairs, 1):
            if one is None or two is None or (one.signature, one.splits is None) != (two.signature, two.splits is None):
                return [f"launch {number} in group {name!r}: {_text(one)} on rank {low}, {_text(two)} on rank {high}"]
    return []


def _text(launch: IssuedLaunch | None) -> str:
    if launch is None:
        return "none"
    signature = launch.signature
    sizes = ", ".join(map(str, signature.number_of_elements or ()))
    words = (signature.kind, signature.reduction, "of", sizes, signature.dtype)
    return f"{launch.node} ({' '.join(str(word) for word in words if word)})"

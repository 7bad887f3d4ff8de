"""Reads the timelines of this folder: what a section holds, and what the simulator says of it. See README.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import weft
from tests.unit.simulation.programs import Op, compute, launch, program, view, wait
from weft.cost.cluster import Cluster
from weft.graph.groups import read_groups
from weft.simulation.build import sequence_of
from weft.simulation.program import Program
from weft.simulation.timeline import Span, Timeline

FOLDER = Path(__file__).parent
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OP = re.compile(
    r"(?P<sort>\w+) (?P<name>.*?)(?: in (?P<kernel>\w+))?(?: makes (?P<makes>[\w= ]+?))?(?: uses (?P<uses>.+))?"
)
SpanT = TypeVar("SpanT", bound=Span)
SETTINGS = ("gap", "slowdown", "wire-slowdown", "link", "given", "kept")


@dataclass(frozen=True)
class Section:
    """One rule."""

    id: str
    arithmetic: str
    """What stands before the blocks."""
    blocks: tuple[tuple[str, str], ...]

    def block(self, name: str) -> list[str]:
        """The texts of the blocks of that name."""
        return [text for found, text in self.blocks if found == name]


def sections() -> list[Section]:
    """Those of all files."""
    return [
        Section(f"{path.stem}: {title}", text.partition("```")[0].strip(), tuple(BLOCK.findall(text)))
        for path in sorted(FOLDER.glob("*.md"))
        if path.stem != "README"
        for title, text in SECTION.findall(path.read_text())
    ]


def program_of_section(section: Section, folder: Path) -> Program:
    """The program of its `program`, or of its listings on its cluster."""
    written = section.block("program")
    if written:
        return read_program(written[0])
    path = folder / "cluster.toml"
    path.write_text(section.block("cluster")[0])
    modules = [weft.parse(text) for text in section.block("listing")]
    return sequence_of([(module, read_groups(module)) for module in modules], Cluster.load(path))


def read_program(text: str) -> Program:
    """A program from its lines."""
    lines = text.splitlines()
    settings = dict(line.split(" ", 1) for line in lines if line.split()[0] in SETTINGS)
    link, _, queues = settings.get("link", "").partition(":")
    return program(
        *(read_op(line) for line in lines if line.split()[0] not in SETTINGS),
        links=dict.fromkeys(queues.split(), link),
        gap_ns=int(settings.get("gap", 0)),
        slowdown_ppm=round(float(settings.get("slowdown", "0 %").removesuffix("%")) * 10_000),
        collective_slowdown_ppm=round(float(settings.get("wire-slowdown", "0 %").removesuffix("%")) * 10_000),
        given=settings.get("given", ""),
        kept=settings.get("kept", ""),
    )


def read_op(line: str) -> Op:
    """One operation."""
    found = OP.fullmatch(line)
    if found is None:
        raise ValueError(f"{line!r} is no operation")
    words = found["name"].split()
    sizes = (pair.split("=") for pair in (found["makes"] or "").split())
    rest = {"makes": {name: int(size) for name, size in sizes}, "uses": tuple((found["uses"] or "").split())}
    match found["sort"], words:
        case "compute", [name, ns]:
            return compute(name, int(ns), kernel=found["kernel"], **rest)
        case "launch", [name, ns, "on", queue]:
            return launch(name, int(ns), queue, **rest)
        case "wait", [*names]:
            return wait(" ".join(names), **rest)
        case "view" | "read" as sort, [name]:
            return view(name, drains=sort == "read", **rest)
        case _:
            raise ValueError(f"{line!r} is no operation")


def tell(made: Program, timeline: Timeline) -> dict[str, str]:
    """The lines of a timeline by their first word."""
    by_queue = groupby(sorted(timeline.collectives, key=lambda span: span.queue), key=lambda span: span.queue)
    lines = {
        "compute": spans(timeline.compute),
        **{made.queues[queue].group: spans(found) for queue, found in by_queue},
        "exposed": ", ".join(f"{span.name} {span.exposed_ns}" for span in by_op(timeline.collectives)),
        "memory": ", ".join(f"{time}: {num_bytes}" for time, num_bytes in timeline.memory),
        "peak": str(timeline.peak_bytes),
        "critical": " ".join(made.names[op] for op in timeline.critical_path),
        "step": str(timeline.step_ns),
    }
    has_storages = any(map(bool, made.allocates))
    return {word: text for word, text in lines.items() if text and (has_storages or word not in ("memory", "peak"))}


def spans(found: Iterable[Span]) -> str:
    """`name start..end` of each, in program order."""
    return ", ".join(f"{span.name} {span.start_ns}..{span.end_ns}" for span in by_op(found))


def by_op(found: Iterable[SpanT]) -> list[SpanT]:
    return sorted(found, key=lambda span: span.op)

"""Plan, Step, Decision: what was decided, as data that can be read, compared, saved and applied again.

Contract: a plan names nodes by name and groups by canonical name, so it means the same on every rank. Each step
carries the digest of the listing it was made for, and the plan the digest of the listing that its last step leads to:
applying it to any other graph, or with any other outcome, is refused. A file carries the digest of all its contents; a
file that was edited is refused.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from weft.errors import PlanError, WeftError, compose
from weft.files import write_whole
from weft.plan.decision import Decision

FORMAT = 2
"""Since 2, plans hold the digests of their outcome and of their contents."""


@dataclass(frozen=True)
class Move:
    """Put nodes right before or right after another, in the order given."""

    nodes: tuple[str, ...]
    anchor: str
    side: Literal["before", "after"]
    kind: Literal["move"] = "move"


@dataclass(frozen=True)
class Replace:
    """Let the users of one node use another."""

    node: str
    by: str
    kind: Literal["replace"] = "replace"


@dataclass(frozen=True)
class Erase:
    """Take nodes out."""

    nodes: tuple[str, ...]
    kind: Literal["erase"] = "erase"


def bucket_names(first: str) -> tuple[str, str]:
    """The names of the launch and of the wait of a bucket, by the name of its first launch."""
    return f"{first}_bucket", f"{first}_done"


@dataclass(frozen=True)
class Merge:
    """Launch collectives as one, and wait for them as one."""

    launches: tuple[str, ...]
    strategy: Literal["concat", "coalesced", "pack"]
    owned: tuple[int, ...] = ()
    """Which tensors, counted over the launches, are given as copies of their own instead of views of the buffer."""
    folded: tuple[str, ...] = ()
    """Casts and scalings in front of the launches that happen once, while or after packing."""
    carried: tuple[str, ...] = ()
    """Cheap nodes that go along to where the launch is put."""
    launch_before: str | None = None
    """The node that the launch is put before; None: where the last of the launches stood."""
    wait_before: str | None = None
    """The node that the wait is put before; None: right behind the launch."""
    together: bool = False
    """Whether the launches must first be brought together, since something between them writes to what they hold."""
    keeps_waits: bool = False
    """Whether the waits stay what and where they are, each for its own tensor: only for `coalesced`."""
    kind: Literal["merge"] = "merge"


@dataclass(frozen=True)
class Settle:
    """Carry out all that stands before this: what stands after it names the nodes of the graph as it is then."""

    kind: Literal["settle"] = "settle"


@dataclass(frozen=True)
class Arrange:
    """Put all nodes into another order, before anything else is done, or right after a `Settle`."""

    runs: tuple[tuple[str, str], ...]
    """Stretches of the graph as it is, each by its first and its last node, in the order that they are put into."""
    kind: Literal["arrange"] = "arrange"


@dataclass(frozen=True)
class Fold:
    """Reduce a sum instead of summing what was reduced."""

    additions: tuple[str, ...]
    """The additions of one tree, the root last."""
    kind: Literal["fold"] = "fold"


@dataclass(frozen=True)
class Rewrite:
    """Make calls, let them stand for others, and take out what is not needed any more."""

    calls: tuple[str, ...]
    """Lines of a listing, `sum_addmm = addmm(bias, x, w)`; they name nodes of the graph and of earlier lines."""
    before: str
    """The node that the calls are put before."""
    heirs: tuple[tuple[str, str], ...]
    """Pairs: the users of the first use the second."""
    erased: tuple[str, ...] = ()
    kind: Literal["rewrite"] = "rewrite"


@dataclass(frozen=True)
class Inside:
    """Rewrite a graph that a call runs."""

    path: tuple[str, ...]
    """The names of the attributes that lead to it."""
    rewrites: tuple[Rewrite, ...]
    kind: Literal["inside"] = "inside"


@dataclass(frozen=True)
class Stream:
    """Cut a collective into chunks, and the products beside it too, so that each runs while the other does."""

    launch: str
    products: tuple[str, ...]
    chunks: int
    kernel: Literal["portable", "symmetric-memory", "low-contention", "ring"] = "portable"
    own: int | None = None
    """Of a ring: the place of this rank in the group."""
    apart: int = 0
    """Of a sum over ranks whose chunks are scattered and gathered: the size of the group."""
    kind: Literal["stream"] = "stream"


@dataclass(frozen=True)
class Loop:
    """Run the nested graph of a scan or a map in a loop, round by round, into results that are there from the start."""

    call: str
    path: tuple[str, ...] = ()
    """The names of the attributes that lead to the graph with the call, where it is nested itself."""
    kind: Literal["loop"] = "loop"


@dataclass(frozen=True)
class Unwrap:
    """Call the kernel of a functional wrapper as it is: it writes what it is given, or copies of that."""

    call: str
    copied: tuple[str, ...] = ()
    """The arguments of the kernel that are copied for it."""
    erased: tuple[str, ...] = ()
    """Copies of results back into the inputs that are now written at once."""
    kind: Literal["unwrap"] = "unwrap"


Action = Arrange | Settle | Move | Replace | Erase | Merge | Fold | Rewrite | Inside | Stream | Loop | Unwrap


@dataclass(frozen=True)
class Step:
    """What one pass decided for one graph."""

    spec: str
    """The pass with its options, as in a pipeline string."""
    actions: tuple[Action, ...] = ()
    decisions: tuple[Decision, ...] = ()
    digest: str = ""
    """The digest of the listing this step was made for."""

    @property
    def stages(self) -> tuple[Self, ...]:
        """The step cut where it settles: each stage is planned for the graph that the one before it leaves."""
        stages: list[list[Action]] = [[]]
        for action in self.actions:
            if isinstance(action, Settle):
                stages.append([])
            else:
                stages[-1].append(action)
        return tuple(replace(self, actions=tuple(actions)) for actions in stages)

    @property
    def applied(self) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if d.applied)

    @property
    def declined(self) -> tuple[Decision, ...]:
        return tuple(d for d in self.decisions if not d.applied)


@dataclass(frozen=True)
class Evidence:
    """How good a plan is on a cluster, and what proves that nothing is much better."""

    cluster: str
    step_ns: int
    """Simulated, of the graph that the plan leads to."""
    peak_bytes: int
    bound_ns: int
    """No order and no merging of the collectives of one graph takes less; `bound_of` says of which."""
    bound: str
    """What the bound is called, and what it rests on."""
    certificate: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`weft.bounds.checker` recomputes the bound from this and the graph alone."""
    bound_of: Literal["before", "after"] = "before"
    """`before`: the graph that the plan was made for. `after`: the one that it leads to, where a pass removed work."""

    @property
    def gap(self) -> float:
        """How far the step is above the bound."""
        return self.step_ns / self.bound_ns - 1 if self.bound_ns else 0.0


@dataclass(frozen=True)
class Plan:
    """Ordered steps, and the facts about the graph that they were made for."""

    steps: tuple[Step, ...]
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What to compare when a digest differs: versions, groups, inputs, number of nodes."""
    evidence: Evidence | None = None
    """Where it was made for a cluster."""
    result: str = ""
    """The digest of the listing after the last step."""
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """Equal exactly for equal plans, on every rank."""
        return _digest_of(asdict(self))

    def to_json(self) -> str:
        """The plan as JSON with its digest, the same text for the same plan."""
        contents = asdict(self)
        return json.dumps({**contents, "digest": _digest_of(contents)}, indent=1, sort_keys=True)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, in a folder that exists."""
        save_text(path, self.to_json() + "\n", PlanError)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a plan. The error names faults with their paths; a plan that was edited is refused."""
        from pydantic import ValidationError

        sealed = _sealed(text)
        try:
            plan: Self = _reader_of(cls).validate_json(text)
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors()]
            raise PlanError(
                compose("plan", "it is no plan", where=faults, do="make it again with weft.optimize")
            ) from None
        if sealed != plan.digest:
            found = f"its digest is {sealed!r}, its contents have {plan.digest!r}"
            what = f"it was edited after it was made: {found}" if sealed else "it has no digest of its contents"
            do = "give the file as plan.save wrote it, or make it again with weft.optimize"
            raise PlanError(compose("plan", what, do=do))
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # not UTF-8, or a NUL in the path
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            do = "give a file that plan.save wrote"
            raise PlanError(compose("plan", f"{path} cannot be read: {why}", do=do)) from None
        return cls.from_json(text)


def _digest_of(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, indent=1, sort_keys=True).encode()).hexdigest()[:32]


def _sealed(text: str) -> Any:
    """The digest that stands in the text of a plan; refuses plans of other formats."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    held: dict[str, Any] = data if isinstance(data, dict) else {}
    if held.get("format", FORMAT) != FORMAT:
        do = "make it again with weft.optimize"
        raise PlanError(compose("plan", f"its format is {held['format']!r}, this version reads {FORMAT}", do=do))
    return held.get("digest")


def save_text(path: str | Path, text: str, fault: type[WeftError]) -> None:
    """Write a file of a caller, whole or not at all."""
    try:
        write_whole(path, text)
    except OSError as error:
        folder = Path(path).parent
        do = "give the path of a file that can be written" if folder.is_dir() else f"make the folder {folder} first"
        raise fault(compose(str(path), f"it cannot be written: {error.strerror or error}", do=do)) from error


@functools.cache
def _reader_of(cls: type[Plan]) -> Any:
    """What reads JSON as such a plan: to make it takes longer than most plans take to read."""
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def what_differs(expected: Mapping[str, Any], found: Mapping[str, Any], only: Iterable[str] = ()) -> list[str]:
    """The facts in which two graphs differ, one line each."""
    return [
        f"{key}: {found.get(key)!r} here, {expected.get(key)!r} in the plan"
        for key in sorted(only or {*expected, *found})
        if expected.get(key) != found.get(key)
    ]

"""What became of the collectives that can be streamed through products: one count for each pass that streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from weft.passes.base import parse_pass
from weft.passes.pipeline import LogEntry
from weft.passes.stream_pass import StreamPass
from weft.plan.decision import Reason


@dataclass(frozen=True)
class StreamRecord:
    """The collectives that one pass considered, each once."""

    pass_name: str
    num_collectives: int
    streamed: int
    whole: dict[str, int]
    """Number of those that stay whole, by reason."""
    other_role: int = 0
    """Number of those that were left to other passes, since they carry something else; not counted above."""

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.whole.items())
        whole = f", {self.num_collectives - self.streamed} whole ({reasons})" if self.whole else ""
        others = f"; {self.other_role} carry something else" if self.other_role else ""
        return f"{self.pass_name}: of {self.num_collectives} collectives {self.streamed} streamed{whole}{others}"


def record_streams(log: Iterable[LogEntry]) -> tuple[StreamRecord, ...]:
    """The counts of a pipeline's log. The last word on a collective counts: earlier ones are of single products."""
    found: list[StreamRecord] = []
    for entry in log:
        if not isinstance(parse_pass(entry.step.spec), StreamPass):
            continue
        last: dict[str, Reason] = {}
        for decision in entry.step.decisions:
            if last.get(decision.nodes[0]) is not Reason.APPLIED:
                last[decision.nodes[0]] = decision.reason
        counts = Counter(reason.value for reason in last.values() if reason is not Reason.APPLIED)
        others = counts.pop(Reason.OTHER_ROLE.value, 0)
        total, name = len(last) - others, entry.step.spec.partition("{")[0]
        found.append(StreamRecord(name, total, total - sum(counts.values()), dict(sorted(counts.items())), others))
    return tuple(found)

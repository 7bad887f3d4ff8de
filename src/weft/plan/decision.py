"""Reasons, decisions and refusals: why each opportunity that a pass considered ended as it did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why an opportunity ended as it did. One list for all passes."""

    APPLIED = "applied"
    ALREADY_DONE = "already-done"
    DEPENDENCY = "dependency"
    IN_FLIGHT_LIMIT = "in-flight-limit"
    UNKNOWN_SIZE = "unknown-size"
    HOLDS_MEMORY = "holds-memory"
    MUTATED = "mutated"
    ESCAPES = "escapes"
    UNSUPPORTED_FORM = "unsupported-form"
    HAS_EFFECT = "has-effect"
    ALONE = "alone"
    FULL = "full"
    OTHER_ROLE = "other-role"
    FORBIDDEN = "forbidden"
    EXPOSED_BY_DEPENDENCY = "exposed-by-dependency"
    EXPOSED_BY_QUEUE = "exposed-by-queue"
    EXPOSED_BY_LINK = "exposed-by-link"
    EXPOSED_BY_MEMORY = "exposed-by-memory"
    EXPOSED_BY_ORDER = "exposed-by-order"
    NO_PRODUCT = "no-product"
    OTHER_ORDER = "other-order"
    NOT_BY_ROWS = "not-by-rows"
    DOES_NOT_SPLIT = "does-not-split"
    NO_KERNEL = "no-kernel"
    NO_GAIN = "no-gain"
    OTHER_RANKS = "other-ranks"

    @property
    def is_refusal(self) -> bool:
        """Whether a rewrite was possible in kind and was not made."""
        return self not in NO_REFUSALS

    @property
    def is_obstacle(self) -> bool:
        """Whether something in the graph forbids a rewrite that would fit; `strict` makes an error of it."""
        return self in OBSTACLES


NO_REFUSALS = (
    Reason.APPLIED,
    Reason.ALREADY_DONE,
    Reason.ALONE,
    Reason.FULL,
    Reason.OTHER_ROLE,
    Reason.FORBIDDEN,
    Reason.EXPOSED_BY_DEPENDENCY,
    Reason.EXPOSED_BY_QUEUE,
    Reason.EXPOSED_BY_LINK,
    Reason.EXPOSED_BY_MEMORY,
    Reason.EXPOSED_BY_ORDER,
    Reason.NO_PRODUCT,
    Reason.NO_GAIN,
)

OBSTACLES = (
    Reason.DEPENDENCY,
    Reason.IN_FLIGHT_LIMIT,
    Reason.UNKNOWN_SIZE,
    Reason.HOLDS_MEMORY,
    Reason.MUTATED,
    Reason.ESCAPES,
    Reason.HAS_EFFECT,
    Reason.OTHER_RANKS,
)


@dataclass(frozen=True)
class Decision:
    """One opportunity that a pass considered."""

    pass_name: str
    reason: Reason
    sentence: str
    nodes: tuple[str, ...]
    blocking: str | None = None
    """The node that stands in the way, where there is one."""
    exposed_us: float = 0.0
    """For how long the stream stands still for what is told of."""
    gain_us: float = 0.0
    """What lifting the block would make the step shorter, at most."""

    @property
    def applied(self) -> bool:
        return self.reason is Reason.APPLIED


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a rewrite that looked possible is not made."""

    reason: Reason
    sentence: str
    blocking: str | None = None
    """The node that stands in the way, where there is one."""

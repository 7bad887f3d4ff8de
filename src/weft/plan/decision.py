"""Decisions: the outcome of each opportunity that a pass considered, and the reason.

This is the only home of reasons. A pass that declines returns or records a `Refusal`; every opportunity ends as a
`Decision` in the plan, so a report can explain the passes without running them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a pass applied or declined a rewrite. All passes share this list."""

    APPLIED = "applied"
    """The pass made the rewrite."""
    ALREADY_DONE = "already-done"
    """The graph already has the form that the pass would give it."""
    DEPENDENCY = "dependency"
    """A node in between needs the old result or the old order."""
    IN_FLIGHT_LIMIT = "in-flight-limit"
    """More collectives would be in flight at once than the pass allows."""
    UNKNOWN_SIZE = "unknown-size"
    """A size or a duration that the rewrite depends on is not known when the graph is planned."""
    HOLDS_MEMORY = "holds-memory"
    """A tensor would stay alive longer, or take more memory, than the pass allows."""
    MUTATED = "mutated"
    """Something writes to a tensor that the rewrite would read later, share or drop."""
    ESCAPES = "escapes"
    """The graph returns a tensor whose identity or storage the rewrite would change."""
    UNSUPPORTED_FORM = "unsupported-form"
    """The operator, its arguments or its layout are outside what the pass handles."""
    HAS_EFFECT = "has-effect"
    """A node has an effect besides its result, or Weft does not know its effects."""
    ALONE = "alone"
    """Nothing else in the graph can share the rewrite with it."""
    FULL = "full"
    """The bucket has reached its size limit."""
    OTHER_ROLE = "other-role"
    """The collective carries something that the pass is not for, such as activations instead of parameters."""
    FORBIDDEN = "forbidden"
    """The user asked to leave it as it is."""
    EXPOSED_BY_DEPENDENCY = "exposed-by-dependency"
    """The collective is exposed: its inputs come too late or its result is needed too soon."""
    EXPOSED_BY_QUEUE = "exposed-by-queue"
    """The collective is exposed: another collective runs before it in the same queue."""
    EXPOSED_BY_LINK = "exposed-by-link"
    """The collective is exposed: it shares the bandwidth of a link with others."""
    EXPOSED_BY_MEMORY = "exposed-by-memory"
    """The collective is exposed: launching it earlier would exceed the memory limit."""
    EXPOSED_BY_ORDER = "exposed-by-order"
    """The collective is exposed: an earlier launch is legal, but the search found no better order with it."""
    NO_PRODUCT = "no-product"
    """No matrix product consumes or produces the tensor that the collective moves."""
    OTHER_ORDER = "other-order"
    """Views reorder, repeat or drop elements between the collective and the product."""
    NOT_BY_ROWS = "not-by-rows"
    """A call between the collective and the product cannot be computed one chunk at a time."""
    DOES_NOT_SPLIT = "does-not-split"
    """A size is not divisible by the number of chunks or ranks."""
    NO_KERNEL = "no-kernel"
    """No kernel that runs the rewritten form is available for this device, group or operator."""
    NO_GAIN = "no-gain"
    """The rewrite would not make the step shorter, or its gain is unknown."""
    OTHER_RANKS = "other-ranks"
    """Other ranks hold graphs or positions that would make the rewrite differ from rank to rank."""

    @property
    def is_refusal(self) -> bool:
        """Whether the pass declined a rewrite of the kind it makes."""
        return self not in NO_REFUSALS

    @property
    def is_obstacle(self) -> bool:
        """Whether the graph prevents a rewrite that the pass wanted to make; `strict` raises on it."""
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
"""Reasons that are not refusals: done, nothing to do, asked for, not worth it, or only a diagnosis."""

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
"""Refusals that a change of the user's graph or of a limit could lift. The others are limits of the pass itself."""


@dataclass(frozen=True)
class Decision:
    """The outcome of one opportunity that a pass considered."""

    pass_name: str
    reason: Reason
    sentence: str
    nodes: tuple[str, ...]
    blocking: str | None = None
    """The node that prevents the rewrite, if a single node does."""
    exposed_us: float = 0.0
    """Exposed time of the collectives that the decision is about."""
    gain_us: float = 0.0
    """Upper bound on the time that the step would save without this obstacle."""

    @property
    def applied(self) -> bool:
        return self.reason is Reason.APPLIED


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a pass does not make a rewrite that looked possible; the pass turns it into a `Decision`."""

    reason: Reason
    sentence: str
    blocking: str | None = None
    """The node that prevents the rewrite, if a single node does."""

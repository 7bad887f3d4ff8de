"""Facts that a graph module carries about its origin, such as where it was captured and how many tokens it takes."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

ABOUT_KEY = "weft.about"
"""In `GraphModule.meta`: a dict that can be written as JSON, such as `{'source': 'trace log', 'rank': 0}`."""
TOKENS_KEY = "tokens_per_step"
"""In that dict: number of tokens that one run of the graph processes, summed over all ranks. Listings have it."""
UNREAD_KEY = "saved_unread_bytes"
"""In that dict: bytes that checkpointing keeps in eager execution although backward never reads them."""

HELD_KEY = "held"
"""In that dict: what eager execution holds although nothing reads it: lists of a first node, a last node, and bytes."""


def tokens_per_step(module: GraphModule) -> int | None:
    """The number of tokens that one run processes; None if the module does not say, or the entry is malformed."""
    return _positive(module, TOKENS_KEY)


def saved_unread_bytes(module: GraphModule) -> int:
    """Bytes that eager checkpointing keeps until backward without need; 0 if the module does not say."""
    return _positive(module, UNREAD_KEY) or 0


def held(module: GraphModule) -> list[tuple[str, str, int]]:
    """Values that eager execution holds from one node until after another although nothing reads them, with bytes."""
    about: Any = module.meta.get(ABOUT_KEY)
    found: Any = about.get(HELD_KEY) if isinstance(about, dict) else None
    entries: list[Any] = found if isinstance(found, list) else []
    return [tuple(each) for each in entries if _is_held(each)]


def _is_held(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and [type(part) for part in entry] == [str, str, int]


def _positive(module: GraphModule, key: str) -> int | None:
    about: Any = module.meta.get(ABOUT_KEY)
    found = about.get(key) if isinstance(about, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

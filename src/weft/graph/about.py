"""What a graph module says of where it comes from, besides its nodes."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule

ABOUT_KEY = "weft.about"
"""In `GraphModule.meta`: a dict that can be written as JSON, such as `{'source': 'trace log', 'rank': 0}`."""
TOKENS_KEY = "tokens_per_step"
"""In that dict: tokens that one run of the graph takes in, on all ranks together."""


def tokens_per_step(module: GraphModule) -> int | None:
    """How many tokens one run takes in; None where the module does not say, or says nonsense."""
    about: Any = module.meta.get(ABOUT_KEY)
    found = about.get(TOKENS_KEY) if isinstance(about, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None

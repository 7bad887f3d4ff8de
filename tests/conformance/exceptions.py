"""What operators seem to do that Weft does not believe of them, each with the reason why that is right.

Reviewed by people. An entry that no call shows any more fails the long test: delete it.
"""

from __future__ import annotations

REVIEWED: dict[tuple[str, str], str] = {
    ("aten::_lazy_clone", "writes self"): "it moves the data to memory that is copied on write; the contents stay",
    ("aten::_version", "reads data on the host"): "it counts the writes that the check itself makes",
}
"""By operator and by what was seen."""

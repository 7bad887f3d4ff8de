"""RunPage: all graphs of a run as one self-contained HTML file, without a script.

Contract: names and sentences are untrusted text, which the template escapes. A content security policy allows the
style by its hash, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from weft.report.html import PAGE, digest_of_content
from weft.report.layers import HEADS
from weft.version import VERSION

RUN_PAGE = Path(__file__).with_name("run_page.html")


@dataclass(frozen=True)
class GraphSection:
    """One simulated graph, or the whole step."""

    name: str
    why: str
    """Why it takes so long, in one sentence."""
    layers: tuple[tuple[str, ...], ...]
    """The rows of the exposed time by layer."""


@dataclass(frozen=True)
class RunPage:
    """The contents of the page."""

    title: str
    why: str
    """Why the whole step takes so long, in one sentence; empty if it is unknown."""
    clusters: str
    rows: Sequence[Sequence[str]]
    """The table of graphs, its heads first."""
    sections: tuple[GraphSection, ...]
    messages: tuple[str, ...]

    def render(self) -> str:
        """The page as text."""
        style = PAGE.with_suffix(".css").read_text(encoding="utf-8")
        template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
            RUN_PAGE.read_text(encoding="utf-8")
        )
        return template.render(
            title=self.title,
            why=self.why,
            clusters=self.clusters,
            version=VERSION,
            heads=self.rows[0],
            rows=self.rows[1:],
            layer_heads=HEADS,
            sections=self.sections,
            messages=self.messages,
            policy=f"default-src 'none'; style-src '{digest_of_content(style)}'; base-uri 'none'; form-action 'none'",
            style=Markup(style),
        )

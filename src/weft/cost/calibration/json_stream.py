"""Stream the events of a Chrome trace: a file of any size takes the memory of its largest event.

Contract: the text is an object with an array `traceEvents`, or that array alone. Nothing in it is executed. Malformed
JSON raises a JsonError with the line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any, NoReturn

CHUNK = 1 << 20
MAX_VALUE = 1 << 26
"""Maximum characters of one event, or of one other value."""
SPACE = re.compile(r"[ \t\n\r]*")


class JsonError(ValueError):
    """A fault of a text, and its line."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


class EventStream:
    """Iterate to get (line, event). Meanwhile `other_values` collects the object's other values."""

    def __init__(self, file: IO[bytes], keep: tuple[str, ...] = ()) -> None:
        self.file = file
        self.keep = keep
        self.other_values: dict[str, Any] = {}
        """Values of the object with the keys in `keep`."""
        self.num_arrays = 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._scan = json.JSONDecoder().raw_decode
        self._text, self._at, self._is_end = "", 0, False
        self._line, self._counted = 1, 0

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        first = self._peek()
        if first == "[":
            yield from self._array()
        elif first == "{":
            yield from self._object()
        else:
            self._fail("expected { or [")
        if self._peek():
            self._fail("there is more text after the end")
        if not self.num_arrays:
            self._fail("there is no array traceEvents")

    def _object(self) -> Iterator[tuple[int, Any]]:
        self._at += 1
        is_first = True
        while self._next_item("}", is_first):
            is_first = False
            key = self._value()
            if not isinstance(key, str):
                self._fail("expected a key in double quotes")
            if self._peek() != ":":
                self._fail("expected a colon after a key")
            self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                yield from self._array()
                continue
            value = self._value()
            if key in self.keep:
                self.other_values[key] = value

    def _array(self) -> Iterator[tuple[int, Any]]:
        self.num_arrays += 1
        self._at += 1
        is_first = True
        while self._next_item("]", is_first):
            is_first = False
            line = self._line_here()
            yield line, self._value()

    def _next_item(self, closing: str, is_first: bool) -> bool:
        """Step over a comma to the next item, or over the end."""
        found = self._peek()
        if found == closing:
            self._at += 1
            return False
        if not is_first:
            if found != ",":
                self._fail(f"expected a comma or {closing}")
            self._at += 1
            # Profilers that are stopped early leave a comma after the last event.
            if self._peek() == closing:
                self._at += 1
                return False
        if not self._peek():
            self._fail(f"it ends before its closing {closing}")
        return True

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except RecursionError:
                self._fail("it is nested too deeply")
            except ValueError as fault:
                if self._more():
                    continue
                # The error's own line counts from the start of this chunk; report the line of the file.
                self._at = min(max(getattr(fault, "pos", self._at), self._at), len(self._text))
                self._fail(getattr(fault, "msg", str(fault)))
            if end < len(self._text) or not self._more():  # a number may continue in the next chunk
                self._at = end
                return value

    def _peek(self) -> str:
        """Skip white space and return the next character; empty at the end."""
        while True:
            found = SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read at least as much as is left over, so that scanning a large value stays linear."""
        if self._is_end or len(self._text) - self._at > MAX_VALUE:
            return False
        self._line_here()
        rest = self._text[self._at :]
        content = self.file.read(max(CHUNK, len(rest)))
        self._is_end = not content
        self._text, self._at, self._counted = rest + self._decode(content, final=self._is_end), 0, 0
        return bool(content)

    def _line_here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _fail(self, what: str) -> NoReturn:
        raise JsonError(self._line_here(), what)

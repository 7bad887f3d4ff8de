"""Weft's backends by name in Hugging Face's `accelerate`, and so in the `Trainer` of `transformers`.

    from weft.integrations.accelerate import add_backends

    add_backends()
    TrainingArguments(..., torch_compile_backend="weft")          # or TorchDynamoPlugin(backend="weft")

Accelerate keeps the names of backends in an enumeration and refuses all others, even those that torch knows.
"""

from __future__ import annotations

import importlib
from typing import Any

BACKENDS = ("WEFT", "WEFT_EAGER")


def add_backends() -> None:
    """Let accelerate accept `weft` and `weft_eager`."""
    enumeration = importlib.import_module("accelerate.utils").DynamoBackend

    def find(cls: Any, value: object) -> Any:
        """A member for a name that the enumeration lacks; None makes it raise its usual error."""
        if value not in BACKENDS:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return member

    enumeration._missing_ = classmethod(find)

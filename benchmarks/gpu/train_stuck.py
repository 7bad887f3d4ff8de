"""Report of a rank that waits too long: its host stack, and the collectives that have started but not ended."""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
from typing import Any

import torch.distributed as dist

SHOWN = 8
"""Collectives around the first that has not ended."""


def tell_if_stuck(after_s: float) -> None:
    """Print the report after this many seconds, if the process still runs."""
    watch = threading.Timer(max(after_s, 1.0), _tell)
    watch.daemon = True
    watch.start()


def _tell() -> None:
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    if dist.get_backend() != "nccl":
        return
    from torch._C import _distributed_c10d  # present if torch is built with NCCL

    dump: Any = json.loads(_distributed_c10d._dump_nccl_trace_json())  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
    entries = dump.get("entries", [])
    first = next((place for place, each in enumerate(entries) if each.get("state") != "completed"), len(entries))
    for each in entries[max(0, first - 2) : first + SHOWN]:
        told = {key: each.get(key) for key in ("collective_seq_id", "op_id", "profiling_name", "state", "input_sizes")}
        print(f"stuck: {told}", flush=True)

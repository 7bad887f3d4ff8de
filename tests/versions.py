"""What some versions of torch lack."""

from __future__ import annotations

import pytest
import torch

from weft.graph import ops

needs_transfers = pytest.mark.skipif("send" not in ops.op_names(), reason="torch has isend and irecv from 2.12")
needs_traced_groups = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="collectives take process groups and not only their names from 2.12"
)

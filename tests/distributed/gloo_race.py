"""Torch without Weft: two threads of a gloo group corrupt the heap. One rank in one process is enough.

    python tests/distributed/gloo_race.py 2 20     # two threads, torch's default, for 20 s: dies within seconds
    python tests/distributed/gloo_race.py 1 20     # one thread: survives

After each collective, `ProcessGroupGloo::runLoop` (torch 2.13) assigns its name to `pgStatus_->lastCompletedWorkName`,
a `std::string` that all threads of the group share, without a lock. Names of up to 15 characters lie in the string
itself. `ALLGATHER_COALESCED`, the name of functional all-gathers, lies on the heap: two threads that assign at the same
time free the same memory twice, or write a name into memory that was freed.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

IN_FLIGHT = 100


def main(num_threads: int, seconds: float) -> None:
    """Run gathers in a group with `num_threads` threads, and print their number."""
    options = dist.ProcessGroupGloo._Options()
    options._threads = num_threads
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo0" if sys.platform == "darwin" else "lo")]
    options._timeout = timedelta(seconds=60)

    def create(store: dist.Store, rank: int, size: int, _: timedelta) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, rank, size, options)

    dist.Backend.register_backend("threads", create, devices=["cpu"])
    dist.init_process_group("threads", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    shard, num_gathers = torch.ones(1), 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        flying = [torch.ops._c10d_functional.all_gather_into_tensor(shard, 1, name) for _ in range(IN_FLIGHT)]
        for gathered in flying:
            torch.ops._c10d_functional.wait_tensor(gathered)
        num_gathers += IN_FLIGHT
    print(f"{num_gathers} gathers in {num_threads} threads")
    dist.destroy_process_group()  # otherwise its threads may still run when the process ends, which aborts it


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

"""The examples run as their README says, and print the losses that torch's own backend gives."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.integration.worlds import PYTHONPATH, REPOSITORY, World, as_by_torchrun
from weft.frontends.session import SESSION

TIMEOUT_S = 240.0
pytestmark = [
    pytest.mark.long,
    pytest.mark.distributed,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.timeout(2 * TIMEOUT_S + 120),
]

STEPS = 10
NUM_RANKS = {
    "ddp": 2,
    "simple_fsdp": 2,
    "tensor_parallel": 2,
    "fsdp_tp": 4,
    "hsdp": 4,
    "moe": 4,
    "hugging_face": 2,
    "lightning_ddp": 2,
}
PACKAGES = {"hugging_face": "transformers", "lightning_ddp": "lightning"}
"""Frameworks that an example needs."""
CASES = [
    pytest.param(name, marks=pytest.mark.needs_package(PACKAGES[name])) if name in PACKAGES else name
    for name in NUM_RANKS
]


@pytest.mark.parametrize("name", CASES)
def test_an_example_trains_as_it_does_with_the_backend_of_torch(name: str, request: pytest.FixtureRequest):
    output = run_by_torchrun(name, STEPS)
    losses = re.findall(r"^step \d+  loss (\S+)$", output, re.MULTILINE)
    assert len(losses) == STEPS, output
    numbers = [float(loss) for loss in losses]
    assert all(math.isfinite(number) for number in numbers)
    assert numbers == sorted(numbers, reverse=True)

    world: World = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[NUM_RANKS[name]])
    reference = world.run(train_example, name=name, backend="aot_eager", steps=STEPS)[0]
    assert numbers == pytest.approx(reference, rel=1e-6)

    if name == "simple_fsdp":
        shown = re.findall(r"^    (step \d+  loss .*|weft: .*)$", (REPOSITORY / "examples/README.md").read_text(), re.M)
        printed = [line for line in output.splitlines() if line.startswith(("step ", "weft: "))]
        assert shown == [*printed[: len(shown) - 1], printed[-1]]

    graphs, collectives, changes = counts(output)
    assert graphs == 2
    assert collectives > 0
    assert changes > 0


def test_every_example_is_run_here_and_named_in_the_readme():
    folder = REPOSITORY / "examples"
    assert sorted(path.stem for path in folder.glob("*.py")) == sorted(NUM_RANKS)
    readme = (folder / "README.md").read_text()
    for name, ranks in NUM_RANKS.items():
        command = f"torchrun --standalone --nproc-per-node={ranks} examples/{name}.py"
        assert command in readme
        assert command in (folder / f"{name}.py").read_text()


def counts(output: str) -> tuple[int, ...]:
    """The numbers of the line that says what Weft did, which is the only one that begins so."""
    lines = [line for line in output.splitlines() if line.startswith("weft: ")]
    assert len(lines) == 1, output
    found = re.fullmatch(r"weft: (\d+) graphs, (\d+) collectives, (\d+) changes", lines[0])
    assert found, lines[0]
    return tuple(map(int, found.groups()))


def run_by_torchrun(name: str, steps: int) -> str:
    """What an example prints, with the backend that is its default."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    ranks = f"--nproc-per-node={NUM_RANKS[name]}"
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    with subprocess.Popen(
        [*launcher, ranks, f"examples/{name}.py", f"--steps={steps}"],
        cwd=REPOSITORY,
        env={**os.environ, "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # by which the launcher ends its ranks
            output, _ = process.communicate()
            pytest.fail(f"no end in {TIMEOUT_S:g} s: {output[-3000:]}")
    assert process.returncode == 0, output[-3000:]
    return output


def train_example(name: str, backend: str, steps: int) -> list[float]:
    """What a rank of a world that exists runs: the training of an example, without its command line."""
    torch._dynamo.reset()
    SESSION.reset()
    with (
        as_by_torchrun(),
        torch._dynamo.config.patch(optimize_ddp=True, compiled_autograd=False),  # set back what an example sets
    ):
        return _load(name).train(backend, steps)


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo looks there for what a function refers to
    spec.loader.exec_module(module)
    return module

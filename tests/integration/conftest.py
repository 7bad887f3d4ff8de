"""Worlds that many tests share, a world in one process, and what is skipped without a C++ compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.integration.worlds import World
from weft.compat.compilers import RIVAL_SETTINGS, settings_of
from weft.frontends.fake_world import fake_world
from weft.frontends.session import SESSION


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Inductor makes C++ of CPU code; some tests train with frameworks that Weft itself does not need."""
    for item in items:
        for marker in item.iter_markers("needs_package"):
            if importlib.util.find_spec(marker.args[0]) is None:
                reason = f"{marker.args[0]} is not installed; `make test-integrations` installs it"
                item.add_marker(pytest.mark.skip(reason=reason))
    if shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++"):
        return
    for item in items:
        if item.get_closest_marker("needs_cpp"):
            item.add_marker(pytest.mark.skip(reason="no C++ compiler: neither $CXX, g++ nor clang++ was found"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For logs and for Inductor's caches, shared by all workers: what one has compiled, another need not."""
    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "integration"
    made.mkdir(exist_ok=True)
    return made


@pytest.fixture(scope="session")
def two_ranks(folder: Path) -> Iterator[World]:
    with World(2, folder) as world:
        yield world


@pytest.fixture(scope="session")
def four_ranks(folder: Path) -> Iterator[World]:
    with World(4, folder) as world:
        yield world


@pytest.fixture
def fresh(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler and a session that have seen nothing; what Inductor caches on disk stays."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    SESSION.reset()
    torch.manual_seed(0)
    settings = settings_of("inductor")  # DDP, in an earlier test of this process, may have switched some on
    with settings.patch({name: False for name in RIVAL_SETTINGS if hasattr(settings, name)}):
        yield
    torch._dynamo.reset()
    SESSION.reset()


@pytest.fixture
def mesh(fresh: None) -> Iterator[DeviceMesh]:
    """Two ranks in this process; their collectives do nothing."""
    with fake_world({"dp": 2}) as made:
        yield made

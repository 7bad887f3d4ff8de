"""A wheel of torch is read and never imported: names from its sources, schemas from its binary."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tools.torch_wheel import LIBRARY, Wheel

FILES = {
    "torch/__init__.py": "raise SystemExit('this file was run')\nfrom torch._tensor import Tensor\n",
    "torch/_C/__init__.pyi": "def _get_schema(name: str) -> str: ...\n",
    "torch/_guards.py": "class CompileContext:\n    @staticmethod\n    def get(): ...\n",
    "torch/late.py": "try:\n    import fast as quick\nexcept ImportError:\n    quick = None\nhandler = make()\n",
    LIBRARY: "x\0all_reduce(Tensor input, str reduce_op, Any group_name) -> Tensor\0"
    "wait_tensor(Tensor tensor)-> Tensor\0all_reduce(Tensor other) -> Tensor\0broadcast(str group_name) cut",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    path = tmp_path / "torch-2.99.1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in FILES.items():
            file.writestr(name, text)
    return Wheel(path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("torch.Tensor", "yes"),
        ("torch.Tensors", "missing"),
        ("torch._guards", "yes"),
        ("torch._guards.CompileContext.get", "yes"),
        ("torch._guards.CompileContext.current", "unreadable"),  # it may be inherited
        ("torch._gone.CompileContext", "missing"),
        ("torch._C._get_schema", "yes"),
        ("torch._C._without_a_stub", "unreadable"),
        ("torch.late.quick", "yes"),
        ("torch.late.handler.end", "unreadable"),
    ],
)
def test_names_are_read_from_sources(wheel: Wheel, name: str, found: str):
    assert wheel.look_up(name) == found


def test_schemas_of_collectives_are_read_from_the_binary(wheel: Wheel):
    assert wheel.version == "2.99.1"
    assert wheel.schemas(["all_reduce", "wait_tensor", "broadcast"]) == {
        "all_reduce": "all_reduce(Tensor input, str reduce_op, Any group_name) -> Tensor",
        "wait_tensor": "wait_tensor(Tensor tensor)-> Tensor",
    }

"""Archives: the same module gives the same bytes, and comes back with its listing, constants and provenance."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import weft
from weft.compat import storage_key
from weft.errors import GraphError, ListingError, ReadError
from weft.frontends import archive
from weft.frontends.trace_log import read_log
from weft.graph.about import ABOUT_KEY
from weft.graph.edit import IN_POLICY_KEY, MEMBERS_KEY
from weft.graph.listings.text import source_of
from weft.graph.listings.types import DTYPE_NAMES
from weft.verification.rank import same_bits

DATA = Path(__file__).parents[2] / "data"
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.int16]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "graph.weft"


def trace(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def with_constants(constants: list[Tensor]) -> GraphModule:
    """A module that returns constants."""
    names = [f"c{i}" for i in range(len(constants))]
    types = [f"{DTYPE_NAMES[c.dtype]}[{', '.join(map(str, c.shape)) or '()'}]" for c in constants]
    head = [f"tensor('{name}', {type_})\n" for name, type_ in zip(names, types, strict=True)]
    lines = [f"    {name} = attribute('{name}')\n" for name in names]
    module = weft.parse("".join([*head, "def graph():\n", *lines, f"    return [{', '.join(names)}]\n"]))
    for name, constant in zip(names, constants, strict=True):
        if isinstance(constant, nn.Parameter):
            delattr(module, name)
        setattr(module, name, constant)
    return module


def round_trip(module: GraphModule, file: Path) -> GraphModule:
    archive.save(module, file)
    loaded = archive.load(file)
    assert weft.listing(loaded) == weft.listing(module)
    return loaded


def test_a_graph_of_a_log_comes_back_with_its_listing_sources_and_facts(file: Path):
    for graph in read_log(DATA / "train_inductor.log"):
        if graph.kind in ("aot_joint_graph", "inductor_post_grad_graph"):
            module = graph.load()
            loaded = round_trip(module, file)
            sources = [[source_of(node) for node in m.graph.nodes] for m in (module, loaded)]
            assert sources[0] == sources[1]
            assert any(sources[0])
            assert loaded.meta[ABOUT_KEY] == module.meta[ABOUT_KEY]


def test_the_same_module_gives_the_same_bytes(file: Path, tmp_path: Path):
    module = with_constants([torch.arange(100.0), torch.tensor([1, 2])])
    archive.save(module, file)
    archive.save(module, tmp_path / "again.weft")
    assert file.read_bytes() == (tmp_path / "again.weft").read_bytes()
    archive.save(archive.load(file), tmp_path / "third.weft")
    assert file.read_bytes() == (tmp_path / "third.weft").read_bytes()


def test_an_archive_holds_these_files(file: Path):
    archive.save(with_constants([torch.arange(100.0)]), file)
    with zipfile.ZipFile(file) as opened:
        assert opened.namelist() == [
            "constants.json",
            "constants/0000.bin",
            "facts.json",
            "listing.txt",
            "provenance.json",
        ]
        assert len(opened.read("constants/0000.bin")) == 400
        assert opened.read("listing.txt").decode() == weft.listing(archive.load(file))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_come_back_bit_for_bit(dtype: torch.dtype, file: Path):
    noise = torch.randint(0, 256, (64 * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    values = (noise % 2).bool()[:64] if dtype == torch.bool else noise.view(dtype)  # NaNs of every kind among them
    loaded = round_trip(with_constants([values, values[0], values[:0]]), file)
    assert same_bits(loaded.c0, values)
    assert same_bits(loaded.c1, values[0])
    assert loaded.c2.shape == (0,)


@pytest.mark.parametrize(
    "constant",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(24.0)[2::3],
        torch.arange(3.0).unsqueeze(1).expand(3, 5),
        torch.zeros(0, 4),
        torch.zeros(()),
    ],
    ids=["transposed", "strided", "expanded", "empty", "scalar"],
)
def test_strides_of_constants_come_back(constant: Tensor, file: Path):
    module = with_constants([constant])
    archive.save(module, file)
    loaded = archive.load(file)
    assert loaded.c0.stride() == constant.stride()
    assert torch.equal(loaded.c0, constant)


def test_a_constant_without_values_stays_without(file: Path):
    loaded = round_trip(with_constants([torch.empty(1000, 1000, device="meta")]), file)
    assert loaded.c0.device.type == "meta"
    assert file.stat().st_size < 10_000


def shared_constants() -> list[Tensor]:
    flat = torch.arange(300.0)
    return [flat[5:150], flat.view(torch.uint8)[10:99], flat[2:4], flat, torch.zeros(2), torch.nn.Parameter(flat[9:])]


def test_constants_that_share_memory_share_it_again(file: Path):
    constants = shared_constants()
    loaded = round_trip(with_constants(constants), file)
    found = [getattr(loaded, f"c{i}") for i in range(len(constants))]
    assert all(same_bits(new, old) for new, old in zip(found, constants, strict=True))
    assert [len({t.untyped_storage().data_ptr() for t in tensors}) for tensors in (found, constants)] == [2, 2]
    assert [new.data_ptr() - found[3].data_ptr() for new in found[:3]] == [20, 10, 8]
    assert sorted(files_of(file))[1:3] == ["constants/0000.bin", "constants/0004.bin"]
    found[3].fill_(7.0)
    assert found[0].tolist() == [7.0] * 145


def test_constants_without_values_share_memory_again(file: Path):
    meta = torch.empty(8, device="meta")
    loaded = round_trip(with_constants([meta[4:], meta[:4]]), file)
    assert storage_key(loaded.c0) == storage_key(loaded.c1)
    assert (loaded.c0.storage_offset(), loaded.c1.storage_offset()) == (4, 0)


def test_an_archive_of_constants_that_share_nothing_is_as_it_was(file: Path):
    archive.save(with_constants([torch.zeros(2)]), file)
    assert sorted(json.loads(files_of(file)["constants.json"])["c0"]) == [
        *("data", "dtype", "is_parameter", "sha256", "size", "strides"),
    ]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("c1", {"start": -1}, "constant 'c1' begins at byte -1, which is not a multiple of its element size"),
        ("c2", {"start": 2}, "constant 'c2' begins at byte 2, which is not a multiple of its element size"),
        ("c1", {"base": "c9"}, "constant 'c1' is in the memory of 'c9', which has no memory of its own"),
        ("c1", {"base": "c2"}, "constant 'c1' is in the memory of 'c2', which has no memory of its own"),
        ("c1", {"base": "c1"}, "constant 'c1' is in the memory of 'c1', which has no memory of its own"),
        ("c1", {"data": "constants/0000.bin"}, "it must name each file of constants exactly once"),
        ("c1", {"sha256": "0" * 64}, "constant 'c1' has its own file, but is in the memory of 'c0'"),
        ("c3", {"start": 1 << 62}, "it has 1200 bytes, its type needs"),
        ("c3", {"start": 1 << 80}, "it has 1200 bytes, its type needs"),
        ("c0", {"start": 24}, "'c1' is given, but not in the memory of 'c0' as its type says"),
        ("c4", {"base": "c0", "data": None, "sha256": None}, "it must name each file of constants exactly once"),
    ],
)
def test_memory_that_constants_cannot_share_is_told(name: str, changes: dict[str, Any], message: str, file: Path):
    archive.save(with_constants(shared_constants()), file)
    files = files_of(file)
    constants = json.loads(files["constants.json"])
    constants[name] |= changes
    pack(file, files | {"constants.json": json.dumps(constants).encode()})
    with pytest.raises((ReadError, ListingError)) as error:
        archive.load(file)
    assert message in str(error.value)


def test_parameters_stay_parameters(file: Path):
    loaded = round_trip(with_constants([nn.Parameter(torch.ones(3)), torch.ones(3)]), file)
    assert isinstance(loaded.c0, nn.Parameter)
    assert not isinstance(loaded.c1, nn.Parameter)


def test_paths_of_modules_and_members_come_back(file: Path):
    module = trace(lambda x: x.relu() + 1, torch.zeros(4))
    relu, add = (node for node in module.graph.nodes if node.op == "call_function")
    relu.meta["nn_module_stack"] = {"": ("", nn.Sequential), "layers.0": ("layers.0", nn.Linear)}
    relu.meta["partitioner_tag"] = "is_backward"
    add.meta[MEMBERS_KEY] = ("a", "b")
    add.meta[IN_POLICY_KEY] = True
    found = {node.name: node.meta for node in round_trip(module, file).graph.nodes}
    assert found[relu.name]["nn_module_stack"] == {
        "": ("", "torch.nn.modules.container.Sequential"),
        "layers.0": ("layers.0", "torch.nn.modules.linear.Linear"),
    }
    assert found[relu.name]["partitioner_tag"] == "is_backward"
    assert found[add.name][MEMBERS_KEY] == ("a", "b")
    assert [IN_POLICY_KEY in found[node.name] for node in (relu, add)] == [False, True]


def test_nested_graphs_come_back_with_their_sources(file: Path):
    module = next(g for g in read_log(DATA / "branches_inductor.log") if g.kind == "aot_inference_graph").load()
    loaded = round_trip(module, file)
    inner = [[source_of(node) for node in m.true_graph_0.graph.nodes] for m in (module, loaded)]
    assert inner[0] == inner[1]
    assert "model.py:42 in <lambda>" in inner[0][1]


def test_symbolic_sizes_come_back(file: Path):
    round_trip(next(g for g in read_log(DATA / "dynamic_aot_eager.log") if g.part == "joint").load(), file)


def test_a_graph_of_a_device_that_is_not_here_comes_back(file: Path):
    round_trip(next(g for g in read_log(DATA / "conv_attention_cuda_2.11.log.gz") if g.part == "joint").load(), file)


def test_what_is_no_json_is_refused_and_no_file_is_left(file: Path):
    module = with_constants([])
    module.meta[ABOUT_KEY] = {"group": object()}
    with pytest.raises(GraphError) as error:
        archive.save(module, file)
    assert str(error.value).startswith("archive: meta['weft.about'] cannot be written as JSON: ")
    assert list(file.parent.iterdir()) == []


def test_two_constants_of_one_name_are_refused(file: Path):
    listing = (
        "def graph(x: f32[2]):\n"
        "    def inner(x: f32[2]):\n"
        "        c: f32[2] = attribute('c')\n"
        "        return [c]\n"
        "    inner = attribute('inner')\n"
        "    c: f32[2] = attribute('c')\n"
        "    return [c]\n"
    )
    module = weft.parse("tensor('c', f32[2], [1.0, 2.0])\n" + listing)
    module.inner.c = torch.zeros(2)
    with pytest.raises(GraphError, match=r"archive: two constants of nested graphs are called 'c'\nrename one of them"):
        archive.save(module, file)


# Faults.


def files_of(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def pack(file: Path, files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    """Write an archive whose checksums are right."""
    if "facts.json" in files:
        facts = json.loads(files["facts.json"])
        facts["sha256"] = {key: hashlib.sha256(files.get(key, b"")).hexdigest() for key in facts["sha256"]}
        files = files | {"facts.json": json.dumps(facts).encode()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as opened:
        for name, content in files.items():
            opened.writestr(name, content)
    file.write_bytes(packed.getvalue())


def fault(file: Path) -> str:
    with pytest.raises(ReadError) as error:
        archive.load(file)
    return str(error.value).replace(str(file), "graph.weft")


@pytest.fixture
def saved(file: Path) -> dict[str, bytes]:
    archive.save(with_constants([torch.arange(100.0)]), file)
    return files_of(file)


def constants_with(saved: dict[str, bytes], **changes: object) -> bytes:
    constants = json.loads(saved["constants.json"])
    constants["c0"] |= changes
    return json.dumps(constants).encode()


def test_another_file_is_no_archive(file: Path):
    file.write_text("hello")
    assert fault(file) == "graph.weft: it is not an archive: File is not a zip file\ngive a file that weft has saved"
    assert "it is not an archive: [Errno 2] No such file" in fault(file.with_name("nowhere"))


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "constants/../x.bin", "constants/1.bin", "a.py", "listing.txt/"])
def test_files_of_other_names_are_refused(name: str, saved: dict[str, bytes], file: Path):
    pack(file, saved | {name: b"x"})
    assert fault(file) == f"graph.weft!{name}: archives do not have such a file\ngive a file that weft has saved"


def test_a_missing_file_is_told(saved: dict[str, bytes], file: Path):
    pack(file, {name: content for name, content in saved.items() if name != "provenance.json"})
    assert fault(file) == "graph.weft!provenance.json: it is missing\ngive a file that weft has saved"


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_that_is_there_twice_is_told(saved: dict[str, bytes], file: Path):
    with zipfile.ZipFile(file, "a") as opened:
        opened.writestr("listing.txt", b"")
    assert fault(file) == "graph.weft!listing.txt: the archive has it twice\nthe file is damaged: save it again"


def test_a_changed_listing_is_told(saved: dict[str, bytes], file: Path):
    facts = saved["facts.json"]
    pack(file, saved | {"listing.txt": saved["listing.txt"] + b"\n"})
    changed = files_of(file) | {"facts.json": facts}
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in changed.items():
            opened.writestr(name, content)
    assert fault(file) == (
        "graph.weft!listing.txt: its checksum is not the one in facts.json\nthe file is damaged: save it again"
    )


def test_changed_memory_is_told(saved: dict[str, bytes], file: Path):
    pack(file, saved | {"constants/0000.bin": bytes(400)})
    assert fault(file) == (
        "graph.weft!constants/0000.bin: its checksum is not the one in constants.json\n"
        "the file is damaged: save it again"
    )


def test_damaged_bytes_are_told(saved: dict[str, bytes], file: Path):
    content = bytearray(file.read_bytes())
    place = content.index(saved["listing.txt"])
    content[place] ^= 1
    file.write_bytes(bytes(content))
    assert fault(file).startswith("graph.weft: it is not an archive: Bad CRC-32 for file 'listing.txt'\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": [99]}, "graph.weft!constants/0000.bin: it has 400 bytes, its type needs 396\n"),
        ({"size": [1 << 60]}, f"graph.weft!constants/0000.bin: it has 400 bytes, its type needs {1 << 62}\n"),
        ({"size": [-1]}, "graph.weft!constants.json: constant 'c0' has an impossible type\n"),
        ({"size": [10, 10]}, "graph.weft!constants.json: constant 'c0' has an impossible type\n"),
        ({"strides": [2]}, "graph.weft!constants/0000.bin: it has 400 bytes, its type needs 796\n"),
        ({"strides": [-1]}, "graph.weft!constants.json: constant 'c0' has an impossible type\n"),
        ({"dtype": "f33"}, "graph.weft!constants.json: constant 'c0' has an impossible type\n"),
        ({"size": "x"}, "graph.weft!constants.json: c0.size: Input should be a valid array\n"),
        ({"colour": 3}, "graph.weft!constants.json: c0.colour: Extra inputs are not permitted\n"),
        (
            {"data": "constants/0007.bin"},
            "graph.weft!constants.json: it must name each file of constants exactly once\n",
        ),
        ({"data": None}, "graph.weft!constants.json: it must name each file of constants exactly once\n"),
    ],
)
def test_constants_of_the_wrong_type_are_told(
    changes: dict[str, object], message: str, saved: dict[str, bytes], file: Path
):
    pack(file, saved | {"constants.json": constants_with(saved, **changes)})
    assert fault(file) == message + "the file is damaged: save it again"


def test_a_constant_that_is_not_in_the_listing_is_told(saved: dict[str, bytes], file: Path):
    constants = json.loads(saved["constants.json"])
    constants["c9"] = constants["c0"] | {"data": None, "sha256": None}
    pack(file, saved | {"constants.json": json.dumps(constants).encode()})
    assert fault(file).startswith("graph.weft!constants.json: 'c9' is not a constant of the listing\n")


def test_provenance_of_nodes_that_are_not_there_is_told(saved: dict[str, bytes], file: Path):
    provenance = {"traces": ["x"], "modules": [], "nodes": {"nobody": {"trace": 0}}}
    pack(file, saved | {"provenance.json": json.dumps(provenance).encode()})
    assert fault(file).startswith("graph.weft!provenance.json: 'nobody' is not a node of the listing\n")
    provenance["nodes"] = {"c0": {"trace": 7}}
    pack(file, saved | {"provenance.json": json.dumps(provenance).encode()})
    assert fault(file).startswith("graph.weft!provenance.json: entry 7 does not exist, it has 1\n")


def test_an_archive_of_a_newer_format_is_told(saved: dict[str, bytes], file: Path):
    facts = json.loads(saved["facts.json"]) | {"format": 2}
    pack(file, saved | {"facts.json": json.dumps(facts).encode()})
    assert fault(file) == "graph.weft!facts.json: it has format 2, expected 1\nuse a newer Weft"


def test_a_bomb_is_not_unpacked(file: Path, monkeypatch: pytest.MonkeyPatch):
    archive.save(with_constants([]), file)
    monkeypatch.setattr(archive, "MAX_TEXT_BYTES", 1 << 20)
    pack(file, files_of(file) | {"listing.txt": b"#" * (2 << 20)}, zipfile.ZIP_DEFLATED)
    assert fault(file) == (
        f"graph.weft!listing.txt: it has {2 << 20} bytes, which is too many\nthe file is damaged: save it again"
    )


def test_memory_that_is_compressed_or_larger_than_the_file_is_refused(saved: dict[str, bytes], file: Path):
    pack(file, saved, zipfile.ZIP_DEFLATED)
    message = fault(file)
    assert message.startswith("graph.weft!constants/0000.bin: it is encrypted or compressed\n")
    pack(file, saved | {"constants/0000.bin": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    assert fault(file).startswith("graph.weft!constants/0000.bin: it has 1048576 bytes, which is too many\n")


def test_texts_that_somebody_compressed_are_read(saved: dict[str, bytes], file: Path):
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in saved.items():
            method = zipfile.ZIP_STORED if name.endswith(".bin") else zipfile.ZIP_DEFLATED
            opened.writestr(name, content, method)
    assert torch.equal(archive.load(file).c0, torch.arange(100.0))

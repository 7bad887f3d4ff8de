"""Texts that are made to hang or to break a reader: each reader reads or refuses each of them, within seconds."""

from __future__ import annotations

import gzip
import io
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.cli.source import load_source
from weft.cost.calibration.chrome_trace import read_chrome_trace
from weft.cost.calibration.fit import read_measurements
from weft.cost.calibration.nccl_tests import read_nccl_tests
from weft.cost.calibration.step_trace import read_step_trace
from weft.cost.cluster import Cluster
from weft.errors import WeftError
from weft.frontends import archive
from weft.frontends.printed.runnable import read_runnable
from weft.frontends.run_report import read_entries
from weft.frontends.trace_log import read_log
from weft.passes.pipeline import Pipeline
from weft.plan.plan import Plan
from weft.verification.agreement.rank_record import Statement

CPU_SECONDS = 6.0
"""Of one case. Most take milliseconds; a syntax tree of a text of megabytes takes seconds."""
MANY = 80_000
LONG = 1_000_000
PREFIX = "V0115 10:00:00.000000 77 torch/_inductor/compile_fx.py:1404] "
LISTING = "def graph(x: f32[4]):\n    r: f32[4] = relu(x)\n    return [r]\n"

TEXTS: dict[str, str] = {
    "nothing": "",
    "a NUL": "\0",
    "NULs": "\0" * LONG,
    "a NUL in a listing": LISTING.replace("relu", "re\0lu"),
    "spaces": " " * LONG,
    "line ends": "\n" * LONG,
    "one digit": "9" * LONG,
    "many classes": "class Repro(\n" * MANY,
    "many load_args": "class Repro(\n" + "def load_args(\n" * MANY,
    "many graphs": "def graph(\n" * MANY,
    "many groups": "group('dp', size=2)\n" * MANY,
    "open parentheses": "(" * LONG,
    "open brackets": "[" * LONG,
    "open braces": "{" * LONG,
    "objects": '{"a":' * MANY,
    "closed brackets": "[" * MANY + "]" * MANY,
    "signs": "-" * LONG,
    "quotes": "'" * LONG,
    "one string": '"' + "a" * LONG,
    "escapes": '"' + "\\" * LONG,
    "commas": "a," * LONG,
    "a listing of deep brackets": LISTING.replace("relu(x)", "relu(" + "[" * 5000 + "]" * 5000 + ")"),
    "a listing of deep sums": LISTING.replace("relu(x)", "relu(" + "1+" * 50_000 + "1)"),
    "a listing of deep signs": LISTING.replace("relu(x)", "relu(" + "-" * 50_000 + "1)"),
    "a listing of deep calls": LISTING.replace("relu(x)", "relu(" * 5000 + "x" + ")" * 5000),
    "a listing of a long number": LISTING.replace("f32[4]", f"f32[{'9' * LONG}]"),
    "a listing of a long hexadecimal": LISTING.replace("f32[4]", f"f32[0x{'f' * LONG}]"),
    "a listing of a large power": LISTING.replace("f32[4]", "f32[9**9**9]"),
    "a listing of a long name": LISTING.replace("r:", "r" * LONG + ":"),
    "a listing of many dims": LISTING.replace("f32[4]", f"f32[{'1, ' * MANY}1]"),
    "a listing of many lines": LISTING.replace("    return", "    r: f32[4] = relu(x)\n" * MANY + "    return"),
    "a runnable of deep brackets": "class Repro(x):\n    x = " + "[" * 5000 + "\ndef load_args(reader):\n",
    "a runnable of attributes": f"class Repro(x):\n    y = a{'.b' * LONG}\ndef load_args(reader):\n    pass\n",
    "a log of nothing": PREFIX + "{}\n",
    "a log of deep brackets": PREFIX + '{"artifact": ' + "[" * LONG + "\n",
    "a log of a long number": PREFIX + '{"rank": ' + "9" * LONG + "}\n",
    "a log of spaces": (PREFIX[:-2] + " " * 200) * 4000,
    "a log of prefixes": PREFIX * 20_000,
    "launches": f"{PREFIX}{{}}\n\tall_gather_into_tensor{'.default(, 2, ' * MANY}\n",
    "a plan of deep brackets": '{"steps": ' + "[" * LONG,
    "a plan of a long number": '{"steps": [], "format": ' + "9" * LONG + "}",
    "a plan of many faults": '{"steps": [' + "1," * 300_000 + "1]}",
    "a plan of half characters": '{"steps": [], "facts": {"a": "\\ud800"}}',
    "a cluster of a long number": f"name = 'x'\nnum_ranks = {'9' * LONG}\n",
    "a cluster of deep tables": "[" + "a." * 20_000 + "a]\n",
    "a cluster of many tables": "".join(f"[a{k}]\n" for k in range(20_000)),
    "a cluster of deep brackets": "a = " + "[" * LONG,
    "a cluster of dotted keys": "".join(f"{'a.' * 200}b{k} = 1\n" for k in range(500)),
    "a table of parentheses": "(" * 200 + "\n" + "(a" * MANY,
    "a table of spaces": "#" + " " * LONG + "size",
    "a table of sizes": "#  size  count  type \n" + ("1 " * 20 + "\n") * 20_000,
    "a table of a long number": "#  size  count  type \n" + "9" * LONG + " 1 float 1 1 1 1\n",
    "a table of devices": "#  Rank  1 Pid" + " 1" * LONG,
    "a trace of nothing": '{"traceEvents": []}',
    "a trace of deep brackets": '{"traceEvents": [' + "[" * LONG,
    "a trace of a long number": '{"traceEvents": [{"ts": ' + "9" * LONG + "}]}",
    "a trace of a large exponent": '{"traceEvents": [{"ph": "X", "ts": 1e999, "dur": 1e999, "name": "nccl"}]}',
    "a trace of long times": '{"traceEvents": [{"cat": "kernel", "name": "nccl", "ts": ' + "9" * 4000 + ', "dur": 1}]}',
    "a trace of many marks": '{"traceEvents": ['
    + "".join(
        f'{{"cat": "user_annotation", "name": "ProfilerStep#{k}", "ts": {k}, "dur": {LONG}}},'
        f'{{"cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": {k}, "dur": 1}},'
        for k in range(MANY // 4)
    )
    + "]}",
    "a trace of odd arguments": '{"traceEvents": [{"cat": "cpu_op", "name": "_c10d_functional::all_reduce", "ts": 1, '
    '"dur": 1, "tid": [], "args": {"Input Dims": [[[]]], "Input type": [{}], "Concrete Inputs": [1]}}], '
    '"distributedInfo": {"rank": [], "pg_config": [3, {"pg_name": {}, "ranks": [0]}]}}',
    "a trace of commas": '{"traceEvents": [' + "," * LONG,
    "a trace of colons": '{"a"' + ":" * LONG,
    "a pipeline of braces": "clean{" * MANY,
    "a pipeline of commas in braces": "clean{" + "," * MANY,
    "a pipeline of names": "clean," * 2000,
    "a pipeline of spaces": " " * MANY + "x y",
    "sides": '{"identity": "a"\n' * MANY,
}
BYTES: dict[str, bytes] = {
    **{name: text.encode() for name, text in TEXTS.items()},
    "no UTF-8": b"\xff\xfe\x80" * 100_000,
    "half of a character": LISTING.encode()[:-1] + b"\xe2\x82",
    "a listing that is no UTF-8": LISTING.replace("relu", "re\udcfflu").encode(errors="surrogateescape"),
    "gzip of nothing": gzip.compress(b""),
    "a gzip bomb": gzip.compress(b"\0" * (1 << 24)) * 64,  # a gibibyte
    "half a gzip": gzip.compress(b"a" * 10_000)[:30],
    "a zip of nothing": b"PK\x03\x04",
}


def packed(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in files.items():
            opened.writestr(name, data)
    return content.getvalue()


def archives(folder: Path) -> dict[str, bytes]:
    archive.save(weft.parse(LISTING), folder / "right.weft")
    with zipfile.ZipFile(folder / "right.weft") as opened:
        right = {name: opened.read(name) for name in opened.namelist()}
    bomb = b"\0" * (1 << 28)
    return {
        **{f"an archive with a bomb for {name}": packed({**right, name: bomb}) for name in right},
        "an archive with a bomb besides": packed({**right, "constants/0000.bin": bomb}),
        "an archive of many files": packed({**right, **{f"constants/{k:04}.bin": b"" for k in range(9000)}}),
        "an archive of deep facts": packed({**right, "facts.json": b"[" * LONG}),
        "an archive of a long number": packed({**right, "facts.json": b'{"format": ' + b"9" * LONG + b"}"}),
        "an archive in an archive": packed({"a.weft": packed(right)}),
    }


READERS: dict[str, Callable[[Path], Any]] = {
    "source": lambda path: load_source(str(path)),
    "runnable": read_runnable,
    "runnable text": lambda path: read_runnable(path.read_text(errors="replace") + "\n"),
    "log": lambda path: [graph.load() for graph in read_log(path)],
    "log of a run that was killed": lambda path: [graph.load() for graph in read_log(path, strict=False)],
    "archive": archive.load,
    "plan": Plan.load,
    "cluster": Cluster.load,
    "table": read_nccl_tests,
    "trace": read_chrome_trace,
    "step of a trace": lambda path: read_step_trace(path).step(),
    "measurements": lambda path: read_measurements([path]),
    "pipeline": lambda path: Pipeline.parse(path.read_text(errors="replace")),
    "side file": lambda path: list(read_entries(path)),
    "listing": lambda path: weft.parse(path.read_text(errors="replace")),
    "statement": lambda path: Statement.from_json(path.read_text(errors="replace")),
}


class Hung(BaseException):
    """A case took too long."""


def stop(*_: Any) -> None:
    raise Hung


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_reads_or_refuses_a_hostile_text_in_time(reader: str, tmp_path: Path):
    contents = BYTES | (archives(tmp_path) if reader in ("source", "archive") else {})
    faults: list[str] = []
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        for name, content in contents.items():
            path = tmp_path / "given"
            path.write_bytes(content)
            signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
            try:
                READERS[reader](path)
            except WeftError as error:
                if len(str(error)) > 20_000:
                    faults.append(f"{name}: an error of {len(str(error))} characters")
            except BaseException as error:
                faults.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    assert faults == []


def test_a_text_of_one_megabyte_is_refused_in_a_second(tmp_path: Path):
    path = tmp_path / "given"
    path.write_text(TEXTS["many classes"])
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1.0)
    try:
        with pytest.raises(WeftError):
            load_source(str(path))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

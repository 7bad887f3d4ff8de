"""What the commands of the pages become in a test, and which tests run those that are not run here."""

from __future__ import annotations

import re

ELSEWHERE = {
    r"make demo": "tests/docs/test_demo.py",
    r"weft demo": "tests/docs/test_demo.py",
    r"make (test|lint|test-all|test-integrations)( .*)?": ".ci/run",
    r"pip install \.": "tests/integration/test_package.py",
    r"make docs": "tests/docs/test_site.py",
    r"torchrun --standalone --nproc-per-node=\d examples/\w+\.py": "tests/integration/test_examples.py",
    r"weft compare .*": "tests/unit/cli/test_compare.py",
    r"weft (optimize|apply) rank0\.log:812 .*": "tests/integration/test_shipped_plans.py",
    r"python docs/tutorial\.py": "tests/docs/test_made_pages.py",
    r"python tools/docs_tutorial\.py": "tests/docs/test_made_pages.py",
    r"python tools/screenshots\.py": "tests/browser/test_screenshots.py",
    r"PYTHONPATH=src python benchmarks/gpu/train\.py --device cpu .*": "tests/unit/benchmarks/test_gpu_train.py",
}
"""Commands, as patterns, and the test that runs them instead."""

SUBSTITUTES = {
    "SOURCE": "before.txt",
    "NAME": "sink-waits",
    "/shared/run-17": "run-17",
    "all_gather_into_tensor_3": "all_gather_into_tensor",
}
"""What pages leave to the reader, or have from a model of full size."""

ZOO = re.compile(r"zoo:([\w-]+)/([\w-]+)(\?[\w=&,.:-]*)?")
ADVISED = re.compile(r"(?:PYTHONPATH=\. )?weft advise (?:zoo:\S+|(\S+)) --cluster \S+ --batch-tokens \S+")
SPECIAL = re.compile(r"[&?*|;<>()]")
"""What a shell would take for itself outside of quotes."""


def elsewhere(command: str) -> str | None:
    """The test that runs a command, where it is not run here."""
    return next((test for pattern, test in ELSEWHERE.items() if re.fullmatch(pattern, command)), None)


def unquoted(command: str) -> str:
    """What of a command a shell would take for itself; `rank*.json.gz` is meant for it."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", command).replace("rank*.json.gz", "")
    return "".join(SPECIAL.findall(bare))


def filled(command: str) -> str:
    """The command on files that are there."""
    for found, instead in SUBSTITUTES.items():
        command = re.sub(rf"(?<![\w:]){re.escape(found)}(?!\w)", instead, command)
    return command


def cut(command: str) -> str:
    """The command on a small model, with one layer, and on files that are there; advice is for two ranks."""

    def one_layer(match: re.Match[str]) -> str:
        pairs = [pair for pair in (match[3] or "?").removeprefix("?").split("&") if pair]
        pairs = [pair for pair in pairs if not pair.startswith("layers=")]
        return f"zoo:{match[1]}/{match[2]}?{'&'.join([*pairs, 'layers=1'])}"

    def two_ranks(match: re.Match[str]) -> str:
        return f"weft advise {match[1] or 'zoo:llama-debug?layers=1'} --cluster h100-1x2 --batch-tokens 64 --workers 1"

    return ADVISED.sub(two_ranks, ZOO.sub(one_layer, filled(command)))

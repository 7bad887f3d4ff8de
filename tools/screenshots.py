"""Make the screenshots of the docs: the pages of a report, of an advice and of a compiled run, opened in Chromium.

    python tools/screenshots.py [--output docs/images] [--layers 4]

Needs Chromium and playwright (`make setup`); nothing is downloaded, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import weft
from weft.advice.page import page_of
from weft.frontends.fake_world import fake_world

NAMES = ("chromium", "chromium-browser", "google-chrome")
CLUSTER = "h100-8x8"
WIDTH, HEIGHT, ADVICE_HEIGHT = 1200, 860, 1430
REASON = "exposed-by-queue"
"""Filter of the table of collectives: a reason that occurs in this step."""
PICTURES = ("report.png", "timelines.png", "layers.png", "hover.png", "collectives.png")
"""Of the page of a report."""
ADVICE_PICTURE = "advice.png"
RUN_PICTURE, RUN_HEIGHT = "run.png", 760


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: none of {', '.join(NAMES)} is on PATH (apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder) / "report.html"
        make_report(path, options.layers)
        chromium = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, num_bytes in photograph(path, chromium, options.output):
            print(f"{options.output / name}: {num_bytes} bytes")
        make_advice(path)
        print(f"{options.output / ADVICE_PICTURE}: {photograph_advice(path, chromium, options.output)} bytes")
        make_run(path)
        print(f"{options.output / RUN_PICTURE}: {photograph_run(path, chromium, options.output)} bytes")
        chromium.close()


def make_report(path: Path, layers: int) -> None:
    """The page of a step under FSDP on 64 ranks."""
    module = weft.zoo.load("llama-8b", "fsdp", ranks=64, layers=layers)
    result = weft.optimize(module, cluster=CLUSTER, verify="equivalence")
    result.report.save_html(path, title=f"llama-8b, {layers} layers, FSDP on 64 ranks")


def make_advice(path: Path) -> None:
    """The page of the advice on a small model for two nodes."""
    advice = weft.advise("zoo:llama-1b", "h100-2x8", batch_tokens=16 * 16 * 4096, told=print)
    path.write_text(page_of(advice), encoding="utf-8")


def make_run(path: Path) -> None:
    """The page of a compiled run of a small model on eight ranks, whose collectives do nothing."""
    with fake_world({"dp": 8}) as mesh:
        model, make_batch = weft.zoo.build("llama-debug", "fsdp", mesh, layers=4)
        options = {"weft.cluster": CLUSTER, "weft.cache": False}
        torch.compile(model, backend="weft_eager", options=options)(*make_batch()).backward()
        weft.run_report().save_html(path, title="llama-debug, 4 layers, FSDP on 8 ranks")


def photograph_run(path: Path, chromium: Any, output: Path) -> int:
    """The picture; its size."""
    page = chromium.new_page(viewport={"width": WIDTH, "height": RUN_HEIGHT}, color_scheme="light")
    page.goto(path.as_uri())
    page.screenshot(path=output / RUN_PICTURE)
    page.close()
    return (output / RUN_PICTURE).stat().st_size


def photograph_advice(path: Path, chromium: Any, output: Path) -> int:
    """The picture, down to the timelines; its size."""
    page = chromium.new_page(viewport={"width": WIDTH, "height": ADVICE_HEIGHT}, color_scheme="light")
    page.goto(path.as_uri())
    page.screenshot(path=output / ADVICE_PICTURE)
    page.close()
    return (output / ADVICE_PICTURE).stat().st_size


def photograph(path: Path, chromium: Any, output: Path) -> list[tuple[str, int]]:
    """The pictures with their sizes: the page, its timelines, the layers, a zoomed collective, the table."""
    page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    page.goto(path.as_uri())
    page.screenshot(path=output / "report.png")
    page.locator("section", has=page.locator("#timeline")).screenshot(path=output / "timelines.png")
    page.locator("section", has=page.locator(".layers")).screenshot(path=output / "layers.png")
    hover_most_exposed(page)
    page.screenshot(path=output / "hover.png")
    page.mouse.move(0, 0)
    page.locator("#filter").fill(REASON)
    page.locator("section", has=page.locator("#rows")).evaluate("section => section.scrollIntoView()")
    page.screenshot(path=output / "collectives.png", clip={"x": 0, "y": 0, "width": WIDTH, "height": 560})
    page.close()
    return [(name, (output / name).stat().st_size) for name in PICTURES]


def hover_most_exposed(page: Any) -> None:
    """Go to the first collective of the table, and point at its last drawing: in the run after."""
    page.locator("#rows .name").first.click()
    page.get_by_label("Zoom out").click()
    page.evaluate("scrollTo(0, 0)")
    box = page.locator("#timeline").bounding_box()
    for y in range(int(box["height"]), 0, -6):
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + y)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
        if page.locator("#tip").is_visible() and "kind" in page.locator("#tip").inner_text():
            return
    sys.exit("no collective was found on the page")


if __name__ == "__main__":
    main()

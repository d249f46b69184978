"""Takes the pictures of the page that the documentation shows, from a real server and two models of the zoo.

    python -m tests.serving.screenshots --out docs/images

Each state is photographed in light and in dark: nothing made yet, a job at work, a job done, a job beside its serial
twin, a request that is refused, a chat, and the operator's view.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.serving.browser import chromium, lacking, opened
from tests.serving.live_server import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROMPTS = [
    "a green triangle above a red square",
    "a large yellow circle below a small blue square",
    "three shapes: a red circle, a blue triangle, a green square",
    "a red circle left of a blue square",
]
MODELS = ("shapes", "sums")


def ready(page: Page) -> None:
    """Waits until all ranks are there and the page lists their strategies."""
    page.wait_for_selector("#health[data-good=true]", timeout=120_000)
    page.wait_for_selector("#strategy option[value=ulysses]", state="attached")


def make(page: Page, prompt: str, *, strategy: str, steps: int | None = None, seed: int = 7, count: int = 1) -> None:
    """Fills in the form and sends it."""
    page.locator("#prompt").fill(prompt)
    page.locator("#strategy").select_option(strategy if strategy in ("auto", "ulysses", "serial") else "other")
    if page.locator("#other").is_visible():
        page.locator("#other").fill(strategy)
    for id, value in (("seed", seed), ("steps", steps or ""), ("count", count if count > 1 else "")):
        page.locator(f"#{id}").fill(str(value))
    page.locator("#make").click()


def done(page: Page) -> None:
    """Waits for the end of the job that is shown."""
    page.wait_for_selector("#stage-state[data-status=completed]", timeout=180_000)
    page.wait_for_selector("#stage-media img:not(.preview)", state="attached")


def shots(browser: Browser, url: str, out: Path) -> None:
    """Walks through all states once and photographs each in both colours and, where it says so, on a phone."""
    with opened(browser, url, viewport={"width": 1280, "height": 860}, device_scale_factor=1.5) as page:
        page.set_default_timeout(180_000)
        ready(page)
        both(page, out, "empty")
        for seed, prompt in enumerate(PROMPTS[:3]):
            make(page, prompt, strategy="ulysses", seed=seed)
            done(page)
        make(page, PROMPTS[3], strategy="ulysses", steps=200)
        # The job before has left a full bar, so this one's own steps are waited for.
        under_way = "() => /of 200/.test(document.body.innerText) && document.getElementById('stage-bar').value > 30"
        page.wait_for_function(under_way)
        both(page, out, "running")
        page.locator("#cancel").click()
        page.wait_for_selector("#stage-state[data-status=cancelled]")
        make(page, PROMPTS[3], strategy="displaced-patch:warmup_steps=4", seed=5)
        done(page)
        both(page, out, "finished")
        page.locator("#twin").click()
        page.wait_for_selector("#twin-numbers dd", timeout=180_000)
        page.wait_for_selector("#pair figure:nth-child(3) img[src]")
        both(page, out, "compared")
        page.set_viewport_size({"width": 400, "height": 860})
        page.screenshot(path=out / "page-narrow.png", full_page=True)
        page.set_viewport_size({"width": 1280, "height": 860})
        make(page, PROMPTS[0], strategy="ring:degree=3")
        page.wait_for_selector("#create-fault:not([hidden])")
        both(page, out, "error")
        chat(page, out)


def chat(page: Page, out: Path) -> None:
    """Asks a small model along several threads."""
    page.locator("#to-chat").click()
    page.locator("#chat-strategy").fill("self-consistency:num=6")
    page.locator("#question").fill("make 64 from 3 7 25 6")
    page.locator("#ask").click()
    page.wait_for_selector(".usage", timeout=180_000)
    page.locator(".turn summary").click()
    both(page, out, "chat")
    page.get_by_role("link", name="Server").click()
    page.wait_for_selector("#server-view table")
    both(page, out, "server")


def both(page: Page, out: Path, name: str) -> None:
    """Photographs what is shown, in light and in dark."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        page.screenshot(path=out / f"page-{name}-{scheme}.png", full_page=True)
    page.emulate_media(color_scheme="light", reduced_motion="reduce")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    parser.add_argument("--url", help="a server that runs already, with the models " + " and ".join(MODELS))
    options = parser.parse_args()
    if reason := lacking():
        parser.error(reason)
    options.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = options.url or stack.enter_context(served(folder, MODELS))
        shots(stack.enter_context(chromium()), url, options.out)


if __name__ == "__main__":
    main()

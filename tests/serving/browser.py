"""A headless Chromium for the tests and pictures of the page."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

NAMES = ("chromium", "chromium-browser", "google-chrome")


def lacking() -> str | None:
    """What a browser test needs and this machine has not, as a reason for skipping."""
    if importlib.util.find_spec("playwright") is None:
        return "needs playwright: pip install playwright"
    if not any(shutil.which(name) for name in NAMES):
        return "needs chromium on the path: apt-get install chromium"
    return None


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Starts the browser that the machine has; none is downloaded."""
    from playwright.sync_api import sync_playwright

    path = next(path for name in NAMES if (path := shutil.which(name)))
    arguments = ["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Opens the page in a session of its own. What it throws, or its policy refuses, fails at the end."""
    context = browser.new_context(base_url=url, reduced_motion="reduce", **options)
    context.set_default_timeout(15_000)
    page = context.new_page()
    complaints: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        # The browser itself writes a line for each answer of 400 or more; the tests look at what the page makes of it.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            complaints.append(message.text)

    page.on("console", heard)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        page.goto(url)
        yield page
        assert not complaints, complaints
    finally:
        context.close()


def field(page: Page, name: str) -> Locator:
    """The field with a label; both views have some of the same name, and only one is shown."""
    return page.get_by_label(name, exact=True).filter(visible=True)


#: Draws an image element and reads it back: its levels, width and height.
DRAW = """selector => {
  const image = document.querySelector(selector);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  return [[...context.getImageData(0, 0, canvas.width, canvas.height).data], canvas.width, canvas.height];
}"""


def pixels(page: Page, selector: str) -> np.ndarray:
    """What an image element shows once it is there, `[H, W, 3]`."""
    loaded = "s => { const image = document.querySelector(s); return image?.complete && image.naturalWidth > 0; }"
    page.wait_for_function(loaded, arg=selector)
    levels, width, height = page.evaluate(DRAW, selector)
    return np.array(levels, np.uint8).reshape(height, width, 4)[..., :3]


def png(seed: int, size: int = 64) -> bytes:
    """A picture of its own for each seed: a soft gradient with a disc."""
    rows, columns = np.mgrid[0:size, 0:size] / size
    colours = np.random.default_rng(seed).uniform(0.15, 0.95, (3, 3))
    image = colours[0] * rows[..., None] + colours[1] * (1 - columns[..., None]) * 0.7
    image[(rows - 0.5) ** 2 + (columns - 0.45) ** 2 < 0.07] = colours[2]
    buffer = io.BytesIO()
    Image.fromarray((255 * image.clip(0, 1)).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()

"""The page with the server that it belongs to: two ranks, a model of the zoo, and a real browser."""

from __future__ import annotations

import io
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'partsong[serve]'")

from tests.serving.browser import field, lacking, opened, pixels
from tests.serving.running import RunningServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

if lacking():
    pytest.skip(lacking() or "", allow_module_level=True)

from playwright.sync_api import expect

#: Milliseconds for what two ranks on a busy machine do.
LONG = 120_000
#: A caption that no other test asks the living server for.
PROMPT = "a red circle above a blue square"


@pytest.fixture
def url(server: RunningServer) -> str:
    return server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with opened(browser, url) as page:
        page.set_default_timeout(LONG)
        # The page begins before the ranks are there, and lists their strategies once they are.
        expect(page.locator("#health")).to_contain_text("ready", timeout=LONG)
        expect(page.locator("#strategy option[value=ulysses]")).to_have_count(1, timeout=LONG)
        yield page


def make(page: Page, prompt: str, strategy: str, **fields: int) -> None:
    field(page, "Prompt").fill(prompt)
    field(page, "Strategy").select_option("other…")
    field(page, "Strategies and their settings").fill(strategy)
    for name, value in fields.items():
        field(page, name).fill(str(value))
    page.get_by_role("button", name="Make").click()


@pytest.mark.full
def test_a_picture_and_its_twin(page: Page, url: str) -> None:
    make(page, PROMPT, "displaced-patch:warmup_steps=1", Seed=3, Steps=6)
    expect(page.locator("#stage-state")).to_contain_text("done in", timeout=LONG)
    expect(page.locator("#rank-rows tr")).to_have_count(2)
    page.wait_for_selector("#stage-media img:not(.preview)")
    shown = pixels(page, "#stage-media img")
    address = page.get_by_role("link", name="Save").get_attribute("href")
    with urllib.request.urlopen(f"{url}{address}") as reply:
        assert (shown == np.asarray(Image.open(io.BytesIO(reply.read())).convert("RGB"))).all()
    page.get_by_role("button", name="Compare with its serial twin").click()
    expect(page.get_by_text("Largest difference", exact=True)).to_be_visible(timeout=LONG)
    first, second, apart = (pixels(page, f"#pair figure:nth-child({place}) img") for place in (1, 2, 3))
    assert (first == shown).all()
    levels = np.abs(first.astype(int) - second)
    assert levels.max() > 0, "an approximate strategy that is exact shows nothing"
    expect(page.get_by_role("region", name="Serial twin")).to_contain_text(f"{levels.max()} of 255 levels")
    assert ((apart.max(axis=-1) == 255) == (levels.max(axis=-1) == levels.max())).all(), "white is where most differs"
    page.reload()
    expect(page.get_by_text("Largest difference", exact=True)).to_be_visible()
    expect(page.locator("#tiles li").filter(has_text=PROMPT)).to_have_count(1)


@pytest.mark.full
def test_a_running_job_is_seen_after_a_reload_and_cancelled(page: Page) -> None:
    make(page, "a green triangle", "ulysses", Steps=200)
    page.wait_for_function("() => document.getElementById('stage-bar').value > 0")
    page.wait_for_selector("#stage-media img.preview")
    page.goto("/")
    expect(page.get_by_role("heading", name="a green triangle")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#stage-state")).to_have_text("cancelled")
    expect(page.locator("#tiles")).to_contain_text("cancelled")


@pytest.mark.full
def test_what_the_ranks_refuse_is_a_sentence(page: Page) -> None:
    make(page, "a green triangle", "ring:degree=3")
    fault = page.locator("#create-fault")
    expect(fault).to_contain_text("3")
    expect(fault).to_contain_text("rank")

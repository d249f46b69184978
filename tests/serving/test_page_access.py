"""The page by keyboard, on a narrow screen, in the dark, and for screen readers, in a real browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serving.browser import lacking, opened, png
from tests.serving.page_stand_in import StandIn, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

if lacking():
    pytest.skip(lacking() or "", allow_module_level=True)

from playwright.sync_api import expect

JOB = "job-0001"
FOCUSED = """() => { const e = document.activeElement; const s = getComputedStyle(e);
  const r = e.getBoundingClientRect();
  return [e.id || e.textContent.trim(), s.outlineStyle, parseFloat(s.outlineWidth), r.width * r.height] }"""


@pytest.fixture
def server() -> StandIn:
    return StandIn()


def test_the_form_by_keyboard_alone(page: Page, server: StandIn) -> None:
    expect(page.get_by_role("button", name="Make")).to_be_visible()
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        name, style, width, area = page.evaluate(FOCUSED)
        assert style != "none" and width >= 2, f"the focus on {name} cannot be seen"
        assert area > 0, f"{name} has the focus and is not shown"
        seen.append(name)
        if name == "make":
            break
    order = ["prompt", "model", "strategy", "width", "height", "steps", "count", "seed", "new-seed"]
    places = [seen.index(name) for name in order]
    assert places == sorted(places), seen
    assert seen[0] == "Skip to the content"
    page.locator("#prompt").focus()
    page.keyboard.type("by keyboard")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("heading", name="by keyboard")).to_be_visible()
    assert server.requests[0]["prompt"] == "by keyboard"


@pytest.mark.full
def test_cancel_by_keyboard_keeps_the_focus_in_place(page: Page, server: StandIn) -> None:
    server.add(status="in_progress", prompt="at work")
    page.reload()
    page.get_by_role("button", name="Cancel").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#stage-state")).to_have_text("cancelled")
    expect(page.locator("#stage")).to_be_focused()


@pytest.mark.full
def test_screen_readers_hear_quarters_and_not_steps(page: Page, server: StandIn) -> None:
    server.add(status="in_progress", prompt="at work", steps=100)
    page.reload()
    assert server.wait(lambda: bool(server.streams.get(JOB)))
    expect(page.get_by_role("status")).to_have_text("Running, 0 percent")
    page.evaluate(
        """() => { window.heard = []; new MutationObserver(() => heard.push(live.textContent))
        .observe(live, { childList: true }) }"""
    )
    for step in range(1, 100):
        server.change(JOB, step=step, progress=step)
    server.finish(JOB, {"a.png": png(1)})
    expect(page.locator("#live")).to_have_text("The job is done.")
    heard = page.evaluate("heard")
    assert heard == [*(f"Running, {part} percent" for part in (25, 50, 75)), "The job is done."]


@pytest.mark.parametrize("width", [pytest.param(400, marks=pytest.mark.full), 320])
def test_narrow(browser: Browser, server: StandIn, width: int) -> None:
    ranks = [{"rank": rank, "bytes_sent": 10**9 * rank, "seconds_waiting": 100.0} for rank in range(4)]
    advice = "usp:ulysses_degree=2,ring_degree=2 with step-cache:threshold=0.08, predicted 4.2 to 5.1 s. " * 3
    server.add(
        prompt="a_very_long_word_" * 12, ranks=ranks, advice=advice, strategy="usp:ulysses_degree=2,ring_degree=2"
    )
    server.add(strategy="serial", twin_of=JOB)
    server.files["difference.png"] = png(3)
    server.jobs[JOB].update(twin="job-0002", max_abs_diff=1e-9, psnr_to_serial=999)
    with serve(server) as url, opened(browser, url, viewport={"width": width, "height": 800}) as page:
        expect(page.get_by_role("button", name="Make")).to_be_visible()
        for id in (JOB, "job-0002"):
            server.finish(id, {f"{id}.png": png(1)})
        for place in ("/#create", f"/#job={JOB}", "/#chat"):
            page.goto(place)
            page.reload()
            if "job" in place:
                expect(page.get_by_text("PSNR to the twin")).to_be_visible()
            wide = page.evaluate("() => [document.documentElement.scrollWidth, innerWidth]")
            assert wide[0] <= wide[1], f"{place} scrolls sideways: {wide}"
        narrow = page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, .button")]
            .filter(e => e.offsetParent && e.getBoundingClientRect().height < 40).map(e => e.id)"""
        )
        assert not narrow, f"too low to touch: {narrow}"


@pytest.mark.full
def test_dark_follows_the_system(browser: Browser, server: StandIn) -> None:
    shades = {}
    with serve(server) as url:
        for scheme in ("light", "dark"):
            with opened(browser, url, color_scheme=scheme) as page:
                expect(page.get_by_role("button", name="Make")).to_be_visible()
                shades[scheme] = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert shades == {"light": "rgb(251, 250, 248)", "dark": "rgb(22, 21, 19)"}


def test_every_control_has_a_name(page: Page, server: StandIn) -> None:
    server.add(n=2, prompt="two")
    server.finish(JOB, {"a.png": png(1), "b.png": png(2)})
    page.goto(f"/#job={JOB}")
    expect(page.get_by_role("heading", name="two")).to_be_visible()
    for role in ("button", "link", "combobox", "spinbutton", "textbox"):
        for control in page.get_by_role(role).all():
            described = control.aria_snapshot().splitlines()[0]
            assert '"' in described, f"without a name: {described}"

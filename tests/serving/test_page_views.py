"""More of the page: what a comparison showed, long prompts, phones, and the operator's view, with a stand-in server."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.browser import field, lacking, opened, png
from tests.serving.page_stand_in import StandIn, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

if lacking():
    pytest.skip(lacking() or "", allow_module_level=True)

from playwright.sync_api import expect

JOB = "job-0001"


@pytest.fixture
def server() -> StandIn:
    return StandIn()


@pytest.mark.parametrize(
    ("psnr", "seconds", "words"),
    [
        pytest.param(31.0, 3.0, "can be seen where one looks for it", marks=pytest.mark.full),
        (8.0, 1.5, "Here it is another picture. It was slower than one worker"),
    ],
)
def test_a_comparison_says_what_came_of_it(
    page: Page, server: StandIn, psnr: float, seconds: float, words: str
) -> None:
    ended: dict[str, Any] = {"status": "completed", "outputs": [{"url": "/v1/files/a.png", "kind": "image"}]}
    server.files |= {"a.png": png(5), "difference.png": png(8)}
    server.add(**ended, seconds=2.0, twin="job-0002", max_abs_diff=0.7, psnr_to_serial=psnr, **{"class": "approximate"})
    server.add(**ended, seconds=seconds, twin_of=JOB, strategy="serial")
    page.evaluate(f"location.hash = 'job={JOB}'")
    expect(page.get_by_role("region", name="Serial twin")).to_contain_text(words)


@pytest.mark.full
def test_a_long_prompt_leaves_the_picture_in_sight(page: Page, server: StandIn) -> None:
    server.files["a.png"] = png(5, 400)
    outputs = [{"url": "/v1/files/a.png", "kind": "image"}]
    server.add(status="completed", prompt="a circle, " * 160, outputs=outputs, seconds=1.0)
    page.evaluate(f"location.hash = 'job={JOB}'")
    page.get_by_role("button", name="Show all of it").click()
    tall = page.locator("#stage-prompt").evaluate("title => title.clientHeight")
    page.get_by_role("button", name="Show less of it").click()
    assert page.locator("#stage-prompt").evaluate("title => title.clientHeight") < tall / 3
    page.get_by_role("button", name="Full size").click()
    assert page.locator("#large-frame img").evaluate("async image => (await image.decode(), image.clientWidth)") == 400
    page.get_by_role("button", name="Close").last.click()
    expect(page.locator("#large-view")).to_be_hidden()


@pytest.mark.full
def test_a_tile_on_a_phone_shows_its_job_and_old_news_goes(browser: Browser, server: StandIn) -> None:
    server.files["a.png"] = png(5)
    outputs = [{"url": "/v1/files/a.png", "kind": "image"}]
    for _ in range(12):
        server.add(status="completed", outputs=outputs, seconds=1.0)
    with serve(server) as url, opened(browser, f"{url}#job=nobody") as page:
        page.set_viewport_size({"width": 390, "height": 800})
        notice = page.get_by_role("alert").filter(has_text="there is no job 'nobody'")
        expect(notice).to_be_visible()
        page.locator("#tiles a").last.click()
        expect(page.locator("#stage-prompt")).to_be_in_viewport()
        expect(notice).to_be_hidden()


@pytest.mark.full
def test_an_operator_sees_the_server(browser: Browser, server: StandIn) -> None:
    replicas = [{"ready": True, "jobs": 2, "memory": 1_500_000_000}]
    model = {"id": "shapes", "kind": "image", "ready": True, "replicas": replicas, "waiting": 3, "running": 2}
    error = {"job": JOB, "model": "shapes", "user": "ada", "at": 1_800_000_000, "message": "<b>too large</b>"}
    with serve(server) as url, opened(browser, url) as page:
        expect(page.get_by_role("link", name="Create")).to_be_visible()
        expect(page.get_by_role("link", name="Server")).to_be_hidden()
        server.operator = {
            "up_seconds": 90, "leaves": False, "unwritten_jobs": 0, "disk": {"free": 5e9, "total": 9e9},
            "models": [{**model, "trouble": None}], "errors": [error],
            "users": [{"name": "ada", "jobs": 5, "unfinished": 5, "seconds": 12.5}],
            "measured": False, "measuring": False, "measure_fault": None,
        }  # fmt: skip
        page.reload()
        page.get_by_role("link", name="Server").click()
        view = page.locator("#server-view")
        for words in ("up for 1:30 min", "5.00 GB of the disk free", "2 jobs, 1.50 GB", "12.5 s", "<b>too large</b>"):
            expect(view).to_contain_text(words)
        page.get_by_role("button", name="Restart ranks").click()
        assert server.wait(lambda: {"restart": True} in server.requests)
        expect(view).to_contain_text("This machine was not measured.")
        page.get_by_role("button", name="Measure it").click()
        expect(view).to_contain_text("This machine is being measured")
        assert {"calibrate": True} in server.requests
        expect(page.get_by_role("button", name="Measure it")).to_be_disabled()
        server.operator |= {"measuring": False, "measured": True}
        expect(page.locator("#measure")).to_be_hidden()


@pytest.mark.full
def test_an_operator_is_led_from_advice_to_a_measurement(browser: Browser, server: StandIn) -> None:
    advice = "ulysses, which is exact and suits most models: this machine was not measured; run `partsong calibrate`"
    server.add(status="completed", advice=advice)
    with serve(server) as url, opened(browser, f"{url}#job={JOB}") as page:
        expect(page.locator("#stage-advice")).to_have_text(advice)
        expect(page.get_by_role("link", name="Measure this machine")).to_be_hidden()
        server.operator = {"models": [], "users": [], "errors": [], "up_seconds": 1, "disk": {"free": 1, "total": 1}}
        page.reload()
        expect(page.get_by_role("link", name="Measure this machine")).to_be_visible()


def test_a_job_begins_with_chosen_pictures(page: Page, server: StandIn) -> None:
    server.models = [{**model, "most_pictures": 2} if model["id"] == "shapes" else model for model in server.models]
    page.reload()
    picker = page.get_by_label("Begin with pictures (2 at most)")
    files: Any = [{"name": f"{value}.png", "mimeType": "image/png", "buffer": png(value)} for value in (10, 200)]
    picker.set_input_files(files)
    expect(page.locator("#given img")).to_have_count(2)
    picker.set_input_files([*files, files[0]])
    expect(page.locator("#pictures-fault")).to_have_text("Choose 2 at most.")
    expect(page.locator("#given img")).to_have_count(0)
    picker.set_input_files(files[:1])
    field(page, "Prompt").fill("blue instead")
    page.get_by_role("button", name="Make").click()
    assert server.wait(lambda: bool(server.requests))
    (url,) = server.requests[0]["pictures"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == png(10)
    field(page, "Model").select_option("motion")
    expect(page.locator("#pictures-field")).to_be_hidden()

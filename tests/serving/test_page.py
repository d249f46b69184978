"""The page of the server, in a real browser, with a stand-in server that holds still what passes in a blink."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from partsong.serving.errors import ApiError
from tests.serving.browser import field, lacking, opened, pixels, png
from tests.serving.page_stand_in import StandIn, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

if lacking():
    pytest.skip(lacking() or "", allow_module_level=True)

from playwright.sync_api import expect

JOB = "job-0001"
RUNNING = {"status": "in_progress", "position": 0, "started_at": 1_800_000_000}
RANKS = [
    {"rank": 0, "bytes_sent": 1_250_000, "seconds_waiting": 0.42},
    {"rank": 1, "bytes_sent": 990, "seconds_waiting": 12.0},
]


@pytest.fixture
def server() -> StandIn:
    return StandIn()


def make(page: Page, server: StandIn, prompt: str = "a red circle") -> dict[str, Any]:
    """Sends the form and waits until the page follows the job."""
    field(page, "Prompt").fill(prompt)
    page.get_by_role("button", name="Make").click()
    assert server.wait(lambda: any(server.streams.values())), "the page follows no job"
    return server.jobs[max(server.jobs)]


def same(shown: np.ndarray, content: bytes) -> bool:
    return bool((shown == np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))).all())


def test_a_picture_from_the_form_to_the_gallery(page: Page, server: StandIn) -> None:
    field(page, "Strategy").select_option("ring")
    field(page, "Width").fill("128")
    field(page, "Steps").fill("12")
    field(page, "Seed").fill("42")
    make(page, server)
    assert server.requests == [
        {
            **{"kind": "image", "model": "shapes", "prompt": "a red circle", "strategy": "ring", "size": "128x64"},
            **{"n": 1, "seed": 42, "num_inference_steps": 12},
        }
    ]
    server.change(JOB, position=3)
    expect(page.get_by_text("3rd in the queue").first).to_be_visible()
    server.change(JOB, **RUNNING, step=3, steps=12, progress=25, ranks=RANKS)
    expect(page.get_by_text("Step 3 of 12")).to_be_visible()
    expect(page.get_by_role("progressbar", name="Progress")).to_have_js_property("value", 25)
    expect(page.get_by_role("row", name="0 1.25 MB 0.42 s")).to_be_visible()
    expect(page.get_by_role("row", name="1 990 B 12.0 s")).to_be_visible()
    server.preview(JOB, png(1, 16))
    expect(page.locator("#stage-media img.preview")).to_be_visible()
    assert same(pixels(page, "#stage-media img"), png(1, 16))
    server.finish(JOB, {"a.png": png(2)}, seconds=3.25)
    expect(page.get_by_text("done in 3.3 s")).to_be_visible()
    page.wait_for_selector("#stage-media img:not(.preview)")
    assert same(pixels(page, "#stage-media img"), png(2))
    assert same(pixels(page, "#tiles img"), png(2))
    expect(page.get_by_role("button", name="Cancel")).to_be_hidden()


@pytest.mark.full
def test_below_the_path_of_a_proxy(browser: Browser, server: StandIn) -> None:
    with serve(server, root="/pictures") as url, opened(browser, url) as page:
        make(page, server)
        server.finish(JOB, {"a.png": png(2)})
        page.wait_for_selector("#stage-media img:not(.preview)")
        assert same(pixels(page, "#stage-media img"), png(2))
        assert page.evaluate("document.getElementById('save').href") == f"{url}/v1/files/a.png"


@pytest.mark.full
def test_what_is_not_filled_in_is_left_to_the_server(page: Page, server: StandIn) -> None:
    make(page, server)
    (body,) = server.requests
    assert 0 <= body.pop("seed") < 2**32
    assert body == {"kind": "image", "model": "shapes", "prompt": "a red circle", "strategy": "auto", "n": 1}
    server.change(JOB, advice="ulysses: 0.42 s predicted, serial 0.71 s.")
    expect(page.get_by_text("ulysses: 0.42 s predicted")).to_be_visible()


def test_jobs_survive_a_reload(page: Page, server: StandIn) -> None:
    for number in range(1, 31):
        server.add(prompt=f"picture {number}")
        server.finish(f"job-{number:04d}", {f"{number}.png": png(number)})
    running = server.add(prompt="still at work", **RUNNING)
    page.reload()
    expect(page.get_by_role("heading", name="still at work")).to_be_visible()
    tiles = page.get_by_role("list").get_by_role("link")
    expect(tiles).to_have_count(24)
    page.get_by_role("button", name="Show older ones").click()
    expect(tiles).to_have_count(31)
    prompts = page.locator("#tiles .line").all_inner_texts()
    assert prompts == ["still at work", *(f"picture {number}" for number in range(30, 0, -1))]
    page.get_by_role("link", name="picture 7 ", exact=False).first.click()
    expect(page.get_by_role("heading", name="picture 7")).to_be_visible()
    assert same(pixels(page, "#stage-media img"), png(7))
    page.reload()
    expect(page.get_by_role("heading", name="picture 7")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", name=running["prompt"])).to_be_visible()


def test_a_job_that_is_opened_while_the_page_still_loads_stays_open(page: Page, server: StandIn) -> None:
    server.add(n=2, prompt="two")
    server.finish(JOB, {"a.png": png(3), "b.png": png(4)})
    held: list[Route] = []

    def asked(times: int) -> None:
        while len(held) < times:
            page.title()  # Requests come to light while something is awaited of the browser.

    page.goto("about:blank")
    page.route("**/v1/jobs?limit=*", lambda route: held.append(route))
    page.goto("/")
    asked(1)
    page.evaluate("job => { location.hash = `job=${job}`; }", JOB)
    asked(2)
    first, later = held
    later.continue_()
    second = page.get_by_role("button", name="two (2 of 2)")
    expect(second).to_be_visible()
    with page.expect_response("**/v1/jobs?limit=*") as listed:
        first.continue_()
    listed.value.finished()
    page.wait_for_load_state("networkidle")
    expect(second).to_be_visible()


@pytest.mark.full
def test_several_pictures_and_their_settings_again(page: Page, server: StandIn) -> None:
    server.add(n=2, prompt="two", strategy="ring:ring_degree=2", seed=99)
    server.finish(JOB, {"a.png": png(3), "b.png": png(4)})
    page.goto(f"/#job={JOB}")
    second = page.get_by_role("button", name="two (2 of 2)")
    second.click()
    expect(second).to_have_attribute("aria-pressed", "true")
    expect(page.get_by_role("link", name="Save picture 2")).to_have_attribute("href", "/v1/files/b.png")
    page.get_by_role("button", name="Use these settings").click()
    expect(field(page, "Prompt")).to_have_value("two")
    expect(field(page, "Strategies and their settings")).to_have_value("ring:ring_degree=2")
    expect(field(page, "Seed")).to_have_value("99")


def test_cancel(page: Page, server: StandIn) -> None:
    make(page, server)
    server.change(JOB, **RUNNING)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#stage-state")).to_have_text("cancelled")
    assert server.jobs[JOB]["status"] == "cancelled"
    expect(page.get_by_role("status")).to_have_text("The job is cancelled.")


def test_the_twin_side_by_side(page: Page, server: StandIn) -> None:
    make(page, server)
    server.change(JOB, steps=8)
    server.finish(JOB, {"a.png": png(5)}, seconds=2.0, **{"class": "approximate"})
    page.get_by_role("button", name="Compare with its serial twin").click()
    assert server.wait(lambda: bool(server.streams.get("job-0002"))), "nobody follows the twin"
    server.change("job-0002", **RUNNING, step=2)
    expect(page.get_by_text("step 2 of 8")).to_be_visible()
    server.preview("job-0002", png(6, 16))
    expect(page.locator("#pair figure:nth-child(2) img.preview")).to_be_visible()
    server.files["difference.png"] = png(8)
    server.jobs[JOB].update(max_abs_diff=3 / 255, psnr_to_serial=41.25)
    server.finish("job-0002", {"twin.png": png(7)}, seconds=3.0)
    region = page.get_by_role("region", name="Serial twin")
    expect(region).to_contain_text("0.012")
    expect(region).to_contain_text("3 of 255 levels")
    expect(region).to_contain_text("41.3 dB")
    expect(region).to_contain_text("1.50 times as fast as the twin")
    expect(region).to_contain_text("This strategy is approximate")
    expect(region).to_contain_text("Here the difference is hard to see.")
    page.get_by_label("Twin on the left, this job on the right").fill("20")
    over = page.locator("#slide-frame img + img")
    assert over.evaluate("image => getComputedStyle(image).clipPath") == "inset(0px 80% 0px 0px)"
    assert same(pixels(page, "#slide-frame img + img"), png(7))
    page.wait_for_selector("#pair figure:nth-child(2) img:not(.preview)")
    for place, seed in ((1, 5), (2, 7), (3, 8)):
        assert same(pixels(page, f"#pair figure:nth-child({place}) img"), png(seed))
    page.reload()
    expect(page.get_by_role("region", name="Serial twin")).to_contain_text("41.3 dB")
    expect(page.get_by_role("list").get_by_role("link")).to_have_count(1)


def test_errors_are_sentences(page: Page, server: StandIn) -> None:
    server.refuse["POST /v1/jobs"] = ApiError(429, "64 jobs wait already.", retry_after=4)
    field(page, "Prompt").fill("a circle")
    page.get_by_role("button", name="Make").click()
    expect(page.get_by_role("alert").filter(has_text="64 jobs wait already. (Try again in 4 s.)")).to_be_visible()
    make(page, server)
    server.change(JOB, status="failed", error={"code": "refused", "message": "ring needs 2 ranks, found 1."})
    expect(page.get_by_role("alert").filter(has_text="ring needs 2 ranks, found 1.")).to_be_visible()
    field(page, "Steps").fill("0")
    page.get_by_role("button", name="Make").click()
    expect(page.get_by_role("alert").filter(has_text="Steps:")).to_be_visible()
    expect(field(page, "Steps")).to_be_focused()
    field(page, "Steps").fill("")
    field(page, "Prompt").fill("   ")
    page.get_by_role("button", name="Make").click()
    expect(page.get_by_role("alert").filter(has_text="Write what should be made.")).to_be_visible()
    page.goto("/#job=nobody")
    expect(page.get_by_role("alert").filter(has_text="there is no job 'nobody'")).to_be_visible()
    assert len(server.requests) == 1


@pytest.mark.full
def test_a_lost_connection_is_made_again(page: Page, server: StandIn) -> None:
    make(page, server)
    server.change(JOB, **RUNNING, step=1)
    expect(page.get_by_text("Step 1 of 8")).to_be_visible()
    first = len(server.streams[JOB])
    server.jobs[JOB].update(step=5)
    server.send(JOB, None)
    assert server.wait(lambda: len(server.streams[JOB]) > first), "the page did not come back"
    expect(page.get_by_text("Step 5 of 8")).to_be_visible()
    server.finish(JOB, {"a.png": png(2)})
    expect(page.get_by_text("done in")).to_be_visible()
    expect(page.get_by_text("The connection was lost")).to_be_hidden()


@pytest.mark.full
def test_a_server_that_is_gone(browser: Browser, server: StandIn) -> None:
    with serve(server) as url, opened(browser, url) as page:
        field(page, "Prompt").fill("a circle")  # once it is there
        page.context.set_offline(True)
        page.get_by_role("button", name="Make").click()
        expect(page.get_by_text("The server does not answer. Is it still running?").last).to_be_visible()


def test_the_key(browser: Browser) -> None:
    server = StandIn(key="right")
    server.add(prompt="behind the key")
    server.files["a.png"] = png(9)
    server.jobs[JOB].update(status="completed", outputs=[{"url": "/v1/files/a.png", "kind": "image"}])
    with serve(server) as url, opened(browser, url) as page:
        box = field(page, "Key")
        expect(box).to_be_focused()
        box.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text="wants a key and got another one")).to_be_visible()
        box.fill("right")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="behind the key").click()
        assert same(pixels(page, "#stage-media img"), png(9))
        assert str(page.locator("#stage-media img").get_attribute("src")).startswith("blob:")
        make(page, server)
        server.change("job-0002", **RUNNING, step=4)
        expect(page.get_by_text("Step 4 of 8")).to_be_visible()
        page.reload()
        expect(page.get_by_text("Step 4 of 8")).to_be_visible()
        page.get_by_role("button", name="Forget key").click()
        expect(box).to_be_focused()


@pytest.mark.parametrize("key", [pytest.param(None, marks=pytest.mark.full), "right"])
def test_a_video_plays_while_it_grows(browser: Browser, tmp_path: Path, key: str | None) -> None:
    from partsong.videos import save_video

    frames = [np.full((64, 64, 3), 8 * index, np.uint8) for index in range(32)]
    content = save_video(frames, tmp_path / "v.mp4", fps=8).read_bytes()
    server = StandIn(key=key)
    with serve(server) as url, opened(browser, url) as page:
        if key:
            field(page, "Key").fill(key)
            page.keyboard.press("Enter")
        field(page, "Model").select_option("motion")
        field(page, "Frames").fill("32")
        make(page, server)
        assert server.requests[0]["num_frames"] == 32
        # Up to the third of its four fragments: what a pipeline has written so far.
        half = [match.start() for match in re.finditer(b"moof", content)][2] - 4
        server.grow("v.mp4", content[:half])
        server.change(JOB, **RUNNING, step=2, outputs=[{"url": "/v1/files/v.mp4", "kind": "video"}])
        video = page.locator("#stage-media video")
        expect(video).to_be_visible()
        page.wait_for_function("() => document.querySelector('#stage-media video').currentTime > 0.5")
        assert server.jobs[JOB]["status"] == "in_progress"
        server.grow("v.mp4", content[half:])
        server.grow("v.mp4", None)
        server.finish(JOB, {"v.mp4": content}, kind="video")
        expect(video).to_have_js_property("loop", True)
        page.wait_for_function("() => document.querySelector('#stage-media video').readyState >= 2")


def test_a_chat_shows_its_threads(page: Page, server: StandIn) -> None:
    page.get_by_role("link", name="Chat").click()
    expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    field(page, "Model").select_option("sums")
    page.get_by_role("textbox", name="Message").fill("What is 2 + 2?")
    field(page, "Strategy").fill("self-consistency:num=2")
    page.get_by_role("textbox", name="Message").press("Enter")
    for thread, text in (("a", "two and "), ("b", "2 + 2"), ("a", "two are four")):
        news = {"thread": thread, "label": f"branch {thread}", "text": text, "status": "running"}
        server.say({"choices": [], "partsong": news})
    expect(page.get_by_role("group", name="Text of branch a")).to_have_text("two and two are four")
    expect(page.get_by_text("2 threads, 2 running")).to_be_visible()
    server.say({"choices": [], "partsong": {"thread": "b", "label": "branch b", "text": "", "status": "cancelled"}})
    expect(page.get_by_text("2 threads, 1 running")).to_be_visible()
    for text in ("The answer ", "is <b>4</b>."):
        server.say({"choices": [{"index": 0, "delta": {"content": text}}]})
    expect(page.locator(".turn.assistant .said")).to_have_text("The answer is <b>4</b>.")
    report = {"answer": "4", "calls": 2, "tokens_critical": 1200, "tokens_cancelled": 1, "rule": None, "seed": 0}
    server.say({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "partsong": report})
    server.say({"choices": [], "usage": {"prompt_tokens": 30, "completion_tokens": 2210, "total_tokens": 2240}})
    server.say(None)
    costs = "Answer: 42,210 tokens written · 1,200 one after another · 1 cancelled · 30 read · 2 calls · seed 0"
    expect(page.locator(".usage")).to_have_text(costs)
    expect(page.get_by_role("group", name="Text of branch a")).to_be_hidden()
    page.get_by_text("2 threads").click()
    expect(page.get_by_role("group", name="Text of branch a")).to_be_visible()
    body = server.requests[0]
    assert body["model"] == "sums:self-consistency:num=2"
    assert body["stream_options"] == {"include_usage": True, "include_threads": True}
    page.get_by_role("textbox", name="Message").fill("And 3 + 3?")
    page.get_by_role("button", name="Send").click()
    assert server.wait(lambda: len(server.requests) == 2), "the second question did not arrive"
    assert [message["role"] for message in server.requests[1]["messages"]] == ["user", "assistant", "user"]
    server.say(None)
    page.reload()
    expect(page.locator(".turn.assistant .said").first).to_have_text("The answer is <b>4</b>.")


@pytest.mark.full
def test_stopping_an_answer_hangs_up(page: Page, server: StandIn) -> None:
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("textbox", name="Message").fill("Count to a million")
    page.get_by_role("button", name="Send").click()
    server.say({"choices": [{"index": 0, "delta": {"content": "1, 2, 3"}}]})
    expect(page.get_by_text("1, 2, 3")).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    assert server.hung_up.wait(15), "the server was not hung up on"
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    server.refuse["POST /v1/chat/completions"] = ApiError(400, "no model of that name is served.")
    page.get_by_role("textbox", name="Message").fill("Again")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("alert").filter(has_text="no model of that name is served.")).to_be_visible()
    expect(page.get_by_role("textbox", name="Message")).to_have_value("Again")

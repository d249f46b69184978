"""What tests of the server share: one living server of two ranks, which takes seconds to start, and browsers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.browser import chromium, opened
from tests.serving.page_stand_in import serve
from tests.serving.running import RunningServer, running

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def inpainting(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pipeline that begins with a picture and a mask, and the folder where it is."""
    from diffusers import StableDiffusionInpaintPipeline

    from partsong import zoo

    folder = tmp_path_factory.mktemp("pipelines") / "edits"
    pipe: Any = StableDiffusionInpaintPipeline(**zoo.load("shapes-unet").components, requires_safety_checker=False)
    pipe.save_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe, folder


@pytest.fixture(scope="session")
def living(inpainting: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of pictures, videos, and edits on two ranks; four jobs take turns, and eight may wait.

    In the end it is asked to end, and its ranks are to end too.
    """
    models = ("--model", "shapes", "--model", "motion", "--model", str(inpainting[1]))
    names = ("gpt-image-1=shapes", "dall-e-3=shapes", "gpt-image-1.5=edits", "sora-2=motion")
    models += tuple(f"--served-name={name}" for name in names)
    limits = ("--nproc", "2", "--max-active", "4", "--max-waiting", "8", "--memory", "4")
    with running(tmp_path_factory.mktemp("served"), *models, *limits) as server:
        yield server
        ranks = server.ranks()
        assert server.stop() in (0, -15)  # by the signal itself, once all is closed
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != "zombie"]


@pytest.fixture
def server(living: RunningServer) -> RunningServer:
    """The living server, once all ranks are there: a test before may have ended some."""
    living.wait_ready()
    return living


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser; while it is there, no test of the same process may run a loop of its own."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Any) -> Iterator[Page]:
    """The page of a server that stands in for the living one; files of tests name it `server`."""
    with serve(server) as url, opened(browser, url) as page:
        yield page

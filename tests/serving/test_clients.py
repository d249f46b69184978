"""What well-known clients send, by their documentation: each request is answered as ours says.

`client_requests.json` holds the requests; a text in ``says`` has to stand in the reply.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from partsong.serving.app import build_app
from partsong.serving.served_names import ServedNames
from partsong.serving.texts.limits import TextLimits
from tests.serving.taker import Taker, png, service
from tests.serving.text_server import LONG, EngineText, LoopThread, listening

REQUESTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("client_requests.json").read_text())
NAMES = {"gpt-image-1": "none", "dall-e-3": "none", "gpt-image-1.5": "one", "sora-2": "motion", "gpt-4o": "sums"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the models behind the names that clients have built in."""
    loop = LoopThread()
    text = EngineText("sums", TextLimits())
    models = (service("none", "image"), service("one", "image"), service("motion", "video"))
    folder = tmp_path_factory.mktemp("served")
    server = Taker(models=models, texts={"sums": text}, folder=folder, served_names=ServedNames(NAMES))
    server.prepare()
    with listening(build_app(server), loop) as address:
        yield address.removesuffix("/v1")
    loop.run(text.close())
    loop.close()


@pytest.mark.parametrize("asked", REQUESTS, ids=[f"{each['client']}: {each['asks']}" for each in REQUESTS])
def test_what_clients_send_is_answered(url: str, asked: dict[str, Any]) -> None:
    more: dict[str, Any] = {"json": asked["json"]} if "json" in asked else {}
    if "form" in asked:  # as parts of a form, also where there is no file among them
        fields = [(name, (None, value.encode())) for name, value in asked["form"].items()]
        more["files"] = [*fields, *((name, ("a.png", png("red"), "image/png")) for name in asked["pictures"])]
    reply = httpx.request(asked["method"], url + asked["path"], timeout=LONG, trust_env=False, **more)
    assert reply.status_code == asked["status"], reply.text
    assert [text for text in asked["says"] if text not in reply.text] == [], reply.text[:2000]
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

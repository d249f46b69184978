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

from partsong.serving.texts.limits import TextLimits
from tests.serving.running import RunningServer
from tests.serving.test_sent_pictures import png
from tests.serving.text_server import LONG, EngineText, LoopThread, serving

REQUESTS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("client_requests.json").read_text())


@pytest.fixture(scope="module")
def texts() -> Iterator[str]:
    """A server of a text model that is also called gpt-4o."""
    loop = LoopThread()
    text = EngineText("sums", TextLimits())
    with serving(loop, [text]) as address:
        yield address.removesuffix("/v1")
    loop.run(text.close())
    loop.close()


@pytest.mark.parametrize("asked", REQUESTS, ids=[f"{each['client']}: {each['asks']}" for each in REQUESTS])
def test_what_clients_send_is_answered(asked: dict[str, Any], request: pytest.FixtureRequest) -> None:
    is_text = asked["path"] in ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    server: RunningServer | None = None if is_text else request.getfixturevalue("server")
    url = request.getfixturevalue("texts") if server is None else server.url
    more: dict[str, Any] = {"json": asked["json"]} if "json" in asked else {}
    if "form" in asked:  # as parts of a form, also where there is no file among them
        fields = [(name, (None, value.encode())) for name, value in asked["form"].items()]
        more["files"] = [*fields, *((name, ("a.png", png("red", 64), "image/png")) for name in asked["pictures"])]
    reply = httpx.request(asked["method"], url + asked["path"], timeout=LONG, trust_env=False, **more)
    assert reply.status_code == asked["status"], reply.text
    assert [text for text in asked["says"] if text not in reply.text] == [], reply.text[:2000]
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    elif asked["path"] == "/v1/videos":  # others wait for the ranks
        httpx.delete(f"{url}/v1/videos/{reply.json()['id']}", timeout=LONG)

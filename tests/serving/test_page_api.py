"""The files of the page: what the server sends, under which policy, and whether they fit together."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs fastapi: pip install 'partsong[serve]'")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from partsong.serving import page_api
from partsong.serving.errors import ApiError

FOLDER = Path(page_api.__file__).with_name("page")
SCRIPTS = sorted(FOLDER.glob("*.js"))


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page_api.router)
    return TestClient(app)


class Elements(HTMLParser):
    """Collects (tag, attributes) of a document, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.all and self.all[-1][0] in ("script", "style"):
            self.inside += data.strip()


def test_policy_allows_only_this_server(client: TestClient) -> None:
    for path in page_api.PAGE_PATHS:
        reply = client.get(path)
        assert reply.status_code == 200, path
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"


def test_html_has_nothing_inline_and_nothing_from_elsewhere(client: TestClient) -> None:
    elements = Elements(client.get("/").text)
    for tag, attributes in elements.all:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("href", "src", "action"):
            assert (attributes.get(name) or "/")[0] in "/#", (tag, attributes)
    assert elements.inside == ""
    for path in (*SCRIPTS, FOLDER / "page.css"):
        assert not re.findall(r"https?://|@import|url\(", path.read_text()), path.name


def test_every_file_is_served_and_every_import_is_there(client: TestClient) -> None:
    assert {path.name for path in FOLDER.iterdir()} - {"page.html"} == set(page_api.ASSETS)
    for path in SCRIPTS:
        imported = re.findall(r'import \{([^}]*)\} from "\./([\w.]+)"', path.read_text())
        for names, target in imported:
            text = (FOLDER / target).read_text()
            for name in (each.strip() for each in names.split(",")):
                assert re.search(rf"export (async )?(function\*?|class|const) {re.escape(name)}(?![\w$])", text), (
                    path.name,
                    name,
                )
                uses = re.findall(rf"(?<![\w$]){re.escape(name)}(?![\w$])", path.read_text())
                assert len(uses) > 1, f"{path.name} imports {name} and does not use it"
    for name in ("page.html", "nothing.js"):
        with pytest.raises(ApiError, match="the page has no file"):
            client.get(f"/page/{name}")
    assert client.get("/page/..%2Fpage_api.py").status_code == 404


def test_scripts_name_elements_that_are_there(client: TestClient) -> None:
    ids = [attributes["id"] for _, attributes in Elements(client.get("/").text).all if attributes.get("id")]
    assert len(ids) == len(set(ids)), "an id stands twice"
    named = {name for path in SCRIPTS for name in re.findall(r'\$\("([\w-]+)"\)', path.read_text())}
    assert named <= set(ids), named - set(ids)


def test_every_field_has_a_label(client: TestClient) -> None:
    elements = Elements(client.get("/").text).all
    labels = {attributes.get("for") for tag, attributes in elements if tag == "label"}
    for tag, attributes in elements:
        if tag in ("input", "select", "textarea"):
            assert attributes.get("id") in labels, attributes
        named_elsewhere = attributes.get("aria-describedby") or attributes.get("aria-labelledby")
        if named_elsewhere:
            assert named_elsewhere in {each.get("id") for _, each in elements}, attributes


def test_scripts_write_text_and_never_markup() -> None:
    for path in SCRIPTS:
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", path.read_text()
        )
        assert not found, f"{path.name}: {found}"
        assert len(path.read_text().splitlines()) <= 400


def test_an_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/page.js")
    again = client.get("/page/page.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/page/page.js", headers={"If-None-Match": '"other"'}).status_code == 200


def tokens(scheme: str) -> dict[str, str]:
    """The colours of a scheme by name, dark ones over light ones."""
    first, second = re.findall(r":root \{(.*?)\}", (FOLDER / "page.css").read_text(), re.DOTALL)
    text = first if scheme == "light" else first + second
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    colours = tokens(scheme)
    texts = ("ink", "soft", "exact", "bounded", "approximate", "serial", "fault")
    for text, ground in itertools.product(texts, ("page", "card", "well")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["fault"], colours["fault-card"]) >= 4.5
    for edge, ground in itertools.product(("edge", "focus"), ("page", "card")):
        assert contrast(colours[edge], colours[ground]) >= 3.0, (edge, ground)

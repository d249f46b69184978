"""Checks what each user of a server sees and may have, without any ranks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from partsong.errors import ArgumentError
from partsong.serving.access.user_tables import read_users
from partsong.serving.access.users import OPERATOR, User, Users
from partsong.serving.answers.response_store import KeptResponse, ResponseStore
from partsong.serving.app import build_app
from partsong.serving.errors import ApiError
from partsong.serving.jobs import Job
from partsong.serving.messages import JobWork, Submit
from partsong.serving.ranks.desk import Desk
from partsong.serving.server import Server
from tests.serving.running import refused

ADA, BOB = User(name="ada", jobs=2, requests=1), User(name="bob")
KEYS = {"key-of-ada-0123456789": ADA, "key-of-bob-0123456789": BOB, "key-of-the-operator-01": OPERATOR}
OF = {user.name: key for key, user in KEYS.items()}


@pytest.fixture
def server(tmp_path: Path) -> Server:
    made = Server(models=(), folder=tmp_path, users=Users(KEYS))
    (tmp_path / "files").mkdir()
    for kind, suffix in (("image", "-0.png"), ("video", ".mp4")):
        name = f"{kind}_{'0' * 24}"
        made.file(name + suffix).write_bytes(b"a file")
        made.jobs[name] = Job(id=name, kind=kind, model="m", request={"prompt": "p"}, user="ada", status="completed")  # type: ignore[arg-type]
        made.jobs[name].files = (name + suffix,)
    return made


def _ask(server: Server, user: str, *asked: tuple[str, str], **more: Any) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(build_app(server))
        headers = {"Authorization": f"Bearer {OF[user]}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            return list(await asyncio.gather(*(client.request(method, path, **more) for method, path in asked)))

    return asyncio.run(ask())


IMAGE, VIDEO = f"/v1/jobs/image_{'0' * 24}", f"/v1/videos/video_{'0' * 24}"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", IMAGE),
        ("GET", f"{IMAGE}/events"),
        ("POST", f"{IMAGE}/cancel"),
        ("DELETE", IMAGE),
        ("POST", f"{IMAGE}/twin"),
        ("GET", f"{IMAGE}/difference"),
        ("GET", f"/v1/files/image_{'0' * 24}-0.png"),
        ("GET", f"/v1/files/video_{'0' * 24}.mp4"),
        ("GET", VIDEO),
        ("GET", f"{VIDEO}/content"),
        ("POST", f"{VIDEO}/remix"),
        ("DELETE", VIDEO),
    ],
)
def test_jobs_of_others_are_not_there(server: Server, method: str, path: str) -> None:
    more = {"json": {"prompt": "q"}} if path.endswith("remix") else {}
    (reply,) = _ask(server, "bob", (method, path), **more)
    assert reply.status_code == 404
    assert len(server.jobs) == 2


def test_everybody_lists_their_own_jobs_and_the_operator_all(server: Server) -> None:
    for user, num in (("ada", 2), ("bob", 0), ("", 2)):
        jobs, videos = _ask(server, user, ("GET", "/v1/jobs")) + _ask(server, user, ("GET", "/v1/videos"))
        assert len(jobs.json()["data"]) == num
        assert len(videos.json()["data"]) == num // 2
    (reply,) = _ask(server, "ada", ("GET", IMAGE))
    assert reply.json()["user"] == "ada"
    (reply,) = _ask(server, "ada", ("GET", f"/v1/files/image_{'0' * 24}-0.png"))
    assert reply.content == b"a file"


def test_a_user_has_so_many_requests_at_a_time(server: Server) -> None:
    async def two() -> list[int]:
        app, is_asked, waits = build_app(server), asyncio.Event(), asyncio.Event()

        @app.get("/slow")
        async def slow() -> str:
            is_asked.set()
            await waits.wait()
            return "done"

        headers = {"Authorization": f"Bearer {OF['ada']}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            first = asyncio.create_task(client.get("/slow", headers=headers))
            await is_asked.wait()
            second = await client.get("/v1/jobs", headers=headers)
            other = await client.get("/v1/jobs", headers={"Authorization": f"Bearer {OF['bob']}"})
            waits.set()
            third = [(await first).status_code, (await client.get("/v1/jobs", headers=headers)).status_code]
            return [second.status_code, other.status_code, *third]

    assert asyncio.run(two()) == [429, 200, 200, 200]


def test_a_user_has_so_many_jobs_at_a_time() -> None:
    jobs = [Job(id=str(n), kind="image", model="m", request={}, user="ada") for n in range(2)]
    with pytest.raises(ApiError, match="2 jobs of ada wait or run already, and 2 may") as refusal:
        ADA.check_jobs(jobs)
    assert (refusal.value.status, refusal.value.code) == (429, "user_jobs")
    jobs[0].status = "completed"
    ADA.check_jobs(jobs)
    BOB.check_jobs(jobs)


def test_responses_of_others_are_not_there() -> None:
    store = ResponseStore()
    store.keep(KeptResponse(reply={"id": "r"}, turns=(), owner="ada"))
    assert store.find("r", ADA) is store.find("r", OPERATOR)
    with pytest.raises(ApiError, match="no response 'r'"):
        store.find("r", BOB)


def test_metrics_name_users(server: Server) -> None:
    _ask(server, "bob", ("GET", "/v1/jobs"))
    job = server.jobs[f"image_{'0' * 24}"]
    job.seconds = 2.5
    server.metrics.note_end(job)
    text = server.metrics.text().decode()
    assert 'partsong_user_requests_total{user="bob"} 1.0' in text
    assert 'partsong_user_jobs_total{status="completed",user="ada"} 1.0' in text
    assert 'partsong_user_seconds_total{user="ada"} 2.5' in text


def test_users_begin_their_jobs_in_turn() -> None:
    desk = Desk(lambda names: bool(names), max_rows=8, max_active=3)
    for name in ("a1", "a2", "a3", "a4", "b1"):
        work = JobWork(id=name, prompt="p", arguments={}, out=(), strategies=("ulysses",), user=name[0])
        desk.take(Submit(work))
    assert [work.id for work in desk.orders().begun] == ["a1", "b1", "a2"]
    desk.forget("a1")
    desk.take(Submit(JobWork(id="b2", prompt="p", arguments={}, out=(), strategies=("ulysses",), user="b")))
    assert [work.id for work in desk.orders().begun] == ["a3"]


def test_jobs_that_run_alone_alternate_between_users() -> None:
    desk = Desk(lambda names: False, max_rows=8, max_active=3)
    for name in ("a1", "a2", "b1", "b2"):
        desk.take(Submit(JobWork(id=name, prompt="p", arguments={}, out=(), user=name[0])))
    begun = []
    for _ in range(4):
        orders = desk.orders()
        assert orders.whole is not None
        begun.append(orders.whole.id)
        desk.charge(orders, 1.0)
    assert begun == ["a1", "b1", "a2", "b2"]


GOOD = {"name": "ada", "key": "key-of-ada-0123456789"}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([{"key": GOOD["key"]}], "name is missing"),
        ([{"name": "ada"}], "user ada has either a key or a key_file"),
        ([{**GOOD, "key_file": "x"}], "user ada has either a key or a key_file"),
        ([{"name": "ada", "key_file": "none"}], "key_file of user ada cannot be read"),
        ([{**GOOD, "key": "short"}], "the key of user ada has 5 characters"),
        ([{**GOOD, "quota": 3}], "quota is not known here"),
        ([{**GOOD, "max_jobs": 0}], "max_jobs=0"),
        ([{**GOOD, "max_jobs": "3"}], 'max_jobs="3"'),
        ([{**GOOD, "name": "a b"}], 'name="a b"'),
        ([GOOD, {"name": "ada", "key": "another-key-0123456789"}], "user ada has the name or the key of another"),
        ([GOOD, {"name": "bob", "key": GOOD["key"]}], "user bob has the name or the key of another"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path: Path, tables: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        read_users(tables, tmp_path)


def test_users_are_read_with_their_keys(tmp_path: Path) -> None:
    (tmp_path / "bob.key").write_text("key-of-bob-0123456789\n")
    tables = [{**GOOD, "max_jobs": 2, "max_requests": 1}, {"name": "bob", "key_file": "bob.key"}]
    assert read_users(tables, tmp_path) == {GOOD["key"]: ADA, "key-of-bob-0123456789": BOB}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = [", "cannot be read as TOML"),
        ('modell = "shapes"', "there is no option 'modell'; did you mean model?"),
        ('json = "x"', "there is no option 'json'"),
        ("model = [true]", "model is True; write a text, a number, or a list of them"),
        ('nproc = "two"', "--nproc"),
        ("users = 3", r"begin each with [[users]]"),
        ('model = "shapes"\n[[users]]\nname = "ada"', "user ada has either a key or a key_file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(capfd: Any, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "server.toml").write_text(text)
    assert words in refused(capfd, "--config", str(tmp_path / "server.toml"))

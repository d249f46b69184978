"""What a run did, written down in three formats."""

from __future__ import annotations

import json
import random
from html.parser import HTMLParser
from pathlib import Path

import pytest

from partsong.errors import ArgumentError
from partsong.ledger import Ledger
from partsong.reasoning import CallGraph, Run, ScriptedEngine, final_number, pdr
from partsong.reasoning.calls.graph import CallNode
from partsong.reasoning.calls.trace import as_lines, as_page, as_perfetto, lanes, write_trace
from partsong.reasoning.calls.virtual_time import run_virtual
from tests.reasoning.scripts import guesses


async def thought(run: Run) -> CallGraph:
    await pdr(run, "<b>1 & 1</b>", extract=final_number, schedule=(3, 2, 1))
    return run.graph


@pytest.fixture(scope="module")
def graph() -> CallGraph:
    engine = ScriptedEngine(guesses(0.6), seconds_per_token=0.02, seconds_to_first=0.1)
    return run_virtual(thought(Run(engine)))[0]


def test_a_line_per_call_holds_all_of_it(graph: CallGraph) -> None:
    lines = [json.loads(line) for line in as_lines(graph).splitlines()]
    assert [line["name"] for line in lines] == list(graph.nodes)
    assert lines[-1]["reads"] == ["round 2/distil#0"] and lines[-1]["tokens"] == list(graph.nodes.values())[-1].tokens
    assert "<b>1 & 1</b>" in lines[0]["chat"][0][1]
    assert [line["start"] for line in lines] == sorted(line["start"] for line in lines)


def test_lanes_are_as_few_as_can_be() -> None:
    draw = random.Random(0)
    for _ in range(200):
        graph = CallGraph()
        for number in range(draw.randint(1, 20)):
            start = draw.randint(0, 10)
            graph.add(CallNode(name=str(number), request=None, start=start, end=start + draw.randint(1, 5)))  # type: ignore[arg-type]
        lane_of, nodes = lanes(graph), list(graph.nodes.values())
        for a in nodes:
            for b in nodes:
                overlap = a is not b and a.start < (b.end or 0) and b.start < (a.end or 0)
                assert not (overlap and lane_of[a.name] == lane_of[b.name])
        most = max(sum(n.start <= moment < (n.end or 0) for n in nodes) for moment in range(16))
        assert len(set(lane_of.values())) == most == max(lane_of.values()) + 1


def test_a_trace_for_perfetto(graph: CallGraph) -> None:
    events = as_perfetto(graph)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(graph.nodes)
    threads = {event["tid"] for event in slices}
    assert threads == {0, 1, 2} == {event["tid"] for event in events if event["ph"] == "M"}
    arrows = [(event["id"], event["ph"]) for event in events if event["ph"] in "sf"]
    reads = [f"{other} > {node.name}" for node in graph.nodes.values() for other in node.reads]
    assert sorted(arrows) == sorted((name, end) for name in reads for end in "sf")
    by_name = {event["name"]: event for event in slices}
    for name, node in graph.nodes.items():
        assert by_name[name]["dur"] == pytest.approx(1e6 * ((node.end or 0.0) - node.start))


class Read(HTMLParser):
    """Refuses what comes from outside and counts bars."""

    bars, texts = 0, ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert "src" not in named and not (named.get("href") or "#").startswith("http")
        self.bars += tag == "a" and (named.get("class") or "").startswith("bar")
        assert tag != "b"  # the question is text

    def handle_data(self, data: str) -> None:
        self.texts += data


def test_a_page_shows_every_call_and_runs_nothing_of_the_model(graph: CallGraph) -> None:
    read = Read()
    read.feed(as_page(graph, title="1 < 2"))
    assert read.bars == len(graph.nodes)
    assert "<b>1 & 1</b>" in read.texts and "1 < 2" in read.texts
    assert as_page(CallGraph()).count('class="bar') == 0


def test_the_name_says_the_format(graph: CallGraph, tmp_path: Path) -> None:
    assert write_trace(graph, tmp_path / "new" / "t.jsonl").read_text() == as_lines(graph)
    assert json.loads(write_trace(graph, tmp_path / "t.json").read_text()) == as_perfetto(graph)
    assert write_trace(graph, tmp_path / "t.html").read_text() == as_page(graph)
    with pytest.raises(ArgumentError, match=r"t.txt has no known format; end it in .jsonl"):
        write_trace(graph, tmp_path / "t.txt")


def test_the_ledger_has_a_record_per_call(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.jsonl") as ledger:
        graph = run_virtual(thought(Run(ScriptedEngine(guesses(0.6), seconds_per_token=0.02))))[0]
    assert sorted(record["call"] for record in ledger.records) == sorted(graph.nodes)
    assert ledger.summary()["tokens"] == sum(node.tokens for node in graph.nodes.values())

"""What workers see, when their steps end, when they are asked something, and when all of them stop."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from partsong.errors import ArgumentError
from partsong.reasoning import Completion, Parameters, final_number
from partsong.reasoning.hogwild.cache import CacheBlock
from partsong.reasoning.hogwild.layouts import LAYOUTS, Table
from partsong.reasoning.hogwild.prompts import HogwildPrompts
from partsong.reasoning.hogwild.workers import HogwildWriter, Writing
from partsong.reasoning.local.model import LocalModel
from tests.reasoning.hogwild_twin import EOS, PARAGRAPHS, SHORT, tiny, tokenizer, work

DOCS = Path(__file__).resolve().parents[2] / "docs" / "methods" / "hogwild.md"
PROMPT = "What is three and four? "
FINISH = SHORT.finish.format()
STEP = re.compile(r"[A-Z][a-z]+[0-9]+:")


# --- layouts ----------------------------------------------------------------------------------------------------------


def views(layout: str) -> list[str]:
    """Of three workers, of whom B, A and B again have finished a step."""
    blocks: dict[str, Any] = {"prompt": "prompt", "others": "others", "own": "own"}
    table = Table[str](layout=LAYOUTS[layout], current=["A1", "B1", "C1"], **blocks)
    if table.layout.history:
        table.finish(1, "B2")
        table.finish(0, "A2")
        table.finish(1, "B3")
    return [" ".join(table.view(worker)) for worker in range(3)]


def test_the_views_are_those_of_the_paper() -> None:
    assert views("contiguous") == [
        "prompt others B1 C1 own A1",
        "prompt others A1 C1 own B1",
        "prompt others A1 B1 own C1",
    ]
    assert views("interleaved") == [
        "prompt B1 A1 B2 own A2",
        "prompt B1 A1 B2 own B3",
        "prompt B1 A1 B2 own C1",
    ]
    assert views("combined") == [
        "prompt B1 A1 B2 others B3 C1 own A2",
        "prompt B1 A1 B2 others A2 C1 own B3",
        "prompt B1 A1 B2 others A2 B3 own C1",
    ]


def test_the_page_shows_these_views() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name: shown.replace("*", "") for name, shown in rows if name in LAYOUTS} == {
        name: views(name)[0] for name in LAYOUTS
    }


def test_a_worker_that_has_left_is_seen_by_its_finished_steps_alone() -> None:
    table = Table(layout=LAYOUTS["combined"], prompt="P", others="o", own="m", current=["A1", "B1"])
    table.finish(0, None)
    assert table.view(1) == ("P", "A1", "o", "m", "B1")


# --- writing ----------------------------------------------------------------------------------------------------------


def writing(num_workers: int, layout: str = "combined", prompt: str = PROMPT, **more: Any) -> Writing:
    """Begins to write with a tiny model; `context` is the model's."""
    model = LocalModel(tiny(max_position_embeddings=more.pop("context", 2048)))
    made = Writing(model, tokenizer(), work(prompt, num_workers, layout, **more))
    model_turn = made.turn

    def turn() -> Any:
        try:
            return model_turn()
        finally:
            if made.over:
                model.close()

    made.turn = turn
    return made


def to_the_end(made: Writing) -> list[Completion]:
    while not made.over:
        made.turn()
    found = [made.completion(writer.number) for writer in made.writers]
    return [each for each in found if each is not None]


class Fed:
    """What every block holds, as text: read off the feeds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from partsong.reasoning.hogwild import workers as hogwild_workers

        self.texts: dict[int, str] = {}
        self.longest = 0
        inner = hogwild_workers.forward

        def noted(model: Any, rotary: Any, store: Any, feeds: Any) -> Any:
            for feed in feeds:
                number = feed.view[-1].number
                self.texts[number] = self.texts.get(number, "") + str(
                    tokenizer().decode(feed.tokens, skip_special_tokens=True)
                )
            out = inner(model, rotary, store, feeds)
            self.longest = max(self.longest, *(sum(block.length for block in feed.view) for feed in feeds))
            return out

        monkeypatch.setattr(hogwild_workers, "forward", noted)

    def of(self, blocks: list[CacheBlock]) -> list[str]:
        return [self.texts.get(block.number, "") for block in blocks]


@pytest.mark.parametrize("layout", ["combined", pytest.param("interleaved", marks=pytest.mark.full)])
def test_finished_steps_come_into_the_history_whole(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(monkeypatch)
    made = writing(3, layout, probe_every=0, answer_tokens=0, parameters=Parameters(max_tokens=60), ends=frozenset())
    to_the_end(made)
    table, steps = made.table, fed.of(made.table.history)
    assert fed.texts[table.prompt.number] == PROMPT + SHORT.history
    assert fed.texts[table.own.number] == SHORT.own and fed.texts.get(table.others.number) == (
        SHORT.others if layout == "combined" else None
    )
    assert len(steps) > 9 and all(STEP.match(step) and step.endswith(".\n\n") for step in steps)
    for writer, name, current in zip(made.writers, made.work.names, table.current, strict=True):
        assert current is not None
        own = [step for step in [*steps, *fed.of([current])] if step.startswith(name)]
        assert [step.split(":")[0] for step in own] == [f"{name}{number + 1}" for number in range(writer.steps)]
        # The last token was drawn but not read.
        said = "".join(step.partition(":")[2] for step in own)
        assert writer.text.startswith(said) and len(writer.text) - len(said) == len(
            tokenizer().decode(writer.pending, skip_special_tokens=True)
        )


def test_in_the_contiguous_layout_all_stays_where_it_is() -> None:
    made = writing(3, "contiguous")
    to_the_end(made)
    assert not made.table.history and len(made.store.blocks) == 6
    assert all(writer.steps == 1 for writer in made.writers)


@pytest.mark.parametrize("layout", ["combined", pytest.param("contiguous", marks=pytest.mark.full)])
def test_workers_are_asked_whether_they_repeat_others(layout: str) -> None:
    every, asked = 8, list[bool]()
    made = writing(
        2, layout, probe_every=every, answer_tokens=0, parameters=Parameters(max_tokens=99), ends=frozenset()
    )
    while not made.over:
        before = [(writer.since_probe + 1, writer.text) for writer in made.writers]
        made.turn()
        for (tokens, text), writer in zip(before, made.writers, strict=True):
            new = writer.text.removeprefix(text)
            if SHORT.probe in new:
                paragraph = new.partition(SHORT.probe)[0] in PARAGRAPHS
                assert every <= tokens <= 2 * every and (paragraph or tokens == 2 * every)
                asked.append(paragraph)
            elif writer.finish is None:
                assert tokens < (every if new in PARAGRAPHS else 2 * every)
    assert len(set(asked)) == 2 and len(asked) > 8


def test_nobody_is_asked_where_there_is_nobody_else() -> None:
    made = writing(1, probe_every=4)
    assert SHORT.probe not in to_the_end(made)[0].text
    assert len(made.store.blocks) == 4


def test_a_worker_that_ends_leaves_its_steps_to_the_others() -> None:
    ends, asked = frozenset(range(2, 6)) | {EOS}, Parameters(max_tokens=400)
    made = writing(3, answer_tokens=0, ends=ends, parameters=asked, seed=3, probe_every=0)
    found = to_the_end(made)
    assert {each.finish for each in found} == {"stop"}
    assert len({each.usage.completion for each in found}) == 3
    # No text ends with the token that ended it.
    assert not any(each.text.endswith(tuple(PARAGRAPHS)) for each in found)
    assert made.table.current == [None] * 3 and len(made.table.history) >= 3
    # Labels and ends of steps are read along the way.
    assert made.steps == max(each.usage.completion for each in found)


def concluding(text: str, ended: bool) -> bool:
    return "\\boxed{" in text and final_number(text) is not None


def test_the_first_result_ends_everything() -> None:
    made = writing(4, concludes=concluding, parameters=Parameters(max_tokens=400), probe_every=0, ends=frozenset())
    found = to_the_end(made)
    finishes = [each.finish for each in found]
    assert sorted(finishes) == ["halted"] * 3 + ["stop"]
    assert all(each.text.endswith("\\boxed{7}") == (each.finish == "stop") for each in found)
    tokens = [each.usage.completion for each in found]
    assert tokens[finishes.index("stop")] < 400 and FINISH not in "".join(each.text for each in found)


def test_without_a_result_the_first_worker_is_made_to_answer() -> None:
    asked: list[tuple[str, bool]] = []

    def note(text: str, ended: bool) -> bool:
        asked.append((text, ended))
        return False

    made = writing(2, concludes=note, answer_tokens=5, ends=frozenset(), parameters=Parameters(max_tokens=20))
    found = to_the_end(made)
    assert [each.finish for each in found] == ["length", "length"]
    assert [each.usage.completion for each in found] == [25, 20]
    before, _, answer = found[0].text.rpartition(FINISH)
    assert before and FINISH not in found[1].text
    # Only what it says then may be the answer: a number of its notes is none.
    assert asked[-1] == (FINISH + answer, True)
    more: dict[str, Any] = {"parameters": Parameters(max_tokens=20), "ends": frozenset()}
    yes = writing(2, concludes=lambda text, ended: ended, answer_tokens=5, **more)
    assert [each.finish for each in to_the_end(yes)] == ["stop", "length"]


@pytest.mark.parametrize("layout", ["combined", "contiguous", "interleaved"])
def test_views_never_outgrow_the_context(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = Fed(monkeypatch)
    more: dict[str, Any] = {"context": 160, "ends": frozenset(), "parameters": Parameters(max_tokens=500)}
    made = writing(3, layout, answer_tokens=6, **more)
    found = to_the_end(made)
    assert {each.finish for each in found} == {"length"} and found[0].text.count(FINISH) == 1
    assert 110 < fed.longest <= 160
    tokens = [each.usage.completion for each in found]
    assert tokens[0] - tokens[1] == 6 and tokens[1] == tokens[2] > 10


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"take 1\d\d positions, and the model's context has 128"):
        writing(2, prompt=PROMPT * 4, context=128)


def test_what_is_written_depends_on_the_seed_alone() -> None:
    one, again, other = (to_the_end(writing(2, seed=seed)) for seed in (4, 4, 5))
    assert one == again
    assert [each.text for each in one] != [each.text for each in other]
    assert one[0].text != one[1].text


def test_usage_counts_the_prompt_once() -> None:
    made = writing(3, probe_every=0, answer_tokens=0, ends=frozenset())
    found = to_the_end(made)
    common = len(PROMPT + SHORT.history + SHORT.others + SHORT.own)
    assert made.prefill == common
    assert [each.usage.cached for each in found] == [0, common, common]
    for each, writer in zip(found, made.writers, strict=True):
        labels = sum(len(f"{made.work.names[writer.number]}{number + 1}:") for number in range(writer.steps))
        assert (each.usage.prompt, each.usage.completion, each.usage.reported) == (common + labels, 40, True)


def test_a_worker_that_is_stopped_stays_in_view() -> None:
    made = writing(2, "contiguous", ends=frozenset())
    while made.steps < 10:
        made.turn()
    made.stop(0)
    length = made.table.view(1)[2].length
    found = to_the_end(made)
    assert made.completion(0) is None and len(found) == 1
    # The one that is left is the one that is made to answer.
    assert length > 9 and FINISH in found[0].text


def test_news_are_the_texts() -> None:
    made = writing(3)
    told = ["", "", ""]
    while not made.over:
        for each in made.turn():
            told[each.worker] += each.text
            assert each.tokens <= made.writers[each.worker].drawn
    assert told == [writer.text for writer in made.writers]


def test_the_default_texts_can_be_filled() -> None:
    HogwildPrompts().validate()
    with pytest.raises(ArgumentError, match="prompt label has"):
        HogwildPrompts(label="{name}: ").validate()
    assert isinstance(writing(2, texts=HogwildPrompts()).writers[0], HogwildWriter)

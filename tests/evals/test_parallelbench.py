"""The benchmark's problems and judges against answers worked out here, and the runner on models and stand-ins."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.text.curves import SWEEPS, curve, scores, sweep
from partsong.errors import ArgumentError
from partsong.evals import parallelbench as bench
from partsong.evals.parallelbench import BenchProblem, Facts, problems, score, tasks
from partsong.evals.parallelbench.runner import ask, reads_lists, run
from partsong.knobs import format_knobs
from partsong.samplers.text import CACHES, RULES, DelayedCache, Quota, TextAdapter, parse_cache, parse_rule
from partsong.samplers.text.model import Head
from partsong_zoo import lists
from partsong_zoo.lists.model import EOS, MASK, PROMPT, build_model, build_tokenizer, token_ids
from tests.tiny_models.text import word_tokenizer

NAMES = [task.name for task in tasks()]
IN_LISTS = [task.name for task in tasks("lists")]
LINE = ("Ada Egan", "Boris Keller", "Clara Owens")


def problem(task: str, answer: str = "", **facts: Any) -> BenchProblem:
    made = Facts(**facts)
    return BenchProblem(task=task, number=0, size=3, language="chat", facts=made, question="?", answer=answer)


def written(*people: str) -> str:
    return "[" + ", ".join(f'"{one}"' for one in people) + "]"


# --- problems ---------------------------------------------------------------------------------------------------------


def test_no_torch_is_loaded_for_problems_and_scores() -> None:
    code = (
        "import sys; from partsong.evals import parallelbench as b\n"
        "p = b.problems('sudoku', 2)[1]; assert b.score(p, p.answer)['score'] == 1.0\n"
        "p = b.problems('sort', 2, language='lists')[1]; assert b.score(p, p.answer)['score'] == 1.0\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_given_answers_are_valid_and_sizes_take_turns(name: str) -> None:
    task, drawn = bench.task_of(name), problems(name, 12, seed=3)
    for number, one in enumerate(drawn):
        assert score(one, one.answer) == {"score": 1.0, "score_strict": 1.0, "items": 1.0}
        assert one.size == task.sizes[number % len(task.sizes)] and one.number == number
        assert one.example is not None and one.example[0] != one.question
        assert score(one, "I cannot do this.")["score"] == 0.0
    assert len({one.question for one in drawn}) > 9
    assert drawn[:5] == problems(name, 5, seed=3) and drawn[:5] != problems(name, 5, seed=4)


def test_questions_say_what_there_is() -> None:
    one = problems("insert_index", 1)[0]
    assert all(f'"{item}"' in one.question for item in (*one.facts.items, one.facts.word))
    assert f"place {one.facts.place} " in one.question
    roles = [message["role"] for message in one.messages()]
    assert roles == ["user", "assistant", "user"] and one.messages()[2]["content"] == one.question
    assert one.prompt().count("Question: ") == 2 and one.prompt().endswith("Answer:\n")
    assert len(problems("copy_n15", 1)[0].facts.items) == 15


def test_answers_are_those_of_plain_python() -> None:
    for name in ("sort", "reverse", "copy"):
        for one in problems(name, 4):
            items = list(one.facts.items)
            wanted = {"sort": sorted(items, key=str.split), "reverse": list(reversed(items)), "copy": items}[name]
            assert one.answer == written(*wanted)
    for one in problems("replace_index", 8):
        items = list(one.facts.items)
        items[(one.facts.place or 0) - 1] = one.facts.word
        assert one.answer == written(*items)
    for one in problems("insert_index", 8):
        items = list(one.facts.items)
        items.insert((one.facts.place or 0) - 1, one.facts.word)
        assert one.answer == written(*items)
    for one in problems("cumsum", 6):
        numbers = one.facts.numbers
        assert one.answer == str([sum(numbers[: end + 1]) for end in range(len(numbers))])


def test_random_answers_are_drawn_evenly() -> None:
    found = Counter()
    for one in problems("remove_random", 1200):
        if one.size == 3:
            found[next(i for i, item in enumerate(one.facts.items) if item not in one.answer)] += 1
    assert len(found) == 3 and min(found.values()) > 70


def test_sudokus_have_one_solution() -> None:
    for one in problems("sudoku", 5):
        holes = [cell for cell, clue in enumerate(one.facts.clues) if clue == 0]
        assert len(holes) == 8
        valid = 0
        for filling in itertools.product((1, 2, 3, 4), repeat=8):
            cells = list(one.facts.clues)
            for cell, value in zip(holes, filling, strict=True):
                cells[cell] = value
            rows = [cells[low : low + 4] for low in (0, 4, 8, 12)]
            if all(len(set(row)) == 4 for row in rows) and all(
                len(set(column)) == 4 for column in zip(*rows, strict=True)
            ):
                corners = [[rows[r + i][c + j] for i in (0, 1) for j in (0, 1)] for r in (0, 2) for c in (0, 2)]
                valid += all(len(set(corner)) == 4 for corner in corners)
        assert valid == 1
        break


# --- judges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "facts", "text", "loose", "strict", "items"),
    [
        ("copy", {"items": LINE}, f"The line is {written(*LINE)}.", 1, 0, 1.0),
        ("copy", {"items": LINE}, ", ".join(LINE), 1, 0, 1.0),
        ("copy", {"items": LINE}, written(*LINE[::-1]), 0, 0, 1 / 3),
        ("copy", {"items": LINE}, written(*LINE, "Ada Egan"), 0, 0, 3 / 4),
        ("shuffle", {"items": LINE}, written(LINE[1], LINE[0], LINE[2]), 1, 1, 1.0),
        ("shuffle", {"items": LINE}, written(*LINE), 0, 0, 1.0),
        ("shuffle", {"items": LINE}, written(LINE[0], LINE[0], LINE[2]), 0, 0, 2 / 3),
        ("insert_random", {"items": LINE, "word": "X"}, written(LINE[0], "X", *LINE[1:]), 1, 1, 1.0),
        ("insert_random", {"items": LINE, "word": "X"}, written(LINE[0], "X", "X", *LINE[1:]), 0, 0, 2 / 5),
        ("insert_random", {"items": LINE, "word": "X"}, written("X", *LINE[::-1]), 0, 0, 2 / 4),
        ("insert_index", {"items": LINE, "word": "X", "place": 4}, written("X", *LINE), 0, 0, 0.0),
        ("insert_index", {"items": LINE, "word": "X", "place": 4}, written(*LINE, "X"), 1, 1, 1.0),
        ("remove_random", {"items": LINE}, written(*LINE[1:]), 1, 1, 1.0),
        ("remove_random", {"items": LINE}, written(LINE[0]), 0, 0, 1 / 2),
        ("replace_random", {"items": LINE, "word": "X"}, written(*LINE[:2], "X"), 1, 1, 1.0),
        ("replace_random", {"items": LINE, "word": "X"}, written(*LINE[:1], "X", "X"), 0, 0, 2 / 3),
        ("replace_random", {"items": LINE, "word": "X"}, written(*LINE), 0, 0, 2 / 3),
        ("repeat", {"items": LINE[:2], "count": 2}, written(LINE[0], LINE[0], LINE[1], LINE[1]), 1, 1, 1.0),
        ("domino", {"count": 3, "numbers": (37,)}, "[37, 71, 19]", 1, 1, 1.0),
        ("domino", {"count": 3, "numbers": (37,)}, "37 71 19", 1, 0, 1.0),
        ("domino", {"count": 3, "numbers": (37,)}, "[37, 71, 29]", 0, 0, 2 / 3),
        ("domino", {"count": 3, "numbers": (37,)}, "[37, 71]", 0, 0, 2 / 3),
        ("domino", {"count": 3, "numbers": (37,)}, "[73, 37, 70]", 0, 0, 1 / 3),
        ("math_op", {"numbers": (76, 923), "sign": "-"}, "-847", 1, 1, 1.0),
        ("math_op", {"numbers": (900, 923), "sign": "+"}, "It is 1,823.", 1, 0, 1.0),
        ("math_op", {"numbers": (12, 34), "sign": "*"}, "12 * 34 = 418", 0, 0, 2 / 3),
        ("math_op", {"numbers": (12, 34), "sign": "*"}, "nothing", 0, 0, 0.0),
        ("latin_square", {"items": tuple("AB")}, "A,B\nB,A", 1, 1, 1.0),
        ("latin_square", {"items": tuple("AB")}, "Here:\nA, B\nB, A", 1, 0, 1.0),
        ("latin_square", {"items": tuple("AB")}, "A,B\nA,B", 0, 0, 1 / 2),
        ("latin_square", {"items": tuple("AB")}, "A,B", 0, 0, 0.0),
        ("sudoku", {"clues": (1, *(0,) * 15)}, "1234\n3412\n2143\n4321", 1, 1, 1.0),
        ("sudoku", {"clues": (1, *(0,) * 15)}, "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1", 1, 0, 1.0),
        ("sudoku", {"clues": (2, *(0,) * 15)}, "1234\n3412\n2143\n4321", 0, 0, 1.0),
        ("sudoku", {"clues": (0,) * 16}, "1234\n2341\n3412\n4123", 0, 0, 8 / 12),
    ],
)
def test_judges(task: str, facts: dict[str, Any], text: str, loose: int, strict: int, items: float) -> None:
    found = score(problem(task, **facts), text)
    assert found == {"score": loose, "score_strict": strict, "items": pytest.approx(items)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["", "[", "]", "[[[[" * 5000, "[,,,]", "9" * 5000, '["\\ud800"]', "\x00", "٣٤"])
def test_no_text_breaks_a_judge(name: str, text: str) -> None:
    assert score(problems(name, 1)[0], text)["score"] == 0.0


def test_sums_are_read_as_numbers() -> None:
    one = problem("cumsum", answer="[1, 3, 6]", numbers=(1, 2, 3))
    assert score(one, "[1, 3, 6]")["score_strict"] == 1.0
    assert score(one, '["1", "3", "6"]') == {"score": 1.0, "score_strict": 0.0, "items": 1.0}
    assert score(one, "[1, 3, 7]") == {"score": 0.0, "score_strict": 0.0, "items": pytest.approx(2 / 3)}


# --- the zoo's language -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_LISTS)
def test_problems_in_the_zoos_language_are_its_own(name: str) -> None:
    task = bench.task_of(name, "lists")
    for one in problems(name, 6, seed=5, language="lists"):
        assert lists.parse(one.question).family == task.lists
        assert one.answer in lists.support(one.question)
        assert score(one, one.answer) == {"score": 1.0, "score_strict": 1.0, "items": 1.0}
        assert score(one, "yak")["score"] == 0.0
        assert one.prompt() == one.question and len(token_ids(one.question)) < PROMPT + 8
        assert one.size in lists.sizes(task.lists)


def test_nearly_right_answers_count_in_part() -> None:
    one = problems("copy", 1, language="lists")[0]
    words = one.answer.split()
    assert score(one, " ".join([*words[:-1], "yak"]))["items"] == pytest.approx(1 - 1 / len(words))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="no task 'juggle'"):
        problems("juggle")
    with pytest.raises(ArgumentError, match="no task 'domino' in 'lists'"):
        problems("domino", language="lists")
    with pytest.raises(ArgumentError, match="language='french'"):
        tasks("french")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num=-1"):
        problems("copy", -1)


# --- the runner -------------------------------------------------------------------------------------------------------


class Knower:
    """A masked model of the zoo's language that knows the first valid answer of every prompt, and is sure of it."""

    def __init__(self) -> None:
        self.adapter = TextAdapter(name="knower", attention="full", keeps_keys=False)
        self.tokenizer = build_tokenizer()
        self.vocab_size, self.mask_token_id, self.eos_token_ids = len(self.tokenizer), MASK, (EOS,)
        self.max_positions = None
        self.device, self.head = torch.device("cpu"), Head(weight=torch.eye(len(self.tokenizer)))

    def key_store(self, rows: int, slots: int) -> None:
        return None

    def flops(self, queries: int, keys: int) -> float:
        return float(queries)

    def forward(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = torch.zeros(*tokens.shape, self.vocab_size)
        for row, ids in enumerate(tokens.tolist()):
            end = ids.index(token_ids("=")[0])
            answer = lists.support(str(self.tokenizer.decode(ids[1 : end + 1])))[0]
            wanted = [*ids[: end + 1], *token_ids(answer), *[EOS] * len(ids)][: len(ids)]
            out[row, torch.arange(len(ids)), torch.tensor(wanted)] = 50.0
        return out


def test_a_model_that_knows_is_right_everywhere() -> None:
    knower = Knower()
    rows = run(knower, knower.tokenizer, num=4, rule="quota:per_step=3", batch_size=3)
    assert [row["task"] for row in rows] == IN_LISTS
    for row in rows:
        assert (row["accuracy"], row["score_strict"], row["items"]) == (1.0, 1.0, 1.0)
        assert (row["language"], row["num"], row["rule"], row["cache"]) == ("lists", 4, "quota:per_step=3", "none")
        assert row["tokens_per_forward_all"] == row["tokens"] / row["forwards"] <= 3.0
        assert row["answer_tokens_per_forward"] == row["answer_tokens"] / row["forwards"] <= 3.0
        assert row["seconds"] > 0.0 and row["edits"] == 0
        assert row["certificate"] == pytest.approx(0.0, abs=1e-6)
    answers = [len(one.answer.split()) + 1 for one in problems("copy", 4, language="lists")]
    assert rows[0]["answer_tokens"] == sum(answers)


def test_samples_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    # In float32 positions of one probability take another order where sums are rounded in another way.
    model, tokenizer = build_model("mdlm", heads=1, depth=1).eval().double(), build_tokenizer()
    runs = [
        ask(model, tokenizer, "shuffle", num=5, adapter="mdlm", temperature=1.0, batch_size=size, seed=seed)
        for size, seed in ((1, 0), (5, 0), (5, 1))
    ]
    texts = [[sample["text"] for sample in one.samples] for one in runs]
    assert texts[0] == texts[1] != texts[2]
    assert [sample["number"] for sample in runs[0].samples] == [0, 1, 2, 3, 4]
    assert runs[0].row["rule"] == "entropy-bound" and runs[0].row["temperature"] == 1.0


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = [
        "<unk>",
        "<end>",
        *sorted({word for name in ("copy", "sudoku") for word in problems(name, 1)[0].prompt().split()}),
    ]
    return word_tokenizer(words, pre_tokenizers.WhitespaceSplit(), chat_template=template, eos_token="<end>")


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.role }}: {{ m.content }} <end> {% endfor %}"])
def test_a_causal_model_is_asked_in_english(template: str | None) -> None:
    tokenizer = chat_tokenizer(template)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokenizer), eos_token_id=1)).eval()
    assert not reads_lists(tokenizer) and reads_lists(build_tokenizer())
    row = ask(model, tokenizer, "copy", num=2, max_new_tokens=3).row
    assert (row["language"], row["cache"], row["accuracy"]) == ("chat", "prefix", 0.0)
    assert row["forwards"] == row["tokens"] <= 6


def test_wrong_questions_are_refused_before_any_forward() -> None:
    knower = Knower()
    for options, named in (
        ({"names": ["domino"]}, "no task 'domino'"),
        ({"names": ["copy"], "rule": "quota:per_step=0"}, "per_step=0"),
        ({"names": ["copy"], "cache": "prefix"}, "keep no keys"),
        ({"names": ["copy"], "num": 0}, "num=0"),
        ({"names": ["copy"], "batch_size": 0}, "batch_size=0"),
    ):
        with pytest.raises(ArgumentError if "keys" not in named else ValueError, match=named):
            run(knower, knower.tokenizer, **options)
    with pytest.raises(TypeError, match="colour"):
        run(knower, knower.tokenizer, names=["copy"], colour="red")


@pytest.mark.parametrize(
    "text", ["quota:per_step=4", "entropy-bound", "quota:steps=2,by=left", "threshold:threshold=0.5"]
)
def test_rules_are_spelled_as_they_are_read(text: str) -> None:
    assert format_knobs(parse_rule(text), RULES) == text
    cache = DelayedCache(refresh_every=None, refresh_blocks=True)
    assert parse_cache(format_knobs(cache, CACHES)) == cache


# --- curves -----------------------------------------------------------------------------------------------------------


def test_every_sweep_can_be_read() -> None:
    for rule in SWEEPS:
        for value, text in sweep(rule):
            assert getattr(parse_rule(text), SWEEPS[rule][0]) == value
    assert parse_rule(sweep("quota")[2][1]) == Quota(per_step=4)


def test_curves_add_up_tasks_and_score_them() -> None:
    def measure(rule: str) -> list[dict[str, Any]]:
        step = parse_rule(rule).per_step  # type: ignore[attr-defined]
        counts = {"num": 5, "tokens": 24, "answer_tokens": 12, "tokens_denoise": 12, "forwards_denoise": 6 // step}
        shared = {"seconds": 1.0, "certificate": None if step == 4 else 0.5 * step, "forwards": 12 // step}
        return [counts | shared | {"accuracy": 1.0}, counts | shared | {"accuracy": 1.0 - 0.05 * step}]

    points = curve(measure, "quota", [1, 2, 4])
    assert [point["accuracy"] for point in points] == pytest.approx([0.975, 0.95, 0.9])
    assert [point["tokens_per_forward_all"] for point in points] == [2.0, 4.0, 8.0]
    assert [point["answer_tokens_per_forward"] for point in points] == [1.0, 2.0, 4.0]
    assert [point["tokens_per_forward"] for point in points] == [2.0, 4.0, 12.0]
    assert [point["certificate"] for point in points] == [0.5, 1.0, None]
    assert {point["num"] for point in points} == {10}
    # The last point lost more than 5 points; the first two make a rectangle and a trapezium.
    weight = torch.tensor(-3.0 * (1 - 95.0 / 97.5)).exp().item()
    board = scores([*points, points[0] | {"sweep": "other"}])
    assert [row["sweep"] for row in board] == ["quota", "other"]
    assert board[0]["aup"] == pytest.approx(97.5 + (97.5 + 95.0 * weight) / 2) and board[1]["aup"] == 97.5
    assert scores(points, best=1.0)[0]["aup"] < board[0]["aup"]
    with pytest.raises(ArgumentError, match="gave no rows"):
        curve(lambda rule: [], "quota")
    with pytest.raises(ArgumentError, match="no sweep of the rule 'dice'"):
        sweep("dice")
    with pytest.raises(ArgumentError, match="at least one value"):
        sweep("quota", [])

"""``partsong text``: what it decodes, draws, writes and refuses."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from partsong import zoo
from partsong.cli import main
from partsong.cli.draw_text import Drawing, viewer
from partsong.cli.screen import printable
from partsong.samplers.text import Event, Step
from tests.tiny_models.text import word_tokenizer

KEYS = {
    *("command", "strategy", "nproc", "seed", "seconds", "out", "ledger"),
    *("text", "tokens", "forwards", "tokens_per_forward", "tokens_per_forward_all", "tokens_per_second"),
    *("certificate", "rule", "cache"),
}
WORDS = ["<pad>", "<unk>", "<bos>", "<eos>", "<mask>", *"abcdefghijklmnop"]
EOS, MASK = 3, 4
PROMPT = "a b c"
TEMPLATE = "{% for message in messages %}{{ message['content'] }} p{% endfor %}"

needs_weights = pytest.mark.skipif(
    not (zoo.MODELS["lists-mdlm"].folder / "config.json").is_file(), reason="the lists-mdlm weights are not there"
)


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def tokenizer(chat: bool = False) -> PreTrainedTokenizerFast:
    ends = [("<bos>", 2), ("<eos>", EOS)]  # behind a prompt the end is left out, or nothing could follow it
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "bos", "eos", "mask")}
    made = word_tokenizer(WORDS, pre_tokenizers.WhitespaceSplit(), **names)
    template: Any = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    made.backend_tokenizer.post_processor = template
    made.chat_template = TEMPLATE if chat else None
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny random Llama as a masked and as a causal model, one with a chat template, and broken folders."""
    root, found = tmp_path_factory.mktemp("text"), {}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    for name, mask in (("masked", MASK), ("causal", None), ("chat", None)):
        torch.manual_seed(3)
        config = LlamaConfig(**sizes, vocab_size=len(WORDS), max_position_embeddings=32, eos_token_id=EOS)
        if mask is not None:
            config.mask_token_id = mask
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.weight.normal_(std=0.6)
            model.lm_head.weight[EOS] = 0.0  # random texts would soon end
        found[name] = root / name
        model.save_pretrained(found[name])
        tokenizer(chat=name == "chat").save_pretrained(found[name])
    for name, lost in (("wordless", "tokenizer.json"), ("weightless", "model.safetensors"), ("empty", "config.json")):
        found[name] = root / name
        shutil.copytree(found["causal"], found[name])
        (found[name] / lost).unlink()
    found["unreadable"] = shutil.copytree(found["causal"], root / "unreadable")
    (found["unreadable"] / "tokenizer.json").write_text("{not json")
    return found


def masked(folders: dict[str, Path], *args: object) -> list[object]:
    return ["text", PROMPT, "--model", folders["masked"], "--adapter", "mdlm", *args]


def decode(tmp_path: Path, args: list[object]) -> dict[str, Any]:
    path = tmp_path / "r.json"
    assert run(*args, "--json", path) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def plainly(folder: Path, ids: list[int], num: int) -> list[int]:
    """The surest place first, one per step, with nothing of ours: what rule quota without a cache decodes."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    row = torch.tensor([ids + [MASK] * num])
    everything = torch.zeros(1, 1, row.shape[1], row.shape[1])
    for _ in range(num):
        with torch.no_grad():
            logits = model(row, attention_mask=everything).logits[0]
        logits[:, MASK] = -torch.inf
        surest = logits.softmax(-1).amax(-1).masked_fill(row[0] != MASK, -1.0).argmax()
        row[0, surest] = logits[surest].argmax()
    return row[0, len(ids) :].tolist()


def test_one_token_per_step_is_what_a_plain_loop_decodes(folders: dict[str, Path], tmp_path: Path) -> None:
    out, ledger = tmp_path / "deep" / "t.txt", tmp_path / "l.jsonl"
    args = ("--rule", "quota", "--max-new-tokens", 6, "--out", out, "--ledger", ledger, "--seed", 7)
    result = decode(tmp_path, masked(folders, *args))
    assert result.keys() >= KEYS
    assert not {"seconds_serial", "speedup"} & result.keys()
    expected = plainly(folders["masked"], [2, 5, 6, 7], 6)
    assert EOS not in expected
    assert result["token_ids"] == expected
    assert result["text"] == " ".join(WORDS[token] for token in expected)
    assert (result["command"], result["nproc"], result["seed"]) == ("text", 1, 7)
    assert (result["rule"], result["cache"], result["stopped"]) == ("quota", "none", "length")
    assert result["forwards"] == {"prefill": 0, "refresh": 0, "denoise": 6, "verify": 0, "store": 0}
    assert (result["tokens"], result["answer_tokens"], result["certificate"]) == (6, 6, 0.0)
    assert result["tokens_per_second"] == pytest.approx(6 / result["seconds"])
    assert out.read_text(encoding="utf-8") == result["text"] + "\n"
    records = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    assert [(record["forwards"], record["tokens"]) for record in records] == [(1, 1)] * 6


def test_text_is_printed_before_what_it_cost(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*masked(folders, "--rule", "quota:per_step=3", "--max-new-tokens", 6)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(lines[0].split()) <= set(WORDS)
    assert lines[1].startswith("6 tokens in 2 forwards (2 denoise), 3.00 per forward; ")
    assert lines[2].startswith("rule quota:per_step=3, cache none; certificate: within ")
    assert len(lines) == 3


def test_comparison_with_one_token_per_step(folders: dict[str, Path], tmp_path: Path) -> None:
    args = ("--max-new-tokens", 8, "--compare")
    same = decode(tmp_path, masked(folders, "--rule", "quota", *args))
    assert same["same_text"] is True
    assert same["tokens_agreeing"] == same["forwards_serial"] == 8
    assert same["speedup"] == pytest.approx(same["seconds_serial"] / same["seconds"])
    bold = decode(tmp_path, masked(folders, "--rule", "quota:per_step=8", *args))
    assert sum(bold["forwards"].values()) == 1
    assert bold["token_ids_serial"] == same["token_ids"]
    agreeing = sum(a == b for a, b in zip(bold["token_ids"], same["token_ids"], strict=True))
    assert bold["tokens_agreeing"] == agreeing
    assert bold["same_text"] is (agreeing == 8) is False


def test_a_causal_model_writes_what_generate_writes(folders: dict[str, Path], tmp_path: Path) -> None:
    result = decode(tmp_path, ["text", PROMPT, "--model", folders["causal"], "--max-new-tokens", 9])
    model: Any = AutoModelForCausalLM.from_pretrained(folders["causal"]).eval()
    expected = model.generate(torch.tensor([[2, 5, 6, 7]]), max_new_tokens=9, do_sample=False)[0, 4:].tolist()
    assert result["token_ids"] == expected
    assert result["adapter"] == "causal"
    assert result["cache"] == "prefix"


def test_chat_template_where_there_is_one(folders: dict[str, Path], tmp_path: Path) -> None:
    asked = ["text", PROMPT, "--model", folders["chat"], "--max-new-tokens", 5]
    chat, plain = decode(tmp_path, asked), decode(tmp_path, [*asked, "--no-chat"])
    model: Any = AutoModelForCausalLM.from_pretrained(folders["chat"]).eval()
    for found, ids in ((chat, [5, 6, 7, 20]), (plain, [2, 5, 6, 7])):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)[0, 4:].tolist()
        assert found["token_ids"] == expected
    assert chat["token_ids"] != plain["token_ids"]


def test_templates_and_prompts_with_gaps_are_filled(folders: dict[str, Path], tmp_path: Path) -> None:
    result = decode(tmp_path, masked(folders, "--template", "d <mask> e <mask>"))
    words = result["text"].split()
    assert (words[0], words[2], len(words)) == ("d", "e", 4)
    assert result["tokens"] == result["answer_tokens"] == 2
    gap = masked(folders)
    words = decode(tmp_path, ["text", "a <mask> c", *gap[2:]])["text"].split()
    assert (words[0], words[2], len(words)) == ("a", "c", 3)
    assert decode(tmp_path, ["text", *gap[2:], "--template", "<mask> b"])["text"].split()[1] == "b"


def test_every_step_is_a_line_where_there_is_no_terminal(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*masked(folders, "--rule", "quota:by=left", "--max-new-tokens", 3, "--show")) == 0
    lines = capsys.readouterr().out.splitlines()
    text = lines[3].split()
    assert lines[:3] == [
        f"step 1: +1, 2 left | {text[0]} ░ ░",
        f"step 2: +1, 1 left | {text[0]} {text[1]} ░",
        f"step 3: +1, 0 left | {' '.join(text)}",
    ]


class Terminal(io.StringIO):
    """A terminal of 80 columns."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def frames(text: str) -> list[str]:
    """What stands on the screen after each frame; checks that a frame takes back just the rows of the one before."""
    rows, shown = 0, []
    for frame in re.split(r"(?=\x1b\[\d+F)", text):
        back = re.match(r"\x1b\[(\d+)F\x1b\[0J", frame)
        assert (int(back[1]) if back else 0) == rows
        body = frame[back.end() :] if back else frame
        rows = body.count("\n")
        shown.append(body)
    return shown


def fake(words: PreTrainedTokenizerFast) -> Any:
    """What a drawing reads of a loaded job."""
    request = SimpleNamespace(prompts=[[5]], stop_token_ids=(EOS,), model=SimpleNamespace(mask_token_id=MASK))
    return SimpleNamespace(tokenizer=words, request=request, before_gap=[], spell=words.decode)


def steps() -> list[Step]:
    """Two tokens after a prompt of one: the second first, then the first and another second."""
    first = (Event(kind="commit", row=0, position=2, token=7),)
    second = (
        Event(kind="commit", row=0, position=1, token=6),
        Event(kind="revise", row=0, position=2, token=8, old=7),
    )
    return [
        Step(number=0, events=first, stable={0: 0}, tokens={0: [None, 7]}, finished=()),
        Step(number=1, events=second, stable={0: 2}, tokens={0: [6, 8]}, finished=(0,)),
    ]


def drawn(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """What a terminal is sent while `steps` are drawn."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    shown = viewer(fake(tokenizer()), show=True, stream=stream)
    for step in steps():
        shown.step(step)
    shown.end("b d")
    return stream.getvalue()


def test_a_terminal_is_redrawn_in_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    first, second = frames(drawn(monkeypatch, TERM="xterm"))
    assert "\x1b[2m░\x1b[0m" in first
    colour = re.search(r"\x1b\[(38;5;\d+);1m c\x1b", first)
    assert colour
    now = re.search(r"\x1b\[(38;5;\d+);1mb\x1b", second)
    assert now and now[1] != colour[1]
    assert f"\x1b[{now[1]};1;4m d\x1b[0m" in second  # revised: underlined
    assert "step 2: +1, 1 revised, 0 left" in second


def test_no_color_leaves_colours_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = frames(drawn(monkeypatch, TERM="xterm", NO_COLOR="1"))
    assert shown == ["step 1: +1, 1 left\n░ c\n", "step 2: +1, 1 revised, 0 left\nb ~d\n"]


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drawn(monkeypatch, TERM="dumb")
    assert shown == "step 1: +1, 1 left | ░ c\nstep 2: +1, 1 revised, 0 left | b ~d\nb d\n"


def test_a_drawing_higher_than_the_terminal_shows_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "5")
    stream = Terminal()
    drawing = Drawing(fake(tokenizer()), stream, live=True, colour=False, frame_seconds=0.0)
    tokens: list[int | None] = [5 + number % 16 for number in range(60)]
    for number in range(2):
        drawing.step(Step(number=number, events=(), stable={0: 0}, tokens={0: tokens}, finished=()))
    last = frames(stream.getvalue())[-1].splitlines()
    assert len(last) == 4
    assert max(map(len, last)) <= 20
    whole = " ".join(WORDS[token] for token in tokens if token is not None)
    assert whole.endswith("".join(last[1:]))
    drawing.end(whole)
    assert stream.getvalue().endswith(whole + "\n")  # no frame showed all of it


def test_a_terminal_without_show_sees_the_text_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    shown = viewer(fake(tokenizer()), show=False, stream=stream)
    seen = []
    for step in steps():
        shown.step(step)
        seen.append(stream.getvalue())
    assert seen == ["", "b d"]
    shown.end("b d")
    assert stream.getvalue() == "b d\n"


def test_nothing_in_a_text_steers_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\nd\r\u202e", io.StringIO()) == "a�[2Jb� c\nd��"
    assert printable("é░", io.TextIOWrapper(io.BytesIO(), encoding="ascii")) == "??"


REFUSED = {
    "no prompt": (["text"], "prompt is empty"),
    "empty prompt": (["text", " "], "prompt is empty"),
    "both chats": (["text", PROMPT, "--chat", "--no-chat"], "--no-chat"),
    "no places": (["text", PROMPT, "--max-new-tokens", 0], "--max-new-tokens 0"),
    "no blocks": (["text", PROMPT, "--open-blocks", 0], "--open-blocks 0"),
    "cold": (["text", PROMPT, "--temperature", -1], "--temperature -1"),
    "negative seed": (["text", PROMPT, "--seed", -1], "seed"),
    "unknown device": (["text", PROMPT, "--device", "abacus"], "--device abacus"),
    "unknown type": (["text", PROMPT, "--dtype", "int8"], "bfloat16"),
    "place that cannot be written": (["text", PROMPT, "--out", "/proc/x.txt"], "/proc/x.txt"),
    "unknown rule": (["text", PROMPT, "--rule", "quoter"], "entropy-bound"),
    "unknown knob": (["text", PROMPT, "--rule", "quota:per=2"], "per_step"),
    "knob out of range": (["text", PROMPT, "--rule", "quota:per_step=0"], "per_step=0"),
    "knob that is missing": (["text", PROMPT, "--rule", "insert-delete:split_token=4"], "needs delete_token"),
    "rule that needs a function": (["text", PROMPT, "--rule", "dependency"], "probe"),
    "unknown cache": (["text", PROMPT, "--cache", "all"], "vicinity"),
    "unknown model": (["text", PROMPT, "--model", "nope"], "lists-mdlm"),
    "model of images": (["text", PROMPT, "--model", "shapes"], "makes images"),
    "file for a folder": (["text", PROMPT, "--model", __file__], "config.json"),
    "unknown option": (["text", PROMPT, "--steps", 3], "--steps"),
}

BAD_MODELS = {
    "no tokenizer": ("wordless", (), "has no tokenizer"),
    "broken tokenizer": ("unreadable", (), "cannot be read"),
    "no weights": ("weightless", (), "safetensors"),
    "no configuration": ("empty", (), "config.json"),
    "unknown adapter": ("masked", ("--adapter", "lama"), "mdlm"),
    "adapter not named": ("masked", (), "mask token 4"),
    "no chat template": ("causal", ("--chat",), "chat template"),
    "too long": ("causal", ("--max-new-tokens", 40), "32 positions"),
    "no gap": ("masked", ("--adapter", "mdlm", "--template", "a b"), "write <mask> for every gap"),
    "gap in a causal model": ("causal", ("--template", "a <mask> b"), "no mask token"),
    "rule that revises": ("causal", ("--rule", "revoke"), "causal model"),
    "blocks of a causal model": ("causal", ("--block-size", 4), "one token after another"),
}


def refuses(capsys: pytest.CaptureFixture[str], args: list[object], message: str) -> None:
    """One line on standard error, nothing on standard output, exit code 2."""
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("partsong: error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, message = REFUSED[case]
    refuses(capsys, list(args), message)


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_model_is_one_line(case: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    name, args, message = BAD_MODELS[case]
    refuses(capsys, ["text", PROMPT, "--model", folders[name], *args], message)


@pytest.mark.slow
@needs_weights
def test_two_ranks_share_a_model(tmp_path: Path) -> None:
    call = ["text", "sort : dog ant cat =", "--temperature", "1", "--seed", "3"]
    alone = decode(tmp_path, call)
    shared = decode(tmp_path, [*call, "--nproc", "2"])  # by TensorParallel where nothing is said
    assert (shared["nproc"], shared["strategy"], alone["strategy"]) == (2, "tensor-parallel", "serial")
    assert (shared["token_ids"], shared["forwards"]) == (alone["token_ids"], alone["forwards"])


@needs_weights
def test_the_zoo_answers_and_its_reader_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = decode(tmp_path, ["text", "reverse : dog ant cat ="])
    assert (result["text"], result["valid"], result["stopped"]) == ("cat ant dog", True, "stop token")
    assert result["answer_tokens"] == 4  # the words and the end
    assert "the answer is valid" in capsys.readouterr().out
    refuses(capsys, ["text", "reverse the list dog ant cat"], "grammar")


def test_list_rules_and_caches(tmp_path: Path) -> None:
    found = {}
    for what in ("rules", "caches", "models"):
        assert run("list", what, "--json", tmp_path / "l.json") == 0
        found[what] = json.loads((tmp_path / "l.json").read_text(encoding="utf-8"))["rows"]
    rules = {row["name"]: row for row in found["rules"]}
    assert rules["entropy-bound"]["certificate"] == "certificate"
    assert rules["llada"]["certificate"] == rules["revoke"]["certificate"] == "no certificate"
    assert rules["quota"]["options"] == "per_step=1, steps=none, by=max_prob"
    assert rules["insert-delete"]["options"].startswith("delete_token=..., ")
    assert [row["name"] for row in found["caches"]] == ["none", "prefix", "dual", "delayed", "vicinity"]
    assert {row["kind"] for row in found["models"]} == {"image", "video", "text"}

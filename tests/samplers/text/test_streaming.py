"""Events replay to the text, the stable beginning never changes, and generate's own streamers see it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TextDiffusionStreamer
from transformers.generation.streamers import BaseStreamer

from partsong.errors import UnsupportedError
from partsong.samplers.text.block_decoder import BlockDecoder
from partsong.samplers.text.decode import decode, decode_steps
from partsong.samplers.text.events import Step, TextStream
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.runner import StockTextModel
from tests.samplers.text import plain

FULL = TextAdapter(name="full", attention="full")
RULES = ["entropy-bound:gamma=2", "token-editing:threshold=0.3,editing_threshold=0.2,max_post_steps=4"]
RULES += ["revoke:draft=0.2,verify=0.3"]


def steps_of(rule: str) -> tuple[list[Step], Any]:
    model = StockTextModel(plain.llama(), FULL, mask_token_id=plain.MASK)
    steps, seen = decode_steps(model, [[1, 2, 3], [4]], rule=rule, max_new_tokens=16, block_size=8), []
    while True:
        try:
            seen.append(next(steps))
        except StopIteration as end:
            return seen, end.value


@pytest.mark.parametrize("rule", RULES)
def test_events_replay_to_the_text(rule: str) -> None:
    steps, decoded = steps_of(rule)
    begins, kinds = {0: 3, 1: 1}, set()
    texts: dict[int, list[int | None]] = {row: [None] * 16 for row in begins}
    for step in steps:
        for event in step.events:
            place = event.position - begins[event.row]
            assert texts[event.row][place] == event.old
            texts[event.row][place] = event.token
            kinds.add(event.kind)
        for row, tokens in step.tokens.items():
            assert texts[row] == tokens
    assert [texts[0], texts[1]] == decoded.tokens
    assert kinds == {"commit"} if rule == RULES[0] else {"commit", "revise"}
    assert sorted(row for step in steps for row in step.finished) == [0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_what_is_stable_never_changes(rule: str) -> None:
    steps, decoded = steps_of(rule)
    grown: dict[int, int] = {}
    for step in steps:
        for row, stable in step.stable.items():
            assert step.tokens[row][:stable] == decoded.tokens[row][:stable]
            assert stable >= grown.get(row, 0)
            grown[row] = stable
    assert grown == {0: 16, 1: 16}


def test_text_grows_by_whole_characters() -> None:
    """The tokens are bytes here; an accented letter is two of them."""
    text = "né"
    tokens: list[int | None] = list(text.encode())
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
    pieces = []
    for stable in range(len(tokens) + 1):
        done = (0,) if stable == len(tokens) else ()
        pieces.append(stream.feed(Step(number=0, events=(), stable={0: stable}, tokens={0: tokens}, finished=done)))
    assert pieces == ["", "n", "", "é"]


def test_generate_takes_it_as_it_is() -> None:
    module = plain.llama(eos_token_id=5, pad_token_id=0)
    ids, mask = torch.tensor([[1, 2, 3], [0, 4, 6]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "attention_mask": mask}
    assert torch.equal(module.generate(ids, custom_generate=BlockDecoder(), **options), module.generate(ids, **options))
    full = TextAdapter(name="full", attention="full")
    decoder = BlockDecoder(adapter=full, rule="threshold:threshold=0.3", block_size=4)
    module.config.mask_token_id = plain.MASK
    sequences = module.generate(ids, custom_generate=decoder, return_dict_in_generate=True, **options).sequences
    expected = decode(
        StockTextModel(module, full, mask_token_id=plain.MASK, eos_token_ids=(5,)),
        [[1, 2, 3], [4, 6]],
        rule="threshold:threshold=0.3",
        block_size=4,
        max_new_tokens=9,
    )
    assert decoder.last is not None and decoder.last.tokens == expected.tokens
    for row, tokens in zip(sequences, expected.tokens, strict=True):
        assert row[3:].tolist() == tokens + [0] * (sequences.shape[1] - 3 - len(tokens))


def test_a_generator_makes_calls_differ_and_repeats_them() -> None:
    module, ids = plain.llama(pad_token_id=0), torch.tensor([[1, 2, 3]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "temperature": 1.5}

    def drawn(seed: int, count: int) -> list[list[int]]:
        decoder = BlockDecoder(generator=torch.Generator().manual_seed(seed))
        return [module.generate(ids, custom_generate=decoder, **options)[0].tolist() for _ in range(count)]

    first, second = drawn(1, 2)
    assert first != second
    assert drawn(1, 1) == [first]


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.drafts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def put_draft(self, value: torch.Tensor, **_: Any) -> None:
        self.drafts.append(value[0].tolist())

    def end(self) -> None:
        self.ended = True


def test_a_streamer_gets_the_stable_text_and_drafts() -> None:
    module, recorder = plain.llama(pad_token_id=0), Recorder()
    module.config.mask_token_id = plain.MASK
    decoder = BlockDecoder(adapter=FULL, block_size=4, rule="entropy-bound:gamma=2", streamer=recorder)
    generated = module.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, custom_generate=decoder)
    assert recorder.tokens == generated[0].tolist()
    assert recorder.ended and len(recorder.drafts) > 1


def test_transformers_own_streamer_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = {f"w{number}": number for number in range(plain.VOCAB)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    module = plain.llama(pad_token_id=0)
    module.config.mask_token_id = plain.MASK
    decoder = BlockDecoder(
        adapter=FULL, block_size=4, rule="quota:per_step=2", streamer=TextDiffusionStreamer(tokenizer, skip_prompt=True)
    )
    generated = module.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, custom_generate=decoder)
    printed = capsys.readouterr().out
    # Drafts stand between saving the cursor and going back to it.
    kept, drafts = re.subn(r"\x1b7.*?\x1b8\x1b\[J", "", printed, flags=re.DOTALL)
    assert kept.replace(" ", "").strip() == tokenizer.decode(generated[0, 3:]).replace(" ", "")
    assert drafts >= 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"do_sample": True, "top_p": 0.5, "top_k": 0}, "TopPLogitsWarper"),
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: dict[str, Any], words: str) -> None:
    module = plain.llama(pad_token_id=0)
    with pytest.raises(UnsupportedError, match=words):
        module.generate(torch.tensor([[1, 2]]), max_new_tokens=4, custom_generate=BlockDecoder(), **options)

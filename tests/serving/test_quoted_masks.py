"""A mask token's text: a gap in a text to continue, and text in a chat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from partsong import zoo
from partsong.errors import ArgumentError
from partsong.jobs.folder_source import find_text_model
from partsong.serving.texts.diffusion import DiffusionTexts
from partsong.serving.texts.events import TextRequest
from partsong.serving.texts.wire import TextSpec

pytestmark = pytest.mark.skipif(
    not (zoo.MODELS["lists-mdlm"].folder / "config.json").is_file(), reason="the lists-mdlm weights are not there"
)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %} ="


@pytest.fixture(scope="module")
def texts() -> DiffusionTexts:
    return DiffusionTexts(find_text_model("lists-mdlm"), TextSpec(name="lists", model="lists-mdlm"))


def gaps(texts: DiffusionTexts, prompt: str, *, plain: bool) -> int:
    """How many gaps the tokens of a request have."""
    ids = texts.prepare(TextRequest(messages=(("user", prompt),), plain=plain, max_tokens=4)).ids
    return ids.count(texts.model.mask_token_id)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_quoted_mask_is_text_in_a_chat_alone(
    texts: DiffusionTexts, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts.tokenizer, "chat_template", template)
    monkeypatch.setattr(texts, "source", replace(texts.source, zoo_name=None))  # its task refuses unknown words
    quote = f"sort : dog {texts.tokenizer.mask_token} ant ="
    assert (gaps(texts, quote, plain=True), gaps(texts, quote, plain=False)) == (1, 0)
    assert gaps(texts, "sort : dog ant =", plain=False) == 0


def test_a_task_of_the_zoo_refuses_it_as_an_unknown_word(texts: DiffusionTexts) -> None:
    with pytest.raises(ArgumentError, match="mask"):
        gaps(texts, f"sort : dog {texts.tokenizer.mask_token} ant =", plain=False)

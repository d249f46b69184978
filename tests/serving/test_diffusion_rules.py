"""Which rules a diffusion model of the server offers: what needs a head only where one lies beside the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from partsong import zoo
from partsong.jobs.folder_source import find_text_model
from partsong.serving.errors import ApiError
from partsong.serving.texts.diffusion import DiffusionTexts
from partsong.serving.texts.events import TextRequest
from partsong.serving.texts.wire import TextSpec

pytestmark = pytest.mark.skipif(
    not (zoo.MODELS["lists-mdlm"].folder / "config.json").is_file(), reason="the lists-mdlm weights are not there"
)


def test_a_rule_that_needs_a_head_is_offered_where_there_is_one(tmp_path: Path) -> None:
    texts = DiffusionTexts(find_text_model("lists-mdlm"), TextSpec(name="lists", model="lists-mdlm"))
    assert "variation-bound" in texts.strategies and "dependency" not in texts.strategies
    ask = (("user", "sort : dog ant ="),)
    assert texts.prepare(TextRequest(messages=ask, strategy="variation-bound:delta=0.1", max_tokens=4)).checked
    with pytest.raises(ApiError, match="names a folder of the server: leave head out"):
        texts.prepare(TextRequest(messages=ask, strategy=f"variation-bound:head={tmp_path}", max_tokens=4))
    texts.model.module.config.name_or_path = ""
    assert "variation-bound" not in texts.strategies

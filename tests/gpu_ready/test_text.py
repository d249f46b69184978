"""A step of text decoding lets the host wait once, for all that it has to know of it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from partsong.samplers.text.decode import decode, decode_steps
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.model import TextModel
from tests.gpu_ready.units import Unit, per_unit

READ = "tolist partsong/samplers/text/canvas.py:read_rows"
DRAWN = "tolist partsong/samplers/text/causal.py:CausalLoop._draw"
#: Each takes one token a step, so that both texts end in the same one.
MASKED: dict[str, dict[str, Any]] = {
    "nothing kept": {"cache": "none"},
    "keys kept": {"cache": "dual"},
    "drawn": {"temperature": 1.0},
    "compared with the step before": {"rule": "kl-stable:threshold=1.0"},
    "revised": {"rule": "token-editing:threshold=1.0,editing_threshold=1.0"},
    "checked by shadows": {"rule": "revoke:draft=1.0,verify=0.0", "cache": "none"},
}


@functools.cache
def model_of(name: str) -> TextModel:
    return load_text_model(name)


def step_of(name: str, *, watched: bool = False, **options: Any) -> Unit:
    """What a step costs with a zoo model and two texts."""
    given = {"rule": "quota:per_step=1", "stop_token_ids": [], **options}
    model = model_of(name)  # what it takes to load it is not counted

    def work(length: int) -> float:
        call = (model, [[3, 4, 5], [6, 7, 8]])
        if watched:
            return sum(1.0 for _ in decode_steps(*call, max_new_tokens=length, **given))
        return float(decode(*call, max_new_tokens=length, **given).steps)

    return per_unit(work, (3, 6), warm=False)


@pytest.mark.parametrize("kind", MASKED)
def test_a_masked_step_reads_once(kind: str) -> None:
    step = step_of("lists-mdlm", **MASKED[kind])
    assert step.waits == {READ: 1.0}
    assert step.uploads == {}


def test_a_watched_step_reads_its_events_and_its_text_besides() -> None:
    step = step_of("lists-mdlm", watched=True)
    events = "partsong/samplers/text/events.py"
    assert step.waits == {READ: 1.0, f"tolist {events}:events_of": 1.0, f"tolist {events}:texts_of": 1.0}
    assert step.uploads == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_causal_step_reads_its_tokens(temperature: float) -> None:
    step = step_of("lists-ar", temperature=temperature)
    assert step.waits == {DRAWN: 1.0}
    assert step.uploads == {}

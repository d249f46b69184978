"""The engine for Dynamo answers with the pictures of one rank, and goes on after requests that it refuses."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from partsong import launch, load_pipeline
from partsong.outputs import max_abs_diff
from partsong.seeds import generators
from tests.integrations import dynamo_worker as worker

MODEL = "shapes"
PROMPT = "a red circle"
STEPS = {"num_inference_steps": 2}
REQUESTS: list[dict[str, Any]] = [
    {"prompt": PROMPT, "n": 2, "response_format": "b64_json", "nvext": {**STEPS, "seed": 5}},
    {"prompt": PROMPT, "size": "63x64", "nvext": STEPS},  # the pipeline refuses it on every rank
    {
        "prompt": PROMPT,
        "size": "32x64",
        "nvext": {**STEPS, "seed": 6, "guidance_scale": 2.0, "negative_prompt": "blue"},
    },
    {"prompt": PROMPT, "n": 11},
]


def picture(datum: dict[str, str]) -> Image.Image:
    text = datum["b64_json"] if "b64_json" in datum else datum["url"].removeprefix("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(text)))


def alone(num: int, seed: int, **arguments: Any) -> list[Image.Image]:
    """Draws with the pipeline's own call."""
    pipe = load_pipeline(MODEL).target
    texts = {name: [value] * num for name, value in arguments.items() if isinstance(value, str)}
    return pipe([PROMPT] * num, **STEPS, **arguments | texts, generator=generators(seed, num)).images


@pytest.mark.parametrize(("ranks", "options"), [(1, []), (2, ["--strategy", "ulysses"])])
def test_requests_are_answered_as_by_the_pipeline_alone(ranks: int, options: list[str]) -> None:
    (two,), refused, (sized,), many, (probe,) = launch(worker.answer, ranks, MODEL, options, REQUESTS)
    assert isinstance(refused, ValueError) and "63" in str(refused)
    assert isinstance(many, ValueError) and "n is a whole number from 1 to 10, found 11" in str(many)
    assert [*two["data"][0]] == ["b64_json"] and [*sized["data"][0]] == ["url"]
    drawn = [picture(datum) for answer in (two, sized) for datum in answer["data"]]
    pictures = alone(2, 5) + alone(1, 6, width=32, height=64, guidance_scale=2.0, negative_prompt="blue")
    assert [each.size for each in drawn] == [(64, 64), (64, 64), (32, 64)]
    # A rounding of the last bit may show as one of 255 levels.
    assert all(max_abs_diff(one, other) <= 1.01 / 255 for one, other in zip(drawn, pictures, strict=True))
    assert np.asarray(picture(probe["data"][0])).std() > 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": None}, "prompt is a text"),
        ({"n": 0}, "n is a whole number from 1 to 10, found 0"),
        ({"n": "2"}, "n is a whole number from 1 to 10, found '2'"),
        ({"size": "64"}, "size is WIDTHxHEIGHT"),
        ({"size": "0x64"}, "size is WIDTHxHEIGHT"),
        ({"nvext": {"seed": -1}}, "seed"),
        ({"input_reference": "https://example.org/a.png"}, "input_reference: this worker draws from text alone"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    module = worker.load([], [])
    with pytest.raises(ValueError, match=reason):
        module.read_request({"prompt": PROMPT} | fields)


def test_without_a_seed_pictures_differ() -> None:
    module = worker.load([], [])
    first, second = (module.read_request({"prompt": PROMPT, "size": "auto", "nvext": None}) for _ in range(2))
    assert first["seed"] != second["seed"] and first.keys() == {"prompt", "num", "seed"}

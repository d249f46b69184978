"""Samples every model of the zoo, or those named, for docs/zoo.md: ``python -m tests.zoo_samples [NAME ...]``.

Writes pictures and clips to docs/images/zoo-*, and to docs/images/zoo-samples.json what models of text answered and
what is read from the pictures.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from partsong import CascadePipeline, decode, generate, load_text_model, parallelize, zoo
from partsong.reasoning import Parameters, Run
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.strategies import fork_join
from partsong.samplers.any_order import LPD
from partsong.seeds import generators
from tests.animation import Pixels, enlarged, labelled, save_gif
from tests.documents import ROOT

IMAGES = ROOT / "docs" / "images"
SAMPLES = IMAGES / "zoo-samples.json"
SIDE, SEED = 128, 7
CAPTIONS = (
    "a red circle left of a blue square",
    "a large yellow triangle above a small green circle",
    "a purple cross at the top left and a black square at the bottom right",
    "a blue circle, a yellow square and a red triangle",
)
MOVING = (
    "a big red circle bounces left and right",
    "a small blue square moves up quickly",
    "a green triangle moves right",
    "a big purple square bounces up and down slowly",
)
#: By task.
PROMPTS = {
    "lists": "sort : dog ant cat =",
    "sums": "make 64 from 3 7 25 6",
    "products": "4729*386=?",
}


def pictures(name: str) -> Pixels:
    """Returns a picture `[H, W, 3]` in [0, 1] of each caption."""
    row, model = zoo.MODELS[name], zoo.load(name)
    if row.read is not None:
        return model.draw(LPD().decode(model.captioned(CAPTIONS), seed=SEED).tokens)
    model.set_progress_bar_config(disable=True)
    seeded = generators(SEED, len(CAPTIONS))
    return np.asarray(model(list(CAPTIONS), generator=seeded, output_type="np", **row.defaults).images)


def clips(name: str) -> list[Pixels]:
    """Returns a video `[F, H, W, 3]` in [0, 1] of each caption."""
    row, pipe = zoo.MODELS[name], zoo.load(name)
    pipe.set_progress_bar_config(disable=True)
    seeded = generators(SEED, len(MOVING))
    given = {"prompt": list(MOVING), "generator": seeded, "output_type": "np", **row.defaults}
    with parallelize(pipe, *([CascadePipeline(depth=4)] if name == "motion-clean" else [])) as plan:
        return list(np.asarray(generate(plan, **given).frames))


def drawn_by(name: str) -> tuple[tuple[str, ...], list[Pixels]]:
    """Returns captions, and the picture or clip of each that a model makes."""
    torch.manual_seed(SEED)
    if zoo.MODELS[name].kind == "image":
        return CAPTIONS, list(pictures(name))
    return MOVING, clips(name)


def read_from(name: str, captions: Sequence[str], drawn: Sequence[Pixels]) -> list[float]:
    """Returns the part of each caption's facts that the task's reader finds."""
    return [zoo.MODELS[name].task.facts_read(*each) for each in zip(captions, drawn, strict=True)]


def prompt_of(name: str) -> str:
    """Returns what a model of text is asked."""
    return PROMPTS[zoo.MODELS[name].task.__name__.rpartition(".")[2]]


def answer(name: str) -> str:
    """Returns what a model of text writes after its prompt, the likeliest tokens."""
    prompt = prompt_of(name)
    if name == "products":
        return asyncio.run(_forked(prompt))
    model, tokenizer = zoo.load(name)
    if name == "lists-mdlm":
        loaded = load_text_model(name)
        ids = decode(loaded, [tokenizer.encode(prompt)], max_new_tokens=24, temperature=0.0).tokens[0]
        return tokenizer.decode([token for token in ids if token != tokenizer.eos_token_id])
    if tokenizer.chat_template is None:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        chat = [{"role": "user", "content": prompt}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        ids = tokenizer.apply_chat_template(chat, **options).input_ids
    written = model.generate(ids, max_new_tokens=zoo.MODELS[name].defaults["canvas"], do_sample=False)
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


async def _forked(prompt: str) -> str:
    engine = LocalEngine("products")
    greedy = Parameters(temperature=0)
    found = await fork_join(
        Run(engine), prompt, extract=zoo.products.answer_of, format="multiverse", teach=False, parameters=greedy
    )
    await engine.close()
    return found.text


def missing() -> list[str]:
    """Returns the models whose samples are not there."""
    there = json.loads(SAMPLES.read_text(encoding="utf-8"))
    return [name for name in zoo.MODELS if name not in there]


def main(names: Collection[str]) -> None:
    """Samples some models, writes what they drew, and keeps the samples of the others."""
    samples: dict[str, dict[str, Any]] = json.loads(SAMPLES.read_text(encoding="utf-8"))
    for name in names:
        model = zoo.MODELS[name]
        if model.kind == "text":
            samples[name] = {"prompt": prompt_of(name), "text": answer(name)}
            continue
        captions, drawn = drawn_by(name)
        samples[name] = {"facts": read_from(name, captions, drawn)}
        if model.kind == "image":
            sheet = labelled([enlarged(each, SIDE) for each in drawn], [""] * len(captions))
            sheet.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"zoo-{name}.png", optimize=True)
        else:
            moments = zip(*drawn, strict=True)
            frames = [labelled([enlarged(each, SIDE) for each in moment], [""] * len(captions)) for moment in moments]
            save_gif(IMAGES / f"zoo-{name}.gif", frames, 80, last=80, colours=32)
    samples = {name: samples[name] for name in zoo.MODELS}
    SAMPLES.write_text(json.dumps(samples, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or list(zoo.MODELS))

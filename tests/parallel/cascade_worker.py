"""Runs on every rank: CascadePipeline against its definition in one forward of all blocks in flight, and itself.

The definition: in every slot one forward of the model holds all blocks in flight, each at its own time, and an explicit
mask says who sees whom, among themselves and the clean keys of the past. Positions are those of the frames in the
video, with the model's own table of angles.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest import mock

import torch
from diffusers import LCMScheduler, UniPCMultistepScheduler
from torch import Tensor

from partsong import CascadePipeline
from partsong.errors import PartsongError
from partsong.ledger import Ledger
from partsong.parallel import Mesh, parallelize
from partsong.samplers import generate, stream
from tests.parallel.dual_worker import SIZE, STEPS, Film, by_heads, call
from tests.parallel.dual_worker import pipeline as wan
from tests.parallel.pipeline_worker import clean
from tests.parallel.pipelines import embeds
from tests.parallel.ranks import error, gathered
from tests.parallel.timestep_worker import FRAMES, LONG, pipeline

#: Knobs, and whether it is guided.
CASES: dict[str, tuple[dict[str, int], bool]] = {
    "serial": ({"depth": 1, "window": 2, "sink": 1}, False),
    "two": ({"depth": 2, "window": 2, "sink": 2}, False),
    "guided": ({"depth": 2, "window": 1, "sink": 1}, True),
    "four": ({"depth": 4, "window": 1, "sink": 1}, False),
    "far": ({"depth": 4, "window": 9, "sink": 1}, False),
}
NAMES = tuple(CASES)


def start(frames: int = LONG) -> Tensor:
    """Latents that a video starts from."""
    shape = (1, 4, (frames - 1) // 4 + 1, SIZE[0] // 8, SIZE[1] // 8)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()


class _Flight(Film):
    """What the definition knows: who is in flight, and the clean keys of all blocks, before they are turned."""

    def __init__(self, model: Any, window: int, sink: int) -> None:
        super().__init__(model, 2, 0, 1)
        self.window, self.sink = window, sink
        self.flight: list[int] = []
        self.done: int | None = None
        for layer, block in enumerate(model.blocks):
            block.attn1.set_processor(_InFlight(layer, self))

    def first(self, reader: int) -> int:
        """The earliest block that a block sees."""
        noisy = [block for block in self.flight if block != self.done and reader != self.done]
        return max(0, min([reader - self.window, *noisy]))

    def sees(self, reader: int, block: int, is_clean: bool) -> bool:
        """Whether a block sees another one, or itself."""
        if is_clean:
            return self.first(reader) <= block <= reader
        return reader != self.done


class _InFlight:
    """Self-attention of all blocks in flight in one, under an explicit mask."""

    def __init__(self, layer: int, film: _Flight) -> None:
        self.layer, self.film = layer, film

    def __call__(self, attn: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        film, past = self.film, {}
        q, k, v = (x.split(film.frames * film.area, dim=2) for x in by_heads(attn, hidden_states))
        for block, *kv in zip(film.flight, k, v, strict=True):
            if block == film.done:
                film.store[block, 0, film.branch, self.layer] = (kv[0], kv[1])
        past = {key[0]: kv for key, kv in film.store.items() if key[2:] == (film.branch, self.layer)}
        keys, values, shown = [], [], []
        now = {block: kv for block, *kv in zip(film.flight, k, v, strict=True) if block != film.done}
        for block, kv in (*past.items(), *now.items()):
            keys.append(film.turned(kv[0], block, 0))
            values.append(kv[1])
            shown.append([film.sees(reader, block, block in past) for reader in film.flight])
        for reader in film.flight:
            if film.sink and (first := film.first(reader)) > 0:
                part = slice(0, film.sink * film.area)
                keys.append(film.turned(past[0][0][:, :, part], first, -film.sink))
                values.append(past[0][1][:, :, part])
                shown.append([other == reader for other in film.flight])
        columns = [torch.tensor(row)[:, None].expand(-1, x.shape[2]) for row, x in zip(shown, keys, strict=True)]
        mask = torch.cat(columns, 1).repeat_interleave(film.frames * film.area, dim=0)
        query = torch.cat([film.turned(x, block, 0) for block, x in zip(film.flight, q, strict=True)], 2)
        weights = query @ torch.cat(keys, 2).mT / query.shape[-1] ** 0.5
        weights = weights.masked_fill(~mask, -torch.inf).softmax(-1)
        out = (weights @ torch.cat(values, 2)).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))


#: What the test's encoder makes of texts.
EMBEDDED = {text: embeds(1, torch.float64, seed=seed) for seed, text in enumerate("abc", 5)}


def telling(pipe: Any, **more: Any) -> dict[str, Any]:
    """Arguments of a long video that begins with a text; the pipeline gets an encoder, which it has none of."""
    vars(pipe)["encode_prompt"] = lambda prompt, *_, **__: (EMBEDDED[prompt], None)
    given = {"prompt_embeds": None, "negative_prompt_embeds": None, "prompt": "a"}
    return call(LONG, False, **given, **more)


@torch.no_grad()
@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)  # the model rounds its residual stream to float32
def definition(name: str, told: bool = False) -> float:
    """Distance of a long video from its definition; one that is told other texts in its course, at depth 1 only."""
    knobs, guided = CASES[name]
    named = call(LONG, guided)
    texts = [named["prompt_embeds"]] * 6
    with parallelize(pipeline(), CascadePipeline(**knobs)) as plan:
        if told:
            # Frames 20 and 21 are the last of a latent frame and the first of the next one, in blocks 2 and 3.
            found = generate(plan, **telling(plan.target, latents=start()), prompts={20: "b", 21: "c"}).frames
            texts = [EMBEDDED[text] for text in "aabccc"]
        else:
            found = generate(plan, **named | {"latents": start()}).frames
    pipe = pipeline()
    film = _Flight(pipe.transformer, knobs["window"], knobs["sink"])
    pipe.scheduler.set_timesteps(STEPS)
    sigmas, times = pipe.scheduler.sigmas, [*pipe.scheduler.timesteps.tolist(), 0.0]
    latents = list(start().split(2, dim=2))
    lag = {1: 4, 2: 2, 4: 1}[knobs["depth"]]
    for slot in range(lag * (len(latents) - 1) + STEPS):
        steps = {b: slot - lag * b for b in range(len(latents)) if 0 <= slot - lag * b <= STEPS}
        film.done = next((block for block, step in steps.items() if step == STEPS), None)
        # At depth 1 nobody meets a later block, so each can have a forward, and a text, of its own.
        for film.flight in [[block] for block in steps] if lag == STEPS else [list(steps)]:
            x = torch.cat([latents[block] for block in film.flight], dim=2)
            t = torch.tensor([times[steps[block]] for block in film.flight]).repeat_interleave(2)[None]
            answers = []
            asked = (texts[film.flight[0]], named["negative_prompt_embeds"])[: 1 + guided]
            for film.branch, text in enumerate(asked):
                answers.append(pipe.transformer(x, t, text, enable_diffusion_forcing=True, return_dict=False)[0])
            v = answers[1] + named["guidance_scale"] * (answers[0] - answers[1]) if guided else answers[0]
            for block, part in zip(film.flight, v.split(2, dim=2), strict=True):
                if (step := steps[block]) < STEPS:
                    latents[block] = latents[block] + float(sigmas[step + 1] - sigmas[step]) * part
    return error(found, torch.cat(latents, dim=2))


@torch.no_grad()
@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
def serial() -> float:
    """At depth 1, with a window that holds the past: distance to the model's own masked forwards of all frames."""
    with parallelize(pipeline(), CascadePipeline(depth=1, window=3, sink=0)) as plan:
        found = generate(plan, **call(FRAMES, False, latents=start(FRAMES))).frames
    pipe, text, past = pipeline(), call(FRAMES)["prompt_embeds"], start()[:, :, :0]
    pipe.scheduler.set_timesteps(STEPS)
    sigmas, times = pipe.scheduler.sigmas, pipe.scheduler.timesteps
    for x in start(FRAMES).split(2, dim=2):
        for step in range(STEPS):
            t = torch.cat([torch.zeros(past.shape[2]), times[step].expand(2)])[None]
            whole = torch.cat([past, x], dim=2)
            v = pipe.transformer(whole, t, text, enable_diffusion_forcing=True, return_dict=False)[0]
            x = x + float(sigmas[step + 1] - sigmas[step]) * v[:, :, -2:]
        past = torch.cat([past, x], dim=2)
    return error(found, past)


def videos(mesh: Mesh, names: Collection[str]) -> dict[str, Tensor]:
    """Latents of some videos, to be compared between numbers of ranks."""
    found = {}
    for name in names:
        knobs, guided = CASES[name]
        scheduler = {"two": LCMScheduler(), "four": unipc()}.get(name)  # one draws noise, one remembers
        with parallelize(pipeline(scheduler), CascadePipeline(**knobs), mesh=mesh) as plan:
            found[name] = generate(plan, **call(LONG, guided)).frames
    return found


def unipc() -> UniPCMultistepScheduler:
    """A scheduler that remembers earlier steps."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def counted(nproc: int, mesh: Mesh) -> dict[str, Any]:
    """Bytes that every rank sent in streams, those predicted, how many frames came at a time, and the keys held."""
    found: dict[str, Any] = {"sent": [], "predicted": []}
    for frames, guided, everywhere in ((LONG, False, False), (FRAMES, True, True), (5, False, False)):
        with parallelize(pipeline(), CascadePipeline(depth=4, window=2), mesh=mesh) as plan:
            with Ledger(flops=False) as ledger:
                named = call(frames, guided, output_type="pt")
                if everywhere:
                    generate(plan, **named)
                else:
                    parts = [part.frames.shape[1] for part in stream(plan, **named) if part is not None]
                    found.setdefault("parts", parts)
            sent = int(ledger.summary().get("bytes_sent", 0))
            found["sent"].append(gathered(sent) if nproc > 1 else [sent])
            found["predicted"].append(plan.explain().bytes_total())
    return found


def refusals(nproc: int, mesh: Mesh, folder: str) -> dict[str, str]:
    """What is said of calls that have no correct form."""
    said = {}

    def run(pipe: Any, named: dict[str, Any], depth: int = 4, journal: Any = None) -> None:
        with parallelize(pipe, CascadePipeline(depth=depth), mesh=mesh) as plan:
            generate(plan, journal=journal, **named)

    pipe = pipeline()
    trials = {
        "frames": lambda: run(pipe, call(25)),
        "depth": lambda: run(pipe, call(21, num_inference_steps=3)),
        "ranks": lambda: run(pipe, call(21), depth=1),
        "model": lambda: run(wan(), call(21)),
        "journal": lambda: run(pipe, call(21), journal=folder),
        "callback": lambda: run(pipe, call(21, callback_on_step_end=print)),
        "prompts": lambda: run(pipe, call(21, prompts={8: "b"})),
        "frame": lambda: run(pipe, call(21, prompt="a", prompts={21: "b"})),
    }
    for name, trial in trials.items():
        try:
            trial()
        except PartsongError as problem:
            said[name] = f"{type(problem).__name__}: {problem}"
    said["hooks"] = "none" if clean(pipe.transformer) and clean(pipe.vae) else "left"
    return said


def ranks(nproc: int, folder: str, names: Collection[str] = NAMES) -> dict[str, Any]:
    """Everything, on one number of ranks, with these videos."""
    with Mesh(stage=nproc) as mesh:
        return {
            "videos": videos(mesh, names),
            "counted": counted(nproc, mesh),
            "refusals": refusals(nproc, mesh, folder),
        }

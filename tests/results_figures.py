"""The figures in the sentences of docs/results.md, each from a result file in benchmarks/."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from partsong.evals.bench.models import BENCH_MODELS
from partsong.zoo import MODELS as ZOO
from tests.results_files import IDLE, Row, filed, noted, row, timed

FILES = {
    "fit": "image/2026-11-25-fit",
    "slow": "image/2026-11-25-slow-links",
    "unet": "image/2026-11-24-unet",
    "unet_large": "image/2026-11-24-unet-9216",
    "unet_slow": "image/2026-11-25-unet-slow-links",
    "unet_packed": "image/2026-11-30-unet",
    "unet_packed_large": "image/2026-11-30-unet-9216",
    "drift": "drift/2026-11-22-zoo",
    "unet_drift": "drift/2026-11-26-zoo-unet",
    "norms": "drift/2026-11-30-norms",
    "wires": "drift/2026-11-24-wires",
    "lagged": "drift/2026-11-24-lagged-layers",
    "partial": "drift/2026-11-24-zoo-partial-patch",
    "video": "video/2026-11-26-zoo",
    "video_ranks": "video/2026-12-01-zoo-ranks",
    "large": "image/2026-12-01-high-resolution",
    "queue": "video/2026-11-22-zoo-memory-queue",
    "stream": "video/2026-11-22-zoo-memory",
    "oracle": "oracle/2026-11-22",
    "lists": "text/2026-11-22-zoo",
    "sums": "thinking/2026-11-26-zoo-sums",
    "votes": "thinking/2026-11-22-votes",
    "kills": "thinking/2026-11-22-reasoning-kills",
    "gsm": "thinking/2026-11-22-gsm8k",
    "gsm_live": "thinking/2026-11-22-gsm8k-live",
    "threads": "threads/2026-11-22",
    "text": "text/2026-11-22",
    "causal": "text/2026-11-23-causal",
    "fork": "threads/2026-11-22-kv-fork",
    "join": "threads/2026-11-22-kv-join",
    "hogwild": "threads/2026-11-22-hogwild",
    "long": "video/2026-11-22",
}
#: Tasks of the oracle that have few valid texts, so that draws show how they are shared out.
FEW_TEXTS = ("replace", "insert", "remove")


def figures() -> dict[str, Any]:
    """Returns every figure by its name in tests/results_page.md."""
    return {
        "files": FILES,
        "idle": f"{100 * IDLE:.0f}",
        **_images(),
        **_pictures(),
        **_videos(),
        "oracle": _oracle(),
        **_thinking(),
        **_busy(),
    }


def percent(value: float) -> str:
    """Returns a share as a percentage with one digit behind the point."""
    return f"{100 * value:.1f}"


@cache
def parameters(build: Callable[[], nn.Module]) -> str:
    """Returns the millions of parameters of a benchmark's model, in tens, without making its weights."""
    with torch.device("meta"):
        number = sum(each.numel() for each in build().parameters())
    return str(10 * round(number / 1e7))


def _images() -> dict[str, str]:
    fewest = min(each["size"] for each in timed(FILES["fit"]))
    ours = [
        each
        for each in timed(FILES["fit"])
        if each["size"] == fewest and not each["case"].startswith(("serial", "diffusers"))
    ]
    worst = min(ours, key=lambda each: each["ratio_to_serial"])
    assert worst["case"] == "ShardedWeights + Ulysses"
    return {
        "flux_parameters": parameters(BENCH_MODELS["flux-like"].build),
        "unet_parameters": parameters(BENCH_MODELS["sdxl-like"].build),
        "fewest_tokens": str(fewest),
        "spread": f"{100 * filed(FILES['fit'])['spreads'][f'flux-like serial at {fewest} on loopback']:.0f}",
        "sharded": f"{worst['ratio_to_serial']:.2f}",
    }


def _pictures() -> dict[str, Any]:
    displaced = "DisplacedPatch(degree=None, warmup_steps=2, order=1, norms='fresh', wire='{}')"
    partial = (
        "PartialPatch(degree=None, warmup_steps=2, order=1, norms='fresh', wire='none', portion=0.3, far=1.0, "
        "error_budget=0.05)"
    )
    lagged = "LaggedLayers(degree=None, components=2, stride=1, warmup_steps=2, window=None, order=None)"
    few = row(FILES["wires"], model="shapes", case=displaced.format("1bit"))
    all_of_it = row(FILES["wires"], model="shapes", case=displaced.format("none"))
    part = row(FILES["partial"], model="shapes", nproc=2, case=partial)
    whole = row(FILES["partial"], model="shapes", nproc=2, case=displaced.format("none"))
    (captions,) = {each["num_captions"] for each in drift_rows()}
    return {
        "drift_captions": str(captions),
        "picture_steps": str(ZOO["shapes"].defaults["num_inference_steps"]),
        "wire": _read(few),
        "wire_bytes": f"{100 * few['bytes_sent'] / all_of_it['bytes_sent']:.0f}",
        "lagged": _read(row(FILES["lagged"], case=lagged)),
        "partial": _read(part),
        "partial_bytes": f"{100 * part['bytes_sent'] / whole['bytes_sent']:.0f}",
    }


def drift_rows() -> list[Row]:
    """Returns the rows of the files with the zoo's pictures, each for one model."""
    # PartialPatch was another method then; its later figures have a file of their own. So have those of the UNet, which
    # was trained on.
    rows = [row for row in filed(FILES["drift"])["rows"] if row["model"] == "shapes"]
    rows = [row for row in rows if not row["case"].startswith("PartialPatch")]
    # Forecast norms were changed on four ranks since.
    later = {(row["nproc"], row["case"]): row for row in filed(FILES["norms"])["rows"] if row["nproc"] == 4}
    return [*rows, *(later.get((row["nproc"], row["case"]), row) for row in filed(FILES["unet_drift"])["rows"])]


def _read(picture: Row) -> dict[str, str]:
    return {"facts": percent(picture["facts_read"]), "psnr": f"{picture['psnr_median']:.1f}"}


def _videos() -> dict[str, Any]:
    first = filed(FILES["video"])["rows"][0]
    return {
        "video": {
            "frames": str(first["frames"]),
            "trained": str(ZOO["motion"].defaults["num_frames"]),
            "captions": str(first["num_captions"]),
            "captions_of_ranks": str(filed(FILES["video_ranks"])["rows"][0]["num_captions"]),
        },
        "large": {"captions": noted(FILES["large"], r"(\d+) captions, float32")[0]},
    }


def _oracle() -> dict[str, str]:
    rows = [each for each in filed(FILES["oracle"])["rows"] if each["task"] in FEW_TEXTS]
    valid = {each["rule"] for each in rows} - {
        each["rule"] for each in filed(FILES["oracle"])["rows"] if each["valid"] < 1
    }
    llada = [each["total_variation"] for each in rows if each["rule"] == "llada"]
    others = [each["total_variation"] for each in rows if each["rule"] in valid - {"llada"}]
    (texts,) = {each["num"] for each in rows}
    return {
        "texts": str(texts),
        "tasks": ", ".join(f"`{task}`" for task in FEW_TEXTS),
        "llada_least": f"{min(llada):.2f}",
        "llada_most": f"{max(llada):.2f}",
        "others": f"{max(others):.2f}",
    }


def _thinking() -> dict[str, Any]:
    votes = filed(FILES["votes"])["rows"]
    mixed = next(each for each in votes if each["share"].endswith("evenly"))
    kills = filed(FILES["kills"])["rows"]
    gsm = {each["strategy"]: each for each in filed(FILES["gsm"])["rows"]}
    vote = next(name for name in gsm if name.startswith("self-consistency:num="))
    live = {each["strategy"].partition(":")[0]: each for each in filed(FILES["gsm_live"])["rows"]}
    spent = {name: each["tokens_total"] / live["greedy"]["tokens_total"] for name, each in live.items()}
    threads = {each["strategy"]: each for each in filed(FILES["threads"])["rows"] if each["task"] == "all"}
    longer = next(name for name in threads if name.startswith("sequential, "))
    return {
        "votes": {
            "samples": noted(FILES["votes"], r"(\d+) samples a vote")[0],
            "same": f"{sum(each['same'] for each in votes):,}",
            "all": f"{sum(each['votes'] for each in votes):,}",
            "least": mixed["share"].partition(" ")[0],
            "saved": f"{100 * mixed['sequential']:.0f}",
        },
        "kills": {
            "times": str(sum(each["kills"] for each in kills)),
            "repeated": str(sum(each["repeated"] for each in kills)),
            "equal": str(sum(each["equal"] for each in kills)),
            "runs": str(len(kills)),
        },
        "gsm": {
            "problems": str(gsm["greedy"]["problems"]),
            "greedy": str(gsm["greedy"]["right"]),
            "vote": str(gsm[vote]["right"]),
            "votes": vote.partition("=")[2],
            "refined": str(live["sequential-refinement"]["right"]),
            "refined_tokens": f"{spent['sequential-refinement']:.1f}",
            "pdr": str(live["pdr"]["right"]),
            "pdr_tokens": f"{spent['pdr']:.1f}",
        },
        "threads": {
            "forked": percent(threads["threads"]["accuracy"]),
            "problems": str(threads["threads"]["problems"]),
            "twin": percent(threads["sequential"]["accuracy"]),
            "longer": percent(threads[longer]["accuracy"]),
            "steps": longer.removeprefix("sequential, "),
        },
    }


def _busy() -> dict[str, Any]:
    many = max(each["batch"] for each in filed(FILES["text"])["rows"])
    causal = [each["ratio"] for each in filed(FILES["causal"])["rows"] if each["name"] == "decode"]
    fork, setting = FILES["fork"], r"(\d+) sampled answers of (\d+) tokens to one prompt of (\d+) tokens"
    answers, length, prompt = noted(fork, setting)
    case = "8 threads and 16 tokens"
    hogwild: dict[int, float] = {}
    for workers in {each["workers"] for each in filed(FILES["hogwild"])["rows"]} - {1}:
        seen = row(FILES["hogwild"], workers=workers, name="queries turned")
        apart = row(FILES["hogwild"], workers=workers, name="apart, as samples of one prompt")
        hogwild[workers] = seen["cpu_seconds_median"] / apart["cpu_seconds_median"]
    return {
        "text": {
            "one": f"{row(FILES['text'], side='decode', name='masked', batch=1)['ratio_to_serial']:.1f}",
            "batch": str(many),
            "many": f"{row(FILES['text'], side='decode', name='masked', batch=many)['ratio_to_serial']:.1f}",
        },
        "causal": {"least": f"{min(causal):.1f}", "most": f"{max(causal):.1f}"},
        "fork": {
            "answers": answers,
            "length": length,
            "prompt": prompt,
            "local": f"{row(fork, name='LocalEngine')['tokens_per_second']:.0f}",
            "vllm": f"{row(fork, name='vLLM')['tokens_per_second']:.0f}",
            "batch": f"{row(fork, name='generate, num_return_sequences')['tokens_per_second']:.0f}",
        },
        "join": {
            "case": case,
            "joined": f"{row(FILES['join'], name=f'{case}, keys joined')['ratio_to_batch']:.2f}",
            "again": f"{row(FILES['join'], name=f'{case}, read again')['ratio_to_batch']:.2f}",
        },
        "hogwild": {
            "fewest": str(min(hogwild)),
            "most_workers": str(max(hogwild)),
            "least": f"{min(hogwild.values()):.1f}",
            "most": f"{max(hogwild.values()):.1f}",
        },
        "long": {
            "clip": f"{row(FILES['long'], name='ClipParallel')['ratio_to_serial']:.2f}",
            "dual": f"{row(FILES['long'], name='DualParallel')['ratio_to_serial']:.2f}",
            "timestep": f"{row(FILES['long'], name='TimestepPipeline')['ratio_to_serial']:.2f}",
        },
    }

"""Lists this package's models as rows, which the core finds by the entry point `partsong.models`. Loads no torch."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

from partsong.zoo import ZooModel
from partsong_zoo import lists, motion, products, shapes, sums

__all__ = ["MODELS"]

_WEIGHTS = Path(__file__).parent / "weights"
#: The distribution that brings the larger models of pictures; each wheel stays below what an index takes.
_PICTURES = "partsong-zoo-pictures"


def _row(name: str, **facts: Any) -> ZooModel:
    return ZooModel(name=name, folder=_WEIGHTS / name, **facts)


def _read_tiles(folder: Path, dtype: Any) -> Any:
    from partsong_zoo.tiles.loading import load_tiles

    return load_tiles(folder, dtype)


def _put_experts(pipeline: Any, base: Path, folder: Path) -> None:
    from partsong_zoo.shapes_experts.loading import put_experts

    put_experts(pipeline, base, folder)


_SCENES = {"num_inference_steps": 28, "guidance_scale": 5.0, "height": 64, "width": 64}
_FEW = {"num_inference_steps": 4, "guidance_scale": 1.0}
_VIDEOS = {"height": 32, "width": 32, "num_frames": 31, "max_sequence_length": 24}

#: Every model of this package, as rows.
MODELS = (
    _row(
        "shapes",
        kind="image",
        description=(
            "Text to image, 64 x 64: one to three coloured shapes, their sizes, places and relations "
            '("a red circle left of a blue square"); a Stable-Diffusion-3 pipeline of 9 M parameters.'
        ),
        defaults=MappingProxyType(_SCENES | {"max_sequence_length": 1}),
        task=shapes,
        recipe="zoo/recipes/train_shapes.py",
    ),
    _row(
        "shapes-few",
        kind="image",
        package=_PICTURES,
        description=(
            "The pipeline of shapes with a transformer that needs four, two or one steps without guidance, where its "
            "teacher takes 28 with."
        ),
        defaults=MappingProxyType(_SCENES | _FEW | {"max_sequence_length": 1}),
        task=shapes,
        recipe="zoo/recipes/train_shapes_few.py",
    ),
    _row(
        "shapes-unet",
        kind="image",
        package=_PICTURES,
        description=(
            "The same scenes through a Stable Diffusion pipeline with a UNet of 5.8 M parameters; it sometimes draws "
            "an object twice."
        ),
        defaults=MappingProxyType(_SCENES),
        task=shapes,
        recipe="zoo/recipes/train_shapes_unet.py",
    ),
    _row(
        "shapes-experts",
        kind="image",
        package=_PICTURES,
        description=(
            "The pipeline of shapes with four experts that were trained apart, each on a cluster of the scenes, and a "
            "router that reads the caption; for expert-parallel."
        ),
        defaults=MappingProxyType(_SCENES | {"max_sequence_length": 1}),
        task=shapes,
        recipe="zoo/recipes/train_shapes_experts.py",
        base="shapes",
        complete=_put_experts,
    ),
    _row(
        "tiles",
        kind="image",
        package=_PICTURES,
        description=(
            "The same scenes as 8 x 8 tokens, decided in any order and in groups of any size by the rules lpd, assd "
            "and keyed-jacobi; a Llama of 1.4 M parameters and a tokenizer of pictures."
        ),
        defaults=MappingProxyType({}),
        task=shapes,
        recipe="zoo/recipes/train_tiles.py",
        read=_read_tiles,
    ),
    _row(
        "motion",
        kind="video",
        description=(
            "Text to video, 32 x 32, 31 frames and more: one or two coloured shapes that move or bounce, slowly or "
            'quickly ("a red circle moves right"); a Wan pipeline of 5 M parameters.'
        ),
        defaults=MappingProxyType(_VIDEOS | {"num_inference_steps": 20, "guidance_scale": 2.0}),
        task=motion,
        recipe="zoo/recipes/train_motion.py",
    ),
    _row(
        "motion-causal",
        kind="video",
        description=(
            "The same videos from a causal model in two or four steps without guidance, block after block of eight "
            "frames, for streams without end; a Wan pipeline around a SkyReels-V2 transformer."
        ),
        defaults=MappingProxyType(_VIDEOS | _FEW),
        task=motion,
        recipe="zoo/recipes/train_motion.py",
    ),
    _row(
        "motion-clean",
        kind="video",
        description=(
            "The causal model, taught to continue blocks that are clean, in four steps without guidance; for "
            "cascade-pipeline."
        ),
        defaults=MappingProxyType(_VIDEOS | _FEW),
        task=motion,
        recipe="zoo/recipes/train_motion_clean.py",
    ),
    _row(
        "lists-mdlm",
        kind="text",
        description=(
            "Masked diffusion language model of list operations, Latin squares and additions in words "
            '("sort : dog ant cat ="); a Llama of 1.3 M parameters whose tokens all see each other.'
        ),
        defaults=MappingProxyType({"canvas": 24}),
        task=lists,
        recipe="zoo/recipes/train_lists.py",
    ),
    _row(
        "lists-ar",
        kind="text",
        description="The causal twin of lists-mdlm: the same tasks, size and words, one token after the other.",
        defaults=MappingProxyType({"canvas": 24}),
        task=lists,
        recipe="zoo/recipes/train_lists.py",
    ),
    _row(
        "sums",
        kind="text",
        description=(
            "Sums and countdowns worked out in steps, from scratch or from earlier attempts "
            '("make 64 from 3 7 25 6"); a chat model, a causal Llama of 2 M parameters.'
        ),
        defaults=MappingProxyType({"canvas": 96}),
        task=sums,
        recipe="zoo/recipes/train_sums.py",
    ),
    _row(
        "products",
        kind="text",
        description=(
            'Multiplications worked out in threads that fork and join ("4729*386=?"); a chat model that writes the '
            "tags of Multiverse, a causal Llama of 0.9 M parameters."
        ),
        defaults=MappingProxyType({"canvas": 256}),
        task=products,
        recipe="zoo/recipes/train_threads.py",
    ),
)

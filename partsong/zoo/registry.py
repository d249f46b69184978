"""Lists the zoo's models as data rows. Importing this module loads neither torch nor diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from partsong.errors import ArgumentError
from partsong.model_folders import ZOO
from partsong.zoo import lists, motion, products, shapes, sums
from partsong.zoo.tiles import PICTURES

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TextPair(NamedTuple):
    """Holds a text model of the zoo.

    Attributes:
        model: What `AutoModelForCausalLM` makes of the folder, in evaluation mode.
        tokenizer: What `AutoTokenizer` makes of it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class ZooModel:
    """Describes a small model that ships with the package.

    Attributes:
        name: The name `load` and the command line know it by.
        kind: What it makes.
        description: One sentence for listings.
        defaults: Keyword arguments for calls of the pipeline; measured results use these. For text only `canvas`, the
            number of tokens that an answer and its end may take.
        task: The module that draws prompts for the model and reads its answers (`captions`, `parse`, `render`,
            `read`, `facts`, `facts_read`; for videos also `identity_kept`, `border_jumps`, `trend`; for text
            `examples`, `parse`, `check`, `support`).
        recipe: The script that makes it.
        license: Licence of weights and training data.
        base: The model whose pipeline it is put in, where its own folder holds experts only.
    """

    name: str
    kind: Literal["image", "video", "text"]
    description: str
    defaults: Mapping[str, Any]
    task: ModuleType
    recipe: str
    license: str = "Apache-2.0"
    base: str | None = None

    @property
    def folder(self) -> Path:
        """Returns the folder of its weights: a stock diffusers pipeline, for text a stock transformers folder."""
        return ZOO / self.name

    @property
    def pipeline_folder(self) -> Path:
        """Returns the stock folder that is loaded first: its own, or that of its base."""
        return ZOO / (self.base or self.name)


_SCENES = {"num_inference_steps": 28, "guidance_scale": 5.0, "height": 64, "width": 64}
_FEW = {"num_inference_steps": 4, "guidance_scale": 1.0}
_VIDEOS = {"height": 32, "width": 32, "num_frames": 31, "max_sequence_length": 24}

_ROWS = (
    ZooModel(
        name="shapes",
        kind="image",
        description=(
            "Text to image, 64 x 64: one to three coloured shapes, their sizes, places and relations "
            '("a red circle left of a blue square"); a Stable-Diffusion-3 pipeline of 9 M parameters.'
        ),
        defaults=MappingProxyType(_SCENES | {"max_sequence_length": 1}),
        task=shapes,
        recipe="recipes/train_shapes.py",
    ),
    ZooModel(
        name="shapes-few",
        kind="image",
        description=(
            "The pipeline of shapes with a transformer that needs four, two or one steps without guidance, where its "
            "teacher takes 28 with."
        ),
        defaults=MappingProxyType(_SCENES | _FEW | {"max_sequence_length": 1}),
        task=shapes,
        recipe="recipes/train_shapes_few.py",
    ),
    ZooModel(
        name="shapes-unet",
        kind="image",
        description=(
            "The same scenes through a Stable Diffusion pipeline with a UNet of 5.8 M parameters; it sometimes draws "
            "an object twice."
        ),
        defaults=MappingProxyType(_SCENES),
        task=shapes,
        recipe="recipes/train_shapes_unet.py",
    ),
    ZooModel(
        name="shapes-experts",
        kind="image",
        description=(
            "The pipeline of shapes with four experts that were trained apart, each on a cluster of the scenes, and a "
            "router that reads the caption; for expert-parallel."
        ),
        defaults=MappingProxyType(_SCENES | {"max_sequence_length": 1}),
        task=shapes,
        recipe="recipes/train_shapes_experts.py",
        base="shapes",
    ),
    ZooModel(
        name="tiles",
        kind="image",
        description=(
            "The same scenes as 8 x 8 tokens, decided in any order and in groups of any size by the rules lpd, assd "
            "and keyed-jacobi; a Llama of 1.4 M parameters and a tokenizer of pictures."
        ),
        defaults=MappingProxyType({}),
        task=shapes,
        recipe="recipes/train_tiles.py",
    ),
    ZooModel(
        name="motion",
        kind="video",
        description=(
            "Text to video, 32 x 32, 31 frames and more: one or two coloured shapes that move or bounce, slowly or "
            'quickly ("a red circle moves right"); a Wan pipeline of 5 M parameters.'
        ),
        defaults=MappingProxyType(_VIDEOS | {"num_inference_steps": 20, "guidance_scale": 2.0}),
        task=motion,
        recipe="recipes/train_motion.py",
    ),
    ZooModel(
        name="motion-causal",
        kind="video",
        description=(
            "The same videos from a causal model in two or four steps without guidance, block after block of eight "
            "frames, for streams without end; a Wan pipeline around a SkyReels-V2 transformer."
        ),
        defaults=MappingProxyType(_VIDEOS | _FEW),
        task=motion,
        recipe="recipes/train_motion.py",
    ),
    ZooModel(
        name="lists-mdlm",
        kind="text",
        description=(
            "Masked diffusion language model of list operations, Latin squares and additions in words "
            '("sort : dog ant cat ="); a Llama of 1.3 M parameters whose tokens all see each other.'
        ),
        defaults=MappingProxyType({"canvas": 24}),
        task=lists,
        recipe="recipes/train_lists.py",
    ),
    ZooModel(
        name="lists-ar",
        kind="text",
        description="The causal twin of lists-mdlm: the same tasks, size and words, one token after the other.",
        defaults=MappingProxyType({"canvas": 24}),
        task=lists,
        recipe="recipes/train_lists.py",
    ),
    ZooModel(
        name="sums",
        kind="text",
        description=(
            "Sums and countdowns worked out in steps, from scratch or from earlier attempts "
            '("make 64 from 3 7 25 6"); a chat model, a causal Llama of 2 M parameters.'
        ),
        defaults=MappingProxyType({"canvas": 96}),
        task=sums,
        recipe="recipes/train_sums.py",
    ),
    ZooModel(
        name="products",
        kind="text",
        description=(
            'Multiplications worked out in threads that fork and join ("4729*386=?"); a chat model that writes the '
            "tags of Multiverse, a causal Llama of 0.9 M parameters."
        ),
        defaults=MappingProxyType({"canvas": 256}),
        task=products,
        recipe="recipes/train_threads.py",
    ),
)

#: Every model of the zoo by name.
MODELS: dict[str, ZooModel] = {row.name: row for row in _ROWS}


def load(name: str, dtype: torch.dtype | None = None) -> Any:
    """Loads a zoo model as the stock object it is, on the CPU.

    Args:
        name: A key of `MODELS`.
        dtype: The weights' type; float32 if None.

    Returns:
        What `DiffusionPipeline.from_pretrained` makes of the folder, nothing attached; for text a `TextPair`, the pair
        of stock model and tokenizer; for pictures of tokens a `TilesModel`. Where it has a base, that one's pipeline
        with an `ExpertMixture`.

    Raises:
        ArgumentError: (a ValueError) If there is no such model.
        FileNotFoundError: If the weights are not there (a source tree without them); the message names the recipe.

    >>> _, tokenizer = load("lists-ar")
    >>> tokenizer("sort : dog ant =", return_tensors="pt").input_ids.shape
    torch.Size([1, 6])
    """
    if name not in MODELS:
        raise ArgumentError(f"no zoo model {name!r}; known: {', '.join(MODELS)}")
    row = MODELS[name]
    if not any((row.folder / settings).is_file() for settings in ("config.json", "model_index.json", "experts.json")):
        raise FileNotFoundError(f"no weights in {row.folder}; make them with {row.recipe}")
    # The folder's own configuration says float32, so only another type needs a conversion.
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    if row.kind == "text":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model: Any = AutoModelForCausalLM.from_pretrained(row.folder, **options).eval()
        tokenizer = AutoTokenizer.from_pretrained(row.folder, local_files_only=True)
        return TextPair(model if dtype is None else model.to(dtype=dtype), tokenizer)
    if (row.folder / PICTURES).is_dir():
        from partsong.zoo.tiles.loading import load_tiles

        return load_tiles(row.folder)
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(row.pipeline_folder, **options)
    return complete(name, pipeline if dtype is None else pipeline.to(dtype=dtype))


def complete(name: str | None, pipeline: Any) -> Any:
    """Puts the experts of a zoo model into its base's pipeline, which is returned; others stay as they are.

    Args:
        name: A key of `MODELS`, or None for a pipeline from elsewhere.
        pipeline: What was loaded from `ZooModel.pipeline_folder`.
    """
    row = MODELS.get(name or "")
    if row is not None and row.base is not None:
        from partsong.zoo.shapes_experts.loading import put_experts

        put_experts(pipeline, row.pipeline_folder, row.folder)
    return pipeline

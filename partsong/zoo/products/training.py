"""What the recipe trains of the `products` model: problems and worked solutions as texts of tokens. Loads torch."""

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
from partsong.reasoning.training.thread_training import train_step
from partsong.zoo.products.problems import SIZES, Family, ProductProblem, draw
from partsong.zoo.products.solutions import in_sequence, in_threads, work_out
from partsong.zoo.training import Optimizers, World

__all__ = ["AcceleratorWorld", "Speech", "as_json", "draw_problems", "solution_parts", "speech_of", "text_of"]


class AcceleratorWorld(World):
    """Knows this process among those of accelerate, which averages gradients and scales losses itself.

    Args:
        accelerator: of accelerate.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.device = accelerator, accelerator.device
        self.size, self.rank = accelerator.num_processes, accelerator.process_index

    def descend(self, loss: Tensor, parameters: list[nn.Parameter], optimizers: Optimizers, scale: float) -> None:
        """Makes one step of every optimizer, at `scale` times its peak learning rate."""
        train_step(self.accelerator, loss, parameters, optimizers, scale=scale)


@dataclass(frozen=True, slots=True)
class Speech:
    """How questions and texts become tokens.

    Attributes:
        prompt: ids of a question, with the beginning of an answer behind it.
        encode: ids of a text, without tokens for its beginning or end.
        end: id that ends an answer.
    """

    prompt: Callable[[str], Sequence[int]]
    encode: Callable[[str], Sequence[int]]
    end: int


def speech_of(tokenizer: Any) -> Speech:
    """Of a tokenizer of transformers, with its chat template where it has one.

    >>> from partsong.zoo.products.model import build_tokenizer
    >>> speech_of(build_tokenizer()).prompt("12*3=?")
    [2, 58, 59, 69, 60, 70, 73, 3]
    """
    return Speech(
        prompt=lambda question: prompt_ids(tokenizer, (Message("user", (question,)),)),
        encode=lambda text: tokenizer(text, add_special_tokens=False).input_ids,
        end=tokenizer.eos_token_id,
    )


def solution_parts(problem: ProductProblem, form: Format | None) -> tuple[Part, ...]:
    """The worked solution, in threads of a format, or in sequence where that is None."""
    work = work_out(problem)
    return in_sequence(work) if form is None else in_threads(work, form)


def as_json(parts: Sequence[Part]) -> list[Any]:
    """Parts for a file: what a model is to write is "written", what it is given is a text, threads are lists of both.

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
    """A question with its worked solution and the token that ends it.

    Args:
        problem: what is asked.
        form: of the threads; None writes them one behind the other.
        speech: how that becomes tokens.
        joined: for engines that join keys; else for those that read the threads again.
    """
    parts = encoded((*solution_parts(problem, form), Piece("", tokens=(speech.end,))), speech.encode)
    text = (TokenRun(tuple(speech.prompt(problem.question))), *parts)
    return text if joined else replayed(text)


def draw_problems(
    rng: Random, num: int, family: Family = "product", *, sizes: Sequence[tuple[int, int]] = SIZES
) -> list[ProductProblem]:
    """Problems that training may show; products all of one size, since texts of one length waste no padding."""
    size = rng.choice(sizes)
    return [draw(family, rng, fresh=False, sizes=[size]) for _ in range(num)]

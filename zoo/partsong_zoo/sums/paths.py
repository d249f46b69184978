"""Teaches a `sums` model to think along several paths and to answer from all of them. Importing this loads torch.

A path is a draft without its verdict and answer, so it may have gone wrong without saying so. A summary reads the
keys of all paths and gives the answer.

Source: ParaThinker, arXiv 2509.04475.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from transformers import AutoTokenizer, LlamaForCausalLM

from partsong.reasoning.calls.text_tree import Fork
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.local.thoughts import ThoughtEmbeddings
from partsong.reasoning.threads.formats import FORMATS
from partsong.reasoning.threads.layout import TokenRun, Tokens, num_tokens
from partsong_zoo.chat_model import EOS, MODEL, USER, Words
from partsong_zoo.folders import load_folder, save_folder
from partsong_zoo.sums import model as sums_model
from partsong_zoo.sums.model import build_model
from partsong_zoo.sums.problems import answer_of, check
from partsong_zoo.sums.training import Attempts, ending
from partsong_zoo.training.thread_batch import ThreadBatch, pack_threads
from partsong_zoo.training.thread_training import ThreadLesson

__all__ = [
    "FORM",
    "MOST_PATHS",
    "WORDS",
    "draw_texts",
    "lesson_of",
    "load_engine",
    "path_answer",
    "save_paths",
    "steps_of",
    "text_of",
    "widened",
]

FORM = FORMATS["parathinker"]
#: How many paths the model knows.
MOST_PATHS = 8
_OPENERS = tuple(FORM.opener(number) for number in range(1, MOST_PATHS + 1))
_CLOSERS = tuple(FORM.closer(number) for number in range(1, MOST_PATHS + 1))
#: The language of `sums`, with the tags of paths and summary.
WORDS = Words((*sums_model.PHRASES, *_OPENERS, *_CLOSERS, FORM.join, FORM.end), sums_model.CHARACTERS)
#: How many paths a text of training may have.
_NUMBERS = (1, 2, 4, 8)
#: How many texts have a path that is learned.
_LEARNED = 0.3
_THOUGHTS = "thoughts.safetensors"
_EMBEDDING = "model.embed_tokens.weight"


def steps_of(draft: str) -> str:
    """Cuts verdict and answer off a draft, so that only its steps are left.

    >>> steps_of("7-3=4: no. answer: none"), steps_of("19*3=57, 85-57=28. answer: 28")
    ('7-3=4', '19*3=57, 85-57=28')
    """
    return draft.rpartition(". answer: ")[0].removesuffix(": yes").removesuffix(": no")


def text_of(
    question: str, paths: Sequence[str], summary: str, numbers: Sequence[int], learned: int | None = None
) -> Tokens:
    """Writes a question with paths and a summary of them all.

    Args:
        question: the question.
        paths: the steps of each path.
        summary: verdict and answer, which are learned.
        numbers: the number of each path, from 1, which its tags and its thought embedding have.
        learned: the place of the path that is learned, too; the others are only read.
    """
    threads = tuple(
        (
            TokenRun(tuple(WORDS.encode(FORM.opener(number)))),
            TokenRun(tuple(WORDS.encode(path + FORM.closer(number))), learn=place == learned),
        )
        for place, (number, path) in enumerate(zip(numbers, paths, strict=True))
    )
    return (
        TokenRun((USER, *WORDS.encode(question), MODEL)),
        Fork(threads, marks=tuple(numbers)),
        TokenRun(tuple(WORDS.encode(FORM.join))),
        TokenRun((*WORDS.encode(summary + FORM.end), EOS), learn=True),
    )


def draw_texts(rng: random.Random, pool: Sequence[Attempts], tokens: int) -> ThreadBatch:
    """Draws problems, each with one to eight of a model's drafts as paths, until there are enough tokens.

    The summary ends like the first right draft among them, or like a right solution if there is none. Numbers of paths
    are drawn, too, so that all are learned equally well. One path of some texts is learned, by which the model keeps
    writing paths; if all were, the few tokens of the summary would hardly count.

    Args:
        rng: where the draws come from.
        pool: problems and drafts.
        tokens: how many tokens the texts have at least, padding not counted.
    """
    texts: list[Tokens] = []
    total = 0
    while total < tokens:
        one = rng.choice(pool)
        num = min(rng.choice(_NUMBERS), len(one.drafts))
        shown = rng.sample(one.drafts, num)
        right = next((draft for draft in shown if check(one.question, draft)), one.solution)
        numbers = sorted(rng.sample(range(1, MOST_PATHS + 1), num))
        paths = [steps_of(draft) for draft in shown]
        learned = rng.randrange(num) if rng.random() < _LEARNED else None
        texts.append(text_of(one.question, paths, ending(right), numbers, learned))
        total += num_tokens(texts[-1])
    return pack_threads(texts)


@torch.no_grad()
def widened(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Makes a model that knows the tags, and all else as a `sums` model does.

    A path begins as an answer does, so its tag is first read like the beginning of an answer.
    """
    config = model.config
    wide = build_model(config.num_attention_heads, config.num_hidden_layers, WORDS)
    old = model.get_parameter(_EMBEDDING)
    known = {**sums_model.VOCABULARY, **dict.fromkeys(_OPENERS, MODEL)}
    rows = [old[known[text]] if text in known else old.mean(0) for text in WORDS.texts]
    # The head has the same weights.
    table = torch.stack(rows)
    wide.load_state_dict({**model.state_dict(), _EMBEDDING: table, "lm_head.weight": table})
    return wide


def lesson_of(model: LlamaForCausalLM) -> ThreadLesson:
    """Joins a model and new thought embeddings, which are attached to it, for training."""
    thoughts = ThoughtEmbeddings.of(model, MOST_PATHS + 1)
    thoughts.attach(model)
    return ThreadLesson(model, thoughts)


def save_paths(lesson: ThreadLesson, folder: Path) -> None:
    """Saves a stock folder, and the thought embeddings beside the weights."""
    assert lesson.thoughts is not None
    save_folder(lesson.model, WORDS.tokenizer(normalizers.Lowercase()), folder)  # type: ignore[arg-type]
    save_file({name: value.contiguous() for name, value in lesson.thoughts.state_dict().items()}, folder / _THOUGHTS)


def load_engine(folder: Path) -> LocalEngine:
    """Loads what `save_paths` wrote, in an engine that adds the thought embeddings."""
    model = load_folder(folder)
    thoughts = ThoughtEmbeddings.of(model, MOST_PATHS + 1)
    thoughts.load_state_dict(load_file(folder / _THOUGHTS))
    return LocalEngine(model, tokenizer=AutoTokenizer.from_pretrained(folder), thoughts=thoughts, name=folder.name)


def path_answer(text: str) -> str | None:
    """Finds the answer of a summary, in the spelling of `answer_of`; None if it has none.

    >>> path_answer("<think1>3+4=7</think1><summary>. answer: 7</summary>")
    '7'
    """
    _, opening, summary = text.rpartition(FORM.join)
    return answer_of(summary.partition(FORM.end)[0]) if opening else None

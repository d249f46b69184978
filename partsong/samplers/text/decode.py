"""Decodes text with masked, block-diffusion and causal language models, many tokens a step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partsong import seeds
from partsong.errors import NotANumberError
from partsong.kernels.speculation.drafter import DrafterKnobs
from partsong.samplers.text.caches import TextCache
from partsong.samplers.text.canvas import Canvas, open_canvas
from partsong.samplers.text.causal import CausalLoop, is_plainly_causal
from partsong.samplers.text.events import Step
from partsong.samplers.text.loop import Loop
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.reader import Reader
from partsong.samplers.text.request import DecodeRequest, check_request
from partsong.samplers.text.rule import Rule
from partsong.samplers.text.tally import Tally
from partsong.samplers.text.verify import VerifiedLoop
from partsong.samplers.text.views import Probe, Views

__all__ = ["Decoded", "decode", "decode_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoded:
    """Holds finished texts, row by row of the batch.

    Attributes:
        tokens: token ids after the prompt, up to and with the stop token.
        stopped: why each ended: "stop token", "length", or a line that begins with "no token" and names row and
            position, where the model's logits were no numbers (NaN, infinite, or all forbidden). Such a text ends
            before that position and has no certificate.
        tallies: what each cost.
        steps: steps of the batch.
    """

    tokens: list[list[int]]
    stopped: list[str]
    tallies: list[Tally]
    steps: int

    def check(self) -> None:
        """Refuses texts that the model could not finish.

        Raises:
            NotANumberError: a row has no token at some position; the message names both.
        """
        for why in self.stopped:
            if why not in ("stop token", "length"):
                raise NotANumberError(why)

    def summary(self) -> dict[str, Any]:
        """Adds up the tallies of all rows, for machine-readable results."""
        whole = Tally()
        for tally in self.tallies:
            for kind in whole.forwards:
                whole.forwards[kind] += tally.forwards[kind]
                whole.tokens[kind] += tally.tokens[kind]
            whole.rows += tally.rows
            whole.drafted += tally.drafted
            whole.rejected += tally.rejected
            whole.edits += tally.edits
            whole.flops += tally.flops
            whole.full_flops += tally.full_flops / len(self.tallies)
        whole.certificate = _largest([tally.certificate for tally in self.tallies])
        whole.variation = _largest([tally.variation for tally in self.tallies])
        return whole.as_dict()


def _largest(bounds: list[float | None]) -> float | None:
    """Returns the largest of the texts' certificates; None where one of them has none."""
    return None if None in bounds else max((bound for bound in bounds if bound is not None), default=0.0)


def decode(
    model: Any,
    input_ids: Sequence[Sequence[int]] | Tensor,
    *,
    adapter: str | TextAdapter | None = None,
    rule: str | Rule | None = None,
    cache: str | TextCache | None = None,
    max_new_tokens: int | None = None,
    template: Sequence[Sequence[int | None]] | None = None,
    attention_mask: Tensor | None = None,
    block_size: int | None = None,
    open_blocks: int = 1,
    open_at: float = 0.5,
    temperature: float = 0.0,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    probe: Probe | None = None,
    verify: int = 0,
    speculate: DrafterKnobs | str | Sequence[DrafterKnobs | str] | None = None,
) -> Decoded:
    """Continues or fills texts with a masked, block-diffusion or causal language model.

    One loop serves all: in every step the model looks at the undecided positions of the active blocks, the rule accepts
    some, and their tokens are written. A row's text is the same in any batch.

    Args:
        model: a `TextModel`, a transformers model, a checkpoint folder or a hub id (see `load_text_model`).
        input_ids: prompts as lists of token ids of any lengths, or `[B, L]` with an `attention_mask`. Mask tokens in
            a prompt are positions to fill.
        adapter: a name or row of `families.ADAPTERS`; default: recognised.
        rule: what to accept in a step: a `Rule`, or "NAME:key=value" with a name of `RULES`. Default:
            ``EntropyBound(gamma=0.1)``; `Renoise` for models of uniform noise.
        cache: which keys to reuse: a `TextCache`, or "NAME:key=value" with a name of `CACHES`. Default: none where
            all tokens see each other, and `PrefixCache`, which is exact there, everywhere else.
        max_new_tokens: positions after the prompt; a text ends sooner at a stop token. Default: 128 or as many as
            the model has room for; 0 where there are mask tokens in the prompts or a template.
        template: per row the required text after the prompt: token ids, and None for positions to fill. A constrained
            beginning is a template that starts with it.
        attention_mask: `[B, L]`, 1 for tokens and 0 for padding on either side; for a tensor of prompts.
        block_size: positions decided together, block after block. Default: the model's own grid, and 32 without one.
        open_blocks: number of active blocks.
        open_at: fraction of a block that must be decided before the next joins.
        temperature: temperature of the draws; 0 takes the most likely tokens.
        seed: the noise is a function of (seed, row, position, step). A list gives each row a seed of its own.
        stop_token_ids: tokens that end a text. Default: the model's.
        probe: for `Dependency`: ``probe(hidden [B, K, C], positions [B, K], rows [B])`` gives the pairwise mutual
            information `[B, K, K]` in nats. For `VariationBound` it gives the pairwise dependence instead, in total
            variation from 0 to 1, as a function of the hidden states; without one the rule's head predicts it.
        verify: steps to draft beyond the next one and to check in the same forward, each in a row of its own. The
            text is that of 0, the default, in fewer forwards; see `verify.VerifiedLoop`.
        speculate: for causal models, what guesses the next tokens, which one forward then checks: knobs such as
            ``Ngram()`` of `kernels.speculation` or "NAME:key=value", one or several. The text is that without guesses.

    Returns:
        The texts and what they cost. A row whose logits are no numbers ends early, which a warning and its `stopped`
        say; the other rows go on as without it.

    Raises:
        ArgumentError: a prompt, size, knob or token that does not fit; the message names it.
        ArgumentTypeError: an argument of the wrong type.
        UnsupportedError: a rule or cache that the model does not support or with which drafts cannot be checked, or
            `speculate` for a model that is not causal.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    >>> llama = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None)).eval()
    >>> len(decode(llama, [[1, 2, 3]], max_new_tokens=4).tokens[0])
    4
    """
    request = check_request(
        model,
        input_ids,
        adapter=adapter,
        rule=rule,
        cache=cache,
        max_new_tokens=max_new_tokens,
        template=template,
        attention_mask=attention_mask,
        block_size=block_size,
        open_blocks=open_blocks,
        open_at=open_at,
        temperature=temperature,
        seed=seed,
        stop_token_ids=stop_token_ids,
        probe=probe,
        verify=verify,
        speculate=speculate,
    )
    return _run(request)


def _run(request: DecodeRequest) -> Decoded:
    loop = _loop(request, watched=False)
    return _collect(loop, sum(1 for _ in loop))


def decode_steps(
    model: Any, input_ids: Sequence[Sequence[int]] | Tensor, *, watched: bool = True, **options: Any
) -> Generator[Step, None, Decoded]:
    """Decodes as `decode` does, step by step: yields every step with what it changed, and returns what `decode` does.

    Arguments and errors are those of `decode`, errors come at the first step. `watched` says whether the steps carry
    events and texts.
    """
    loop, steps = _loop(check_request(model, input_ids, **options), watched), 0
    for step in loop:
        steps += 1
        yield step
    return _collect(loop, steps)


def _collect(loop: Loop | CausalLoop, steps: int) -> Decoded:
    """Collects the texts of a loop that has run to its end, in the order of the batch."""
    texts = [loop.ended[row] for row in sorted(loop.ended)]
    return Decoded(
        tokens=[text.tokens for text in texts],
        stopped=[text.stopped for text in texts],
        tallies=[text.tally for text in texts],
        steps=steps,
    )


def _loop(request: DecodeRequest, watched: bool) -> Loop | CausalLoop:
    model, grid, canvas = request.model, request.grid, _canvas(request)
    vocab, width = model.head.weight.shape
    tallies = [
        Tally(full_flops=model.flops(length, length) + 2.0 * vocab * width * undecided)
        for length, undecided in zip(canvas.length.tolist(), canvas.undecided.sum(1).tolist(), strict=True)
    ]
    if is_plainly_causal(request):
        return CausalLoop(request, tallies, watched=watched)
    if request.rule.mixes:
        canvas.mask_share = torch.zeros(canvas.tokens.shape, device=canvas.tokens.device)
    shadows = grid.block_size * grid.open_blocks if request.rule.shadows else 0
    views = Views(
        model, request.rule, temperature=request.temperature, row_seeds=list(request.row_seeds), probe=request.probe
    )
    reader = Reader(model, request.cache, canvas, tallies, shadows)
    stops = request.stop_token_ids
    if not request.verify:
        return Loop(canvas, views, reader, stop_token_ids=stops, watched=watched)
    return VerifiedLoop(canvas, views, reader, stop_token_ids=stops, watched=watched, drafts=request.verify)


def _canvas(request: DecodeRequest) -> Canvas:
    """Makes the texts before the first step; models of uniform noise get random tokens at undecided positions."""
    model = request.model
    canvas = open_canvas(
        request.prompts,
        request.answers,
        grid=request.grid,
        adapter=model.adapter,
        filler=0 if model.mask_token_id is None else model.mask_token_id,
        device=model.device,
    )
    if model.adapter.noise != "uniform":
        return canvas
    length, vocab = canvas.tokens.shape[1], request.model.vocab_size
    noise = seeds.uniform_rows([seeds.derive(seed, "canvas") for seed in request.row_seeds], length)
    drawn = (noise * vocab).long().to(canvas.tokens.device)
    canvas.tokens = torch.where(canvas.undecided, drawn, canvas.tokens)
    return canvas

"""Makes the decoding loop a ``custom_generate`` callable for transformers' ``generate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from partsong import seeds
from partsong.errors import UnsupportedError
from partsong.samplers.text.caches import TextCache
from partsong.samplers.text.decode import Decoded, decode_steps
from partsong.samplers.text.events import Step
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.model import TextAdapter
from partsong.samplers.text.rule import Rule

__all__ = ["BlockDecoder"]


@dataclass(kw_only=True, slots=True)
class BlockDecoder:
    """Decodes with `decode` from within ``model.generate(..., custom_generate=BlockDecoder(...))``.

    ``generate`` provides prompts, lengths, stop tokens and the temperature (``do_sample=True``); the rest is set here.
    Without sampling the most likely tokens are taken. The noise is that of `seed`, or drawn from `generator`. All
    other attributes are arguments of `decode`.

    Attributes:
        generator: gives the seed of each call instead, so that calls differ and a manual seed repeats them.
        streamer: a transformers streamer for one text: a `TextDiffusionStreamer` sees drafts, any other the stable
            beginning as it grows. (Not ``generate(streamer=...)``: transformers does not pass that to custom
            callables.)
        last: full result of the last call.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    >>> llama = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).eval()
    >>> ids = torch.tensor([[1, 2, 3]])
    >>> llama.generate(ids, max_new_tokens=4, custom_generate=BlockDecoder()).shape
    torch.Size([1, 7])
    """

    adapter: str | TextAdapter | None = None
    rule: str | Rule | None = None
    cache: str | TextCache | None = None
    block_size: int | None = None
    open_blocks: int = 1
    open_at: float = 0.5
    seed: int = 0
    verify: int = 0
    generator: torch.Generator | None = None
    streamer: Any = None
    last: Decoded | None = None

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Answers the call of ``generate`` and returns what ``generate`` returns.

        Raises:
            UnsupportedError: generation options that block decoding cannot honour, named.
            PartsongError: as in `decode`.
        """
        _refuse(generation_config, logits_processor, stopping_criteria)
        steps = decode_steps(
            load_text_model(model, adapter=self.adapter),
            input_ids,
            watched=self.streamer is not None,
            attention_mask=model_kwargs.get("attention_mask"),
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            temperature=float(generation_config.temperature or 1.0) if generation_config.do_sample else 0.0,
            stop_token_ids=_stop_tokens(generation_config),
            seed=self._seed(),
            rule=self.rule,
            cache=self.cache,
            block_size=self.block_size,
            open_blocks=self.open_blocks,
            open_at=self.open_at,
            verify=self.verify,
        )
        self.last = self._run(steps, input_ids)
        return generated(input_ids, self.last.tokens, generation_config)

    def _seed(self) -> int:
        if self.generator is None:
            return seeds.check_seed(self.seed)
        return int(torch.randint(2**62, (), generator=self.generator, device=self.generator.device))

    def _run(self, steps: Any, input_ids: Tensor) -> Decoded:
        if self.streamer is not None and len(input_ids) > 1:
            raise UnsupportedError(f"a streamer shows one text, and there are {len(input_ids)} prompts; give it one")
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())  # as generate does; streamers may skip it
        shown = 0
        while True:
            try:
                shown = self._show(next(steps), shown)
            except StopIteration as end:
                if self.streamer is not None:
                    if rest := end.value.tokens[0][shown:]:
                        self.streamer.put(torch.tensor(rest))
                    self.streamer.end()
                return end.value

    def _show(self, step: Step, shown: int) -> int:
        """Passes new stable tokens to the streamer, and the rest as a draft if it takes drafts."""
        if self.streamer is None or 0 not in step.stable:
            return shown
        stable = step.stable[0]
        new = [token for token in step.tokens[0][shown:stable] if token is not None]
        if new:
            self.streamer.put(torch.tensor(new))
        draft = [token for token in step.tokens[0][stable:] if token is not None]
        if draft and hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(torch.tensor([draft]))
        return max(stable, shown)


def _refuse(config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> None:
    """Refuses options that would otherwise be ignored."""
    for name, plain in (("num_beams", 1), ("num_return_sequences", 1), ("penalty_alpha", None)):
        if (value := getattr(config, name, None)) not in (plain, None):
            raise UnsupportedError(
                f"generate was asked for {name}={value}, which BlockDecoder does not do; leave it out"
            )
    odd = [type(p).__name__ for p in processors if not isinstance(p, TemperatureLogitsWarper)]
    if odd:
        raise UnsupportedError(
            f"generate was asked for {', '.join(odd)}, which change a token's logits after the others are known; "
            f"BlockDecoder writes many at once: leave these options out (top_k=0 and top_p=1.0 when sampling)"
        )
    odd = [type(c).__name__ for c in criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)]
    if odd:
        raise UnsupportedError(
            f"generate was asked to stop by {', '.join(odd)}; BlockDecoder stops by tokens and length"
        )


def _stop_tokens(config: GenerationConfig) -> list[int]:
    stops = config.eos_token_id
    return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)


def generated(
    input_ids: Tensor, texts: list[list[int]], config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """Returns what ``generate`` does: prompts and texts `[B, L]`, filled up with the pad token."""
    stops = _stop_tokens(config)
    pad = config.pad_token_id if config.pad_token_id is not None else (stops or [0])[0]
    longest = max(map(len, texts))
    rows = [tokens + [pad] * (longest - len(tokens)) for tokens in texts]
    new = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device).view(len(rows), longest)
    sequences = torch.cat([input_ids, new], 1)
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
    return sequences

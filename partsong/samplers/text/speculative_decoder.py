"""Plugs speculation into transformers: ``model.generate(..., custom_generate=SpeculativeDecoder())``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode

from partsong import seeds
from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.keyed_draw import TokenDraw, draw
from partsong.kernels.no_token import NOT_A_NUMBER
from partsong.kernels.speculation.draft import DraftTree
from partsong.kernels.speculation.drafter import DrafterKnobs, DraftText
from partsong.kernels.speculation.match import Match, follow, node_draws
from partsong.kernels.speculation.registry import drafters_of
from partsong.parallel.text.cache_names import CACHE_NAMES, given_cache
from partsong.samplers.text.block_decoder import generated
from partsong.samplers.text.caches import PrefixCache
from partsong.samplers.text.causal import speculator_of
from partsong.samplers.text.draft_reader import DraftReader
from partsong.samplers.text.heads import head_logits
from partsong.samplers.text.loading import load_text_model
from partsong.samplers.text.loop import report_no_token
from partsong.samplers.text.plainly_causal import why_not_plainly_causal
from partsong.samplers.text.request import rows_of
from partsong.samplers.text.row_processors import RowProcessors
from partsong.samplers.text.rules import Quota
from partsong.samplers.text.runner import StockTextModel
from partsong.samplers.text.tally import Tally, count

__all__ = ["SpeculativeDecoder"]

#: Arguments from `generate` that do not change tokens here.
_IGNORED = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHE_NAMES)
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(kw_only=True)
class SpeculativeDecoder:
    """Guesses tokens ahead and verifies them, as a ``custom_generate`` callable for batches of any prompts.

    Greedy texts are those of ``generate``, whatever is guessed. Sampled ones have the distribution of ``generate`` and
    noise that is a function of (seed, row, place): the same text with and without guesses. Logits processors and
    stopping criteria of transformers are honoured at every guess. Prompts are padded on the left, as ``generate`` wants
    them. A row that comes to logits that are no numbers ends there; a warning names it, and the others go on.
    (transformers hands a callable neither a streamer nor the tokenizer for ``stop_strings``: give
    ``stopping_criteria=[StopStringCriteria(tokenizer, strings)]``.)

    Attributes:
        speculate: what guesses: knobs or "NAME:key=value", one or several; None guesses nothing.
        seed: of the noise where ``generate`` samples.
        row_wise: types of your own processors and criteria that look only at the row they are given.
        last: cost of the last call.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    >>> llama = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, pad_token_id=0)).eval()
    >>> ids = torch.tensor([[1, 2, 3], [3, 1, 2]])
    >>> fast = llama.generate(ids, max_new_tokens=4, custom_generate=SpeculativeDecoder(speculate="ngram"))
    >>> torch.equal(fast, llama.generate(ids, max_new_tokens=4))
    True
    """

    speculate: DrafterKnobs | str | Sequence[DrafterKnobs | str] | None = "ngram"
    seed: int = 0
    row_wise: tuple[type, ...] = ()
    last: Tally | None = None

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
            ArgumentError: no such drafter, a seed out of range, or prompts that are not padded on the left.
            UnsupportedError: a model, generation option, processor or criterion that cannot be honoured, named.
        """
        drafters, seed = drafters_of(self.speculate), seeds.check_seed(self.seed)
        _refuse(generation_config, model_kwargs)
        processors = RowProcessors(logits_processor, stopping_criteria, self.row_wise)
        text_model = load_text_model(model)
        if not isinstance(text_model, StockTextModel) or (why := _why_not(text_model)) is not None:
            raise UnsupportedError(f"SpeculativeDecoder is for causal models, and {why}; use BlockDecoder for others")
        mask = model_kwargs.get("attention_mask")
        prompts = rows_of(input_ids, mask, text_model)
        if not all(prompts) or (mask is not None and not bool(mask[:, -1].all())):
            raise ArgumentError(
                "every prompt needs a token and is padded on the left: set tokenizer.padding_side='left'"
            )
        heat = 1.0 if generation_config.do_sample else 0.0
        texts = [
            _Text(row, input_ids[row].tolist(), prompt, TokenDraw(heat, 1.0, seeds.derive(seed, "row", row), 0))
            for row, prompt in enumerate(prompts)
        ]
        self.last = Tally()
        room = max(generation_config.max_length - input_ids.shape[1], 0)
        run = _Run(text_model, processors, drafters, texts, room, self.last)
        try:
            run.run()
        finally:
            run.speculator.close()
        new = [text.ids[input_ids.shape[1] :] for text in texts]
        return generated(input_ids, new, generation_config)


@dataclass(slots=True, eq=False)
class _Text:
    """Holds a row of the batch.

    Attributes:
        row: its number.
        ids: its tokens as ``generate`` has them, with padding at the beginning.
        prompt: those of the prompt only.
        next: how its next token is drawn.
    """

    row: int
    ids: list[int]
    prompt: list[int]
    next: TokenDraw


class _Run:
    """Decodes a batch."""

    def __init__(
        self,
        model: StockTextModel,
        processors: RowProcessors,
        drafters: tuple[DrafterKnobs, ...],
        texts: list[_Text],
        room: int,
        tally: Tally,
    ) -> None:
        self.model, self.processors, self.tally = model, processors, tally
        self.texts, self.length = list(texts), len(texts[0].ids) + room
        self.speculator = speculator_of(model, drafters)
        self.reader = DraftReader(model, [text.prompt for text in texts], room, layers=self.speculator.layers)
        for text in texts:
            self.speculator.join(text.row, DraftText(list(text.prompt), text.next))

    @torch.inference_mode()
    def run(self) -> None:
        """Runs until every text has ended."""
        hidden, drafts = self.reader.begin(), [DraftTree()] * len(self.texts)
        self._count("prefill", [len(text.prompt) for text in self.texts])
        left = self._take(self._draw(hidden, drafts), drafts, self._read_prompts())[1]
        while left:
            if len(left) < len(self.reader.ends):
                self.reader.keep(left)
            rooms = [self.length - len(text.ids) - 1 for text in self.texts]
            drafts = self.speculator.propose([text.row for text in self.texts], rooms) or [DraftTree()] * len(left)
            tokens = self._verify(drafts)
            if NOT_A_NUMBER in tokens and any(map(len, drafts)):
                # A guess that the model breaks on spoils its text though nothing sees it, since 0 * nan is nan.
                self.reader.take_back()
                drafts = [DraftTree()] * len(left)
                tokens = self._verify(drafts)
            states = [self.reader.states_of(place, 1 + len(draft)) for place, draft in enumerate(drafts)]
            paths, left = self._take(tokens, drafts, states)
            self.reader.keep_paths(paths)

    def _read_prompts(self) -> list[Tensor | None]:
        """Shows drafters the states of the prompts; returns those of each one's last token."""
        last: list[Tensor | None] = []
        for place, text in enumerate(self.texts):
            states = self.reader.states_of(place)
            if states is not None:
                self.speculator.read_prompt(text.row, states[:-1])
            last.append(None if states is None else states[-1:])
        return last

    def _verify(self, drafts: Sequence[DraftTree]) -> list[int]:
        """Feeds the last token of every text with the guesses, and draws the token after each of them."""
        hidden = self.reader.verify([text.ids[-1] for text in self.texts], drafts)
        self._count("denoise", [1 + len(draft) for draft in drafts])
        return self._draw(hidden, drafts)

    def _take(
        self, tokens: Sequence[int], drafts: Sequence[DraftTree], states: Sequence[Tensor | None]
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """Accepts those of the tokens drawn after every node that continue the texts.

        Returns:
            The nodes that each text keeps, and the indices of the unfinished texts, the only ones kept.
        """
        drawn = iter(tokens)
        paths, left = list[tuple[int, ...]](), list[int]()
        for place, (text, draft) in enumerate(zip(self.texts, drafts, strict=True)):
            match, ended = self._cut(text, follow(draft, [next(drawn) for _ in draft.depths]))
            paths.append(match.path)
            self.tally.drafted += len(draft)
            self.tally.rejected += len(draft) + 1 - len(match.path)
            new = len(match.tokens)
            text.next = TokenDraw(text.next.temperature, 1.0, text.next.seed, text.next.place + new)
            if ended:
                self.speculator.leave(text.row)
            else:
                left.append(place)
                self.speculator.observe(text.row, text.next, draft, match, states[place])
        self.texts = [self.texts[place] for place in left]
        return paths, left

    def _cut(self, text: _Text, match: Match) -> tuple[Match, bool]:
        """Takes tokens up to where the text ends; returns what was taken, and whether it has ended."""
        for taken, token in enumerate(match.tokens, 1):
            if token < 0:
                place = len(text.prompt) + text.next.place + taken - 1
                report_no_token(token, text.row, place, self.tally)
                return match, True
            text.ids.append(token)
            if self.processors.ends(text.ids):
                return Match(match.tokens[:taken], match.path[:taken], match.drawn), True
        return match, False

    def _draw(self, hidden: Tensor, drafts: Sequence[DraftTree]) -> list[int]:
        rows, ids, draws = list[int](), list[list[int]](), list[TokenDraw]()
        for text, draft in zip(self.texts, drafts, strict=True):
            draws += node_draws(draft, text.next)
            for node in range(1 + len(draft)):
                rows.append(text.row)
                ids.append([*text.ids, *(draft.tokens[each - 1] for each in draft.ancestors(node)[1:])])
        logits = head_logits(self.model.head, hidden)
        # `generate` chooses among logits of this type, whatever the model computes in.
        return draw(self.processors.scores(rows, ids, logits.float()), draws)

    def _count(self, kind: str, fed: list[int]) -> None:
        head = self.model.head.weight.numel()
        flops = [self.model.flops(num, len(text.ids)) for num, text in zip(fed, self.texts, strict=True)]
        nodes = len(fed) if kind == "prefill" else sum(fed)
        count([self.tally] * len(fed), kind, flops)
        self.tally.flops += 2.0 * head * nodes


def _why_not(model: StockTextModel) -> str | None:
    return why_not_plainly_causal(model, Quota(), PrefixCache())


def _refuse(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuses options that would otherwise be ignored."""
    if (mode := config.get_generation_mode()) not in _MODES:
        raise UnsupportedError(
            f"generate was asked for {mode.value}, and SpeculativeDecoder draws a text for each row; leave it out"
        )
    wanted = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    odd = [name for name in wanted if getattr(config, name, None) and config.return_dict_in_generate]
    odd += [name for name, value in model_kwargs.items() if value is not None and name not in _IGNORED]
    keys = given_cache(model_kwargs)
    odd += ["a cache with tokens"] if keys is not None and keys.get_seq_length() else []
    if odd:
        raise UnsupportedError(
            f"generate was given {', '.join(odd)}, which SpeculativeDecoder does not take; leave it out"
        )

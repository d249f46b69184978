"""Runs the decoders of this package as models of lm-evaluation-harness: ``lm_eval --model partsong``.

Newer releases of the harness find the model by the entry point that this package declares. Releases up to 0.4.13 have
no plug-ins; with them the same command line runs through this module, which registers the model first::

    python -m partsong.evals.harness.lm_eval_model run --model partsong \
        --model_args 'pretrained=FOLDER,rule=entropy-bound:gamma=0.1,max_new_tokens=256' --tasks gsm8k

With ``strategy=`` among the arguments the model is a `ThinkingLM`, which thinks with many calls.

Importing this module needs the harness (``pip install 'partsong[eval]'``) and registers the model.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from transformers import AutoTokenizer

from partsong import seeds, zoo
from partsong.errors import ArgumentError
from partsong.evals.harness.likelihood import log_likelihood
from partsong.evals.harness.texts import check_options, cut, room_of, stops_of
from partsong.knobs import Count, Whole, check_value, format_knobs
from partsong.progress import progress
from partsong.reasoning.local.chat_tokens import quoting_ids
from partsong.samplers.registry import parse_strategy
from partsong.samplers.text import CACHES, RULES, Decoded, Tally, decode, load_text_model
from partsong.samplers.text.request import check_request

try:
    # Imported first, because the harness registers its own models only while no other is registered.
    importlib.import_module("lm_eval.models")
    _Harness: Any = importlib.import_module("lm_eval.api.model").TemplateLM
    _registry: Any = importlib.import_module("lm_eval.api.registry")
    _utils: Any = importlib.import_module("lm_eval.utils")
except ImportError as error:
    raise ImportError("this model needs lm-evaluation-harness: pip install 'partsong[eval]'") from error

__all__ = ["PartsongLM", "main"]

_LOG = logging.getLogger("partsong.evals.lm_eval")

#: Settings that change nothing when the most likely tokens are taken.
_OF_DRAWS = ("top_k", "top_p", "min_p")


class PartsongLM(_Harness):
    """Decodes many tokens at once as a model of the harness.

    Log-likelihoods of masked models are bounds, see `log_likelihood`. An answer is greedy if the model writes the same
    tokens with the rule and the cache at temperature 0. ``results["config"]`` of a run holds the forwards, the tokens
    per forward and the largest certificate of all texts, and the root mean square of the bounds' standard errors.

    Args:
        pretrained: a checkpoint folder, hub id, name of a text model of the zoo, or a model object as `decode` takes.
        tokenizer: a folder, a hub id or a tokenizer; None is that of `pretrained`.
        adapter: as in `decode`.
        rule: as in `decode`; on command lines separate knobs by ``;``, because the harness splits at commas.
        cache: as in `decode`, with ``;`` like `rule`.
        max_new_tokens: for tasks that do not set it.
        block_size: as in `decode`.
        open_blocks: as in `decode`.
        verify: as in `decode`.
        temperature: for tasks that do not set it.
        seed: of the draws and masks, which do not depend on the batch or the order of requests.
        num_pairs: as in `log_likelihood`.
        check_greedy: False reports no answer of a masked model as greedy, and saves the time to write them.
        max_length: most tokens of a text; a longer prompt loses its beginning. None is the model's own limit.
        batch_size: how many prompts to decode together.
        max_batch_size: must be None, because batch sizes are not searched.
        device: of a model that is loaded.
        dtype: of a model that is loaded, such as "bfloat16".
        share: how ranks that torchrun has started share the model: "tensor-parallel", "sharded-weights" or
            "layer-pipeline".

    Raises:
        ArgumentError: `load_text_model`, `decode` or `log_likelihood` refuses an argument; raised before any request.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        adapter: Any = None,
        rule: Any = None,
        cache: Any = None,
        max_new_tokens: Count = 256,
        block_size: int | None = None,
        open_blocks: int = 1,
        verify: int = 0,
        temperature: float = 0.0,
        seed: int = 0,
        num_pairs: int = 16,
        check_greedy: bool = True,
        max_length: int | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        share: str | None = None,
    ) -> None:
        super().__init__()
        check_value("max_new_tokens", max_new_tokens, Count)
        self.batch_size = _batch_size(batch_size, max_batch_size)
        self.model, source = _model(pretrained, adapter, device, dtype, share)
        self.tokenizer = _tokenizer(source if tokenizer is None else tokenizer)
        self.options = {"rule": _with_commas(rule), "cache": _with_commas(cache)}
        self.options |= {"block_size": block_size, "open_blocks": open_blocks, "verify": verify}
        self.temperature, self.room, self.seed = temperature, max_new_tokens, seeds.check_seed(seed)
        self.num_pairs, self.check_greedy, self.prefix = num_pairs, check_greedy, _prefix(self.tokenizer)
        self.max_length = _max_length(max_length, self.model.max_positions)
        checked = check_request(
            self.model, [[self.prefix_token_id]], max_new_tokens=1, temperature=temperature, **self.options
        )
        self.rule, self.cache = format_knobs(checked.rule, RULES), format_knobs(checked.cache, CACHES)
        self.tallies: list[Tally] = []
        self.answer_tokens, self.squared_errors = 0, []

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """Makes a model from the text of ``--model_args``."""
        return cls.create_from_arg_obj(_utils.simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """Makes a model from its arguments; with a ``strategy`` it is a `ThinkingLM`."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if "strategy" not in arg_dict:
            return cls(**arg_dict, **given)
        from partsong.evals.harness.lm_eval_thinking import ThinkingLM

        return ThinkingLM(**arg_dict, **given)

    # --- what the harness asks about the model ------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """Returns the token that ends a text."""
        ends = (self.tokenizer.eos_token_id, *self.model.eos_token_ids)
        return next((token for token in ends if token is not None), 0)

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that precedes a text without a prompt."""
        start = self.prefix[0] if self.prefix else self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        """Returns a name that is different for request caches of different tokenizers."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Writes a chat as one prompt."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns token ids, including those that the tokenizer puts before a text; a mask token's text is no gap."""
        ids = quoting_ids(self.tokenizer, string, self.tokenizer.mask_token)
        if add_special_tokens is False or ids[: len(self.prefix)] == self.prefix:
            return ids
        return [*self.prefix, *ids]

    def get_model_info(self) -> dict[str, Any]:
        """Returns the rule, the cache and the costs of all requests, for ``results["config"]``."""
        info: dict[str, Any] = {"rule": self.rule, "cache": self.cache}
        if self.tallies:
            whole = Decoded(tokens=[], stopped=[], tallies=self.tallies, steps=0).summary()
            forwards = sum(whole["forwards"].values())
            info |= whole | {"answer_tokens_per_forward": self.answer_tokens / max(forwards, 1)}
        if self.squared_errors:
            info["likelihood_standard_error"] = (sum(self.squared_errors) / len(self.squared_errors)) ** 0.5
        return info

    # --- requests -----------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Writes continuations, each up to the first of its stopping texts."""
        arguments = [request.args for request in requests]
        settings = [self._settings(options) for _, options in arguments]
        rows = [
            self.tok_encode(context)[-(self.max_length - room) :]
            for (context, _), (room, *_) in zip(arguments, settings, strict=True)
        ]
        row_seeds = self._seeds("tokens", rows)
        texts = [""] * len(requests)
        bar = progress(len(requests), "partsong: writing", None if not disable_tqdm else False)
        # Requests with the same settings are batched, the longest first, so that one too long fails at once.
        order = sorted(range(len(requests)), key=lambda index: (settings[index][:2], -len(rows[index])))
        with bar:
            for here in _batches(order, self.batch_size, lambda index: settings[index][:2]):
                room, temperature, _ = settings[here[0]]
                written = self._write([rows[i] for i in here], [row_seeds[i] for i in here], room, temperature)
                for index, text in zip(here, written, strict=True):
                    texts[index] = cut(text, settings[index][2], arguments[index][0])
                    self.cache_hook.add_partial("generate_until", arguments[index], texts[index])
                bar.update(len(here))
        _LOG.info("partsong: %s", self.get_model_info())
        return texts

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns log-likelihoods of whole texts, computed in windows of the model's length."""
        totals = []
        for request in progress(requests, "partsong: texts", None if not disable_tqdm else False):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = _utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            pairs = [((request.args[0], ""), *_utils.make_disjoint_window(window)) for window in windows]
            totals.append(sum(value for value, _ in self._likelihoods(pairs, check_greedy=False)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        size = max(self.batch_size, 16)
        with progress(len(requests), "partsong: likelihoods", None if not disable_tqdm else False) as bar:
            for low in range(0, len(requests), size):
                here = requests[low : low + size]
                for (key, *_), result in zip(here, self._likelihoods(here, self.check_greedy), strict=True):
                    results.append(result)
                    self.cache_hook.add_partial("loglikelihood", key, result)
                bar.update(len(here))
        return results

    def _likelihoods(self, requests: Sequence[Any], check_greedy: bool) -> list[tuple[float, bool]]:
        answers = [list(answer) for _, _, answer in requests]
        for (context, text), _, answer in requests:
            if len(answer) >= self.max_length:
                raise ArgumentError(f"{(text or context)[:40]!r}... has {len(answer)} tokens, too many for the model")
        prompts = [list(prompt)[-(self.max_length - len(answer)) :] for _, prompt, answer in requests]
        likelihoods = log_likelihood(
            self.model,
            prompts,
            answers,
            num_pairs=self.num_pairs,
            seed=self._seeds("masks", [[*p, -1, *a] for p, a in zip(prompts, answers, strict=True)]),
            batch_size=self.batch_size,
        )
        self.squared_errors += [one.standard_error**2 for one in likelihoods if one.kind == "bound"]
        greedy = [bool(one.greedy) for one in likelihoods]
        if check_greedy and any(one.greedy is None for one in likelihoods):
            greedy = self._are_greedy(prompts, answers)
        return [(one.log_likelihood, is_greedy) for one, is_greedy in zip(likelihoods, greedy, strict=True)]

    def _are_greedy(self, prompts: list[list[int]], answers: list[list[int]]) -> list[bool]:
        greedy: list[bool] = []
        for low in range(0, len(prompts), self.batch_size):
            here = slice(low, low + self.batch_size)
            template = [[None] * len(answer) for answer in answers[here]]
            written = decode(self.model, prompts[here], template=template, stop_token_ids=(), **self.options)
            greedy += [row == answer for row, answer in zip(written.tokens, answers[here], strict=True)]
        return greedy

    def _write(self, rows: list[list[int]], row_seeds: list[int], room: int, temperature: float) -> list[str]:
        decoded = decode(self.model, rows, max_new_tokens=room, temperature=temperature, seed=row_seeds, **self.options)
        self.tallies += decoded.tallies
        self.answer_tokens += sum(map(len, decoded.tokens))
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in decoded.tokens]

    def _settings(self, options: dict[str, Any]) -> tuple[int, float, tuple[str, ...]]:
        """Returns the most tokens, the temperature and the stopping texts of a request."""
        temperature = float(options.get("temperature", self.temperature))
        if options.get("do_sample") is False:
            temperature = 0.0
        check_options(options, (), _OF_DRAWS, temperature)
        room = room_of(options, self.room)
        if not 1 <= room < self.max_length:
            raise ArgumentError(f"max_gen_toks={room}; use 1 to {self.max_length - 1}, below the model's length")
        return room, temperature, stops_of(options)

    def _seeds(self, name: str, rows: Sequence[Sequence[int]]) -> list[int]:
        """Derives a seed for each row from the row and how often it came before, but not from the other rows."""
        seen: Counter[str] = Counter()
        row_seeds = []
        for row in rows:
            text = " ".join(map(str, row))
            row_seeds.append(seeds.derive(self.seed, name, text, seen[text]))
            seen[text] += 1
        return row_seeds


_registry.register_model("partsong")(PartsongLM)


def main() -> None:
    """Runs the harness's own command line, with the model registered.

    Where torchrun has started ranks that share a model, all of them run it, and the first one prints and writes.
    """
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        sys.argv = _without_files(sys.argv)
    importlib.import_module("lm_eval.__main__").cli_evaluate()


def _model(pretrained: Any, adapter: Any, device: str | None, dtype: str | None, share: str | None) -> tuple[Any, Any]:
    """Loads the model, and returns it with the place of its tokenizer."""
    if hasattr(pretrained, "key_store"):
        if (adapter, device, dtype, share) != (None, None, None, None):
            raise ArgumentError("leave out adapter, device, dtype and share; this model is loaded and ready to decode")
        return pretrained, None
    if isinstance(pretrained, str) and pretrained in zoo.MODELS and zoo.MODELS[pretrained].kind == "text":
        pretrained = zoo.MODELS[pretrained].folder
    kind = None if dtype in (None, "auto") else getattr(torch, str(dtype), None)
    if dtype not in (None, "auto") and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ArgumentError(f"dtype={dtype!r}; use a floating type of torch such as 'bfloat16'")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        # The harness asks for cuda:0 by default.
        _LOG.warning("partsong: this machine has no %s, so the model is loaded to the CPU", device)
        device = None
    source = pretrained if isinstance(pretrained, str | Path) else getattr(pretrained, "name_or_path", None)
    strategies = tuple(map(parse_strategy, filter(None, [share])))
    if strategies and device is not None:
        device = device.partition(":")[0] + (f":{os.environ.get('LOCAL_RANK', 0)}" if device[:4] == "cuda" else "")
    return load_text_model(pretrained, adapter=adapter, dtype=kind, device=device, strategies=strategies), source


def _without_files(arguments: list[str]) -> list[str]:
    """Takes out of a command line of the harness what makes it write files.

    >>> _without_files(["run", "--output_path", "out", "--log_samples", "--tasks=gsm8k"])
    ['run', '--tasks=gsm8k']
    """
    kept = list[str]()
    for before, each in zip(["", *arguments], arguments, strict=False):
        is_file = each.startswith(("--output_path", "-o")) or before in ("--output_path", "-o")
        if not is_file and each not in ("--log_samples", "-s"):
            kept.append(each)
    return kept


def _with_commas(knobs: Any) -> Any:
    return knobs.replace(";", ",") if isinstance(knobs, str) else knobs


def _tokenizer(source: Any) -> Any:
    if source is None or source == "":
        raise ArgumentError("a model object needs tokenizer=, a folder, a hub id or a tokenizer")
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False) if isinstance(source, str | Path) else source


def _prefix(tokenizer: Any) -> list[int]:
    """Returns the tokens that the tokenizer puts before every text, without those it puts after one."""
    plain, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def _batch_size(size: int | str | None, most: int | None) -> int:
    size = int(size) if isinstance(size, str) and size.isdigit() else 1 if size is None else size
    check_value("batch_size", size, Annotated[int, Whole(1, why="sizes are not searched")])
    if most is not None:
        raise ArgumentError(f"max_batch_size={most!r}; leave it out, because batch sizes are not searched")
    return size  # type: ignore[return-value]


def _max_length(length: int | None, positions: int | None) -> int:
    if length is None:
        return 2048 if positions is None else positions
    check_value("max_length", length, Annotated[int, Whole(2, positions, "the model has no more positions")])
    return length


def _batches(order: Sequence[int], size: int, kind: Any) -> list[list[int]]:
    """Cuts an order into runs of at most `size` neighbours of one kind."""
    batches: list[list[int]] = []
    for index in order:
        if batches and len(batches[-1]) < size and kind(batches[-1][0]) == kind(index):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


if __name__ == "__main__":
    main()

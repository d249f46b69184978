"""lm-evaluation-harness over the decoders of this package: ``lm_eval --model partsong``.

Newer releases of the harness find the model by the entry point this package declares. Releases up to 0.4.13 know no
plug-ins; there the same command line runs through this module, which registers the model first::

    python -m partsong.evals.harness.lm_eval_model run --model partsong \
        --model_args 'pretrained=FOLDER,rule=entropy-bound:gamma=0.1,max_new_tokens=256' --tasks gsm8k

With ``strategy=`` among the arguments the model is one that thinks with many calls: `ThinkingLM`.

Importing this module needs the harness (``pip install 'partsong[eval]'``) and registers the model.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from partsong import seeds, zoo
from partsong.errors import ArgumentError
from partsong.evals.harness.likelihood import log_likelihood
from partsong.knobs import format_knobs
from partsong.progress import progress
from partsong.samplers.text import CACHES, RULES, Decoded, Tally, decode, load_text_model
from partsong.samplers.text.request import check_request

try:
    # First, for where anything is registered already the harness does not register its own models any more.
    importlib.import_module("lm_eval.models")
    _Harness: Any = importlib.import_module("lm_eval.api.model").TemplateLM
    _registry: Any = importlib.import_module("lm_eval.api.registry")
    _utils: Any = importlib.import_module("lm_eval.utils")
except ImportError as error:
    raise ImportError("this model needs lm-evaluation-harness: pip install 'partsong[eval]'") from error

__all__ = ["PartsongLM", "main"]

_LOG = logging.getLogger("partsong.evals.lm_eval")

#: Of the harness's names for one thing, the first that is given.
_ROOM = ("max_gen_toks", "max_new_tokens", "max_tokens")
_KNOWN = (*_ROOM, "until", "do_sample", "temperature")
#: Change nothing where the most likely tokens are taken.
_OF_DRAWS = ("top_k", "top_p", "min_p")


class PartsongLM(_Harness):
    """A model of the harness that decodes many tokens at once.

    Log-likelihoods of masked models are bounds (see `log_likelihood`); whether an answer is what the model would write
    is found by writing as many tokens with the rule and cache at temperature 0. ``results["config"]`` of a run tells
    forwards, tokens per forward and the largest certificate of what was written, and the root mean square of the
    bounds' standard errors.

    Args:
        pretrained: a checkpoint folder, hub id, name of a text model of the zoo, or a model object as `decode` takes.
        tokenizer: a folder, a hub id or a tokenizer. Default: `pretrained`'s.
        adapter: as in `decode`.
        rule: as in `decode`; on command lines ``;`` stands between knobs, for the harness cuts at commas.
        cache: likewise.
        max_new_tokens: where the task does not say.
        block_size: as in `decode`.
        open_blocks: as in `decode`.
        temperature: where the task does not say.
        seed: of the draws and masks; they do not depend on the batch or the order of requests.
        num_pairs: as in `log_likelihood`.
        check_greedy: False reports no answer of a masked model as greedy, which saves the writing.
        max_length: most tokens of a text; earlier ones of a prompt are dropped. Default: the model's.
        batch_size: prompts decoded together.
        max_batch_size: must be None: sizes are not searched for.
        device: where the model is loaded to.
        dtype: its type, such as "bfloat16".

    Raises:
        ArgumentError: what `load_text_model`, `decode` or `log_likelihood` refuse, before any request.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        tokenizer: Any = None,
        adapter: Any = None,
        rule: Any = None,
        cache: Any = None,
        max_new_tokens: int = 256,
        block_size: int | None = None,
        open_blocks: int = 1,
        temperature: float = 0.0,
        seed: int = 0,
        num_pairs: int = 16,
        check_greedy: bool = True,
        max_length: int | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__()
        self.batch_size = _batch_size(batch_size, max_batch_size)
        self.model, source = _model(pretrained, adapter, device, dtype)
        self.tokenizer = _tokenizer(source if tokenizer is None else tokenizer)
        self.options = {
            "rule": rule.replace(";", ",") if isinstance(rule, str) else rule,
            "cache": cache.replace(";", ",") if isinstance(cache, str) else cache,
            "block_size": block_size,
            "open_blocks": open_blocks,
        }
        self.temperature, self.room, self.seed = temperature, max_new_tokens, seeds.check_seed(seed)
        self.num_pairs, self.check_greedy, self.prefix = num_pairs, check_greedy, _prefix(self.tokenizer)
        self.max_length = _max_length(max_length, self.model.max_positions, max_new_tokens)
        checked = check_request(
            self.model, [[self.prefix_token_id]], max_new_tokens=1, temperature=temperature, **self.options
        )
        self.rule, self.cache = format_knobs(checked.rule, RULES), format_knobs(checked.cache, CACHES)
        self.tallies: list[Tally] = []
        self.answer_tokens, self.squared_errors = 0, []

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """A model by the text of ``--model_args``."""
        return cls.create_from_arg_obj(_utils.simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """A model by its arguments: one that thinks where ``strategy`` is among them, else one of this class."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if "strategy" not in arg_dict:
            return cls(**arg_dict, **given)
        from partsong.evals.harness.lm_eval_thinking import ThinkingLM

        return ThinkingLM(**arg_dict, **given)

    # --- what the harness asks about the model ------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        ends = (self.tokenizer.eos_token_id, *self.model.eos_token_ids)
        return next((token for token in ends if token is not None), 0)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        start = self.prefix[0] if self.prefix else self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        """Tells request caches apart."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as one prompt."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids. What the tokenizer puts in front of a text is put there unless it stands there already."""
        ids = self.tokenizer(string, add_special_tokens=False).input_ids
        if add_special_tokens is False or ids[: len(self.prefix)] == self.prefix:
            return ids
        return [*self.prefix, *ids]

    def get_model_info(self) -> dict[str, Any]:
        """For ``results["config"]``: how was decoded, and what it cost."""
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
        """Continuations, each up to the first of its stopping texts."""
        asked = [request.args for request in requests]
        settings = [self._settings(options) for _, options in asked]
        rows = [
            self.tok_encode(context)[-(self.max_length - room) :]
            for (context, _), (room, *_) in zip(asked, settings, strict=True)
        ]
        row_seeds = self._seeds("tokens", rows)
        found = [""] * len(asked)
        bar = progress(len(asked), "partsong: writing", None if not disable_tqdm else False)
        # Requests of one kind together, the longest first, so that what is too long for the machine shows at once.
        order = sorted(range(len(asked)), key=lambda index: (settings[index][:2], -len(rows[index])))
        with bar:
            for here in _batches(order, self.batch_size, lambda index: settings[index][:2]):
                room, temperature, _ = settings[here[0]]
                texts = self._write([rows[i] for i in here], [row_seeds[i] for i in here], room, temperature)
                for index, text in zip(here, texts, strict=True):
                    found[index] = _cut(text, settings[index][2])
                    self.cache_hook.add_partial("generate_until", asked[index], found[index])
                bar.update(len(here))
        _LOG.info("partsong: %s", self.get_model_info())
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, a window of the model's length after the other."""
        found = []
        for request in progress(requests, "partsong: texts", None if not disable_tqdm else False):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = _utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            pairs = [((request.args[0], ""), *_utils.make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._likelihoods(pairs, check_greedy=False)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        size = max(self.batch_size, 16)
        with progress(len(requests), "partsong: likelihoods", None if not disable_tqdm else False) as bar:
            for low in range(0, len(requests), size):
                here = requests[low : low + size]
                for (key, *_), result in zip(here, self._likelihoods(here, self.check_greedy), strict=True):
                    found.append(result)
                    self.cache_hook.add_partial("loglikelihood", key, result)
                bar.update(len(here))
        return found

    def _likelihoods(self, requests: Sequence[Any], check_greedy: bool) -> list[tuple[float, bool]]:
        answers = [list(answer) for _, _, answer in requests]
        for (context, text), _, answer in requests:
            if len(answer) >= self.max_length:
                raise ArgumentError(f"{(text or context)[:40]!r}... has {len(answer)} tokens, too many for the model")
        prompts = [list(prompt)[-(self.max_length - len(answer)) :] for _, prompt, answer in requests]
        found = log_likelihood(
            self.model,
            prompts,
            answers,
            num_pairs=self.num_pairs,
            seed=self._seeds("masks", [[*p, -1, *a] for p, a in zip(prompts, answers, strict=True)]),
            batch_size=self.batch_size,
        )
        self.squared_errors += [one.standard_error**2 for one in found if one.kind == "bound"]
        greedy = [bool(one.greedy) for one in found]
        if check_greedy and any(one.greedy is None for one in found):
            greedy = self._is_greedy(prompts, answers)
        return [(one.log_likelihood, taken) for one, taken in zip(found, greedy, strict=True)]

    def _is_greedy(self, prompts: list[list[int]], answers: list[list[int]]) -> list[bool]:
        taken: list[bool] = []
        for low in range(0, len(prompts), self.batch_size):
            here = slice(low, low + self.batch_size)
            template = [[None] * len(answer) for answer in answers[here]]
            written = decode(self.model, prompts[here], template=template, stop_token_ids=(), **self.options)
            taken += [row == answer for row, answer in zip(written.tokens, answers[here], strict=True)]
        return taken

    def _write(self, rows: list[list[int]], row_seeds: list[int], room: int, temperature: float) -> list[str]:
        done = decode(self.model, rows, max_new_tokens=room, temperature=temperature, seed=row_seeds, **self.options)
        self.tallies += done.tallies
        self.answer_tokens += sum(map(len, done.tokens))
        return [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in done.tokens]

    def _settings(self, options: dict[str, Any]) -> tuple[int, float, tuple[str, ...]]:
        """Room, temperature and stopping texts of a request."""
        temperature = float(options.get("temperature", self.temperature))
        if options.get("do_sample") is False:
            temperature = 0.0
        known = (*_KNOWN, *_OF_DRAWS) if temperature == 0.0 else _KNOWN
        if unknown := sorted(set(options) - set(known)):
            raise ArgumentError(
                f"the task asks for {', '.join(unknown)}, which this model does not honour at temperature "
                f"{temperature:g}; known are {', '.join(known)}"
            )
        room = next((int(options[name]) for name in _ROOM if options.get(name) is not None), self.room)
        if not 1 <= room < self.max_length:
            raise ArgumentError(f"max_gen_toks={room}; use 1 to {self.max_length - 1}, below the model's length")
        until = options.get("until") or ()
        return room, temperature, (until,) if isinstance(until, str) else tuple(until)

    def _seeds(self, name: str, rows: Sequence[Sequence[int]]) -> list[int]:
        """A function of the seed, the row and how often it has been asked for, whatever the order of the others."""
        seen: Counter[str] = Counter()
        found = []
        for row in rows:
            text = " ".join(map(str, row))
            found.append(seeds.derive(self.seed, name, text, seen[text]))
            seen[text] += 1
        return found


_registry.register_model("partsong")(PartsongLM)


def main() -> None:
    """The harness's own command line, with the model registered."""
    importlib.import_module("lm_eval.__main__").cli_evaluate()


def _model(pretrained: Any, adapter: Any, device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """The model, and where its tokenizer is."""
    if hasattr(pretrained, "key_store"):
        if (adapter, device, dtype) != (None, None, None):
            raise ArgumentError("adapter, device and dtype are for models that are loaded; this one is ready to decode")
        return pretrained, None
    if isinstance(pretrained, str) and pretrained in zoo.MODELS and zoo.MODELS[pretrained].kind == "text":
        pretrained = zoo.MODELS[pretrained].folder
    kind = None if dtype in (None, "auto") else getattr(torch, str(dtype), None)
    if dtype not in (None, "auto") and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ArgumentError(f"dtype={dtype!r}; use a floating type of torch such as 'bfloat16'")
    if device is not None and device.startswith("cuda") and not torch.cuda.is_available():
        # The harness asks for cuda:0 where nobody has asked for anything.
        _LOG.warning("partsong: there is no %s here, the model is loaded to the CPU", device)
        device = None
    source = pretrained if isinstance(pretrained, str | Path) else getattr(pretrained, "name_or_path", None)
    return load_text_model(pretrained, adapter=adapter, dtype=kind, device=device), source


def _tokenizer(source: Any) -> Any:
    if source is None or source == "":
        raise ArgumentError("a model object needs tokenizer=, a folder, a hub id or a tokenizer")
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False) if isinstance(source, str | Path) else source


def _prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text. What it puts behind is left out: there the answer stands."""
    plain, whole = (tokenizer("a", add_special_tokens=special).input_ids for special in (False, True))
    starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
    return whole[: starts[0]] if starts else []


def _batch_size(size: int | str | None, most: int | None) -> int:
    size = int(size) if isinstance(size, str) and size.isdigit() else 1 if size is None else size
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or most is not None:
        raise ArgumentError(
            f"batch_size={size!r}, max_batch_size={most!r}; use a positive integer, sizes are not searched"
        )
    return size


def _max_length(asked: int | None, positions: int | None, room: int) -> int:
    length = positions if asked is None else asked
    length = 2048 if length is None else length
    if length < 2 or (positions is not None and length > positions):
        raise ArgumentError(f"max_length={asked!r}; use 2 to {positions}, the positions of the model")
    if room < 1:
        raise ArgumentError(f"max_new_tokens={room!r}; use a positive integer")
    return length


def _batches(order: Sequence[int], size: int, kind: Any) -> list[list[int]]:
    """Runs of at most `size` neighbours of one kind."""
    batches: list[list[int]] = []
    for index in order:
        if batches and len(batches[-1]) < size and kind(batches[-1][0]) == kind(index):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _cut(text: str, until: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in until if stop and stop in text), default=len(text))]


if __name__ == "__main__":
    main()

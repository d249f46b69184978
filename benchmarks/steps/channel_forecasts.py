"""Asks whether forecasts for clusters of channels help a step cache: ``python benchmarks/steps/channel_forecasts.py``.

The idea is HyCa's (arXiv 2510.04188): group the channels of what the blocks add by how they move, choose for every
group the rule that forecasts it best on a few captions, and keep that table for all others.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from benchmarks.filing import file_result, markdown_table, result_path
from partsong import zoo
from partsong.outputs import psnr
from partsong.parallel.step_cache.forecasts import polynomial_weights
from partsong.seeds import generators

#: Rules by the share of the last slope that they follow, and by their degree.
RULES: dict[str, Callable[[Sequence[float], float], list[float]]] = {
    "hold": lambda levels, level: _followed(levels, level, 0.0),
    "half a line": lambda levels, level: _followed(levels, level, 0.5),
    "linear": lambda levels, level: _followed(levels, level, 1.0),
    "quadratic": lambda levels, level: _quadratic(levels, level),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Says what to sample."""

    out: Path = result_path(__file__)
    """Result files without suffix."""
    captions: int = 40
    """How many fresh captions to compare on."""
    known: int = 20
    """How many captions the tables are chosen on."""
    mask: str = "1010101010101010100010101011"
    """Which steps are computed."""
    seed: int = 1
    """Seed of captions and noise; those that tables are chosen on have the next."""


def _followed(levels: Sequence[float], level: float, share: float) -> list[float]:
    """Weighs values, newest first, to follow a share of the last slope."""
    if len(levels) == 1:
        return [1.0]
    ratio = share * (level - levels[0]) / (levels[0] - levels[1])
    return [1 + ratio, -ratio, 0.0][: len(levels)]


def _quadratic(levels: Sequence[float], level: float) -> list[float]:
    return list(reversed(polynomial_weights(list(reversed(levels)), level)))


def rule_weights(levels: Sequence[float], full: Sequence[int], step: int) -> tuple[list[int], Tensor]:
    """Returns the last full steps, newest first, and what each weighs under every rule: `[rules, steps]`."""
    known = sorted((each for each in full if each < step), reverse=True)[:3]
    return known, torch.tensor([rule([levels[each] for each in known], levels[step]) for rule in RULES.values()])


class ChannelCache:
    """Leaves out all blocks of some steps of a Stable-Diffusion-3 model, each channel with a rule of its own.

    Args:
        model: the transformer; its blocks' forwards are replaced until `remove`.
        levels: noise level of every step.
        mask: which steps are computed.
        table: `[rules, channels]`, how much each rule counts for a channel.
    """

    def __init__(self, model: Any, levels: Sequence[float], mask: str, table: Tensor) -> None:
        self.model, self.levels, self.mask, self.table = model, levels, mask, table
        self.step, self.added = -1, dict[int, Tensor]()
        self._entering = torch.empty(0)
        for number, block in enumerate(model.transformer_blocks):
            block.forward = self._replaced(number, type(block).forward.__get__(block))

    def remove(self) -> None:
        """Puts the blocks' own forwards back."""
        for block in self.model.transformer_blocks:
            del block.forward

    def _replaced(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        last = len(self.model.transformer_blocks) - 1

        def run(hidden_states: Tensor, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if number == 0:
                self.step, self._entering = self.step + 1, hidden_states
            if self.mask[self.step] == "0":
                ahead = self._forecast() if number == last else 0
                return encoder_hidden_states, hidden_states + ahead
            text, hidden = forward(hidden_states, encoder_hidden_states, *args, **kwargs)
            if number == last:
                self.added[self.step] = hidden - self._entering
            return text, hidden

        return run

    def _forecast(self) -> Tensor:
        known, weights = rule_weights(self.levels, list(self.added), self.step)
        by_channel = weights.T @ self.table  # [steps, channels]
        return torch.stack([self.added[step] * weight for step, weight in zip(known, by_channel, strict=True)]).sum(0)


def recorded(pipe: Any, seed: int, num: int) -> Tensor:
    """Returns what all blocks add in every step of a serial generation: `[steps, samples, tokens, channels]`."""
    table = torch.zeros(len(RULES), pipe.transformer.config.caption_projection_dim)
    seen = ChannelCache(pipe.transformer, [], "1" * 99, table)
    pictures(pipe, seed, num)
    seen.remove()
    return torch.stack([seen.added[step] for step in sorted(seen.added)])


def errors_of(added: Tensor, levels: Sequence[float], mask: str) -> Tensor:
    """Returns the squared error of every rule for each channel and left-out step: `[rules, steps, channels]`."""
    full = [step for step, digit in enumerate(mask) if digit == "1"]
    found = []
    for step in (step for step, digit in enumerate(mask) if digit == "0"):
        known, weights = rule_weights(levels, full, step)
        ahead = torch.einsum("rk,kstc->rstc", weights, added[known])
        found.append((ahead - added[step]).square().mean((1, 2)))
    return torch.stack(found, 1)


def table_of(errors: Tensor, groups: int) -> Tensor:
    """Chooses a rule for each group of channels: `[rules, channels]` of zeros and ones.

    Groups come from k-means over the logarithms of the rules' errors, started at evenly spaced channels.
    """
    rules, _, channels = errors.shape
    profile = (errors / errors.mean(0, keepdim=True)).log().flatten(0, 1).T  # [channels, rules * steps]
    group = torch.arange(channels)
    if groups < channels:
        centres = profile[torch.linspace(0, channels - 1, groups).long()]
        for _ in range(30):
            group = torch.cdist(profile, centres).argmin(1)
            centres = torch.stack(
                [profile[group == g].mean(0) if (group == g).any() else centres[g] for g in range(groups)]
            )
    total = torch.zeros(rules, groups).index_add_(1, group, errors.sum(1))
    return torch.nn.functional.one_hot(total.argmin(0)[group], rules).T.float()


def pictures(pipe: Any, seed: int, num: int) -> list[Any]:
    """Returns a picture for each of some captions, all in one call."""
    row = zoo.MODELS["shapes"]
    asked = {**row.defaults, "output_type": "np", "generator": list(generators(seed, num))}
    return list(pipe(**asked, prompt=list(row.task.captions(num, seed))).images)


def main(config: Config) -> None:
    """Chooses tables, samples with them and with each single rule, and writes the files."""
    torch.set_num_threads(1)
    row, pipe = zoo.MODELS["shapes"], zoo.load("shapes")
    pipe.set_progress_bar_config(disable=True)
    known = recorded(pipe, config.seed + 1, config.known)
    levels = pipe.scheduler.sigmas.tolist()
    errors = errors_of(known, levels, config.mask)
    channels = errors.shape[-1]
    one_hot = torch.eye(len(RULES))
    tables = {name: one_hot[:, [i]].expand(-1, channels) for i, name in enumerate(RULES)}
    tables |= {f"{groups} groups": table_of(errors, groups) for groups in (4, 16, channels)}
    serial, rows = pictures(pipe, config.seed, config.captions), list[dict[str, Any]]()
    captions = row.task.captions(config.captions, config.seed)
    power = known[[step for step, digit in enumerate(config.mask) if digit == "0"]].square().mean((1, 2)).sum()
    for name, table in tables.items():
        cache = ChannelCache(pipe.transformer, levels, config.mask, table)
        images = pictures(pipe, config.seed, config.captions)
        cache.remove()
        apart = [min(psnr(got, wanted), 999.0) for got, wanted in zip(images, serial, strict=True)]
        facts = [row.task.facts_read(caption, image) for caption, image in zip(captions, images, strict=True)]
        found = {
            "case": name,
            "error": float((torch.einsum("rsc,rc->", errors, table) / power).sqrt()),
            "psnr_median": statistics.median(apart),
            "psnr_worst": min(apart),
            "facts_read": statistics.fmean(facts),
            "channels": dict(zip(RULES, table.mean(1).tolist(), strict=True)),
        }
        rows.append(found)
        print(found, flush=True)
    _file(config, rows)


def _file(config: Config, rows: list[dict[str, Any]]) -> None:
    """Writes both files."""
    note = (
        f"`shapes` at 28 steps and its default guidance, {config.captions} captions; all blocks are left out where the "
        f"mask {config.mask} has a 0. Tables were chosen on {config.known} other captions. The error ahead is that of "
        "their forecasts along the serial trajectory, relative. PSNR in dB against the serial picture."
    )
    columns = ("rule", "error ahead", "PSNR median", "worst", "facts read", *(f"channels: {name}" for name in RULES))
    lines = [
        (
            each["case"],
            f"{100 * each['error']:.1f} %",
            f"{each['psnr_median']:.1f}",
            f"{each['psnr_worst']:.1f}",
            f"{100 * each['facts_read']:.1f} %",
            *(f"{100 * share:.0f} %" for share in each["channels"].values()),
        )
        for each in rows
    ]
    title = "A forecast for each group of channels"
    file_result(config.out, __file__, rows, title, note, markdown_table(columns, lines))


if __name__ == "__main__":
    main(tyro.cli(Config))

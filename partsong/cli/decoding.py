"""What ``partsong text`` and ``partsong eval`` check and read alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partsong.errors import ArgumentError
from partsong.seeds import check_seed

if TYPE_CHECKING:
    from partsong.cli.options import Eval, Text
    from partsong.samplers.text import Rule

__all__ = ["check_decoding", "read_rule"]


def check_decoding(options: Text | Eval, *counts: str) -> None:
    """Refuses what `Decoding` options say wrong, without a model.

    Args:
        options: of the command.
        *counts: names of its own options that count something.
    """
    check_seed(options.seed)
    for name in ("max_new_tokens", "block_size", "open_blocks", "threads", *counts):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ArgumentError(f"--{name.replace('_', '-')} {value}: must be 1 or more")
    if options.temperature is not None and not 0 <= options.temperature < 1e6:
        raise ArgumentError(
            f"--temperature {options.temperature}: give 0 for the most likely tokens, or a number above"
        )
    if options.device is not None:
        _check_device(options.device)


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # Builds without CUDA assert, others raise.
        raise ArgumentError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error


def read_rule(text: str, *, probe: bool = False) -> Rule:
    """The rule of ``NAME[:key=value,...]``.

    Args:
        text: what the user wrote.
        probe: whether there is something that tells what places share, which one rule needs.

    Raises:
        ArgumentError: an unknown name, key or value, a key that is missing, or a rule that needs a probe.
    """
    from partsong.samplers.text import parse_rule

    rule = parse_rule(text)
    if rule.probes and not probe:
        raise ArgumentError(
            f"rule {text} needs a probe, which is a function: give it to decode in Python; "
            "here only the oracle suite has one"
        )
    return rule

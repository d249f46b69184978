"""Checks and reads the options that ``partsong text`` and ``partsong eval`` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from partsong.errors import ArgumentError
from partsong.seeds import check_seed

if TYPE_CHECKING:
    from partsong.cli.options import Text
    from partsong.cli.suites.options import Eval
    from partsong.samplers.text import Rule

__all__ = ["check_decoding", "read_rule"]


def check_decoding(options: Text | Eval) -> None:
    """Checks the seed and the device.

    Raises:
        ArgumentError: the seed is out of range, or the device cannot be used.
    """
    check_seed(options.seed)
    if options.device is not None:
        _check_device(options.device)


def _check_device(name: str) -> None:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # torch raises AssertionError if it was built without CUDA.
        raise ArgumentError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error


def read_rule(text: str, *, probe: bool = False) -> Rule:
    """Reads ``NAME[:key=value,...]`` into a rule.

    Args:
        text: what the user wrote.
        probe: whether a probe is available, which one of the rules needs.

    Raises:
        ArgumentError: a name, key or value is unknown, a key is missing, or the rule needs a probe.
    """
    from partsong.samplers.text import parse_rule

    rule = parse_rule(text)
    if rule.probes and not probe:
        raise ArgumentError(
            f"rule {text} needs a probe, which is a function: give it to decode in Python; "
            "here only the oracle suite has one"
        )
    return rule

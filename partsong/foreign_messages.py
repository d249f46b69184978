"""Keeps messages of other libraries from the user of a command, who can do nothing about them."""

from __future__ import annotations

import logging
import os
import warnings
from importlib import import_module

__all__ = ["hide_foreign_messages", "hide_if_parent_does", "quiet_libraries"]

#: What tells libraries, and Python itself, to stay silent unless something fails; also in the processes started here.
_VARIABLES = {
    "PARTSONG_HIDES": "1",
    "DIFFUSERS_VERBOSITY": "error",
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_LOGS": "-all",
    "PYTHONWARNINGS": "ignore",
}


def hide_foreign_messages() -> None:
    """Hides warnings of other libraries in this process and in those that it starts; errors and our own stay.

    A variable that the user has set keeps its value. Call it before the libraries are imported: they warn then.

    Example:
        >>> hide_foreign_messages()  # doctest: +SKIP
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    _hide()


def hide_if_parent_does() -> None:
    """Does the same in a process that was started by one which hides them."""
    if "PARTSONG_HIDES" in os.environ:
        _hide()


def quiet_libraries(*names: str) -> None:
    """Turns off the messages and the progress bars of libraries in this process; a job reports its progress itself.

    Their bars know no variable, and a script has none set.

    Args:
        names: which of diffusers and transformers the process uses; none means both.
    """
    for name in names or ("diffusers", "transformers"):
        messages = import_module(f"{name}.utils.logging")
        messages.set_verbosity_error()
        messages.disable_progress_bar()


def _hide() -> None:
    if os.environ.get("PYTHONWARNINGS") == "ignore":
        warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("partsong").setLevel(logging.WARNING)

"""Commands show errors of other libraries and warnings of ours, in this process and in those that it starts."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.documents import ROOT

SCRIPT = """
import logging, subprocess, sys, warnings
from partsong.foreign_messages import hide_foreign_messages, hide_if_parent_does, quiet_libraries
{begin}
warnings.warn("a warning of Python")
logging.getLogger("torchao").warning("a warning of another library")
logging.getLogger("torchao").error("an error of another library")
logging.getLogger("partsong.parallel").warning("our warning")
"""
SHOWN = ["an error of another library", "our warning"]


def printed(begin: str, **variables: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", SCRIPT.format(begin=begin)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    return ran.stderr.splitlines()


def test_errors_and_our_warnings_are_shown() -> None:
    assert printed("hide_foreign_messages()") == SHOWN
    assert printed("hide_if_parent_does()", PARTSONG_HIDES="1", PYTHONWARNINGS="ignore") == SHOWN


def test_libraries_that_a_process_uses_are_quiet() -> None:
    begin = """quiet_libraries("transformers")
print("diffusers" in sys.modules, file=sys.stderr)
quiet_libraries()
for library in ("diffusers", "transformers"):
    messages = sys.modules[f"{library}.utils.logging"]
    messages.get_logger(f"{library}.models").warning("a warning of a library")
    list(messages.tqdm(range(3)))
"""
    lines = printed(begin)
    assert lines[0] == "False" and not any("of a library" in line or "3/3" in line for line in lines)


def test_what_the_user_asked_for_stays() -> None:
    lines = printed("hide_foreign_messages()", PYTHONWARNINGS="default")
    assert any("a warning of Python" in line for line in lines) and lines[-2:] == SHOWN
    assert len(printed("hide_if_parent_does()")) >= 4

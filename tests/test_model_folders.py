"""Where a model's folder is found, and what is said of one that is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from partsong import zoo
from partsong.errors import ArgumentError, UnsupportedError
from partsong.jobs.pipelines import read_pipeline
from partsong.model_folders import model_folder, read_settings


def hub_with(monkeypatch: pytest.MonkeyPatch, *files: str, error: Exception | None = None) -> None:
    """A hub with one model of these files, or one that answers with an error."""

    def model_info(*_: Any, **__: Any) -> SimpleNamespace:
        if error is not None:
            raise error
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in files])

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)


def test_a_folder_comes_before_the_zoo_and_the_zoo_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_folder("sums") == zoo.MODELS["sums"].folder
    assert model_folder("mine", others={"mine": lambda: tmp_path}) == tmp_path
    (tmp_path / "sums").mkdir()
    assert model_folder("sums") == Path("sums")
    hub_with(monkeypatch, "config.json")
    asked: list[tuple[str, bool]] = []
    assert model_folder("owner/name", download=lambda *each: asked.append(each) or tmp_path) == tmp_path
    assert asked == [("owner/name", False)]


def test_without_a_network_the_local_cache_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_with(monkeypatch, error=ConnectionError("no network\nand more"))
    asked: list[tuple[str, bool]] = []
    model_folder("owner/name", download=lambda *each: asked.append(each) or tmp_path)
    assert asked == [("owner/name", True)]

    def nothing_cached(name: str, offline: bool) -> Path:
        raise FileNotFoundError("no snapshot")

    with pytest.raises(ArgumentError, match=r"not reachable \(no network\) and owner/name is not in the local cache$"):
        model_folder("owner/name", download=nothing_cached)
    hub_with(monkeypatch, "config.json")
    with pytest.raises(ArgumentError, match=r"owner/name cannot be downloaded \(no snapshot\)"):
        model_folder("owner/name", download=nothing_cached)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("nope", "config.json", "no model 'nope': not a folder here, not one of lists-ar, .*, and not a hub id"),
        ("sums/", "config.json", "no model 'sums/'"),
        ("../a/b", "config.json", "no model '../a/b'"),
        (Path("sums"), "config.json", "no model 'sums'"),
        (__file__, "config.json", "is a file; give the folder that holds config.json"),
        ("shapes", "config.json", "shapes makes images or videos; those that make text are lists-ar"),
        ("sums", "model_index.json", "sums makes text; those that make images or videos are motion"),
    ],
)
def test_other_names_are_refused(
    name: Any, settings: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match=words):
        model_folder(name, settings)


def test_what_the_hub_cannot_give_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any) -> Path:
        raise AssertionError("asked for a download")

    hub_with(monkeypatch, "README.md", "model_index.json")
    with pytest.raises(ArgumentError, match="holds no model that makes text: it has no config.json"):
        model_folder("owner/name", download=download)
    hub_with(monkeypatch, error=huggingface_hub.errors.HFValidationError("two dashes"))
    with pytest.raises(ArgumentError, match=r"the hub has no readable model owner/na--me \(two dashes\)"):
        model_folder("owner/na--me", download=download)


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("[1]")
    with pytest.raises(ArgumentError, match="has no config.json; it holds a model that makes images or videos"):
        read_settings(tmp_path)
    with pytest.raises(ArgumentError, match="not a model configuration: it holds a list"):
        read_settings(tmp_path, "model_index.json")
    assert read_settings(zoo.MODELS["sums"].folder)["model_type"] == "llama"


def test_a_package_that_cleans_prompts_is_asked_for_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    for module in (pipeline_wan, pipeline_wan_i2v):
        monkeypatch.delattr(module, "ftfy", raising=False)  # as where it is not installed
    with pytest.raises(UnsupportedError, match="WanImageToVideoPipeline cleans prompts .* pip install ftfy"):
        read_pipeline(tmp_path, "WanImageToVideoPipeline")
    with pytest.raises(ArgumentError, match="model_index.json"):
        read_pipeline(tmp_path, "WanPipeline")  # which does without

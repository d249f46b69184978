"""The command line: what it refuses and how, what it writes, and that it leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import partsong
from partsong import zoo
from partsong.cli import main
from partsong.cli.arguments import read_arguments
from partsong.evals.bench import parscale as bench_parscale
from partsong.samplers.registry import strategies

COMMON = {"command", "strategy", "nproc", "seed", "seconds", "out", "ledger"}
IMAGE = {"class", "psnr_to_serial", "max_abs_diff", "facts_read", "bytes_sent"}
COMPARED = {"seconds_serial", "speedup"}
CAPTION = "a red circle left of a blue square"
PROGRAM = [sys.executable, "-m", "partsong"]

needs_weights = pytest.mark.skipif(
    not (zoo.MODELS["shapes"].folder / "model_index.json").is_file(), reason="the shapes weights are not there"
)


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def folder(path: Path, index: object, *parts: str) -> Path:
    """A pipeline folder with a `model_index.json` and empty part folders."""
    path.mkdir()
    (path / "model_index.json").write_text(index if isinstance(index, str) else json.dumps(index), encoding="utf-8")
    for part in parts:
        (path / part).mkdir()
        (path / part / "diffusion_pytorch_model.safetensors").touch()
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each way a model folder can be wrong."""
    root = tmp_path_factory.mktemp("models")
    unet = {
        "_class_name": "AmusedPipeline",
        "transformer": ["diffusers", "UVit2DModel"],
    }
    flux = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    folder(root / "unet", unet, "transformer")
    folder(root / "broken", "{not json")
    folder(root / "list", [1, 2])
    folder(root / "nameless", {"transformer": ["diffusers", "FluxTransformer2DModel"]}, "transformer")
    folder(root / "incomplete", flux)
    folder(root / "foreign", {**flux, "transformer": ["my_code", "MyTransformer"]}, "transformer")
    folder(root / "pickles", flux, "transformer")
    (root / "pickles" / "transformer" / "diffusion_pytorch_model.safetensors").rename(root / "pickles" / "weights.bin")
    (root / "empty").mkdir()
    return root


REFUSED = {
    "empty prompt": (["image", "  "], "prompt is empty"),
    "no prompt": (["image"], "PROMPT"),
    "no command": ([], "Expected one of"),
    "unknown command": (["imagine", "x"], "imagine"),
    "unknown option": (["image", CAPTION, "--ulysses"], "--ulysses"),
    "word for a number": (["image", CAPTION, "--nproc", "two"], "--nproc"),
    "no ranks": (["image", CAPTION, "--nproc", 0], "--nproc 0: use a positive integer"),
    "no steps": (["image", CAPTION, "--steps", 0], "--steps 0"),
    "negative seed": (["image", CAPTION, "--seed", -1], "seed"),
    "not a picture": (
        ["image", CAPTION, "--out", "x.bmp"],
        "images are written as .png, .webp, .jpg, .jpeg, not x.bmp",
    ),
    "place that cannot be written": (["image", CAPTION, "--out", "/proc/x.png"], "/proc/x.png"),
    "JSON place": (["image", CAPTION, "--json", "/proc/x.json"], "/proc/x.json"),
    "unknown strategy": (["image", CAPTION, "--strategy", "ulises"], "displaced-patch"),
    "unknown key": (["image", CAPTION, "--strategy", "ulysses:degre=2"], "degree"),
    "word for a degree": (["image", CAPTION, "--strategy", "ulysses:degree=x"], "'x'"),
    "degree and ranks": (["image", CAPTION, "--nproc", 2, "--strategy", "ulysses:degree=3"], "3"),
    "same axis twice": (["image", CAPTION, "--nproc", 2, "--strategy", "ring", "--strategy", "ring"], "ring"),
    "few shares": (["image", CAPTION, "--nproc", 2, "--strategy", "ring", "--shares", "1"], "2 ranks"),
    "share of nothing": (["image", CAPTION, "--nproc", 2, "--strategy", "ring", "--shares", "1,0"], "above 0"),
    "shares in words": (["image", CAPTION, "--nproc", 2, "--strategy", "ring", "--shares", "fast,slow"], "measured"),
    "shares of no use": (["image", CAPTION, "--nproc", 2, "--strategy", "cfg-parallel", "--shares", "2,1"], "equal"),
    "nothing to measure for": (["image", CAPTION, "--shares", "measured"], "1 rank"),
    "setting without a value": (["image", CAPTION, "--set", "true_cfg_scale"], "KEY=VALUE"),
    "setting without a name": (["image", CAPTION, "--set", "=4"], "KEY=VALUE"),
    "setting with a flag of its own": (["image", CAPTION, "--set", "height=64"], "--height"),
    "setting given twice": (["image", CAPTION, "--set", "mu=1", "--set", "mu=2"], "mu is given twice"),
    "setting that is broken JSON": (["image", CAPTION, "--set", "sigmas=[1.0, 0.5"], "JSON"),
    "setting that is no number": (["image", CAPTION, "--set", "mu=nan"], "finite"),
    "unknown model": (["image", CAPTION, "--model", "nope"], "shapes"),
    "missing folder": (["image", CAPTION, "--model", "./nope"], "./nope"),
    "file for a folder": (["image", CAPTION, "--model", __file__], "model_index.json"),
    "unknown bench": (["bench", "sound"], "sound"),
    "unknown list": (["list", "colours"], "colours"),
    "support of an unknown model": (["list", "support", "wan vice"], "did you mean Wan VACE"),
    "a name where there is none to give": (["list", "rules", "Flux"], "takes no name"),
    "demo on one rank": (["demo", "--nproc", 1], "--nproc 1: use an integer of 2 or more"),
}

SETTINGS = [
    ("cfg_scale=4", "guidance_scale", 1),
    ("cfg_scale=4", "guidance_scale", 2),
    ("skip_layer_guidance_scale=lots", "a number", 1),
    ("clip_skip=high", "refused the call", 1),
]

VALUES = {
    "4": 4,
    "-4.5": -4.5,
    ".5": 0.5,
    "1e-3": 1e-3,
    "True": True,
    "none": None,
    "": "",
    "a=b": "a=b",
    "3 boats": "3 boats",
    '"4"': "4",
    "[1, 2]": [1, 2],
    '{"a": null}': {"a": None},
}

BAD_FOLDERS = {
    "empty": "model_index.json",
    "broken": "cannot be read",
    "list": "list",
    "nameless": "pipeline class",
    "incomplete": "transformer",
    "foreign": "my_code",
    "pickles": "safetensors",
}


def refuses(capsys: pytest.CaptureFixture[str], args: list[object], words: str) -> None:
    """One line on standard error, nothing on standard output, exit code 2."""
    assert run(*args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("partsong: error: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("case", REFUSED)
def test_bad_request_is_one_line(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    args, words = REFUSED[case]
    refuses(capsys, list(args), words)


@pytest.mark.parametrize("text", VALUES)
def test_a_setting_is_read_as_what_it_looks_like(text: str) -> None:
    value = read_arguments([f"key={text}"])["key"]
    assert (value, type(value)) == (VALUES[text], type(VALUES[text]))


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_model_folder_is_one_line(name: str, nproc: int, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["image", CAPTION, "--model", folders / name, "--nproc", nproc, "--strategy", "ulysses"]
    refuses(capsys, args, BAD_FOLDERS[name])


@pytest.mark.parametrize("nproc", [1, 2])
def test_unsupported_architecture_is_one_line(nproc: int, folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["image", CAPTION, "--model", folders / "unet", "--nproc", nproc, "--strategy", "ring"]
    refuses(capsys, args, "UVit2DModel")


def test_every_rank_refuses_and_one_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert run("image", CAPTION, "--strategy", "ulysses:degree=3") == 2
        assert capsys.readouterr().err.count("\n") == lines
    monkeypatch.setenv("RANK", "0")
    refuses(capsys, ["image", CAPTION, "--nproc", 4, "--strategy", "ring"], "torchrun started 2")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ValueError, match="ulises"):
        main(["image", CAPTION, "--strategy", "ulises", "--debug"])


def test_weights_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(zoo.MODELS["shapes"].folder, tmp_path / "shapes")
    weights = next((tmp_path / "shapes" / "transformer").glob("*.safetensors"))
    tensors = load_file(weights)
    del tensors["norm_out.linear.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    words = "the weights of its part transformer lack 1 tensors, among them norm_out.linear.weight"
    refuses(capsys, ["image", CAPTION, "--model", tmp_path / "shapes", "--out", tmp_path / "x.png"], words)


def test_list_and_env(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "strategies", "--json", tmp_path / "s.json") == 0
    rows = read(tmp_path / "s.json")["rows"]
    assert [row["name"] for row in rows] == list(strategies())
    assert {row["class"] for row in rows} == {"exact", "bounded", "approximate"}
    assert all(10 < len(row["use_when"]) < 120 for row in rows)
    assert run("list", "models") == 0
    assert run("list", "suites") == 0
    assert run("list", "drafters", "--json", tmp_path / "d.json") == 0
    assert [row["name"] for row in read(tmp_path / "d.json")["rows"]][:2] == ["ngram", "jacobi"]
    for name in ("wan vace", "WanVACETransformer3DModel", "WanVACEPipeline"):
        assert run("list", "support", name, "--json", tmp_path / "one.json") == 0
        rows = json.loads((tmp_path / "one.json").read_text())["rows"]
        assert {row["model"] for row in rows} == {"WanVACETransformer3DModel"}
        assert next(row for row in rows if row["strategy"] == "Ulysses")["class"] == "exact"
        assert next(row for row in rows if row["strategy"] == "DynamicSequence")["reason"]
    for part, models in {
        "z image": {"ZImageTransformer2DModel"},
        "qwen": {"QwenImageTransformer2DModel", "QwenImage21Transformer2DModel"},
        "FLUX.1-dev": {"FluxTransformer2DModel"},
        "WanImageToVideoPip": {"WanTransformer3DModel"},
    }.items():
        assert run("list", "support", part, "--json", tmp_path / "part.json") == 0
        assert {row["model"] for row in read(tmp_path / "part.json")["rows"]} == models
    assert run("env", "--json", tmp_path / "e.json") == 0
    machine = read(tmp_path / "e.json")
    assert machine.keys() >= COMMON
    assert {"naive", "cpu_flash"} <= {row["name"] for row in machine["attention"]}
    assert machine["instruction_set"] == torch.backends.cpu.get_cpu_capability()
    out = capsys.readouterr().out
    assert all(name in out for name in (*strategies(), *zoo.MODELS, "naive"))


@pytest.mark.full
def test_measurements_name_the_instruction_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Times and last bits differ between processors: `partsong bench` and the filed benchmarks say which it was."""
    monkeypatch.setattr(bench_parscale, "run", lambda **_: [{"name": "one", "seconds": 1.0}])
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    assert run("bench", "parscale", "--json", tmp_path / "b.json") == 0
    assert read(tmp_path / "b.json")["hardware"]["instruction_set"] == "ABACUS"
    from benchmarks import filing  # its watch of the load begins here

    script = Path(filing.__file__).with_name("serving.py")
    filing.file_result(tmp_path / "page", str(script), [], "One", "A note.", "| table |")
    assert read(tmp_path / "page.json")["hardware"]["instruction_set"] == "ABACUS"
    assert " cores with ABACUS, " in (tmp_path / "page.md").read_text(encoding="utf-8")


@needs_weights
def test_image_on_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, result = tmp_path / "deep" / "x.png", tmp_path / "r.json"
    assert run("image", CAPTION, "--steps", 2, "--num-images", 2, "--out", out, "--json", result) == 0
    found = read(result)
    assert found.keys() >= COMMON | IMAGE
    assert not COMPARED & found.keys()
    assert (found["command"], found["strategy"], found["nproc"], found["class"]) == ("image", "serial", 1, "exact")
    assert [Image.open(path).size for path in found["images"]] == [(64, 64)] * 2
    assert (found["height"], found["width"], found["size_note"]) == (64, 64, None)
    assert str(found["out"]) in capsys.readouterr().out


@needs_weights
def test_pipeline_refusal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refuses(capsys, ["image", CAPTION, "--height", 61, "--out", tmp_path / "x.png"], "61")


@needs_weights
@pytest.mark.parametrize(("setting", "words", "nproc"), SETTINGS)
def test_setting_the_pipeline_does_not_take_is_one_line(
    setting: str, words: str, nproc: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["image", CAPTION, "--set", setting, "--nproc", nproc, "--strategy", "ulysses", "--out", tmp_path / "x.png"]
    refuses(capsys, args, words)


@needs_weights
def test_settings_reach_the_pipeline(tmp_path: Path) -> None:
    """Noise levels of one's own instead of a number of steps: the ledger has as many records."""
    ledger = tmp_path / "l.jsonl"
    settings = ["--set", "sigmas=[1.0, 0.6, 0.3]", "--set", "prompt_2=a red circle"]
    assert run("image", CAPTION, *settings, "--out", tmp_path / "x.png", "--ledger", ledger) == 0
    assert len(ledger.read_text(encoding="utf-8").splitlines()) == 3


@needs_weights
def test_image_with_its_serial_twin(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, result, ledger = tmp_path / "x.png", tmp_path / "r.json", tmp_path / "l.jsonl"
    command = [
        "image",
        CAPTION,
        "--nproc",
        2,
        "--strategy",
        "ulysses",
        "--shares",
        "measured",
        "--compare",
        "--steps",
        2,
    ]
    code = run(*command, "--out", out, "--json", result, "--ledger", ledger, "--seed", 7)
    # Of ranks too: they write to the same place.
    assert (code, capfd.readouterr().err) == (0, "")
    found = read(result)
    assert found.keys() >= COMMON | IMAGE | COMPARED
    assert (found["strategy"], found["nproc"], found["seed"], found["class"]) == ("ulysses", 2, 7, "exact")
    assert found["psnr_to_serial"] > 100
    assert found["max_abs_diff"] < 1e-4
    assert max(found["shares"] or [1.0]) == 1.0, "the fastest rank has 1; both may be alike"
    assert found["facts_read"] == found["facts_read_serial"]
    assert found["speedup"] == pytest.approx(found["seconds_serial"] / found["seconds"])
    records = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    sent = [sum(record["bytes_sent"] for record in records if record["rank"] == rank) for rank in range(2)]
    assert found["bytes_sent"] == sent
    assert min(sent) > 0
    assert Image.open(out).size == (64, 64)


@pytest.mark.full
@needs_weights
def test_image_under_torchrun(tmp_path: Path) -> None:
    out, result = tmp_path / "x.png", tmp_path / "r.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    options = ["--strategy", "displaced-patch:warmup_steps=2", "--steps", "2", "--out", str(out), "--json", str(result)]
    subprocess.run([*torchrun, "partsong", "image", CAPTION, *options], capture_output=True, check=True)
    found = read(result)
    assert (found["nproc"], found["class"], len(found["bytes_sent"])) == (2, "approximate", 2)
    assert out.is_file()


def _heed_interrupts() -> None:
    """A test run started in the background ignores interrupts, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@needs_weights
def test_interrupt_leaves_no_process(tmp_path: Path) -> None:
    command = [*PROGRAM, "demo", "--out", str(tmp_path / "page.html")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=_heed_interrupts, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("sampling")
        ranks: list[psutil.Process] = []
        while len(ranks) < 2:
            with pytest.raises(psutil.TimeoutExpired):  # anything else: it ended by itself
                psutil.Process(process.pid).wait(timeout=0.05)
            ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "partsong: error: interrupted\n"
    assert psutil.wait_procs(ranks, timeout=15)[1] == []
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["imgae", "a cat"], "did you mean image?"),
        (["image", "a cat", "--num-proc", "2"], "did you mean --nproc?"),
        (["image", "a cat", "--stps=2"], "did you mean --steps?"),
        (["image", "a cat", "--nproc", "2", "--strategy", "ulises"], "did you mean ulysses?"),
        (["text", "a cat", "--model", "smollm2-135"], "did you mean smollm2-135m?"),
        (["plan", "--model", "flux-dev", "--gpus", "2xrtx409"], "did you mean 4090?"),
        (["think", "What is twelve plus five?", "--model", "sums"], "6', numbers of at most three digits"),
        (["think", "1+1=?", "--strategy", "self-consistancy"], "did you mean self-consistency?"),
    ],
)
def test_what_was_probably_meant_is_named(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"partsong {partsong.__version__}\n"


def test_strategies_may_be_spelled_as_pages_do() -> None:
    assert partsong.parse_strategy("DisplacedPatch:warmup_steps=2") == partsong.DisplacedPatch(warmup_steps=2)

"""``partsong eval images`` and ``eval videos``: rows, what is kept, the sheet, and what is refused."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DiTPipeline, StableDiffusionXLPipeline
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPTextModelWithProjection

from partsong import zoo
from partsong.cli import main
from partsong.evals.pictures import scorers
from partsong.evals.pictures.lpips import alexnet
from partsong.evals.pictures.scoring import IMAGE_METRICS, VIDEO_METRICS
from partsong.evals.pictures.sheet import AMPLIFIED, Panel, Row, Tile, difference, draw_sheet
from partsong.outputs import psnr
from partsong.seeds import generators
from tests.evals.pictures.tiny_clip import save_clip
from tests.parallel.families import dit
from tests.pipelines.cases.stable_diffusion_xl import POOLED, unet
from tests.pipelines.unet_parts import clip_text, clip_tokenizer
from tests.tiny_models.autoencoders import kl_autoencoder
from tests.tiny_models.motion import save_motion
from tests.tiny_models.weights import randomized

#: Tests of whole runs need it; what is refused, and the sheet, do not.
needs_torchmetrics = pytest.mark.skipif(
    not scorers.find_spec("torchmetrics"), reason="needs torchmetrics: pip install 'partsong[eval]'"
)
STALE = "displaced-patch:warmup_steps=1"


def run(*args: object) -> int:
    """Exit code of a command run in this process."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def evaluate(suite: str, out: Path, *args: object) -> dict[str, Any]:
    assert run("eval", suite, "--out", out, "--json", out.with_suffix(".json"), *args) == 0
    return json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def scoring(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Options for every metric, with small random networks."""
    root = tmp_path_factory.mktemp("scoring")
    torch.manual_seed(0)
    torch.save({f"features.{name}": value for name, value in alexnet().state_dict().items()}, root / "alexnet.pth")
    head = {"layers.0.weight": torch.randn(1, 8), "layers.0.bias": torch.randn(1)}
    save_file(head, root / "head.safetensors")
    clip = ("--clip", save_clip(root / "clip"), "--aesthetic", root / "head.safetensors")
    return (*clip, "--lpips", root / "alexnet.pth")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, scoring: tuple[object, ...]) -> tuple[object, ...]:
    """Options of a comparison on two ranks, whose first and last prompt are the same."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    prompts.write_text("a red circle\na blue square\n", encoding="utf-8")
    ranks = ("--nproc", 2, "--strategies", "ulysses", STALE)
    return ("--prompts", prompts, "--num", 3, "--steps", 3, "--seed", 5, *ranks, *scoring)


@needs_torchmetrics
@pytest.mark.slow
def test_pictures(asked: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate("images", tmp_path / "out", *asked)
    assert (result["command"], result["suite"], result["nproc"], result["seed"]) == ("eval", "images", 2, 5)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert list(rows) == ["serial", "ulysses", STALE]
    assert [row["class"] for row in rows.values()] == ["exact", "exact", "approximate"]
    for row in rows.values():
        assert set(row) == {"strategy", "class", "num", *IMAGE_METRICS} and row["num"] == 3
    folders = {"serial": "serial", "ulysses": "ulysses", STALE: "displaced-patch-warmup_steps-1"}
    drawn = {
        name: [np.load(tmp_path / "out" / folder / f"{number:05d}.npy")[0] for number in range(3)]
        for name, folder in folders.items()
    }
    # The serial ones are the pipeline's own, each with the noise of its number.
    pipe = zoo.load("shapes")
    own = zoo.MODELS["shapes"].defaults | {"num_inference_steps": 3, "output_type": "np"}
    for number, prompt in enumerate(("a red circle", "a blue square", "a red circle")):
        picture = pipe(prompt, **own, generator=generators(5, 3)[number]).images[0]
        np.testing.assert_allclose(drawn["serial"][number], picture, atol=1e-5)
    assert abs(drawn["serial"][0] - drawn["serial"][2]).max() > 0.1
    for name in ("ulysses", STALE):
        apart = [psnr(one, other) for one, other in zip(drawn[name], drawn["serial"], strict=True)]
        assert rows[name]["psnr"] == pytest.approx(statistics.median(apart))
        assert rows[name]["psnr_lowest"] == pytest.approx(min(apart))
        seconds = [row["seconds"] for row in result["samples"] if row["strategy"] == name]
        assert rows[name]["seconds"] == statistics.median(seconds)
        assert rows[name]["speedup"] == pytest.approx(rows["serial"]["seconds"] / rows[name]["seconds"])
        assert all(sent > 0 for sent in rows[name]["bytes_sent"]) and len(rows[name]["bytes_sent"]) == 2
    assert rows["ulysses"]["psnr"] > 90 > 60 > rows[STALE]["psnr"]
    assert rows["ulysses"]["ssim"] == pytest.approx(1, abs=1e-6) and rows[STALE]["ssim"] < 0.999
    assert rows["ulysses"]["lpips"] < 1e-6 < rows[STALE]["lpips"]
    assert rows["ulysses"]["fid_clip"] < 1e-3 < rows[STALE]["fid_clip"]
    for name in ("clip_score", "aesthetic", "facts_read"):
        assert rows["ulysses"][name] == pytest.approx(rows["serial"][name], abs=1e-2)
    assert rows["serial"]["psnr"] is rows["serial"]["fid_clip"] is None and rows["serial"]["bytes_sent"] == [0, 0]
    assert result["notes"] == [] and len(result["samples"]) == 9
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*rows, "psnr_lowest", "fid_clip")) and "not computed" not in shown
    pixels = np.asarray(Image.open(tmp_path / "out" / "ulysses" / "00001.png"))
    np.testing.assert_allclose(pixels / 255, drawn["ulysses"][1].clip(0, 1), atol=0.5 / 255 + 1e-6)
    assert Image.open(result["sheet"]).width > 600

    # Nothing is sampled again: other metrics are computed on what is there, and only new pictures are drawn.
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    again = evaluate("images", tmp_path / "out", *asked, "--reference", tmp_path / "out" / "serial")
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before
    rows = {row["strategy"]: row for row in again["rows"]}
    assert rows["serial"]["fid_clip"] < 1e-3 < rows[STALE]["fid_clip"]
    assert run("eval", "images", "--out", tmp_path / "out", *asked, "--guidance", 9) == 2
    refused = capsys.readouterr().err
    assert "holds samples with guidance_scale " in refused and "9.0 is asked for; give another folder" in refused


@needs_torchmetrics
def test_without_strategies_or_networks_the_summary_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate("images", tmp_path / "out", "--num", 1, "--steps", 1)
    (row,) = result["rows"]
    assert row["facts_read"] is not None
    assert row["clip_score"] is row["lpips"] is row["psnr"] is row["ssim"] is None
    shown = capsys.readouterr().out
    assert "not computed: clip_score: give --clip FOLDER" in shown and "lpips: give --lpips FILE" in shown


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_motion(tmp_path_factory.mktemp("motion"))


SMALL = ("--height", 32, "--width", 32, "--steps", 2, "--guidance", 1)


@needs_torchmetrics
@pytest.mark.slow
def test_videos(folders: dict[str, Path], scoring: tuple[object, ...], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle moves right\n", encoding="utf-8")
    ranks = ("--nproc", 2, "--strategies", "ulysses", "dual-parallel:block_frames=4,context=2")
    given = ("--model", folders["plain"], "--prompts", prompts, "--num", 2, "--frames", 21, *ranks, *SMALL)
    result = evaluate("videos", tmp_path / "out", *given, *scoring[:2], *scoring[4:])
    rows = {row["strategy"]: row for row in result["rows"]}
    dual = ranks[-1]
    assert list(rows) == ["serial", f"serial {dual}", "ulysses", dual]
    for row in rows.values():
        assert set(row) == {"strategy", "class", "num", *VIDEO_METRICS}
        assert row["facts_read"] is row["identity_kept"] is None  # no zoo model, so nobody can read it
        assert 0 < row["first_frame_seconds"] <= row["seconds"]
    # The twin of a loop that changes the video by itself is that loop on one rank.
    assert (rows[dual]["psnr"], rows[dual]["flicker_ratio"]) == (999.0, 1.0)
    assert rows["ulysses"]["psnr"] > 80 and rows["ulysses"]["ssim"] == pytest.approx(1, abs=1e-5)
    frames = np.load(tmp_path / "out" / "serial" / "00001.npy")
    assert frames.shape == (21, 32, 32, 3)
    steps = [abs(np.diff(np.load(tmp_path / "out" / "serial" / f"{n:05d}.npy"), axis=0)).mean() for n in (0, 1)]
    assert rows["serial"]["flicker"] == pytest.approx(np.mean(steps), rel=1e-4)
    assert rows["ulysses"]["flicker_ratio"] == pytest.approx(1, abs=1e-3)
    assert -1 <= rows["serial"]["identity_clip"] < 1
    assert rows["ulysses"]["identity_clip"] == pytest.approx(rows["serial"]["identity_clip"], abs=1e-3)
    assert (tmp_path / "out" / "ulysses" / "00000.mp4").is_file()
    assert result["notes"] == []


@needs_torchmetrics
@pytest.mark.full
def test_a_causal_video_is_compared_with_its_own_loop(folders: dict[str, Path], tmp_path: Path) -> None:
    ranks = ("--nproc", 2, "--strategies", "timestep-pipeline:window=2")
    given = ("--model", folders["causal"], "--prompts", "motion", "--num", 1, "--frames", 15, *ranks, *SMALL)
    rows = evaluate("videos", tmp_path / "out", *given)["rows"]
    assert [row["strategy"] for row in rows] == [f"serial {ranks[-1]}", ranks[-1]]
    assert rows[1]["psnr"] == 999.0 and rows[1]["first_frame_seconds"] < rows[1]["seconds"]


def _sdxl(folder: Path) -> None:
    StableDiffusionXLPipeline(
        vae=kl_autoencoder(),
        unet=unet(),
        scheduler=DDIMScheduler(clip_sample=False),
        text_encoder=clip_text(4),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_text(8, CLIPTextModelWithProjection, projection_dim=POOLED),
        tokenizer_2=clip_tokenizer(),
        add_watermarker=False,
    ).save_pretrained(folder)


@needs_torchmetrics
@pytest.mark.full
def test_a_folder_of_sdxl(scoring: tuple[object, ...], tmp_path: Path) -> None:
    _sdxl(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab c", "tag": "two"}\n', encoding="utf-8")
    ranks = ("--nproc", 2, "--strategies", "cfg-parallel", "displaced-patch:warmup_steps=1", "cfg-parallel+encode-once")
    given = ("--model", tmp_path / "model", "--prompts", tmp_path / "prompts.jsonl", "--num", 2, *ranks)
    size = ("--height", 64, "--width", 80, "--steps", 3)
    result = evaluate("images", tmp_path / "out", *given, *size, *scoring)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert rows["cfg-parallel"]["psnr"] > 80 and rows["cfg-parallel+encode-once"]["psnr"] > 80
    assert rows["displaced-patch:warmup_steps=1"]["psnr"] < 100 < rows["cfg-parallel"]["psnr"]
    assert rows["serial"]["facts_read"] is None and rows["serial"]["clip_score"] is not None


@needs_torchmetrics
@pytest.mark.full
def test_a_pipeline_of_classes_takes_their_names(tmp_path: Path) -> None:
    transformer = randomized(dit(6, num_embeds_ada_norm=1000))
    DiTPipeline(transformer, kl_autoencoder(), DDIMScheduler()).save_pretrained(tmp_path / "model")
    index = tmp_path / "model" / "model_index.json"
    labels = {"3": "cat, house cat", "7": "dog"}
    index.write_text(json.dumps(json.loads(index.read_text()) | {"id2label": labels}), encoding="utf-8")
    (tmp_path / "classes.txt").write_text("dog\nhouse cat\n", encoding="utf-8")
    given = ("--model", tmp_path / "model", "--prompts", tmp_path / "classes.txt", "--steps", 2)
    result = evaluate("images", tmp_path / "out", *given)
    assert [row["prompt"] for row in result["samples"]] == ["dog", "house cat"]
    (tmp_path / "classes.txt").write_text("unicorn\n", encoding="utf-8")
    assert run("eval", "images", "--out", tmp_path / "out", *given) == 2


REFUSED = [
    (("images", "--strategies", "ulises"), "did you mean ulysses?"),
    (("images", "--strategies", "ulysses:degree=3", "--nproc", "2"), "3"),
    (("images", "--nproc", "2"), "2 ranks have nothing to do; add --strategies"),
    (("images", "--prompts", "missing.txt"), "--prompts missing.txt: no such file or folder"),
    (("images", "--clip", "missing"), "no model 'missing'"),
    (("images", "--lpips", "missing.pth"), "no file missing.pth; give one with weights"),
    (("images", "--aesthetic", "head.pth"), "--aesthetic needs the features of a CLIP model; add --clip FOLDER"),
    (("images", "--reference", "pictures"), "--reference needs the features of a CLIP model"),
    (("images", "--model", "missing"), "missing has no captions of its own; give --prompts"),
    (("images", "--model", "lists-ar", "--prompts", "shapes"), "lists-ar makes text"),
    (("images", "--model", "motion", "--num", "1"), "makes videos, not images"),
    (("videos", "--model", "shapes", "--num", "1"), "takes no prompt and num_frames"),
    (("images", "--num", "0"), "--num 0: use a positive integer"),
    (("videos", "--fps", "0"), "frames per second lie between"),
    (("images", "--set", "seed"), "write KEY=VALUE"),
]


@pytest.mark.parametrize(("args", "words"), REFUSED, ids=lambda value: "-".join(value) if type(value) is tuple else "")
def test_what_cannot_be_done_is_refused_in_one_line(
    args: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scorers, "find_spec", lambda name: True)
    assert run("eval", *args, "--out", "out") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("partsong: error: ") and words in line
    assert not list(tmp_path.rglob("*.npy"))


def test_torchmetrics_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(scorers, "find_spec", lambda name: None)
    assert run("eval", "images", "--out", tmp_path) == 2
    assert "pip install 'partsong[eval]'" in capfd.readouterr().err


def test_a_difference_is_amplified_as_much_as_the_sheet_says() -> None:
    one = np.full((2, 3, 3), 0.5, np.float32)
    other = one.copy()
    other[0, 0, 0], other[1, 2, 1] = 0.48, 0.9
    expected = np.zeros((2, 3, 3), np.uint8)
    expected[0, 0, 0], expected[1, 2, 1] = round(255 * AMPLIFIED * 0.02), 255
    np.testing.assert_array_equal(difference(one, other), expected)


def test_the_sheet_shows_every_tile_apart_from_the_others() -> None:
    """Tiles keep their colours, have white between them, and long labels stay within their column."""
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    tiles = [
        Tile(pixels=np.full((64, 64, 3), colour, np.uint8), label="displaced-patch:warmup_steps=2,wire=int8+cfg" * 3)
        for colour in colours
    ]
    sheet = np.asarray(
        draw_sheet(
            "heading",
            [
                Panel(
                    title="a prompt " * 30,
                    rows=[Row(tiles=tiles), Row(tiles=[None, tiles[1], None], label="difference")],
                )
            ],
        )
    )
    for colour, times in zip(colours, (1, 2, 1), strict=True):
        places = np.argwhere((sheet == colour).all(-1))
        assert len(places) == times * 192 * 192
    first, second = (np.argwhere((sheet == colour).all(-1)) for colour in colours[:2])
    gutter = sheet[first[:, 0].min() : first[:, 0].max() + 90, first[:, 1].max() + 1 : second[:, 1].min()]
    assert gutter.shape[1] >= 10 and (gutter == 255).all()

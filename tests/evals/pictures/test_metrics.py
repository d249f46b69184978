"""Each metric against a plain computation of its own, with random weights where it has a network."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from partsong import ArgumentError
from partsong.evals.pictures import closeness
from partsong.evals.pictures.aesthetic import Aesthetic
from partsong.evals.pictures.clip import frechet_distance, identity
from partsong.evals.pictures.given_files import read_pictures, read_weights
from partsong.evals.pictures.lpips import Lpips, alexnet

pytest.importorskip("torchmetrics", reason="needs torchmetrics: pip install 'partsong[eval]'")

RNG = np.random.default_rng(0)


def test_psnr_of_each_frame() -> None:
    one, other = RNG.random((2, 3, 5, 7, 3))
    other[1] = one[1]
    found = closeness.psnrs(one, other)
    assert found[1] == math.inf
    assert found[::2] == pytest.approx([10 * math.log10(1 / np.mean((one[i] - other[i]) ** 2)) for i in (0, 2)])


def plain_ssim(one: np.ndarray, other: np.ndarray) -> float:
    """The definition of Wang et al., window by window and colour by colour, with pictures reflected at their edges."""
    one, other = (np.pad(each, ((5, 5), (5, 5), (0, 0)), mode="reflect") for each in (one, other))
    places = np.arange(11) - 5
    weights = np.exp(-(places[:, None] ** 2 + places[None] ** 2) / (2 * 1.5**2))
    weights /= weights.sum()
    values = []
    for y, x, c in itertools.product(range(one.shape[0] - 10), range(one.shape[1] - 10), range(3)):
        a, b = (each[y : y + 11, x : x + 11, c] for each in (one, other))
        mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
        var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
        both = (weights * (a - mean_a) * (b - mean_b)).sum()
        top = (2 * mean_a * mean_b + 0.01**2) * (2 * both + 0.03**2)
        values.append(top / ((mean_a**2 + mean_b**2 + 0.01**2) * (var_a + var_b + 0.03**2)))
    return float(np.mean(values))


def test_ssim_is_its_definition() -> None:
    one = RNG.random((2, 11, 12, 3))
    other = np.clip(one + 0.2 * RNG.standard_normal(one.shape), 0, 1)
    expected = [plain_ssim(a, b) for a, b in zip(one, other, strict=True)]
    assert closeness.ssims(one, other) == pytest.approx(expected, abs=1e-6)
    assert closeness.ssims(one[:, :10], other[:, :10]) == []


def test_flicker_is_the_mean_step_between_frames() -> None:
    frames = np.zeros((3, 2, 2, 3), np.float32)
    frames[1], frames[2, 0] = 0.5, 0.25
    # From black to 0.5 everywhere; then half of the pixels fall by 0.25 and the others to 0.
    assert closeness.flicker(frames) == pytest.approx((0.5 + (0.25 + 0.5) / 2) / 2)
    assert closeness.flicker(frames[:1]) is None


def plain_convolution(value: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int, pad: int) -> np.ndarray:
    value = np.pad(value, ((0, 0), (pad, pad), (pad, pad)))
    size = weight.shape[-1]
    windows = np.lib.stride_tricks.sliding_window_view(value, (size, size), axis=(1, 2))[:, ::stride, ::stride]
    return np.einsum("iyxhw,oihw->oyx", windows, weight, optimize=True) + bias[:, None, None]


def plain_pool(value: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(value, (3, 3), axis=(1, 2))[:, ::2, ::2].max((-2, -1))


def plain_features(picture: np.ndarray, weights: dict[str, Tensor]) -> list[np.ndarray]:
    """What AlexNet finds in `[H, W, 3]`, with numpy alone."""
    value = (2 * picture - 1 - np.array([-0.030, -0.088, -0.188])) / np.array([0.458, 0.448, 0.450])
    value, found = value.transpose(2, 0, 1), []
    for number, stride, pad, pooled in (
        (0, 4, 2, False),
        (3, 1, 2, True),
        (6, 1, 1, True),
        (8, 1, 1, 0),
        (10, 1, 1, 0),
    ):
        value = plain_pool(value) if pooled else value
        weight, bias = (weights[f"features.{number}.{part}"].double().numpy() for part in ("weight", "bias"))
        value = np.maximum(plain_convolution(value, weight, bias, stride, pad), 0)
        found.append(value / np.sqrt((value**2).sum(0) + 1e-8))
    return found


@pytest.fixture(scope="module")
def backbone() -> dict[str, Tensor]:
    """Random weights under torchvision's names, with some of its classifier."""
    torch.manual_seed(0)
    plain = {f"features.{name}": value for name, value in alexnet().state_dict().items()}
    return {**plain, "classifier.1.weight": torch.randn(8, 4)}


def test_lpips_is_its_definition(backbone: dict[str, Tensor], tmp_path: Path) -> None:
    channels = (64, 192, 384, 256, 256)
    heads = {f"lin{i}.model.1.weight": torch.rand(1, num, 1, 1) for i, num in enumerate(channels)}
    pairs = RNG.random((2, 2, 37, 40, 3)).astype(np.float32)
    expected = []
    for one, other in zip(*pairs, strict=True):
        layers = zip(plain_features(one, backbone), plain_features(other, backbone), heads.values(), strict=True)
        expected.append(sum((((a - b) ** 2) * head.double().numpy()[0]).sum(0).mean() for a, b, head in layers))
    found = Lpips(backbone, heads)(*(closeness.as_batch(each) for each in pairs))
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


def test_lpips_with_the_heads_of_torchmetrics_is_what_torchmetrics_computes(
    backbone: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchmetrics.functional.image import lpips as theirs

    def features(net: str, pretrained: bool = False) -> nn.Sequential:
        """torchvision's network, which is not there."""
        network = nn.Sequential(*alexnet(), nn.MaxPool2d(3, 2))
        network.load_state_dict({k.removeprefix("features."): v for k, v in backbone.items() if "features" in k})
        return network

    name = "_get_tv_model_features" if hasattr(theirs, "_get_tv_model_features") else "_get_net"
    monkeypatch.setattr(theirs, name, features)
    network = theirs._LPIPS(net="alex", use_dropout=True)
    torch.save(backbone, tmp_path / "alexnet.pth")
    save_file(backbone, tmp_path / "alexnet.safetensors")
    one, other = torch.rand(2, 2, 3, 64, 48)
    expected = network(one, other, normalize=True).flatten().tolist()
    for name in ("alexnet.pth", "alexnet.safetensors"):
        assert Lpips.read(tmp_path / name)(one, other).tolist() == pytest.approx(expected, rel=1e-5)


def test_backbones_that_do_not_fit_are_refused(backbone: dict[str, Tensor], tmp_path: Path) -> None:
    short = {name: value for name, value in backbone.items() if name != "features.6.bias"}
    torch.save(short, tmp_path / "short.pth")
    with pytest.raises(ArgumentError, match=r"short.pth should hold 6.bias of shape \[384\], found nothing"):
        Lpips.read(tmp_path / "short.pth")
    with pytest.raises(ArgumentError, match=r"should hold 0.weight of shape \[64, 3, 11, 11\], found \[64, 3, 3, 3\]"):
        Lpips({**backbone, "features.0.weight": torch.zeros(64, 3, 3, 3)})
    with pytest.raises(ArgumentError, match="31 pixels or more"):
        Lpips(backbone)(torch.zeros(1, 3, 30, 64), torch.zeros(1, 3, 30, 64))


class _Spiteful:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_files_with_code_are_refused_and_nothing_of_them_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"layers.0.weight": _Spiteful()}, "code.pth")
    torch.save([torch.zeros(1)], "list.pth")
    (tmp_path / "text.pth").write_text("no weights")
    for name, words in (("code.pth", "cannot be read as weights"), ("list.pth", "no tensors by name")):
        with pytest.raises(ArgumentError, match=words):
            read_weights(name)
    for name, words in (("text.pth", "cannot be read as weights"), ("missing.pth", "no file missing.pth")):
        with pytest.raises(ArgumentError, match=words):
            read_weights(name)
    assert not (tmp_path / "ran").exists()


def test_an_aesthetic_head_is_a_chain_of_linear_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # LAION's numbers, between which it has dropout; as text "10" comes before "2".
    sizes = {0: (6, 8), 2: (5, 6), 10: (1, 5)}
    weights = {f"layers.{n}.weight": torch.randn(size) for n, size in sizes.items()}
    weights |= {f"layers.{n}.bias": torch.randn(size[0]) for n, size in sizes.items()}
    torch.save(weights, tmp_path / "head.pth")
    features = torch.randn(3, 8)
    value = (features / features.norm(dim=1, keepdim=True)).numpy()
    for n in sizes:
        value = value @ weights[f"layers.{n}.weight"].numpy().T + weights[f"layers.{n}.bias"].numpy()
    assert Aesthetic(tmp_path / "head.pth", 8)(features) == pytest.approx(value[:, 0].tolist(), rel=1e-5)
    with pytest.raises(ArgumentError, match=r"layers.0.weight of shape \[6, 16\], found \[6, 8\]"):
        Aesthetic(tmp_path / "head.pth", 16)


def test_a_single_linear_layer_is_a_head_too(tmp_path: Path) -> None:
    save_file({"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([0.5])}, tmp_path / "head.safetensors")
    # 3 * 0.6 + 4 * 0.8 + 0.5
    assert Aesthetic(tmp_path / "head.safetensors", 2)(torch.tensor([[30.0, 40.0]])) == pytest.approx([5.5])
    for name, weights, words in (
        ("two", {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, "ends in 2 numbers"),
        ("none", {"other": torch.zeros(2)}, "holds no layers.N.weight; found other"),
    ):
        save_file(weights, tmp_path / f"{name}.safetensors")
        with pytest.raises(ArgumentError, match=words):
            Aesthetic(tmp_path / f"{name}.safetensors", 2)


def test_the_distance_of_features_is_frechets() -> None:
    one, other = RNG.standard_normal((12, 4)), 0.5 * RNG.standard_normal((9, 4)) + 1
    product = np.cov(one, rowvar=False) @ np.cov(other, rowvar=False)
    apart = ((one.mean(0) - other.mean(0)) ** 2).sum()
    spread = np.trace(np.cov(one, rowvar=False)) + np.trace(np.cov(other, rowvar=False))
    expected = apart + spread - 2 * np.trace(scipy.linalg.sqrtm(product).real)
    first, second = torch.from_numpy(one), torch.from_numpy(other)
    assert frechet_distance(first, second) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(first, first) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(first[:1], second) is None


def test_identity_is_the_mean_cosine_with_the_first_frame() -> None:
    frames = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 5.0], [-1.0, 0.0]])
    assert identity(frames) == pytest.approx((1 + 0 - 1) / 3)
    assert identity(frames[:1]) is None


def test_reference_pictures_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("a.png", "deep/b.JPG", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in read_pictures(tmp_path)] == ["a.png", "b.JPG"]
    with pytest.raises(ArgumentError, match="0 pictures found"):
        read_pictures(tmp_path / "missing")

"""Measures the perceptual distance of pictures from the features of AlexNet (LPIPS)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from partsong.errors import ArgumentError
from partsong.evals.pictures.given_files import fitting, read_weights

__all__ = ["SMALLEST", "Lpips", "alexnet"]

#: Layers of `alexnet` after which the five features are taken.
_TAPS = (1, 4, 7, 9, 11)
_CHANNELS = (64, 192, 384, 256, 256)
#: Mean and deviation of ImageNet's colours, on values in [-1, 1].
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
#: A smaller picture vanishes between the pools of the network.
SMALLEST = 31


def alexnet() -> nn.Sequential:
    """Builds the convolutions of AlexNet, with the names of torchvision's ``features`` and random weights.

    Source: Krizhevsky, "One weird trick", arXiv 1404.5997.
    """
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()),
    )


class Lpips:
    """Compares pictures by the features that AlexNet finds in them.

    At every place the features of five layers are scaled to length 1 and subtracted. The squares are weighed by learned
    numbers, averaged over the places and added up. The learned numbers come with torchmetrics.

    Source: Zhang et al., arXiv 1801.03924.

    Args:
        backbone: torchvision's state dict of AlexNet, or of its ``features``; see `alexnet`.
        heads: the learned numbers, such as ``lin0.model.1.weight``. Default: those inside torchmetrics.
        device: where to compute.

    Raises:
        ArgumentError: a tensor is missing or has another shape.

    Example:
        >>> lpips = Lpips(alexnet().state_dict(), {f"lin{i}.model.1.weight": torch.ones(1, n, 1, 1)
        ...     for i, n in enumerate((64, 192, 384, 256, 256))})
        >>> picture = torch.rand(2, 3, 64, 64)
        >>> lpips(picture, picture).tolist()
        [0.0, 0.0]
    """

    def __init__(
        self,
        backbone: Mapping[str, Tensor],
        heads: Mapping[str, Tensor] | None = None,
        *,
        device: str | torch.device = "cpu",
        file: str | Path = "the backbone",
    ) -> None:
        self._net = alexnet()
        shapes = {name: value.shape for name, value in self._net.state_dict().items()}
        plain = {name.removeprefix("features."): value for name, value in backbone.items()}
        self._net.load_state_dict(fitting(file, plain, shapes))
        self._net.to(device).eval().requires_grad_(False)
        names = {f"lin{layer}.model.1.weight": torch.Size((1, num, 1, 1)) for layer, num in enumerate(_CHANNELS)}
        given = _heads_of_torchmetrics() if heads is None else heads
        self._heads = [head.to(device) for head in fitting("the heads of LPIPS", given, names).values()]
        self._device = device

    @classmethod
    def read(cls, path: str | Path, *, device: str | torch.device = "cpu") -> Lpips:
        """Reads the backbone from a file; see `read_weights`."""
        return cls(read_weights(path), device=device, file=path)

    @torch.inference_mode()
    def __call__(self, pictures: Tensor, others: Tensor) -> Tensor:
        """Returns the distance of each pair, `[N]`.

        Args:
            pictures: `[N, 3, H, W]` in [0, 1], with sides of at least 31 pixels.
            others: as many.
        """
        pairs = zip(self._features(pictures), self._features(others), self._heads, strict=True)
        return torch.stack([((a - b).square() * head).sum(1).mean((1, 2)) for a, b, head in pairs]).sum(0).cpu()

    def _features(self, pictures: Tensor) -> list[Tensor]:
        if min(pictures.shape[2:]) < SMALLEST:
            raise ArgumentError(f"LPIPS needs sides of {SMALLEST} pixels or more, found {list(pictures.shape[2:])}")
        shift, scale = (torch.tensor(value, device=self._device)[:, None, None] for value in (_SHIFT, _SCALE))
        value, features = (2 * pictures.to(self._device) - 1 - shift) / scale, []
        for number, layer in enumerate(self._net):
            value = layer(value)
            if number in _TAPS:
                features.append(value / (value.square().sum(1, keepdim=True) + 1e-8).sqrt())
        return features


def _heads_of_torchmetrics() -> dict[str, Tensor]:
    spec = find_spec("torchmetrics")
    if spec is None or spec.origin is None:
        raise ArgumentError("LPIPS takes its learned numbers from torchmetrics: pip install 'partsong[eval]'")
    return read_weights(Path(spec.origin).parent / "functional" / "image" / "lpips_models" / "alex.pth")

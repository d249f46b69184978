"""Makes Muon work for convolutions. Importing this module loads torch; only recipes import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def as_matrix(weight: Tensor) -> Tensor:
    """Views a kernel `[out, in, height, width]` as `[out, in * height * width]`; a linear weight stays as it is."""
    return weight.reshape(len(weight), -1)


class KernelMuon(torch.optim.Muon):
    """Applies orthogonalised momentum to linear and convolution weights (the stock optimizer takes only matrices).

    Kernels are seen through views that share their memory, so they must be contiguous and stay where they are. Method:
    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".

    Args:
        weights: The weights to train; their gradients are read at every step.
        **options: Passed to `torch.optim.Muon`.
    """

    def __init__(self, weights: list[nn.Parameter], **options: Any) -> None:
        self._weights = weights
        views = [nn.Parameter(as_matrix(weight.detach())) for weight in weights]
        pairs = zip(views, weights, strict=True)
        assert all(view.data_ptr() == weight.data_ptr() for view, weight in pairs), "kernels must be contiguous"
        super().__init__(views, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes the weights' gradients and makes one step."""
        for view, weight in zip(self.param_groups[0]["params"], self._weights, strict=True):
            view.grad = None if weight.grad is None else as_matrix(weight.grad)
        return super().step(closure)

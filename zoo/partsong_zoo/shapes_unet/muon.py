"""Makes Muon work for convolutions. Importing this module loads torch; only recipes import it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from partsong.errors import UnsupportedError
from partsong_zoo.training.common import multiplies_bfloat16


def as_matrix(weight: Tensor) -> Tensor:
    """Views a kernel `[out, in, height, width]` as `[out, in * height * width]`; a linear weight stays as it is."""
    return weight.reshape(len(weight), -1)


def orthogonalised(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, smallest: float) -> Tensor:
    """Moves the singular values of a matrix towards 1 by Newton and Schulz's iteration of fifth order.

    Args:
        matrix: `[rows, columns]`.
        coefficients: of the powers 1, 3 and 5.
        num_steps: how often.
        smallest: least norm that it is divided by.
    """
    first, third, fifth = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=smallest)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x


#: From torch 2.9 on; an older one lets this module be imported, and the optimizer refuses to be made.
_MUON: Any = getattr(torch.optim, "Muon", torch.optim.Optimizer)


class KernelMuon(_MUON):
    """Applies orthogonalised momentum to linear and convolution weights (the stock optimizer takes only matrices).

    Kernels are seen through views that share their memory, so they must be contiguous and stay where they are. Method:
    Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".

    Args:
        weights: The weights to train; their gradients are read at every step.
        **options: Passed to `torch.optim.Muon`.

    Raises:
        UnsupportedError: torch is older than 2.9, where Muon came.
    """

    def __init__(self, weights: list[nn.Parameter], **options: Any) -> None:
        if _MUON is torch.optim.Optimizer:
            raise UnsupportedError(f"Muon needs torch 2.9 or newer, found {torch.__version__}")
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
        if multiplies_bfloat16(self._weights[0].device):
            return super().step(closure)
        for view in self.param_groups[0]["params"]:
            if view.grad is not None:
                self._step_in_float32(view, view.grad, self.param_groups[0])
        return None

    def _step_in_float32(self, view: nn.Parameter, gradient: Tensor, knobs: dict[str, Any]) -> None:
        """Does for one matrix what the stock step does in bfloat16, which some processors emulate slowly."""
        momentum = self.state[view].setdefault("momentum_buffer", torch.zeros_like(gradient))
        momentum.lerp_(gradient, 1 - knobs["momentum"])
        update = gradient.lerp(momentum, knobs["momentum"]) if knobs["nesterov"] else momentum
        update = orthogonalised(update, knobs["ns_coefficients"], knobs["ns_steps"], knobs["eps"])
        view.mul_(1 - knobs["lr"] * knobs["weight_decay"])
        rows, columns = view.shape
        is_as_adam = knobs["adjust_lr_fn"] == "match_rms_adamw"
        factor = 0.2 * max(rows, columns) ** 0.5 if is_as_adam else max(1, rows / columns) ** 0.5
        view.add_(update, alpha=-knobs["lr"] * factor)

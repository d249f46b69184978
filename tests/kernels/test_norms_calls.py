"""What the norms refuse, and which backend computes them."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from partsong.errors import ArgumentError, ArgumentTypeError
from partsong.kernels import norms
from tests.kernels.test_norms import TRITON, load

X, Q, V, WRONG = torch.zeros(2, 6, 4), torch.zeros(2, 5, 3, 8), torch.zeros(6), torch.zeros(5, 3)
STATS, ONE = (torch.zeros(2, 3), torch.ones(2, 3)), (torch.zeros(1, 3), torch.ones(1, 3))
stats, merge = norms.group_norm_stats, norms.merge_group_norm_stats
correct, apply = norms.corrected_group_norm_stats, norms.group_norm_apply
adaptive, seam = norms.adaptive_layer_norm, norms.residual_adaptive_layer_norm
rotary = partial(norms.rms_norm_rotary, interleaved=True)
REFUSALS = [
    (r"\(2, 6, 4\) and 4 groups", lambda: stats(X, 4)),
    (r"counts \(0,\)", lambda: merge([0], STATS[:1], STATS[1:])),
    (r"\(3,\)", lambda: merge([1], STATS[0][:1], STATS[1][:1])),
    (r"own_stale.*\(1, 3\)", lambda: correct(STATS, ONE, STATS)),
    (r"x \(2, 6, 4\), mean and var \(1, 3\)", lambda: apply(X, *ONE, None, None, 0.0)),
    (r"weight needs shape \[6\].*\(5,\)", lambda: apply(X, *STATS, V[:5], None, 0.0)),
    ("found -1", lambda: apply(X, *STATS, None, None, -1.0)),
    ("bias is on meta", lambda: apply(X, *STATS, None, V.to("meta"), 0.0)),
    (r"\[B, L, C\], found \(6,\)", lambda: adaptive(V, None, None)),
    (r"shift .*\(3, 4\)", lambda: adaptive(X, torch.zeros(3, 4), None)),
    ("found nan", lambda: adaptive(X, None, None, eps=float("nan"))),
    (r"\(1, 6, 4\)", lambda: seam(X, X[:1], None, None, None)),
    ("'heads'", lambda: rotary(Q, Q, *[None] * 4, norm="heads")),
    (r"k \[B, L, H, D\]", lambda: rotary(Q, X, *[None] * 4)),
    (r"q_weight needs shape \[24\]", lambda: rotary(Q, Q, V, *[None] * 3, norm="token")),
    ("norm is None", lambda: rotary(Q, Q, V, *[None] * 3, norm=None)),
    (r"cos \(5, 3\)", lambda: rotary(Q, Q, None, None, WRONG, WRONG)),
    (r"sin \(1, 4\)", lambda: rotary(Q, Q, None, None, torch.ones(5, 4), torch.ones(1, 4))),
    ("for k", lambda: rotary(Q, Q[:, :4], None, None, torch.ones(5, 4), torch.ones(5, 4))),
]
TYPE_REFUSALS = [
    ("int64", lambda: stats(X.long(), 3)),
    ("2.5", lambda: stats(X, 2.5)),
    ("own_fresh is a pair", lambda: correct(STATS, STATS, X)),
    ("gate.*float", lambda: seam(X, X, 2.0, None, None)),
    ("sin.*NoneType", lambda: rotary(Q, Q, None, None, torch.ones(5, 4), None)),
]
KINDS = [(ArgumentError, *row) for row in REFUSALS] + [(ArgumentTypeError, *row) for row in TYPE_REFUSALS]


@pytest.mark.parametrize(("kind", "words", "call"), KINDS)
def test_refusals(kind, words, call) -> None:
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.full
def test_importing_loads_no_triton() -> None:
    code = "import sys, partsong.kernels.norms; print('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@TRITON
def test_what_triton_leaves_to_the_plain_version() -> None:
    fused = load("norms_triton")
    given = {"nothing": X[:0], "float64": X.double(), "gradient": X.clone().requires_grad_(), "longer": X}
    for word, x in given.items():
        assert word in fused.supports([x], 1 << 20)[1]
    for answer, chosen in (((True, ""), "token_norms_triton"), ((False, "it cannot"), "norms_naive")):
        x = mock.Mock(device=torch.device("cuda"))
        with (
            mock.patch.object(norms, "triton_refusal", return_value=""),
            mock.patch.object(fused, "supports", return_value=answer) as supports,
        ):
            assert norms._implementation("token_norms_triton", x, None, row=7) is load(chosen)
        supports.assert_called_once_with([x], 7)
    assert norms._implementation("norms_triton", X) is load("norms_cpu")
    assert norms._implementation("norms_triton", X.clone().requires_grad_()) is load("norms_naive")

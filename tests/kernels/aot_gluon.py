"""The Hopper kernel as launches specialise it; none where this triton's Gluon is another."""

from __future__ import annotations

from typing import Any

from partsong.kernels.backends.gluon_attention import BLOCK_N, STAGES, known_gluon

VARIANTS: list[dict[str, Any]] = []


def variant(dtype: str, width: int, causal: bool) -> dict[str, Any]:
    from triton.experimental.gluon import language as gl

    from partsong.kernels.backends import gluon_attention_kernel as kernel

    def descriptor(rows: int) -> str:
        element = gl.float16 if dtype == "fp16" else gl.bfloat16
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], element)
        return f"tensordesc<{dtype}[1, 1, {rows}, {width}],{layout!r}>"

    constexprs = {
        "WIDTH": width, "BLOCK_N": BLOCK_N, "STAGES": STAGES, "CAUSAL": causal, "CONSUMERS": kernel.CONSUMERS,
    }  # fmt: skip
    kinds = {
        "q_desc": descriptor(kernel.ROWS), "k_desc": descriptor(BLOCK_N), "v_desc": descriptor(BLOCK_N),
        "out": f"*{dtype}", "lse": "*fp32", "scale": "fp32",
    }  # fmt: skip
    names = kernel.hopper_attention_kernel.arg_names
    return {
        "name": f"gluon d{width} {'causal' if causal else 'full'} {dtype}",
        "kernel": kernel.hopper_attention_kernel, "gluon": True, "architectures": (90,), "has_dot": True,
        "copy_engine": True,
        "signature": {name: "constexpr" if name in constexprs else kinds.get(name, "i32") for name in names},
        "constexprs": constexprs, "aligned": ["out", "lse", "stride_ob", "stride_oh", "stride_ol"],
        "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


if known_gluon()[0]:
    VARIANTS += [variant("bf16", 128, False), variant("bf16", 128, True), variant("fp16", 64, False)]

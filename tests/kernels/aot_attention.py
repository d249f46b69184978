"""The attention kernel as launches specialise it: one row per way of using it."""

from __future__ import annotations

from typing import Any

from partsong.kernels.backends import triton_attention_kernel as kernel
from tests.kernels.aot import ARCHITECTURES

BASE: dict[str, Any] = {
    "WIDTH": 128, "BLOCK_D": 128, "BLOCK_M": 128, "BLOCK_N": 64, "GROUP_SIZE": 1, "SEGMENTED": False, "ORDER": 0,
    "GROUP": 0, "KEY_IDS": False, "BIAS": 0, "INIT": False, "SPLITS": 1, "ALIGN": 1, "TMA": False,
    "UPCAST": False, "PRECISION": "ieee",
}  # fmt: skip
#: Arguments of stride 1 or 0 and counts; everything else that is a whole number is a stride, a multiple of 16.
COUNTS = {
    "num_queries", "num_keys", "key_heads", "num_segments", "offset", "block", "batch_size", "stride_bk",
    "stride_query_ids", "stride_key_ids",
}  # fmt: skip


def variant(
    name: str,
    dtype: str,
    warps: int,
    stages: int,
    out: str | None = None,
    on: tuple[int, ...] = ARCHITECTURES,
    **chosen: Any,
) -> dict[str, Any]:
    constexprs = {**BASE, **chosen}
    tma = constexprs["TMA"]
    pointers = {
        "q_base": dtype, "k_base": dtype, "v_base": dtype, "table": "i64", "bias": "fp32", "query_ids": "i32",
        "key_ids": "i32", "leaves": "i32", "init_out": "fp32", "init_lse": "fp32", "out": out or dtype, "lse": "fp32",
    }  # fmt: skip
    signature, aligned = {}, []
    for argument in kernel.attention_kernel.arg_names:
        if argument in constexprs:
            signature[argument] = "constexpr"
        elif argument in pointers:
            signature[argument] = "*" + pointers[argument]
            aligned.append(argument)
        else:
            signature[argument] = "fp32" if argument == "scale" else "i32"
            if argument not in COUNTS and argument != "scale":
                aligned.append(argument)
    return {
        "name": f"attention {name} {dtype}" + " by the copy engine" * tma, "kernel": kernel.attention_kernel,
        "signature": signature, "constexprs": constexprs, "aligned": aligned, "num_warps": warps,
        "num_stages": stages, "has_dot": True, "copy_engine": tma, "architectures": (90, 100, 120) if tma else on,
    }  # fmt: skip


def combine() -> dict[str, Any]:
    constexprs = {"WIDTH": 128, "BLOCK_D": 128, "SPLITS": 16, "BLOCK_S": 16}
    kinds = {"parts": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
    names = kernel.combine_kernel.arg_names
    signature = {name: "constexpr" if name in constexprs else kinds.get(name, "i32") for name in names}
    return {
        "name": "combine bf16", "kernel": kernel.combine_kernel, "signature": signature, "constexprs": constexprs,
        "num_warps": 4, "num_stages": 1, "has_dot": False,
    }  # fmt: skip


D64, D256 = {"WIDTH": 64, "BLOCK_D": 64}, {"WIDTH": 256, "BLOCK_D": 256}
#: Desktops' have less memory for a block, and smaller tiles.
SERVERS, DESKTOPS = (80, 90, 100), (86, 89, 120)
#: The first of a kind is what is compiled without ``--full``: it goes through most of the kernel.
VARIANTS = [
    variant("segments with padding and a start d128", "bf16", 8, 3, out="fp32", SEGMENTED=True, ALIGN=8,
            BIAS=kernel.BIAS_ROW, INIT=True),
    variant("full d128", "bf16", 8, 3, on=SERVERS),
    variant("full d128", "bf16", 8, 3, BLOCK_N=32, on=DESKTOPS),
    variant("causal d64", "fp16", 4, 3, ORDER=kernel.ORDER_CAUSAL, on=SERVERS, **D64),
    variant("causal d64", "fp16", 8, 3, ORDER=kernel.ORDER_CAUSAL, on=DESKTOPS, **D64),
    variant("block causal d256", "bf16", 8, 2, BLOCK_M=64, ORDER=kernel.ORDER_BLOCK, on=SERVERS, **D256),
    variant("block causal d256", "bf16", 8, 2, BLOCK_M=64, BLOCK_N=32, ORDER=kernel.ORDER_BLOCK, on=DESKTOPS, **D256),
    variant("streams, decoding in splits d128", "bf16", 4, 2, out="fp32", BLOCK_M=16, BLOCK_N=128, GROUP_SIZE=4,
            GROUP=kernel.GROUP_STREAMS, SEGMENTED=True, ALIGN=8, SPLITS=8),
    variant("tree d64", "fp16", 4, 2, GROUP=kernel.GROUP_TREE, KEY_IDS=True, on=SERVERS, **D64),
    variant("tree d64", "fp16", 8, 3, GROUP=kernel.GROUP_TREE, KEY_IDS=True, on=DESKTOPS, **D64),
    variant("whole bias d128", "bf16", 8, 2, BLOCK_M=64, BIAS=kernel.BIAS_FULL),
    variant("full d128", "fp32", 8, 2, BLOCK_M=32, BLOCK_N=32, PRECISION="tf32x3"),
    variant("segments with padding and a start d128", "bf16", 8, 3, out="fp32", SEGMENTED=True, ALIGN=8,
            BIAS=kernel.BIAS_ROW, INIT=True, TMA=True),
    variant("full d128", "bf16", 8, 3, TMA=True),
    combine(),
]  # fmt: skip

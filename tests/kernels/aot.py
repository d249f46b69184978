"""Compiles every Triton kernel for GPUs that are not here and reads the machine code: a script, started by the test.

It needs the kernels undecorated by the interpreter, so it runs in a process of its own without TRITON_INTERPRET.
Prints one JSON line per kernel and architecture. With ``--full`` every use of a kernel is compiled for every
architecture; without it one use of each kernel is compiled for one, and the kernels take the architectures in turn.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
MODULES = (
    "tests.kernels.aot_attention",
    "tests.kernels.aot_gluon",
    "partsong.kernels.token_head_triton",
    "partsong.kernels.merge_triton",
    "partsong.kernels.norms_triton",
    "partsong.kernels.wires_triton",
)
TENSOR_CORE = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b")


def compiled(variant: dict[str, Any], architecture: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature = variant["kernel"], variant["signature"]
    # Addresses and strides as a launch would find them: multiples of 16.
    aligned = variant.get("aligned", [name for name, kind in signature.items() if str(kind)[0] in "*("])
    attrs = {}
    for name in aligned:
        place, kinds = kernel.arg_names.index(name), signature[name]
        paths = [(place, part) for part in range(len(kinds))] if isinstance(kinds, tuple) else [(place,)]
        attrs |= {path: [["tt.divisibility", 16]] for path in paths}
    Source = ASTSource
    if variant.get("gluon"):
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    source = Source(fn=kernel, signature=signature, constexprs=variant["constexprs"], attrs=attrs)
    options = {"num_warps": variant["num_warps"], "num_stages": variant["num_stages"]}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def measured(variant: dict[str, Any], architecture: int, folder: Path) -> dict[str, Any]:
    """Registers, stack and local memory, shared memory, and tensor-core instructions of one kernel."""
    import triton

    built = compiled(variant, architecture)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(built.asm["cubin"])
    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    usage = subprocess.run([tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    # What has no products has nothing to look for but spills, which need a stack.
    code = ""
    if variant["has_dot"]:
        code = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "name": variant["name"],
        "architecture": architecture,
        "has_dot": variant["has_dot"],
        "registers": numbers["REG"],
        "stack": numbers["STACK"],
        "local": numbers["LOCAL"],
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "tensor_core": len(TENSOR_CORE.findall(code)),
        "shared": built.metadata.shared,
        "copy_engine": len(re.findall(r"\bUTMALDG\b", code)),
        "wants_copy_engine": variant.get("copy_engine", False),
        "descriptor_bytes": built.metadata.global_scratch_size,
        "gives_registers_away": len(re.findall(r"\bUSETMAXREG\b", code)),
        "gluon": bool(variant.get("gluon")),
    }


def cases(modules: list[str], full: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """Which use of a kernel to compile for which architecture."""
    for name in modules or MODULES:
        variants = [variant for variant in importlib.import_module(name).VARIANTS if variant.get("gate", True)]
        seen: set[tuple[str, bool]] = set()
        for variant in variants:
            architectures = variant.get("architectures", ARCHITECTURES)
            kind = variant["kernel"].__name__, variant.get("copy_engine", False)
            one = None if kind in seen else architectures[len(seen) % len(architectures)]
            yield from ((variant, target) for target in architectures if full or target == one)
            seen.add(kind)


def main(*modules: str, full: bool = False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for variant, architecture in cases(list(modules), full):
            print(json.dumps(measured(variant, architecture, Path(folder))), flush=True)


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if word != "--full"), full="--full" in sys.argv)

"""The vLLM side of kv_fork.py, run by the python of an environment of its own, which need not have partsong.

Reads ``[token ids, seed]`` a line and answers ``seconds S``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(folder: str, dtype: str, branches: str, new_tokens: str, threads: str) -> None:
    """Answers until the input ends."""
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm  # pyright: ignore[reportMissingImports]

    # Of the host's memory, despite the name: by default it wants more than is free beside the other sides.
    memory = 0.3
    engine: Any = vllm.LLM(
        model=folder, dtype=dtype, max_model_len=2048, enable_prefix_caching=True, gpu_memory_utilization=memory
    )
    for line in sys.stdin:
        ids, seed = json.loads(line)
        asked = vllm.SamplingParams(
            n=int(branches), max_tokens=int(new_tokens), temperature=1.0, ignore_eos=True, seed=seed
        )
        begin = time.perf_counter()
        found = engine.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
        taken = time.perf_counter() - begin
        assert sum(len(each.token_ids) for each in found[0].outputs) == int(branches) * int(new_tokens)
        print(f"seconds {taken}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

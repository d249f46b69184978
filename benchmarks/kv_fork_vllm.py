"""Runs the vLLM side of kv_fork.py, with the python of another environment, which need not have partsong.

Reads a line ``[token ids, seed]`` for each prompt and answers with ``seconds S``.
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

    # This is a share of the host's memory, despite its name; the default is more than the other sides leave free.
    memory = 0.3
    engine: Any = vllm.LLM(
        model=folder, dtype=dtype, max_model_len=2048, enable_prefix_caching=True, gpu_memory_utilization=memory
    )
    for line in sys.stdin:
        ids, seed = json.loads(line)
        sampling = vllm.SamplingParams(
            n=int(branches), max_tokens=int(new_tokens), temperature=1.0, ignore_eos=True, seed=seed
        )
        begin = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        taken = time.perf_counter() - begin
        assert sum(len(each.token_ids) for each in outputs[0].outputs) == int(branches) * int(new_tokens)
        print(f"seconds {taken}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

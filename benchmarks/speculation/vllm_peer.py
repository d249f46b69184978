"""Lets benchmarks time vLLM, which runs in another environment that need not have partsong.

The other python runs this file: it reads a line with options, then a line with token ids and sampling for each prompt,
and answers each with the seconds it took and the tokens it wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ANSWER = "vllm_peer answers "


class VllmPeer:
    """Runs vLLM in another process and asks it line by line.

    Args:
        python: the python of an environment that has vLLM.
        threads: threads of torch.
        options: those of `vllm.LLM`, such as `model`, `dtype` and `speculative_config`.
    """

    def __init__(self, python: Path, threads: int, options: Mapping[str, Any]) -> None:
        command = [str(python), __file__, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._say(options)

    def ask(self, ids: list[int], sampling: Mapping[str, Any]) -> tuple[float, int]:
        """Returns the seconds that a prompt took, and how many tokens were written.

        Args:
            ids: the tokens of the prompt.
            sampling: options of `vllm.SamplingParams`.
        """
        self._say([ids, sampling])
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANSWER):
                seconds, tokens = json.loads(line.removeprefix(_ANSWER))
                return seconds, tokens
        raise SystemExit(f"vLLM ended with {self._process.wait()}")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()


def main(threads: str) -> None:
    """Answers until the input ends."""
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(threads) - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm  # pyright: ignore[reportMissingImports]

    # `gpu_memory_utilization` is a share of the host's memory, despite its name; the default is more than others leave.
    usual = {"max_model_len": 2048, "enable_prefix_caching": True, "gpu_memory_utilization": 0.3}
    engine: Any = vllm.LLM(**usual | json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        ids, options = json.loads(line)
        sampling = vllm.SamplingParams(**options)
        begin = time.perf_counter()
        outputs = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(each.token_ids) for each in outputs[0].outputs)
        print(f"{_ANSWER}{json.dumps([seconds, tokens])}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

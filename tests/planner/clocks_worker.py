"""Runs on every rank: measures the machine while one rank's clock runs ahead."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from partsong.planner import measuring


def measured_with_a_fast_clock() -> dict[str, Any]:
    """Measures little of everything; to the second rank, every measurement seems to take days."""
    measuring.TOKENS, measuring._ROWS, measuring._KEYS, measuring._ADDED = (16,), (64,), (64,), (1 << 13,)
    if os.environ["RANK"] == "1":
        measuring.time = SimpleNamespace(perf_counter=lambda: 1e6 * time.perf_counter())
    return measuring.measure(1)

"""Before anything imports torch or triton: one thread per process, and kernels in the interpreter without a GPU."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # reads the number of threads when it is imported

from tests import covering

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


#: Files that take longest, longest first; measured, and worth measuring again when the end of a run is slow.
LONGEST = (
    *("test_unet", "test_every_pipeline", "test_equivalence", "test_ray_engine", "test_launch", "test_decode"),
    *("test_clip_parallel", "test_plugins", "test_cli", "test_rules", "test_dual_parallel", "test_controlnets"),
    *(
        "test_pipelines",
        "test_docs",
        "test_parallel_vae",
        "test_openai_servers",
        "test_zoo_models",
        "test_patch_pipeline",
    ),
    *("test_sums_model", "test_triton_attention", "test_aot", "test_verify", "test_step_cache", "test_turning_models"),
    *("test_structure_guidance", "test_cli_video", "test_timestep_pipeline", "test_patch_models", "test_real_sizes"),
    *("test_partial_patch", "test_torchrun", "test_video", "test_time_parallel", "test_join", "test_bench_video"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run whole products of cases, and tests marked full")


def pytest_configure(config: pytest.Config) -> None:
    covering.FULL = config.getoption("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked full to ``pytest --full``, and lets long files begin first: no core idles at the end."""
    left = {item for item in items if item.get_closest_marker("full") and not covering.FULL}
    config.hook.pytest_deselected(items=left)
    places = {name: place for place, name in enumerate(LONGEST)}
    kept = (item for item in items if item not in left)
    items[:] = sorted(kept, key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Keeps what is there before the first test from being searched for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> None:
    """Lets ranks be forked from a process that has imported what most of them need: once, not once per rank."""
    folders = {"parallel", "features", "pipelines", "gpu_ready"}
    ranked = any(folders & {*item.path.parts} for item in request.session.items)
    if ranked and not torch.cuda.is_available():
        workers = sorted(path.stem for path in (Path(__file__).parent / "parallel").glob("*_worker.py"))
        workers.append("fork_server")
        context = multiprocessing.get_context("forkserver")
        others = ("tests.features.features_worker", "tests.pipelines.worker", "tests.gpu_ready.steps_worker")
        context.set_forkserver_preload(
            ["partsong.parallel", *others, *(f"tests.parallel.{worker}" for worker in workers)]
        )
        forkserver.ensure_running()


@pytest.fixture(scope="module", autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its first settings for the process: those of one file are not to meet another's."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)

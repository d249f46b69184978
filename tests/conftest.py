"""Before anything imports torch or triton: one thread per process, and kernels in the interpreter without a GPU."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Models of tests are on the CPU, also where there are GPUs; set it to cuda to have meshes there.
os.environ.setdefault("PARTSONG_DEVICE", "cpu")

import torch  # reads the number of threads when it is imported

from tests import covering, few_collections, file_seconds
from tests.file_seconds import file_of
from tests.newer_names import older
from tests.skip_newer import SkipNewer

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run whole products of cases, and tests marked full")
    parser.addoption("--shard", metavar="K/N", help="run part K of N of the full suite, files whole")
    parser.addoption("--write-seconds", action="store_true", help="file how long each file took, on a quiet machine")


def pytest_configure(config: pytest.Config) -> None:
    covering.FULL = config.getoption("full") or bool(config.getoption("shard"))
    if shard := config.getoption("shard"):
        number, count = map(int, shard.split("/"))
        covering.SHARD = (number % count, count)
    if older():
        config.pluginmanager.register(SkipNewer(), "skip_newer")
    if not hasattr(config, "workerinput"):  # the process that hears of every test
        config.pluginmanager.register(file_seconds.Watch(config), "file_seconds")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves tests marked full to ``pytest --full``, and lets long files begin first: no core idles at the end."""
    seconds = file_seconds.known(file_of(item.nodeid) for item in items)
    left = {item for item in items if item.get_closest_marker("full") and not covering.FULL}
    number, count = covering.SHARD
    if count > 1:
        whole = {file: took for file, took in seconds.items() if file not in file_seconds.IN_EVERY_SHARD}
        places = file_seconds.shard_of(whole, count)
        left |= {item for item in items if places.get(file_of(item.nodeid), number) != number}
    config.hook.pytest_deselected(items=left)
    kept = (item for item in items if item not in left)
    by_scope = file_seconds.by_scope(seconds)
    items[:] = sorted(kept, key=lambda item: -by_scope[file_seconds.scope_of(file_of(item.nodeid))])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives whole files to a process, and those that share a thing that starts slowly to the same one."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return file_seconds.scope_of(file_of(nodeid))

    return ByScope(config, log)


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
        others = ("features.features_worker", "pipelines.worker", "gpu_ready.steps_worker")
        context.set_forkserver_preload(
            [
                few_collections.__name__,
                "partsong.parallel",
                *(f"tests.{worker}" for worker in others),
                *(f"tests.parallel.{worker}" for worker in workers),
            ]
        )
        forkserver.ensure_running()


@pytest.fixture(scope="module", autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps its first settings for the process: those of one file are not to meet another's."""
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)

"""Commands start soon: a process imports only what it needs itself, and ranks import theirs beside it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from partsong.errors import ArgumentError
from partsong.fork_server import has_gpu_files
from partsong.jobs.planning import machine_here
from partsong.parallel.hooks.call_hook import CallHook
from tests.planner.shipped_files import skip_other_versions

#: What takes seconds to import.
MODELS = ("diffusers", "transformers", "peft", "torch._dynamo")
HEAVY = ("torch", *MODELS)
forks = pytest.mark.skipif(has_gpu_files(), reason="ranks are not forked where there may be a GPU")


def run(folder: Path, body: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs lines as the main program of a process of its own."""
    script = folder / "program.py"
    lines = "\n    ".join(body.strip().splitlines())
    script.write_text(f"import sys\n\nif __name__ == '__main__':\n    {lines}\n")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def loaded(folder: Path, body: str, **more: str) -> set[str]:
    """Returns which of the heavy packages a process has loaded when it ends."""
    report = f"import atexit\natexit.register(lambda: print('loaded', *filter(sys.modules.get, {HEAVY})))\n"
    done = run(folder, report + body, **more)
    last = (done.stdout.splitlines() or [""])[-1]
    assert last.startswith("loaded"), done.stdout + done.stderr
    return set(last.split()[1:])


#: Nothing of this is to load anything, so that one process shows it of all.
LIGHT = """
import partsong.cli.image, partsong.cli.video, partsong.cli.demo, partsong.cli.serve, partsong.cli.plan
import partsong.fork_server
from partsong.cli import main
for asked in (["--help"], ["image", "a red circle", "--nproc", "2", "--out", "a.gif"]):
    try:
        main(asked)
    except SystemExit as ended:
        print("ended", ended.code)
"""


def test_the_command_line_loads_nothing_heavy_before_it_computes(tmp_path: Path) -> None:
    assert loaded(tmp_path, LIGHT) == set()
    assert [line for line in run(tmp_path, LIGHT).stdout.splitlines() if "ended" in line] == ["ended 0", "ended 2"]


def test_strategies_are_read_without_the_libraries_of_models(tmp_path: Path) -> None:
    body = "import partsong.parallel\nfrom partsong.samplers.registry import parse_strategy\nparse_strategy('ulysses')"
    assert loaded(tmp_path, body) == {"torch"}


@pytest.mark.full
def test_a_process_that_only_starts_ranks_loads_no_models(tmp_path: Path) -> None:
    asked = "['image', 'a red circle', '--nproc', '2', '--strategy', 'ulysses', '--steps', '1', '--out', 'a.png']"
    assert loaded(tmp_path, f"from partsong.cli import main; main({asked})") == {"torch"}
    assert (tmp_path / "a.png").is_file()


PLAN = """
sys.argv = "partsong plan --model pixart-sigma --gpus 2xa100".split() + {}
from partsong.cli import main
main()
"""


def test_a_plan_for_a_published_model_at_its_own_size_loads_no_models(tmp_path: Path) -> None:
    skip_other_versions("pixart-sigma")
    assert loaded(tmp_path, PLAN.format([])) == {"torch"}


@pytest.mark.full
def test_a_plan_for_a_published_model_loads_no_adapters_and_no_text_encoders(tmp_path: Path) -> None:
    asked = ["--height", "512", "--width", "512"]
    assert loaded(tmp_path, PLAN.format(asked)) - {"torch._dynamo"} == {"torch", "diffusers"}


@forks
def test_a_server_on_a_machine_that_was_not_measured_does_not_load_the_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARTSONG_CALIBRATIONS", str(tmp_path))
    with pytest.raises(ArgumentError) as planner:
        machine_here(2)
    body = f"""
from partsong.jobs.pipeline_source import find_pipeline
from partsong.jobs.usual_strategy import usual_strategy
chosen, _, why = usual_strategy(find_pipeline("shapes"), 2)
assert chosen == ("ulysses",), chosen
assert why.endswith({str(planner.value)!r}), why
"""
    assert loaded(tmp_path, body) == set()


@forks
def test_ranks_are_forked_from_a_server_that_was_started_early_and_lack_what_it_lacks(tmp_path: Path) -> None:
    body = """
import gc, importlib.util, os, signal
from multiprocessing import forkserver
from partsong.fork_server import begin_early
from partsong.left_out_libraries import leave_out
leave_out("peft", "sys")
before = dict(os.environ)
begin_early(2)
assert dict(os.environ) == before
server = forkserver._forkserver._forkserver_pid
assert "torch" not in sys.modules
from partsong.parallel import launch
assert launch(os.getppid, 2) == server
assert launch(gc.isenabled, 1)
assert launch(gc.get_freeze_count, 1) > 100_000
assert launch(signal.getsignal, 1, signal.SIGINT) is signal.default_int_handler
# Ranks do without what the command does without.
assert launch(importlib.util.find_spec, 2, "peft") is None
assert launch(importlib.util.find_spec, 2, "transformers") is not None
print("done")
"""
    done = run(tmp_path, body)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("has_adapters", [True, False])
def test_a_folder_with_adapters_gets_what_loads_them(tmp_path: Path, has_adapters: bool) -> None:
    if has_adapters:
        (tmp_path / "adapter_config.json").write_text("{}")
    body = f"""
sys.argv = ["partsong", "image", "a", "--model", {str(tmp_path)!r}]
from partsong.cli import main
try:
    main()
except SystemExit:
    print("left out" if sys.modules.get("peft", "") is None else "kept")
"""
    assert run(tmp_path, body).stdout == ("kept\n" if has_adapters else "left out\n")


@pytest.mark.parametrize(
    ("scheduler", "outcome"),
    [
        ('{"_class_name": "EulerDiscreteScheduler", "use_beta_sigmas": false}', "left out"),
        ('{"_class_name": "EulerDiscreteScheduler", "use_beta_sigmas": true}', "kept"),
        ('{"_class_name": "LMSDiscreteScheduler"}', "kept"),
        ('{"_class_name": "DPMSolverSDEScheduler"}', "kept"),
    ],
)
def test_a_scheduler_that_computes_with_scipy_gets_it(tmp_path: Path, scheduler: str, outcome: str) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text(scheduler)
    body = f"""
sys.argv = ["partsong", "image", "a", "--model", {str(tmp_path)!r}]
from partsong.cli import main
try:
    main()
except SystemExit:
    print("left out" if sys.modules.get("scipy", "") is None else "kept")
"""
    assert run(tmp_path, body).stdout == f"{outcome}\n"


@pytest.mark.full
def test_an_image_of_one_rank_loads_no_scipy_and_collects_garbage_once_it_has_imported_all(tmp_path: Path) -> None:
    body = """
import gc
sys.argv = "partsong image circle --model shapes --steps 1 --out a.png".split()
from partsong.cli import main
try:
    main()
except SystemExit as ended:
    print(ended.code, gc.isenabled(), gc.get_freeze_count() > 100_000, sys.modules["scipy"])
"""
    done = run(tmp_path, body)
    assert done.stdout.splitlines()[-1] == "0 True True None", done.stderr


@forks
def test_a_server_that_is_still_importing_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "mark_of_the_end.py").write_text("open('imported everything', 'w').close()\n")
    body = """
import os
from multiprocessing import forkserver
from pathlib import Path
from partsong.fork_server import begin_early
begin_early(2, ["mark_of_the_end"])
maps = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/maps")
while "libtorch_cpu" not in maps.read_text():
    pass  # it has not begun to import torch yet
os._exit(0)
"""
    assert run(tmp_path, body).returncode == 0  # the server has let go of the output, so it has ended
    assert not (tmp_path / "imported everything").exists()


def test_a_refused_command_says_so_in_one_line_though_its_server_has_started(tmp_path: Path) -> None:
    asked = "['image', 'a red circle', '--nproc', '2', '--strategy', 'no-such']"
    done = run(tmp_path, f"from partsong.cli import main; main({asked})")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no strategy 'no-such'" in done.stderr


def test_hooks_have_all_that_diffusers_asks_of_a_hook() -> None:
    from diffusers.hooks import ModelHook

    for name, theirs in inspect.getmembers(ModelHook, inspect.isfunction):
        ours = inspect.signature(getattr(CallHook, name))
        assert list(ours.parameters) == list(inspect.signature(theirs).parameters), name
    assert vars(CallHook()).keys() == vars(ModelHook()).keys()
    assert CallHook._is_stateful is ModelHook._is_stateful

"""Settings of all tests: one thread per process, skipped tests, tests in forked processes.

The variables are set before torch is imported: a process that ran multi-threaded torch operations
must not fork.
"""

import faulthandler
import gc
import getpass
import os
import random
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # as in launch/cores.py
os.environ.pop("COLUMNS", None)  # 80 in processes of xdist: tables would be narrow

import pytest
from hypothesis import settings

import frontier_llm  # noqa: F401  (before megatron-core, as in every process of the program)
import tests.properties  # noqa: F401  (registers the profiles)
from tests.huge_pages import keep_forks_fast
from tests.kept_configs import keep_configs

keep_forks_fast()
# a collection would copy pages of the parent; and to destroy what is garbage in the parent, for
# example a process group with threads that the fork has not, crashes or hangs
os.register_at_fork(after_in_child=gc.freeze)
keep_configs()
settings.load_profile("repeated")  # before pytest loads the profile of --hypothesis-profile


NICENESS = os.getpriority(os.PRIO_PROCESS, 0)
FOLDER = Path(__file__).parent
LONGEST = (
    "trainer/test_resume", "saving/test_drain", "saving/test_bounded_end",
    "recovery/test_replaced_ranks", "recovery/test_replaced_tasks", "planning/test_plan",
    "trainer/test_context_parity", "trainer/test_context_run", "convert/test_convert",
    "foreign/test_foreign_tables", "trainer/test_transformers_reference",
    "trainer/test_schedules", "examples/test_own_text", "trainer/test_quantised",
    "data/test_malformed_corpora", "checkpoint/test_faults", "cli/test_unused_keys",
    "health/test_watchdog", "cli/test_first_command",
    "trainer/test_state_accounting", "trainer/test_deferred_weights",
    "parallel/test_launch_order", "trainer/test_sharding_cases", "parallel/test_queues",
    "membership/test_launcher", "streams/test_sharded_steps", "engine/test_behaviours",
    "examples/test_examples", "trainer/test_run", "trainer/test_parity",
    "streams/test_lanes", "checkpoint/test_layouts", "model/test_compiled",
    "membership/test_nccl_replacement", "saving/test_killed_drain", "trainer/test_sharding_parity",
    "launch/test_rendezvous", "cli/test_train_command", "sweeps/test_sweep",
    "trainer/test_support", "trainer/test_traffic", "trainer/test_t5_parity", "model/test_flex",
    "benchmarks/test_bench_sharding", "benchmarks/test_planner_layouts", "model/test_flops",
    "config/test_every_choice", "config/test_experiments", "cli/test_launch_checks",
)  # fmt: skip
"""Files that take the most time, the longest first."""


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name bytes by their argument: gzip stores the time, and all processes need the same names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(autouse=True, scope="session")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the temporary files of tests and of their processes in a folder that pytest removes.

    Ranks end without Python's exit handlers, so wandb and torchrun leave folders. Only the kernels
    that torch has compiled stay in their usual folder, where the next tests find them.
    """
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        )
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_visible_gpus() -> Iterator[None]:
    """Give configurations the same defaults on a machine with GPUs as on one without."""
    from frontier_llm.cli import machine_defaults

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_defaults, "visible_devices", lambda: None)
        yield


def pytest_runtest_setup() -> None:
    """Seed what tests draw, so that it does not depend on the tests before."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_runtest_teardown() -> None:
    """Check that the test has left its process as urgent as the processes of other workers."""
    assert os.getpriority(os.PRIO_PROCESS, 0) == NICENESS, "the test has lowered its priority"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --exhaustive."""
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also run long tests of what other tests cover in part",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection, and leave what they imported out of it later on.

    Each full collection would visit all objects of torch, megatron-core and the test modules. That
    took a quarter of the time to collect the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Undo the freeze: Triton reports its objects as leaks if they are not collected at the end."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out exhaustive tests, unless asked for, and put the longest files first.

    Otherwise a process might run a long file alone at the end.
    """
    if not config.getoption("exhaustive"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    places = {FOLDER / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    skip_without_device(items)


def skip_without_device(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA or ROCm device here"))


SKIPPED = 77


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `forked` in a forked process, so that its threads end with it."""
    if pyfuncitem.get_closest_marker("forked") is None:
        return None
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code, text = 1, ""
        faulthandler.enable(writer)
        try:
            names = pyfuncitem._fixtureinfo.argnames
            pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
            code = 0
        except pytest.skip.Exception as skip:
            code, text = SKIPPED, str(skip)
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writer, text.encode()[-32_000:])
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, errors="replace") as output:
        text = output.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == SKIPPED:
        pytest.skip(text)
    if code:
        pytest.fail(f"{text}\nended with {code}", pytrace=False)
    return True


def mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 240 KiB, with room for two checkpoints but not for three."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount(folder, "size=240k")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)

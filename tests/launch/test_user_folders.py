"""Folders that are used if $HOME cannot be written."""

import os
import stat
import subprocess
import sys
import tempfile

import pytest

from frontier_llm.launch.user_folders import cache_folder, redirect_libraries

LIBRARIES = {"WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "MPLCONFIGDIR",
             "TRITON_CACHE_DIR", "HF_HOME"}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_home(monkeypatch, tmp_path):
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nohome")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def test_without_a_home_every_start_uses_one_private_folder():
    folder = cache_folder()
    assert folder == cache_folder()
    assert folder.parent == folder.parents[1] / "temporary"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "kept").touch()
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "of another user"])
def test_a_folder_that_a_stranger_may_have_made_is_not_used(monkeypatch, tmp_path, kind):
    folder = tmp_path / "temporary" / f"frontier_llm-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        folder.touch(mode=0o700)
    else:
        folder.mkdir(mode=0o700)
    if kind == "open to others":
        folder.chmod(0o777)
    if kind == "of another user":
        uid = os.getuid()
        folder.rename(folder.with_name(f"frontier_llm-{uid + 1}"))
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    used = cache_folder()
    assert used.name.startswith("frontier_llm-")
    assert used.resolve() not in (folder.resolve(), tmp_path / "elsewhere")
    assert stat.S_IMODE(used.stat().st_mode) == 0o700


def test_a_home_that_can_be_written_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "frontier_llm"
    for environ in ({"HOME": str(tmp_path)}, {}):  # what expanduser finds, if it is not set
        redirect_libraries(environ)
        assert environ == {"HOME": str(tmp_path)}
    assert not (tmp_path / ".config").exists()


@pytest.mark.parametrize("home", ["/proc/nohome", "/dev/null", "/dev/null/home"])
def test_libraries_are_redirected_unless_their_variable_or_their_base_is_usable(
    home, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", home)
    environ = {"WANDB_CACHE_DIR": "/mine", "XDG_CONFIG_HOME": str(tmp_path)}
    redirect_libraries(environ)
    redirected = LIBRARIES - {"WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "MPLCONFIGDIR"}
    assert {name for name in environ if environ[name].startswith(str(cache_folder()))} == redirected
    assert environ["WANDB_CACHE_DIR"] == "/mine"


def test_a_cache_of_hugging_face_that_can_be_read_stays(monkeypatch, tmp_path):
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    redirect_libraries(environ)
    assert LIBRARIES - {"HF_HOME"} <= environ.keys()
    assert "HF_HOME" not in environ


@pytest.mark.slow
def test_wandb_and_matplotlib_print_nothing_without_a_home(tmp_path):
    program = (
        "import os; from frontier_llm.launch.user_folders import redirect_libraries\n"
        "redirect_libraries(os.environ)\n"
        "from pathlib import Path; from frontier_llm.telemetry.trackers import WandbSink\n"
        "import matplotlib.pyplot\n"
        f"WandbSink('offline', 'p', Path({str(tmp_path)!r}), {{}}).close()\n"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "")

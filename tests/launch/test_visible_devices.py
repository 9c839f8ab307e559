"""The GPUs that a process would see, asked of stand-ins for the libraries of the drivers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from frontier_llm.launch import visible_devices as module
from frontier_llm.launch.visible_devices import VisibleDevices, visible_devices

SOURCE = """
#include <stdlib.h>
#include <string.h>
static int visible(void) {  /* a list of devices in a variable, as the drivers read it */
  const char *list = getenv(VARIABLE);
  if (!list) return 8;
  if (!*list) return 0;
  int count = 1;
  for (; *list; list++) count += *list == ',';
  return count;
}
int INIT(unsigned flags) { return getenv("FAKE_ERROR") ? atoi(getenv("FAKE_ERROR")) : 0; }
int COUNT(int *count) { *count = visible(); return *count ? 0 : 100; }
int GET(int *device, int ordinal) { *device = ordinal; return 0; }
int NAME(char *name, int length, int device) {
  strncpy(name, device == 6 ? "Some display adapter" : DEVICE, length); return 0; }
int MEMORY(size_t *bytes, int device) { *bytes = (size_t)64 << 30; return 0; }
"""
WORDS = ("INIT", "COUNT", "GET", "NAME", "MEMORY")
CASES = {"cuda": ("CUDA_VISIBLE_DEVICES", "GPU of a test"), "hip": ("ROCR_VISIBLE_DEVICES", "GCD")}
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(params=CASES)
def kind(request, tmp_path, monkeypatch):
    """Compile the library of a kind of device, and let the module load it."""
    variable, name = CASES[request.param]
    words = zip(WORDS, module.FUNCTIONS[request.param], strict=True)
    (tmp_path / "driver.c").write_text(SOURCE)
    library = tmp_path / "libdriver.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"]
        + [f"-D{word}={function}" for word, function in words]
        + [f'-DVARIABLE="{variable}"', f'-DDEVICE="{name}"'],
        check=True,
    )
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module, "torch_kind", lambda: request.param)
    monkeypatch.setattr(module, "_libraries", lambda kind: ["libabsent.so.1", str(library)])
    visible_devices.cache_clear()
    yield request.param
    visible_devices.cache_clear()


def test_devices_before_one_of_another_kind_are_counted(kind):
    assert visible_devices() == VisibleDevices(kind, CASES[kind][1], 64.0, 6)


@pytest.mark.parametrize(("value", "count"), [("3", 1), ("0,1,2,3", 4), ("", 0)])
def test_the_driver_itself_reads_the_variables_that_hide_devices(kind, monkeypatch, value, count):
    monkeypatch.setenv(CASES[kind][0], value)
    found = visible_devices()
    assert (found.count if found else 0) == count


def test_a_driver_that_fails_is_named_and_the_cpu_is_used(kind, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_ERROR", "803")
    assert visible_devices() is None
    assert f"its driver fails: RuntimeError: {kind} returns error 803" in capsys.readouterr().err


def test_without_the_library_there_is_no_gpu_and_no_message(kind, monkeypatch, capsys):
    monkeypatch.setattr(module, "_libraries", lambda kind: ["libabsent.so.1"])
    assert visible_devices() is None
    assert capsys.readouterr().err == ""


def test_this_process_does_not_load_the_library(kind):
    visible_devices()
    assert "libdriver.so" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("version", "lines", "expected"),
    [
        ("2.10.0+git8514f05", "hip: str = '7.1.25424'\ncuda = None", "hip"),
        ("2.10.0", "cuda = '12.8'\nhip = None", "cuda"),
        ("2.10.0+rocm7.1", "cuda = None", "cpu"),
    ],
)
def test_the_kind_of_torch_is_not_read_from_its_version(tmp_path, version, lines, expected):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = {version!r}\n{lines}\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runpy, importlib;"
    code += "from frontier_llm.launch.visible_devices import torch_kind; print(torch_kind())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]

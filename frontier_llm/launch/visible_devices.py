"""Find the GPUs that ranks would see, without a driver in this process.

A process that has started CUDA or HIP must not fork ranks, and importing torch takes seconds. So
this file is also a script: a short process runs it, and loads only the library of the driver. The
library itself applies CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES and shows
the partitions of a GPU, as it does in a rank.
"""

import contextlib
import ctypes
import json
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

FUNCTIONS = {
    "cuda": ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem_v2"),
    "hip": (
        "hipInit", "hipGetDeviceCount", "hipDeviceGet", "hipDeviceGetName", "hipDeviceTotalMem"
    ),
}  # fmt: skip
"""Functions of the driver's library. Those of HIP have the arguments of those of CUDA."""
NO_DEVICE = (100, 101)
"""Error codes of both libraries on a machine without a device that they can use."""
_LIMIT_SECONDS = 120
"""How long the library may take. It starts every GPU of the node if no other process uses them."""
_GIB = 2**30


@dataclass(frozen=True)
class VisibleDevices:
    """The GPUs of this machine that ranks would use."""

    kind: str
    """`cuda` or `hip`."""
    name: str
    """Name as given by the driver, such as `AMD Instinct MI250X`."""
    memory_gib: float
    count: int
    """Number of GPUs; on an MI250X each of the two GCDs is one. If there are several kinds, only
    the first ones count, up to one with another name."""


@cache
def torch_kind() -> str:
    """Return the kind of device that the installed torch was built for: `cuda`, `hip` or `cpu`.

    This is read from torch's file of versions, because the text of the version does not name ROCm
    in builds from source.
    """
    file = _torch_folder() / "version.py"
    built = runpy.run_path(str(file)) if file.is_file() else {}
    return "hip" if built.get("hip") else "cuda" if built.get("cuda") else "cpu"


@cache
def visible_devices() -> VisibleDevices | None:
    """Return the GPUs that ranks on this machine would see; None = ranks compute on the CPU."""
    kind = torch_kind()
    if kind == "cpu":
        return None
    command = [sys.executable, "-I", "-S", __file__, kind, *_libraries(kind)]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        sys.stderr.write(f"{'device':<11}no GPU is used, because its driver fails: {reason}\n")
        return None
    devices: list[tuple[str, int]] = json.loads(found.stdout)
    if not devices:
        return None
    name, total = devices[0]
    count = len(list(takewhile(lambda device: device[0] == name, devices)))
    return VisibleDevices(kind, name, total / _GIB, count)


def _torch_folder() -> Path:
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent/torch")


def _libraries(kind: str) -> list[str]:
    """Return names of the driver's library, in the order in which they are tried.

    Builds of torch for ROCm contain the library, or a package beside torch does.
    """
    if kind == "cuda":
        return ["libcuda.so.1"]
    patterns = "torch/lib/libamdhip64.so*", "_rocm_sdk*/lib/libamdhip64.so*"
    beside = _torch_folder().parent
    found = [str(file) for pattern in patterns for file in sorted(beside.glob(pattern))]
    return [*found, "libamdhip64.so"]


def _names_and_bytes(kind: str, libraries: Sequence[str]) -> list[tuple[str, int]]:
    """Ask the driver for the name and the memory of each device; a script calls this."""
    library = None
    for file in libraries:
        with contextlib.suppress(OSError):  # on a machine without this driver
            library = library or ctypes.CDLL(file)
    if library is None:
        return []
    start, get_count, get, get_name, get_memory = (getattr(library, f) for f in FUNCTIONS[kind])
    code, count = start(0), ctypes.c_int()
    code = code or get_count(ctypes.byref(count))
    devices = []
    for index in range(0 if code else count.value):
        device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        code = code or get(ctypes.byref(device), index)
        code = code or get_name(name, len(name), device)
        code = code or get_memory(ctypes.byref(total), device)
        devices.append((name.value.decode(), total.value))
    if code and code not in NO_DEVICE:
        raise RuntimeError(f"{kind} returns error {code}")
    return [] if code else devices


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_names_and_bytes(sys.argv[1], sys.argv[2:])))

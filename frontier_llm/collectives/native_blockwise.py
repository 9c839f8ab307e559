"""The kernels of blockwise.c, compiled once per processor type and called without copies.

kernel_choice.py calls `load` on a rank without a GPU. blockwise.c needs only standard headers and
compiles in under a second. The shared library is kept in the user's cache directory. Since it is
compiled for one processor type, its file name has a digest of the source and of the processor's
features.
"""

import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from frontier_llm.collectives.blockwise import PartKernels
from frontier_llm.collectives.residual import Residual
from frontier_llm.collectives.slots import Blocks
from frontier_llm.geometry.formats import Format
from frontier_llm.launch.user_folders import cache_folder

SOURCE = Path(__file__).with_name("blockwise.c")
HEADER = SOURCE.with_name("blocks.h")
# GCC and clang use vectors of 32 bytes on many x86 processors that have vectors of 64 bytes
WIDE_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC",
    *WIDE_VECTORS,
)  # fmt: skip
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_SECONDS = 60
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""The values of FP32 and BF16 in blockwise.c."""


class _Format(ctypes.Structure):
    """The struct Format of blockwise.c."""

    _fields_ = (
        ("block", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("scale_dtype", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("run", ctypes.c_int32),
        ("factor", ctypes.c_float),
    )


class _Residual(ctypes.Structure):
    """The struct Residual of blockwise.c."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("scale_dtype", ctypes.c_int32),
        ("has_decay", ctypes.c_int32),
        ("old_weight", ctypes.c_float),
        ("new_weight", ctypes.c_float),
    )


@dataclass(frozen=True)
class NativeKernels(PartKernels):
    """The functions of blockwise.c, for contiguous tensors in main memory."""

    name: str = "native"
    reason: str = "compiled for this processor, verified on a few blocks"
    library: ctypes.CDLL = field(kw_only=True)

    @override
    def quantise_part(
        self,
        values: torch.Tensor,
        blocks: Blocks,
        residual: Residual | None,
        seed: int,
        base: torch.Tensor | None,
    ) -> None:
        values = _readable(values)
        base = None if base is None else _readable(base)
        self.library.frontier_quantise(
            _address(values),
            _DTYPE_CODES[values.dtype],
            ctypes.c_int64(values.numel()),
            None if base is None else _address(base),
            0 if base is None else _DTYPE_CODES[base.dtype],
            _format(blocks.fmt),
            ctypes.c_uint32(seed),
            None if residual is None else _residual(residual),
            _address(blocks.scales),
            _address(blocks.packed),
        )

    @override
    def dequantise_part(self, blocks: Blocks, out: torch.Tensor, *, add: bool) -> None:
        if out.dtype not in _DTYPE_CODES:
            wide = out.float()
            self.dequantise_part(blocks, wide, add=add)
            out.copy_(wide)
            return
        self.library.frontier_dequantise(
            _address(blocks.scales),
            _address(blocks.packed),
            ctypes.c_int64(out.numel()),
            _format(blocks.fmt),
            _address(out),
            _DTYPE_CODES[out.dtype],
            int(add),
        )

    @override
    def add_up_parts(self, blocks: Blocks, total: torch.Tensor, skip: int | None) -> None:
        assert total.dtype == torch.float32
        self.library.frontier_add_up(
            *_rows(blocks.scales),
            *_rows(blocks.packed),
            len(blocks.packed),
            -1 if skip is None else skip,
            ctypes.c_int64(total.numel()),
            _format(blocks.fmt),
            _address(total),
        )


def load() -> NativeKernels:
    """Load the kernels, and compile them if the cache does not have them.

    Raises an OSError if there is no compiler, or it failed; the message has its output.
    """
    return NativeKernels(library=ctypes.CDLL(str(_find_or_compile(cache_folder()))))


def _readable(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype in _DTYPE_CODES else values.float()


@cache
def _format(fmt: Format) -> Any:
    """Return a pointer to a format, as an argument of the functions of blockwise.c."""
    scale_dtype = _DTYPE_CODES[torch.float32 if fmt.scale_bytes == 4 else torch.bfloat16]
    rotation = (fmt.rotation_elements, fmt.rotation_factor) if fmt.rotation_elements else (0, 1.0)
    fields = (fmt.block_elements, fmt.bits, scale_dtype, int(fmt.is_stochastic), *rotation)
    return ctypes.byref(_Format(*fields))


def _residual(residual: Residual) -> Any:
    """Return a pointer to the residual of a part, as an argument of `frontier_quantise`."""
    scales, scale_dtype = None, 0
    if residual.scales is not None:
        scales, scale_dtype = _address(residual.scales), _DTYPE_CODES[residual.scales.dtype]
    fields = (scales, scale_dtype, int(residual.decay > 0), *residual.weights)
    return ctypes.byref(_Residual(_address(residual.values), *fields))


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _rows(table: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    """Return the address of a [rows, columns] table, and the bytes from one row to the next."""
    assert table.stride(1) == 1 or table.shape[1] <= 1
    stride = table.stride(0) * table.element_size()
    return ctypes.c_void_p(table.data_ptr()), ctypes.c_int64(stride)


def _find_or_compile(folder: Path) -> Path:
    """Return the library's path; ranks that start together wait until one has compiled it."""
    library = folder / f"blockwise-{_digest()}.so"
    if library.exists():
        return library
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"no C compiler ({', '.join(COMPILERS)})")
    partial = library.with_suffix(".partial")
    result = subprocess.run(
        [compiler, *FLAGS, str(SOURCE), "-o", str(partial), "-lm"],
        check=False,
        capture_output=True,
        text=True,
        timeout=COMPILE_TIMEOUT_SECONDS,
    )
    if result.returncode:
        raise OSError(f"{compiler}: {' '.join(result.stderr.split())[-300:]}")
    partial.replace(library)


def _digest() -> str:
    target = repr((FLAGS, platform.machine(), _processor_features()))
    text = SOURCE.read_bytes() + HEADER.read_bytes() + target.encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _processor_features() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return "|".join(sorted(features)) or platform.processor()

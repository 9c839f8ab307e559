"""blockwise.c as kernels: compiled once on each kind of machine, kept, called without a copy.

The file needs no header but C's own and takes under a second to compile. What is made is kept in
the user's cache, under a name that holds the source's digest and the processor's abilities, since
it is made for this very processor.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from typing_extensions import override

from frontier_llm.collectives.blockwise import BlockKernels
from frontier_llm.geometry.formats import Format

SOURCE = Path(__file__).with_name("blockwise.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
LIMIT_SECONDS = 60
_KINDS = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class NativeKernels(BlockKernels):
    """The functions of blockwise.c, for contiguous tensors in main memory."""

    name: str = "native"
    reason: str = "compiled for this processor, proved on a few blocks"
    library: ctypes.CDLL = field(kw_only=True)

    @override
    def quantise(
        self,
        values: torch.Tensor,
        code: Format,
        scales: torch.Tensor,
        packed: torch.Tensor,
        residual: torch.Tensor | None = None,
        seed: int = 0,
    ) -> None:
        if values.dtype not in _KINDS:
            values = values.float()
        self.library.frontier_quantise(
            _address(values),
            _KINDS[values.dtype],
            ctypes.c_int64(values.numel()),
            ctypes.c_int64(code.block_elements),
            code.bits,
            _KINDS[scales.dtype],
            int(code.is_stochastic),
            ctypes.c_uint32(seed),
            None if residual is None else _address(residual),
            _address(scales),
            _address(packed),
        )

    @override
    def dequantise(
        self, scales: torch.Tensor, packed: torch.Tensor, code: Format, out: torch.Tensor
    ) -> None:
        if out.dtype not in _KINDS:
            wide = torch.empty_like(out, dtype=torch.float32)
            self.dequantise(scales, packed, code, wide)
            out.copy_(wide)
            return
        self.library.frontier_dequantise(
            _address(scales),
            _KINDS[scales.dtype],
            _address(packed),
            ctypes.c_int64(out.numel()),
            ctypes.c_int64(code.block_elements),
            code.bits,
            _address(out),
            _KINDS[out.dtype],
        )

    @override
    def add_up(
        self,
        scales: torch.Tensor,
        packed: torch.Tensor,
        code: Format,
        total: torch.Tensor,
        left_out: int,
    ) -> None:
        assert total.dtype == torch.float32
        self.library.frontier_add_up(
            *_rows(scales),
            _KINDS[scales.dtype],
            *_rows(packed),
            len(packed),
            left_out,
            ctypes.c_int64(total.numel()),
            ctypes.c_int64(code.block_elements),
            code.bits,
            _address(total),
        )


def load() -> NativeKernels:
    """Compile the kernels, unless that was done before, and load them.

    Raises:
        OSError: no compiler, or it failed; says how.
    """
    return NativeKernels(library=ctypes.CDLL(str(_compiled(_cache()))))


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    assert tensor.is_contiguous()
    return ctypes.c_void_p(tensor.data_ptr())


def _rows(table: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    """Return where rows begin, and the bytes from one to the next."""
    assert table.stride(1) == 1 or table.shape[1] <= 1
    stride = table.stride(0) * table.element_size()
    return ctypes.c_void_p(table.data_ptr()), ctypes.c_int64(stride)


def _compiled(folder: Path) -> Path:
    """Return the library; ranks that start together wait for the one that makes it."""
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
    done = subprocess.run(
        [compiler, *FLAGS, str(SOURCE), "-o", str(partial), "-lm"],
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        raise OSError(f"{compiler}: {' '.join(done.stderr.split())[-300:]}")
    partial.replace(library)


def _cache() -> Path:
    """Return a folder that only this user writes to; a fresh one where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "frontier_llm"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="frontier_llm_"))
    return folder


def _digest() -> str:
    """Name the source, the flags and what the processor can do."""
    about = SOURCE.read_bytes() + repr((FLAGS, platform.machine(), _abilities())).encode()
    return hashlib.sha256(about).hexdigest()[:16]


def _abilities() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    words = (line for line in lines if line.startswith(("flags", "Features", "model name")))
    return "|".join(sorted(set(words))) or platform.processor()

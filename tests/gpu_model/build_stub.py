"""Build the stand-in for CUDA: `python -m tests.gpu_model.build_stub FOLDER`; prints how to use it.

The header of CUDA's runtime comes with Triton, which comes with a CUDA build of torch.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def main(folder: Path) -> None:
    """Build FOLDER/fake_cuda.so and its copy FOLDER/libcuda.so.1."""
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        sys.exit("Triton is not installed: install a CUDA build of torch")
    include = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "fake_cuda.so"
    source = Path(__file__).with_name("cuda_stub.c")
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{include}", "-o", library, source]
    subprocess.run(command, check=True)
    shutil.copy(library, folder / "libcuda.so.1")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

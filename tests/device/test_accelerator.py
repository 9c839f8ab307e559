import ctypes
import platform
import resource
import subprocess
import sys

import pytest

from frontier_llm.device.accelerator import keep_freed_memory

SIZE, COUNT, ROUNDS = 20 * 2**20, 8, 5
PAGES = SIZE * COUNT // resource.getpagesize()


def faults_of_the_last_round(keep: bool) -> int:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    if keep:
        assert keep_freed_memory()
    for _ in range(ROUNDS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(SIZE))) for _ in range(COUNT)]
        for one in held:
            libc.memset(one, 1, ctypes.c_size_t(SIZE))
        for one in held:
            libc.free(one)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def faults(keep: bool) -> int:
    """Count page faults in a new interpreter, since malloc's settings and heap are per process."""
    words = [sys.executable, __file__, *(["keep"] if keep else [])]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_freed_memory_is_reused_without_page_faults():
    assert faults(keep=True) < PAGES / 50
    assert faults(keep=False) > PAGES / 2  # otherwise the kernel takes it back


if __name__ == "__main__":
    sys.stdout.write(str(faults_of_the_last_round(keep="keep" in sys.argv)))

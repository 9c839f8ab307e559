import ctypes
import platform
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from frontier_llm.device.accelerator import Accelerator, choose_precision, keep_freed_memory
from frontier_llm.device.identity import device_id
from frontier_llm.errors import LaunchError

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


GPU = Accelerator(torch.device("cuda", 0), "cuda", "NVIDIA Z1")


def test_more_ranks_than_devices_are_refused_unless_they_may_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Z1")
    with pytest.raises(LaunchError, match="no device for local rank 3: 2 are visible"):
        Accelerator.of_rank(3)
    assert Accelerator.of_rank(3, may_share=True).device == torch.device("cuda", 1)


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "bf16"), (False, "fp32")])
def test_a_gpu_computes_in_bf16_if_it_has_it(monkeypatch, has_bf16, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    precision, reason = choose_precision(GPU)
    assert precision == expected
    assert "NVIDIA Z1" in reason


CPU = Accelerator(torch.device("cpu"), "cpu", "cpu")


@pytest.mark.parametrize(
    ("cpuinfo", "expected", "named"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_vnni", "bf16", "avx512_bf16"),
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile", "bf16", "amx_bf16"),
        ("flags\t\t: fpu avx2 avx512f avx512bw", "fp32", "no instructions"),
        ("Features\t: fp asimd i8mm bf16 dgh", "bf16", ": bf16"),
        ("Features\t: fp asimd evtstrm", "fp32", "no instructions"),
        ("model name\t: a bf16 processor", "fp32", "no instructions"),
        (None, "fp32", "no instructions"),
    ],
)
def test_a_cpu_computes_in_bf16_if_its_flags_name_it(tmp_path, cpuinfo, expected, named):
    file = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        file.write_text(f"processor\t: 0\n{cpuinfo}\n" * 2)
    precision, reason = choose_precision(CPU, file)
    assert precision == expected
    assert named in reason


def test_two_devices_with_one_uuid_differ_by_their_address(monkeypatch):
    """The two devices of an MI250X package may have the same UUID."""
    addresses = iter([0xC1, 0xC6])

    def properties(_):
        return SimpleNamespace(
            uuid="one", pci_domain_id=0, pci_bus_id=next(addresses), pci_device_id=0
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert [device_id(GPU), device_id(GPU)] == ["one at 00:c1:00", "one at 00:c6:00"]


def test_a_driver_without_addresses_still_gives_the_uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="one"))
    assert device_id(GPU) == "one at ?:?:?"


def test_a_gpu_tells_what_its_allocator_holds(monkeypatch):
    stats = {
        "allocated_bytes": {"all": {"peak": 5, "current": 1}},
        "reserved_bytes": {"all": {"peak": 8, "current": 2}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    assert GPU.allocator_bytes() == {"allocated": 5, "reserved": 8}
    assert Accelerator(torch.device("cpu"), "cpu", "cpu").allocator_bytes() == {}


if __name__ == "__main__":
    sys.stdout.write(str(faults_of_the_last_round(keep="keep" in sys.argv)))

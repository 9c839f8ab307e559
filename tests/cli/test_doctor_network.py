"""The options of frontier-llm doctor, and its line about the network plugin."""

import pytest

from frontier_lab.commands.doctor import main, network
from frontier_llm.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder of LD_LIBRARY_PATH; NCCL_NET_PLUGIN is not set."""
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    return tmp_path


def test_a_plugin_in_the_library_path_is_named(folder):
    assert network("hip") == "RCCL; no plugin is in LD_LIBRARY_PATH, hence InfiniBand or TCP"
    (folder / "librccl-net.so").touch()
    assert network("hip") == "RCCL with librccl-net.so"


def test_a_path_in_nccl_net_plugin_needs_no_library_path(folder, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    plugin = folder / "librccl-net.so"
    monkeypatch.setenv("NCCL_NET_PLUGIN", str(plugin))
    assert "is not in LD_LIBRARY_PATH" in network("hip")
    plugin.touch()
    assert network("hip") == f"RCCL with {plugin}"


def test_a_name_in_nccl_net_plugin_ends_a_file_s_name(folder, monkeypatch):
    monkeypatch.setenv("NCCL_NET_PLUGIN", "ofi")
    (folder / "libnccl-net.so").touch()
    missing = "NCCL_NET_PLUGIN=ofi is not in LD_LIBRARY_PATH, hence InfiniBand or TCP"
    assert network("cuda") == f"NCCL; {missing}"
    (folder / "libnccl-net-ofi.so").touch()
    assert network("cuda") == f"NCCL with {folder}/libnccl-net-ofi.so"


def test_no_plugin_is_used_if_the_variable_says_none(folder, monkeypatch):
    (folder / "libnccl-net.so").touch()
    monkeypatch.setenv("NCCL_NET_PLUGIN", "none")
    assert network("cuda") == "NCCL; NCCL_NET_PLUGIN=none, hence InfiniBand or TCP"


@pytest.mark.parametrize("options", [["--netwrok"], ["--network", "--numerics"], ["--network=3"]])
def test_other_options_are_refused(options):
    with pytest.raises(ConfigError) as caught:
        main(options)
    assert f"got:    {' '.join(options)}" in str(caught.value)

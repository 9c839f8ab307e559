"""The names that are replaced on a CPU are still there, and there are no others."""

import inspect
import re
from importlib.metadata import version

import torch
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import layers, mappings

from frontier_llm.parallel.megatron_cpu import REPLACEMENTS, install
from frontier_llm.parallel.world import World
from tests.ranks import run_ranks


def names_replaced(world: World) -> list[str]:
    import importlib

    before = {
        (r.module, r.name): getattr(importlib.import_module(r.module), r.name) for r in REPLACEMENTS
    }
    install()
    return [
        f"{module}.{name}"
        for (module, name), old in before.items()
        if getattr(importlib.import_module(module), name) is not old
    ]


def test_every_listed_name_exists_and_is_replaced() -> None:
    replaced = run_ranks(names_replaced, 1)[0]
    assert replaced == [f"{r.module}.{r.name}" for r in REPLACEMENTS]
    assert all(r.reason for r in REPLACEMENTS)


def test_importing_the_package_replaces_nothing() -> None:
    import frontier_llm.trainer.assemble  # noqa: F401

    assert torch.cuda.current_device.__module__ == "torch.cuda"
    assert schedules.torch is torch


def test_this_release_names_cuda_where_we_think_it_does() -> None:
    """A new release that writes `cuda` in another place must be read before it is used."""
    found = {
        module.__name__.rpartition(".")[2]: sorted(
            re.findall(r'device="cuda"|torch\.cuda\.\w+', inspect.getsource(module))
        )
        for module in (schedules, p2p_communication, mappings)
    }
    known = {
        "schedules": ['device="cuda"'] * 3,
        "p2p_communication": ["torch.cuda.current_device"] * 6 + ["torch.cuda.synchronize"] * 2,
        "mappings": ["torch.cuda.current_device"] * 5,
    }
    assert found == known, f"megatron-core {version('megatron-core')}"
    named = set(re.findall(r"torch\.cuda\.\w+", inspect.getsource(layers)))
    assert named == {"torch.cuda.amp", "torch.cuda.current_device"}

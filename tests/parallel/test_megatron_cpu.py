"""megatron-core still has the names that are replaced on a CPU, and no others."""

import importlib
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import layers, mappings, model_parallel_cuda_manual_seed

from frontier_llm.parallel.megatron_cpu import REPLACEMENTS, install

pytestmark = pytest.mark.slow


def check_replacements() -> None:
    import frontier_llm.trainer.assemble  # noqa: F401

    compilers = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
    assert compilers == [], "megatron_jit.py must keep compilers out of the import"
    assert torch.cuda.current_device.__module__ == "torch.cuda", "importing replaces nothing"
    before = {
        (r.module, r.name): getattr(importlib.import_module(r.module), r.name) for r in REPLACEMENTS
    }
    install()
    for (module, name), old in before.items():
        assert getattr(importlib.import_module(module), name) is not old, (module, name)


def test_every_listed_name_exists_and_is_replaced() -> None:
    """Run in a new process: other tests may have replaced the names in this one."""
    work = f"import frontier_llm; from {__name__} import check_replacements; check_replacements()"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", work], check=False, capture_output=True, text=True, cwd=root
    )
    assert done.returncode == 0, done.stderr
    assert all(r.reason for r in REPLACEMENTS)


def test_this_release_takes_only_one_name_from_the_module_that_is_replaced() -> None:
    folder = Path(inspect.getsourcefile(layers) or "").parents[1]
    sources = [path.read_text() for path in folder.rglob("*.py") if path.name != "jit.py"]
    imports = [line for text in sources for line in re.findall(r".*import.*\bjit\b.*", text)]
    imports += [line for text in sources for line in re.findall(r"from megatron.core.jit .*", text)]
    assert set(imports) == {"from megatron.core.jit import jit_fuser"}
    assert layers.__name__ in sys.modules
    assert sys.modules["megatron.core.jit"].__name__ == "frontier_llm.megatron_jit"


def test_this_release_uses_cuda_only_in_the_known_places() -> None:
    """A release that writes `cuda` in other places needs other replacements."""
    found = re.findall(r'device="cuda"|torch\.cuda\.\w+', inspect.getsource(mappings))
    assert found == ["torch.cuda.current_device"] * 5, f"megatron-core {version('megatron-core')}"
    named = set(re.findall(r"torch\.cuda\.\w+", inspect.getsource(layers)))
    assert named == {"torch.cuda.amp", "torch.cuda.current_device"}


@pytest.mark.forked
def test_seeding_dropout_draws_the_same_numbers_and_keeps_nothing() -> None:
    install()

    def drawn() -> torch.Tensor:
        model_parallel_cuda_manual_seed(3, tp_rank=0, ep_rank=0, etp_rank=0, force_reset_rng=True)
        return torch.rand(4)

    kept = len(torch.cuda._queued_calls)
    assert torch.equal(drawn(), drawn())
    assert len(torch.cuda._queued_calls) == kept

"""megatron's configuration on a GPU."""

import torch

from frontier_llm.config import RunConfig
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.transformer import transformer_config
from tests.values import tiny_values


def test_exchanges_between_stages_do_not_wait_for_the_device() -> None:
    """megatron's default waits, also until the copies of a checkpoint are done."""
    config = RunConfig.model_validate(tiny_values("parallel.pipeline=2"))
    layout = ResolvedLayout.resolve(config, 2, 2, precision="bf16", check_rules=False)
    on_gpu = transformer_config(layout, torch.device("cuda", 0))
    assert on_gpu.batch_p2p_comm
    assert not on_gpu.batch_p2p_sync

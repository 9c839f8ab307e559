"""Sharded states, lazy checkpoints and the watchdog for any torch module, without the trainer.

    states = shard(model, params=2, grads=2, optimizer=4)
    checkpoints = Checkpoints("checkpoints", states)
    step = checkpoints.restore()
    with Watchdog("run") as watchdog:
        for step in range(step + 1, 1001):
            with watchdog.step(step):
                states.backward(model(batch).loss)
                states.step(learning_rate=3e-4, saved=checkpoints.is_due(step))
                checkpoints.save_if_due(step)
    checkpoints.close()

Every rank of `torch.distributed` runs this loop on samples of its own. docs/library.md explains it.
"""

from frontier_llm.engine.lazy_checkpoints import Checkpoints
from frontier_llm.engine.shard import shard
from frontier_llm.engine.shard_settings import AdamW, Formats, ParameterGroup, Precision
from frontier_llm.engine.sharded import Sharded
from frontier_llm.engine.torch_optimizer import Optimizer
from frontier_llm.engine.watchdog import Watchdog

__all__ = [
    "AdamW", "Checkpoints", "Formats", "Optimizer", "ParameterGroup", "Precision", "Sharded",
    "Watchdog", "shard",
]  # fmt: skip

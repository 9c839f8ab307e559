"""DeepSpeed as a contender of bench_sharding.py.

    python -m benchmarks.peers.deepspeed_peer FILE    # replaces a turn in a file by its figures

Runs in a separate environment that has only torch and deepspeed (deepspeed_env.py).
"""

import os
import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

import deepspeed  # type: ignore[import-not-found]
import torch

from benchmarks.peers.plain_gpt import PlainGpt
from benchmarks.peers.turn import ADAMW, CLIP_NORM, SEED, MicroBatch, Peer, Turn, measure
from benchmarks.testbed.forked import on_ranks


def make(turn: Turn, rank: int) -> "DeepSpeed":
    """Build one rank of the contender. Collective over all ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(turn.ranks)}
    return DeepSpeed(turn)


def settings(turn: Turn) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a turn; all other settings have their defaults."""
    return {
        "train_micro_batch_size_per_gpu": turn.samples,
        "gradient_accumulation_steps": turn.micro_batches,
        "gradient_clipping": CLIP_NORM,
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "bf16": {"enabled": turn.precision == "bf16"},
        "zero_optimization": {"stage": int(turn.contender[-1])},
        "steps_per_print": 1_000_000,
    }


class DeepSpeed(Peer):
    """One rank of DeepSpeed's ZeRO-1, -2 or -3."""

    def __init__(self, turn: Turn) -> None:
        torch.manual_seed(SEED)
        model = PlainGpt(**asdict(turn.shape))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        self._engine = deepspeed.initialize(model=model, config=settings(turn))[0]

    def step(self, batches: list[MicroBatch]) -> float:
        """Run one step; return the loss of this rank."""
        total = 0.0
        for tokens, labels in batches:
            loss = self._engine(tokens, labels)
            self._engine.backward(loss)
            self._engine.step()
            total += loss.item()
        return total / len(batches)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    asked: Turn = pickle.loads(file.read_bytes())
    found = on_ranks(measure, asked.ranks, make, asked, namespaces=asked.namespaces)
    file.write_bytes(pickle.dumps(found))

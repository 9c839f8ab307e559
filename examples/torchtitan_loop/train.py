"""Train a plain torch model in a loop like torchtitan's: torchrun --nproc-per-node 2 train.py."""

import argparse
import math

import torch
import torch.distributed as dist
from model import Transformer, samples_of
from torch.nn.functional import cross_entropy

from frontier_llm.library import Checkpoints, Precision, Sharded, shard

RATE, WARMUP, MICRO_BATCHES = 3e-3, 4, 2  # learning rate; steps; per step and rank


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine."""
    progress = max(0, step - 1 - WARMUP) / (steps - WARMUP)
    return RATE * min(step / WARMUP, 0.5 + 0.5 * math.cos(math.pi * progress))


def loss_of(states: Sharded, samples: torch.Tensor) -> torch.Tensor:
    """Run the passes of this rank's samples [samples, tokens + 1]; return the loss of all ranks."""
    losses = torch.zeros(())
    for micro_batch in samples.chunk(MICRO_BATCHES):
        logits = states.module(micro_batch[:, :-1]).float().flatten(0, 1)
        loss = cross_entropy(logits, micro_batch[:, 1:].flatten())
        states.backward(loss)  # gradients are averaged over micro-batches and ranks
        losses += loss.detach() / MICRO_BATCHES / dist.get_world_size()
    dist.all_reduce(losses)
    return losses


def main() -> None:
    """Train on this rank, from the newest checkpoint on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="runs/torchtitan_loop")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16")
    parser.add_argument("--compile", metavar="BACKEND", help="compile each layer")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    model = Transformer()
    for layer in model.layers if options.compile else ():
        layer.compile(backend=options.compile)
    precision = Precision(torch.bfloat16) if options.bf16 else None
    states = shard(model, params=2, precision=precision, micro_batches=MICRO_BATCHES)
    checkpoints = Checkpoints(options.folder, states, every=5)
    for step in range(checkpoints.restore() + 1, options.steps + 1):
        rate, own = rate_at(step, options.steps), samples_of(step).chunk(dist.get_world_size())
        loss = loss_of(states, own[dist.get_rank()])
        norm = states.step(rate, saved=checkpoints.is_due(step))  # clips the gradients, too
        checkpoints.save_if_due(step)
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss:.6f}  norm {norm:.4f}  rate {rate:.2e}")
    checkpoints.close()
    dist.destroy_process_group()


main()

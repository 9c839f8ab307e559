"""Train a Llama of transformers in your own loop, with sharded states and lazy checkpoints.

torchrun --nproc-per-node 4 examples/own_loop/own_loop.py --steps 20
torchrun --nproc-per-node 2 examples/own_loop/own_loop.py --steps 40     # continues on two ranks
"""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from frontier_llm.library import Checkpoints, Formats, Watchdog, shard

SAMPLES, TOKENS, VOCABULARY = 8, 64, 512  # samples per step over all ranks


def main() -> None:
    """Train on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="runs/own_loop")
    options = parser.parse_args()
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun, as --help shows")
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(1)  # all ranks draw the same weights
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2,
        )
    ).train()  # fmt: skip
    pair = 2 - size % 2  # parameters and gradients are sharded over pairs of ranks, if possible
    states = shard(
        model, params=pair, grads=pair, optimizer=size, formats=Formats(grads="int8"),
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
    )  # fmt: skip
    checkpoints = Checkpoints(f"{options.folder}/checkpoints", states, every=10)
    first = checkpoints.restore() + 1
    with Watchdog(options.folder) as watchdog:
        for step in range(first, options.steps + 1):
            with watchdog.step(step):
                everyone = torch.Generator().manual_seed(step)
                starts = torch.randint(VOCABULARY, (SAMPLES, 1), generator=everyone)
                samples = (starts + 3 * torch.arange(TOKENS)) % VOCABULARY  # a rule to learn
                own = samples.chunk(size)[rank]
                loss = model(input_ids=own, labels=own).loss
                states.backward(loss)
                norm = states.step(1e-3, saved=checkpoints.is_due(step))
                checkpoints.save_if_due(step)
            if rank == 0:
                sent = sum(volume.total for volume in states.sent_bytes().values()) / 1e6
                print(f"step {step}  loss {loss:.4f}  norm {norm:.2f}  sent {sent:.2f} MB")
    checkpoints.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a Llama by transformers' Trainer: torchrun --nproc-per-node 2 train.py FOLDER STEPS."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from frontier_llm.library import AdamW, Checkpoints, Optimizer, shard


class ShardedTrainer(Trainer):
    """A Trainer whose states are sharded, and saved while it trains."""

    def __init__(self, model: torch.nn.Module, args: TrainingArguments, **rest: Any) -> None:
        super().__init__(model, args, **rest)
        rule = AdamW(args.adam_beta1, args.adam_beta2, args.adam_epsilon, args.weight_decay)
        self.states = states = shard(model, params=dist.get_world_size(), update=rule)
        self.checkpoints = Checkpoints(f"{args.output_dir}/states", states, every=args.save_steps)
        self.optimizer = self.sharded = Optimizer(states, args.learning_rate, self.checkpoints)
        self.accelerator.prepare_model = lambda model, **_: model  # no DistributedDataParallel
        self.accelerator.no_sync = lambda model: states.no_sync()  # all micro-batches but the last

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the norm of the gradient, which Trainer does not see."""
        super().log({**logs, "grad_norm": self.sharded.norm}, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights for transformers, unless this is a part of a checkpoint."""
        Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)
        if not _internal_call:
            with self.states.gathered():
                super().save_model(output_dir)

    def _save_checkpoint(self, *args: Any) -> None:
        super()._save_checkpoint(*args)  # the learning rate, the step and random states
        self.checkpoints.save(self.state.global_step)

    def _load_from_checkpoint(self, *_: Any) -> None:
        """Keep the weights, which `Checkpoints` has restored."""


folder, steps = sys.argv[1:]
arguments = TrainingArguments(
    folder, max_steps=int(steps), save_steps=5, logging_steps=1, use_cpu=True, ddp_backend="gloo",
    per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=3e-3,
    lr_scheduler_type="cosine", warmup_steps=4, report_to="none", disable_tqdm=True,
)  # fmt: skip
torch.manual_seed(1)  # all ranks draw the same weights and samples
llama = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
rows = (torch.randint(256, (512, 1)) + 3 * torch.arange(32)) % 256
samples = [{"input_ids": row, "labels": row} for row in rows]
trainer = ShardedTrainer(LlamaForCausalLM(llama), arguments, train_dataset=samples)
step = trainer.checkpoints.restore()
trainer.train(f"{folder}/checkpoint-{step}" if step else None)
trainer.checkpoints.close()
trainer.save_model()
trainer.save_state()

"""Where everything is put together for one rank: the composition root."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.datasets import Corpus, Samples, open_corpus
from frontier_llm.data.loader import BatchLoader
from frontier_llm.data.prepare import prepare
from frontier_llm.device.accelerator import Accelerator, faster_precision
from frontier_llm.device.kernels import resolve
from frontier_llm.model.build import build_model
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.agreement import made_once
from frontier_llm.parallel.groups import Groups, destroy_groups, make_groups
from frontier_llm.parallel.stop import StopFlag
from frontier_llm.parallel.world import World, init_process_group
from frontier_llm.trainer.evaluate import Evaluation
from frontier_llm.trainer.loop import Loop
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.parts import Choices, Parts
from frontier_llm.trainer.sample import Sampler
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep

if TYPE_CHECKING:
    from torch.distributed import Store


def run(config: RunConfig, world: World, store: "Store") -> None:
    """Do the work of one rank from beginning to end.

    Collective over all ranks.

    Args:
        config: the run.
        world: this rank's place.
        store: where the ranks met.

    Raises:
        FrontierError: the run cannot go on, or was asked to stop.
    """
    stop = StopFlag.install()
    accelerator = Accelerator.of_rank(world.local_rank)
    timeout = timedelta(seconds=config.launch.timeout_seconds)
    if accelerator.is_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        megatron_cpu.install()
    choices = choose(config, world, store, accelerator)
    init_process_group(world, store, accelerator.device, timeout)
    with Loop(assemble(config, world, accelerator, choices, stop)) as loop:
        loop.run()
    destroy_groups()


def choose(config: RunConfig, world: World, store: "Store", accelerator: Accelerator) -> Choices:
    """Settle what the configuration leaves open; rank 0 measures for all."""
    wanted = config.precision.name
    if wanted != "auto":
        return Choices(wanted, f"precision={wanted}")

    def measure() -> str:
        return "\n".join(faster_precision(accelerator))

    answer = made_once(world, store, "precision", measure, timedelta(seconds=60))
    return Choices(*answer.split("\n"))


def assemble(
    config: RunConfig, world: World, accelerator: Accelerator, choices: Choices, stop: StopFlag
) -> Parts:
    """Build the parts of one rank.

    Collective over all ranks.
    """
    groups = make_groups(config.parallel, world.ranks_per_node, config.trainer.seed)
    kernels = resolve(config.kernels, accelerator.device)
    corpus = open_corpus(prepare(config.data))
    model = build_model(config, groups, choices.precision, accelerator.device, kernels)
    traffic = Traffic(groups.grid, world.rank)
    states = shard(config, model, groups, traffic)
    loss_scale = LossScale(config.precision, choices.precision)
    validation = loader(config, groups, corpus, train=False)
    return Parts(
        config=config,
        world=world,
        accelerator=accelerator,
        choices=choices,
        stop=stop,
        groups=groups,
        kernels=kernels,
        corpus=corpus,
        model=model,
        states=states,
        step=TrainStep(model, states, groups, config, loss_scale, traffic),
        evaluation=Evaluation(model, groups, config, validation),
        loader=loader(config, groups, corpus, train=True),
        validation_loader=validation,
        sampler=Sampler(model, groups, config, corpus.tokenizer),
    )


def loader(config: RunConfig, groups: Groups, corpus: Corpus, *, train: bool) -> BatchLoader:
    """Make the loader of this rank's replica."""
    data = config.data
    samples = Samples(
        corpus.train if train else corpus.validation,
        data.sequence_length,
        config.trainer.seed,
        corpus.manifest.digest,
        shuffle=train,
    )
    return BatchLoader(
        samples, data.global_batch, data.micro_batch, groups.at.data, groups.grid.data
    )

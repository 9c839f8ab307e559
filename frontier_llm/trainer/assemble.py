"""Where everything is put together for one rank: the composition root."""

import gc
import os
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import BlendedSamples, Corpora, open_all
from frontier_llm.data.reading import make_loader, make_windows
from frontier_llm.device.accelerator import Accelerator, faster_precision
from frontier_llm.device.host_memory import keep_freed_memory
from frontier_llm.device.kernels import resolve
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.model.build import build_model
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.agreement import made_once
from frontier_llm.parallel.groups import destroy_groups
from frontier_llm.parallel.slurm import end_of_job
from frontier_llm.parallel.stop import Deadline, StopFlag, StopRequest
from frontier_llm.parallel.stragglers import Stragglers
from frontier_llm.parallel.watchdog import Watchdog
from frontier_llm.parallel.world import World
from frontier_llm.telemetry.log import setup_logging
from frontier_llm.trainer.checkpoints import Checkpoints
from frontier_llm.trainer.connect import connect
from frontier_llm.trainer.evaluate import Evaluation
from frontier_llm.trainer.loop import Loop
from frontier_llm.trainer.loss_scale import LossScale
from frontier_llm.trainer.parts import Choices, Parts
from frontier_llm.trainer.progress import Progress
from frontier_llm.trainer.resume import Restorer
from frontier_llm.trainer.run_directory import FAILURES
from frontier_llm.trainer.sample import Sampler
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep

if TYPE_CHECKING:
    from torch.distributed import Store

STOP_FILE = "STOP"
"""In the run directory: `touch` it, and the run saves and stops."""


def run(config: RunConfig, corpora: Sequence[Path], world: World, store: "Store") -> None:
    """Do the work of one rank from beginning to end.

    Collective over all ranks.

    Args:
        config: the run.
        corpora: the folders of what it reads.
        world: this rank's place.
        store: where the ranks met.

    Raises:
        FrontierError: the run cannot go on, or was asked to stop.
    """
    setup_logging(world.rank)
    accelerator = Accelerator.of_rank(world.local_rank)
    if accelerator.is_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        megatron_cpu.install()
        keep_freed_memory()
    run_dir = Path(config.run.dir)
    with Watchdog(config.watchdog, world, store, run_dir, run_dir / FAILURES) as watchdog:
        choices = choose(config, world, store, accelerator)
        corpus = open_all(config.data, corpora)
        with Loop(assemble(config, corpus, world, store, accelerator, choices, watchdog)) as loop:
            # what stays for the whole run is not searched for garbage again: that takes a rank
            # tens of milliseconds, each rank in another step, and all wait for it
            gc.collect()
            gc.freeze()
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
    config: RunConfig,
    corpus: Corpora,
    world: World,
    store: "Store",
    accelerator: Accelerator,
    choices: Choices,
    watchdog: Watchdog,
) -> Parts:
    """Build the parts of one rank.

    Collective over all ranks.
    """
    with watchdog.phase("groups"):
        groups, digits = connect(config, world, store, accelerator)
    kernels = resolve(config.kernels, accelerator.device)
    model = build_model(config, groups, choices.precision, accelerator.device, kernels)
    traffic = Traffic(groups.grid, world.rank)
    states = shard(config, model, groups, traffic, digits)
    loss_scale = LossScale(config.precision, choices.precision)
    windows = make_windows(config, corpus, train=True)
    blend = windows if isinstance(windows, BlendedSamples) else None
    # an encoder-decoder's stages all mask by the batch; a decoder's middle ones need only its shape
    reads = config.model.kind == "t5" or not groups.is_between
    loader = partial(make_loader, config, corpus, groups.at.data, groups.grid.data, reads=reads)
    validation = loader(train=False)
    progress = Progress()
    patience = timedelta(seconds=config.watchdog.startup_seconds)  # rank 0 may build for longer
    start = made_once(world, store, "start", lambda: uuid.uuid4().hex, patience)

    def meta() -> dict[str, Any]:
        return {
            "progress": progress.to_meta(),
            "loss_scale": loss_scale.to_meta(),
            "corpus": corpus.manifest.digest,
            "blend": blend.schedule.to_meta() if blend else None,
            "config": config.model_dump(mode="json"),
            "start": start,
        }

    def before_update() -> None:
        with watchdog.phase("checkpoint"):
            checkpoints.before_update()

    shapes = model_shapes(config.model, config.data.sequence_length)
    checkpoints = Checkpoints(config, world, store, states, groups, meta)
    return Parts(
        config=config,
        world=world,
        accelerator=accelerator,
        choices=choices,
        stop=stop_request(config, world),
        watchdog=watchdog,
        stragglers=Stragglers(config.watchdog, world, accelerator),
        groups=groups,
        kernels=kernels,
        corpus=corpus,
        blend=blend,
        model=model,
        states=states,
        step=TrainStep(model, states, groups, config, loss_scale, traffic, before_update),
        evaluation=Evaluation(model, groups, config, validation),
        loader=loader(train=True, windows=windows),
        validation_loader=validation,
        sampler=Sampler(model, groups, config, corpus.tokenizer),
        progress=progress,
        checkpoints=checkpoints,
        restorer=Restorer(config, world, states, shapes, corpus.manifest.digest),
    )


def stop_request(config: RunConfig, world: World) -> StopRequest:
    """Listen for requests to stop; rank 0 also looks for a file, and at the clock of the job."""
    flag, margin = StopFlag.install(), config.launch.stop_minutes * 60
    if world.rank:
        return StopRequest(flag)
    end = end_of_job(os.environ) if margin else None
    deadline = None if end is None else Deadline(end, margin)
    return StopRequest(flag, Path(config.run.dir) / STOP_FILE, deadline)

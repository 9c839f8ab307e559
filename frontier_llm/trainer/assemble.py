"""Builds the objects of one rank: the only module that connects the parts of the program."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch.distributed import Store

from frontier_llm.checkpoint.archive import Archive
from frontier_llm.collectives.traffic import Traffic
from frontier_llm.config.run import RunConfig
from frontier_llm.data.corpora import Corpora, ValidationWindows, open_all
from frontier_llm.data.read_share import with_read_share
from frontier_llm.data.run_loader import make_loader, make_windows
from frontier_llm.data.sample_counts import window_tokens
from frontier_llm.data.sample_order import LengthSegment
from frontier_llm.device.accelerator import Accelerator, choose_precision, keep_freed_memory
from frontier_llm.device.kernels import resolve, use_deterministic_operations
from frontier_llm.geometry.inventory import model_shapes
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.health.watchdog import Watchdog
from frontier_llm.launch.coordination import broadcast_from_rank_zero
from frontier_llm.launch.stop import StopRequest
from frontier_llm.launch.world import World
from frontier_llm.model.attention_kernels import attention_kernels
from frontier_llm.model.build import build_model
from frontier_llm.model.transformer import DTYPES
from frontier_llm.parallel import megatron_cpu
from frontier_llm.parallel.groups import Groups
from frontier_llm.saving.checkpoints import Checkpoints
from frontier_llm.saving.restorer import Restorer
from frontier_llm.saving.tier_writers import TierWriters
from frontier_llm.telemetry.log import close_logging, setup_logging
from frontier_llm.trainer.connect import connect
from frontier_llm.trainer.context import (
    Hardware,
    ResolvedPrecision,
    RunControl,
    TrainerContext,
    TrainingData,
)
from frontier_llm.trainer.evaluate import Evaluation
from frontier_llm.trainer.progress import LossScale, Progress
from frontier_llm.trainer.resume import checkpoint_meta
from frontier_llm.trainer.sample import Sampler
from frontier_llm.trainer.states import shard
from frontier_llm.trainer.step import TrainStep
from frontier_llm.trainer.step_meter import StepMeter, Throughput


def prepare_device(config: RunConfig, world: World) -> Accelerator:
    """Return the device of this rank. On a CPU, replace the parts of megatron-core for GPUs."""
    may_share = config.collectives.backend == "gloo"
    accelerator = Accelerator.of_rank(world.local_rank, may_share=may_share)
    if accelerator.is_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        megatron_cpu.install()
        keep_freed_memory()
    if config.trainer.deterministic:
        use_deterministic_operations()
    return accelerator


def build_context(
    config: RunConfig,
    corpora: Sequence[Path],
    world: World,
    store: Store,
    accelerator: Accelerator,
    watchdog: Watchdog,
    archive: Archive | None = None,
) -> TrainerContext:
    """Build the objects of one rank. Collective. An `archive` that is given outlives the others."""
    precision = resolve_precision(config, world, store, accelerator)
    corpus = open_all(config.data, corpora)
    measured = with_read_share(config, corpora)
    layout = ResolvedLayout.resolve(
        measured, world.size, world.ranks_per_node, precision=precision.name
    )
    with watchdog.phase("groups"):
        groups, state_groups = connect(config, layout, world, store, accelerator)
    kernels = resolve(
        config.kernels, accelerator.device, DTYPES[precision.name], config.model.hidden
    )
    attention = attention_kernels(layout, accelerator.device)
    hardware = Hardware(accelerator, precision, kernels, attention)
    model = build_model(layout, groups, accelerator.device, hardware.kernels, config.trainer.seed)
    traffic = Traffic(groups.grid, world.rank)
    states = shard(config, model, groups, traffic, state_groups)
    data = build_data(config, corpus, groups, accelerator.device)
    progress, loss_scale = Progress(), LossScale(config.precision, precision.name)
    try:
        meta = checkpoint_meta(config, world, store, data, progress, loss_scale)
    except BaseException:
        states.close()  # with its hooks the model would never be freed
        raise
    tiers = TierWriters(config, world, store, states, groups, archive)
    checkpoints = Checkpoints(config, world, store, tiers, meta)
    fence = partial(wait_for_snapshot, checkpoints, watchdog)
    shapes = model_shapes(layout.model, layout.sequence_length)
    throughput = Throughput(measured, world.size, accelerator, precision.name)
    return TrainerContext(
        config=config,
        world=world,
        groups=groups,
        hardware=hardware,
        data=data,
        model=model,
        states=states,
        train_step=TrainStep(model, states, groups, config, loss_scale, traffic, fence),
        evaluation=Evaluation(
            model, groups, config, data.validation, corpus, data.validation_windows
        ),
        sampler=Sampler(model, groups, config, corpus.tokenizer),
        meter=StepMeter(throughput, progress, checkpoints, logs=world.rank == 0),
        progress=progress,
        checkpoints=checkpoints,
        restorer=Restorer(config, world, states, shapes, corpus.manifest),
        control=RunControl(watchdog, StopRequest.of_rank(config, world)),
    )


def resolve_precision(
    config: RunConfig, world: World, store: Store, accelerator: Accelerator
) -> ResolvedPrecision:
    """Return the compute precision. With `auto`, rank 0 chooses for all ranks: collective."""
    wanted = config.precision.name
    if wanted != "auto":
        return ResolvedPrecision(wanted, f"precision={wanted}")

    def choose() -> str:
        return "\n".join(choose_precision(accelerator))

    answer = broadcast_from_rank_zero(world, store, "precision", choose, timedelta(seconds=60))
    return ResolvedPrecision(*answer.split("\n"))


def build_data(
    config: RunConfig, corpus: Corpora, groups: Groups, device: torch.device
) -> TrainingData:
    """Make the loaders of this rank, which read only the samples of its replica."""
    # Every pipeline stage of an encoder-decoder makes masks from the tokens. In a GPT the stages
    # without embedding and head need only the shape of the batch, so they do not read the corpus.
    reads = config.model.kind == "t5" or groups.has_head or groups.coordinates.pipeline == 0
    windows = make_windows(config, corpus, train=True, reads=reads)  # the samples by index
    place = groups.coordinates.data, groups.grid.data
    loader = partial(make_loader, config, corpus, *place, device=device)
    validation_windows = make_windows(config, corpus, train=False, reads=reads)
    assert isinstance(validation_windows, ValidationWindows)
    assert not isinstance(windows, ValidationWindows)
    return TrainingData(
        corpus=corpus,
        windows=windows,
        lengths=[LengthSegment(0, window_tokens(config.data))],
        train=loader(train=True, windows=windows),
        validation=loader(train=False, windows=validation_windows),
        validation_windows=validation_windows,
    )


def wait_for_snapshot(checkpoints: Checkpoints, watchdog: Watchdog) -> None:
    """Wait until the checkpoint being written has copied the states."""
    with watchdog.phase("checkpoint"):
        checkpoints.before_update()


@contextmanager
def run_log(run_dir: Path, world: World) -> Iterator[None]:
    """Also log to `run.log` in the run directory on rank 0; close the log at the end."""
    setup_logging(world.rank, run_dir if world.rank == 0 else None)
    try:
        yield
    finally:
        close_logging()

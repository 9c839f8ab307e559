"""Builds the model of a run in a single process, and loads its weights from a checkpoint.

Commands such as `generate` and `evaluate` use it. The run may have had any parallel layout.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frontier_lab.option_values import restored_config
from frontier_llm.checkpoint.folders import FOLDER
from frontier_llm.config import RunConfig, decode
from frontier_llm.errors import CheckpointError, DataError
from frontier_llm.saving.run_directory import CONFIG, last_values

if TYPE_CHECKING:
    import torch

    from frontier_llm.model.build import Model
    from frontier_llm.parallel.groups import Groups


ON_ONE_RANK = {
    "tensor": 1, "pipeline": 1, "chunks": 1, "sequence": False, "layers_per_stage": None,
    "schedule": "1f1b", "waiting_weights": 0,
}  # fmt: skip
"""The section `parallel` of a configuration with a single rank."""


def single_process_run(run: Path, named: Path | None) -> tuple[RunConfig, Path]:
    """Return what a command needs to place the whole model of a run on one rank.

    That is the run's configuration, and the folder of the checkpoint that a user `named` or of the
    newest one. A command looks for it once, because the run may save a newer one meanwhile. The
    model is the checkpoint's: a run may have changed its model since (`run.allow_changes`). Raises
    a CheckpointError if there is no checkpoint.
    """
    from frontier_llm.checkpoint.discovery import find

    values = _read_values(run)
    if named is not None and not named.exists():  # the name of a checkpoint of the run
        named = run / FOLDER / named
    checkpoint = find(named or run)
    stored = checkpoint.manifest.meta.get("config")
    model = stored.get("model") if isinstance(stored, dict) else None
    if isinstance(model, dict) and isinstance(values.get("model"), dict):
        values["model"] |= model
    values["parallel"] = ON_ONE_RANK
    values["run"] = values["run"] | {"dir": str(run)}
    return decode(values), checkpoint.folder


def read_config(run: Path) -> RunConfig:
    """Return a run's configuration.

    Raises a DataError if the folder is no run directory, and a ConfigError for keys of another
    version.
    """
    return decode(_read_values(run))


def _read_values(run: Path) -> dict[str, Any]:
    file, values = run / CONFIG, last_values(run)
    if not file.is_file():
        raise DataError(
            f"{run} is not a run directory: it holds no config.yaml\n"
            "  do: give the run.dir of a training run"
        )
    if not isinstance(values.get("run"), dict):
        todo = restored_config(run) or "copy it from another folder of the same run"
        raise DataError(f"{file} is damaged: it holds no configuration\n  do: {todo}")
    _begin_at_start(values, run)
    return values


def _begin_at_start(values: dict[str, Any], run: Path) -> None:
    """Let relative paths of the data begin where the run was started; a relative run.dir tells."""
    given, data = Path(str(values["run"].get("dir"))), values.get("data")
    if given.is_absolute() or not run.absolute().match(str(given)) or not isinstance(data, dict):
        return
    start, corpora = run.absolute().parents[len(given.parts) - 1], data.get("corpora") or ()
    for section in (data, *(corpus for corpus in corpora if isinstance(corpus, dict))):
        for key in ("path", "directory", "tokenizer"):
            if isinstance(text := section.get(key), str) and (start / text).exists():
                section[key] = str(start / text)


@contextmanager
def single_process_model(
    config: RunConfig, weights: Path, device: "torch.device"
) -> Iterator[tuple["Model", "Groups"]]:
    """Build a model in fp32 and load its weights.

    The configuration is one from `single_process_run`. The weights are a checkpoint of any
    layout, a folder of checkpoints, or a run directory. Raises a CheckpointError if there is no
    checkpoint, or it is of another model.
    """
    from frontier_lab.stored_weights import load_weights
    from frontier_llm.checkpoint.discovery import find
    from frontier_llm.device.kernels import resolve
    from frontier_llm.geometry.resolved import ResolvedLayout
    from frontier_llm.model.build import build_model

    with groups_of_one_rank(device) as groups:
        kernels = resolve(config.kernels, device)
        layout = ResolvedLayout.resolve(
            config, 1, 1, precision="fp32", ignore_sharding=True, check_rules=False
        )
        model = build_model(layout, groups, device, kernels, config.trainer.seed)
        load_weights(find(weights), model.records)
        yield model, groups


@contextmanager
def groups_of_one_rank(device: "torch.device") -> Iterator["Groups"]:
    """Make process groups, which Megatron needs, of one rank; the process has none afterwards."""
    import torch.distributed as dist

    from frontier_llm.geometry.grid import Grid
    from frontier_llm.parallel import megatron_cpu
    from frontier_llm.parallel.groups import destroy_groups, make_groups

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cpu":
        megatron_cpu.install()
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_groups(Grid(1, 1, 1, 1), head_stage=0)
    finally:
        destroy_groups()


def no_model(weights: Path, found: str) -> CheckpointError:
    """Return the error for a checkpoint of a run that has diverged; `found` says what shows it."""
    from frontier_llm.checkpoint.discovery import find

    return CheckpointError(
        f"{find(weights).folder}: {found}, so the run had diverged when it was saved\n"
        "  do: frontier-llm evaluate RUN_DIR --checkpoint PATH shows whether an earlier checkpoint "
        "can be used; otherwise train again with a lower optimizer.learning_rate"
    )

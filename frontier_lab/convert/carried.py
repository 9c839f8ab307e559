"""Keep the tensors of their model that ours does not compute with, and write them again.

They are for images, or stand for their borders. A file of the run directory holds them, and the
part of config.json that is about them. A run that began with these weights finds it by
`run.init_from`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from frontier_lab.convert.base_family import Family, Values
from frontier_lab.convert.theirs import TheirWeights, save_tensors
from frontier_llm.config import RunConfig

FILE = "carried.safetensors"


def carry(
    family: Family, weights: TheirWeights, theirs: Values, surplus: Sequence[str], run: Path
) -> list[str]:
    """Keep the carried tensors in a run directory; return the names of the other tensors."""
    kept = [
        name
        for name in surplus
        if any(part in name for part in family.carried) and not name.endswith(tuple(family.copies))
    ]
    if kept:
        metadata = {"settings": json.dumps(family.carried_settings(theirs))}
        save_tensors({name: weights.read_any(name) for name in kept}, run / FILE, metadata)
        print(
            f"{len(kept)} tensors are kept as they are, in {FILE}: no text is computed with them, "
            f"and they are not trained ({kept[0]}, ...)"
        )
    return [name for name in surplus if name not in kept]


def carried_parts(
    config: RunConfig, family: Family, dtype: torch.dtype
) -> tuple[list[list[tuple[str, Tensor]]], Values]:
    """Return the carried tensors of a run, as at most one file, and their part of config.json."""
    folders = [Path(folder) for folder in (config.run.dir, config.run.init_from) if folder]
    path = next((f / FILE for f in folders if (f / FILE).is_file()), None)
    if path is None or not family.carried:
        if family.carried:
            print(f"there is no {FILE} here or in run.init_from: only tensors of text are written")
        return [], {}
    with safe_open(path, framework="pt") as file:
        tensors = [(name, file.get_tensor(name).to(dtype)) for name in file.keys()]
        return [tensors], json.loads(file.metadata()["settings"])


def merged(settings: Values, further: Values) -> Values:
    """Return nested settings with further ones, which win."""
    both: dict[str, Any] = {**settings, **further}
    for key, value in further.items():
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            both[key] = merged(settings[key], value)
    return both

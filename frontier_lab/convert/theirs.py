"""Read and write a Hugging Face folder tensor by tensor.

The folder holds config.json, and the weights in one or several safetensors files.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from frontier_llm.errors import DataError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
"""Maps the name of each tensor to its file, if there are several files."""
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
"""Tells of changes to the weights by PEFT, which from_pretrained of transformers applies."""
_MAP = TypeAdapter(dict[str, str])
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_RESTORE = "restore the file from where the model is from"


class TheirWeights:
    """The tensors of a Hugging Face folder, which may omit the prefix from all names.

    `largest_dim` is the size of the largest dim of all tensors.
    """

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self.folder = folder
        self.largest_dim = 0
        self._files = self._find_files()
        omits_prefix = not any(name.startswith(prefix) for name in self._files)
        # full name of each tensor -> name in the file
        self._stored = {f"{prefix}{name}" if omits_prefix else name: name for name in self._files}

    @property
    def names(self) -> list[str]:
        """The names of all tensors, with the prefix."""
        return list(self._stored)

    def read(self, name: str) -> Tensor:
        """Read a tensor of weights."""
        tensor = self.read_any(name)
        if tensor.dtype not in _DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise DataError(
                f"{name} has dtype {tensor.dtype}, which is no dtype of weights\n"
                f"  do: save the model in one of {known}"
            )
        if bad := tensor.numel() - int(torch.isfinite(tensor).sum()):
            raise DataError(
                f"{name} has {bad} weights that are NaN or infinite\n"
                "  do: convert an earlier checkpoint of this model"
            )
        return tensor

    def read_any(self, name: str) -> Tensor:
        """Read a tensor that may hold any values."""
        stored = self._stored[name]
        try:
            with safe_open(self.folder / self._files[stored], framework="pt") as file:
                tensor: Tensor = file.get_tensor(stored)
        except Exception as error:
            raise DataError(
                f"{self.folder / self._files[stored]} is damaged: {error}\n  do: {_RESTORE}"
            ) from None
        return tensor

    def _find_files(self) -> dict[str, str]:
        """Return the file of each tensor, by the name of the tensor in the file."""
        found: dict[str, str] = {}
        if (self.folder / ADAPTER).exists():
            raise DataError(
                f"{self.folder} has an adapter ({ADAPTER}), whose weights are not converted\n"
                "  do: merge it: AutoPeftModelForCausalLM.from_pretrained(FOLDER)"
                ".merge_and_unload().save_pretrained(NEW); or remove its files"
            )
        try:  # from_pretrained ignores an index beside a single file
            has_index = (self.folder / INDEX).exists() and not (self.folder / SINGLE).exists()
            index = _read_object(self.folder / INDEX) if has_index else {}
            named = _MAP.validate_python(index.get("weight_map", {"": SINGLE}))
            for name in sorted(set(named.values())):
                path = self.folder / name
                if Path(name).name != name or not path.is_file():
                    raise ValueError(f"{name} is not a file in this folder")
                found |= dict.fromkeys(self._read_header(path), name)
            if missing := sorted(named.keys() - found.keys() - {""}):
                raise ValueError(f"{named[missing[0]]} lacks {missing[0]}")
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(
                f"{self.folder} contains no model in safetensors files: {error}\n"
                "  do: save the model in safetensors files, as save_pretrained does"
            ) from None
        return found

    def _read_header(self, path: Path) -> list[str]:
        """Return the names of the tensors in a file, and note the size of the largest dim."""
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                for name in names:
                    dims = file.get_slice(name).get_shape()
                    self.largest_dim = max([self.largest_dim, *dims])
        except Exception as error:  # safetensors raises no narrower class
            raise DataError(
                f"{path} is damaged or not complete: {error}\n  do: copy or download the file again"
            ) from None
        return names


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json."""
    path = folder / CONFIG
    if not path.exists():
        raise DataError(
            f"{folder} is not a folder of a Hugging Face model: it has no {CONFIG}\n"
            "  do: name a folder that save_pretrained has written"
        )
    try:
        return _read_object(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}\n  do: {_RESTORE}") from None


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a regular file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path.name} is not a regular file")
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a new safetensors file, readable for others as far as the umask allows.

    Safetensors itself writes it for its owner alone.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def write_model(
    folder: Path,
    config: dict[str, Any],
    shards: Iterable[Sequence[tuple[str, Tensor]]],
    count: int,
) -> None:
    """Write a model to an empty folder; each shard is freed before the next one is requested.

    A shard has (name, tensor) of each tensor of a file.
    """
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    files: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, 1):
        name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        tensors = {key: tensor.contiguous() for key, tensor in shard}
        save_tensors(tensors, folder / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    if count > 1:
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

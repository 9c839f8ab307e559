"""Read and write the weights of our checkpoints one tensor at a time.

Reads checkpoints of any layout, and writes one that runs of any layout can read. Only this module
of the conversion depends on the format of checkpoints.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import save_file
from torch import Tensor

from frontier_llm.checkpoint import manifest as stored
from frontier_llm.checkpoint.discovery import Checkpoint, find
from frontier_llm.checkpoint.folders import FOLDER, MANIFEST, rank_file_name, step_folder
from frontier_llm.checkpoint.restore import read_tensor
from frontier_llm.convert.table import Shape
from frontier_llm.errors import CheckpointError

STATE = "master"


class OurWeights:
    """The weights of a checkpoint."""

    def __init__(self, path: Path) -> None:
        """Open a checkpoint.

        Args:
            path: a checkpoint, or a run directory or folder of checkpoints, of which the newest is
                opened.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        self.checkpoint: Checkpoint = find(path)

    def check_names(self, shapes: dict[str, Shape]) -> None:
        """Refuse a checkpoint of another model than the configuration's.

        Raises:
            CheckpointError: a tensor is missing, superfluous or of another shape.
        """
        found = {name: tensor.shape for name, tensor in self.checkpoint.manifest.tensors.items()}
        for name in sorted(found.keys() | shapes.keys()):
            if found.get(name) != shapes.get(name):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {name} is {_words(found.get(name))}, config.yaml "
                    f"says {_words(shapes.get(name))}"
                )

    def read(self, name: str) -> Tensor:
        """Return a tensor in fp32.

        Raises:
            CheckpointError: the tensor is damaged or incomplete.
        """
        return read_tensor(self.checkpoint, name, states=(STATE,))[STATE]


def write_weights(
    run: Path, shards: Iterable[Sequence[tuple[str, Tensor]]], meta: dict[str, Any]
) -> None:
    """Write a checkpoint of step 0 with weights and without moments.

    Args:
        run: the run directory.
        shards: complete tensors by global name; each shard is freed before the next is requested.
        meta: metadata of the checkpoint, which must be JSON.

    Raises:
        OSError: the disk is full or has failed.
    """
    folder = run / FOLDER / step_folder(0)
    folder.mkdir(parents=True)
    files: dict[str, stored.File] = {}
    tensors: dict[str, stored.Tensor] = {}
    for number, shard in enumerate(shards):
        name = rank_file_name(number)
        whole = {f"{key}.{STATE}": value.float().contiguous().clone() for key, value in shard}
        save_file(whole, folder / name)
        files[name] = _digests(folder / name)
        tensors |= dict(_places(folder / name, shard))
    content = stored.Manifest(
        step=0,
        world=1,
        chunk_bytes=stored.CHUNK_BYTES,
        files=files,
        tensors=tensors,
        meta=meta,
    )
    (folder / MANIFEST).write_bytes(content.to_bytes())


def _places(path: Path, shard: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, stored.Tensor]]:
    """Yield the entry of each tensor of a file for the manifest."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    for name, tensor in shard:
        key, shape = f"{name}.{STATE}", tuple(tensor.shape)
        stored_range = stored.StoredRange(
            file=path.name,
            start=(0,) * len(shape),
            shape=shape,
            first=0,
            count=tensor.numel(),
            keys={STATE: key},
            bytes_at={STATE: 8 + size + header[key]["data_offsets"][0]},
        )
        yield name, stored.Tensor(shape=shape, stored_ranges=(stored_range,))


def _digests(path: Path) -> stored.File:
    chunks = []
    with path.open("rb") as stream:
        while chunk := stream.read(stored.CHUNK_BYTES):
            chunks.append(xxhash.xxh3_128_hexdigest(chunk))
    return stored.File(size=path.stat().st_size, chunks=tuple(chunks))


def _words(shape: Shape | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


def plan_shards(sizes: Sequence[int], most: int) -> list[range]:
    """Split a list into ranges whose sizes sum up to at most `most`; a larger item is alone."""
    ranges, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > most:
            ranges.append(range(start, index))
            start, total = index, 0
        total += size
    return [*ranges, range(start, len(sizes))]

"""Read and write the weights of "our" checkpoints (those of frontier_llm), tensor by tensor.

A checkpoint of any parallel layout can be read, and runs of any layout can read the checkpoint that
this module writes. No other module of the conversion depends on the format of checkpoints.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from frontier_lab.convert.table import Shape
from frontier_lab.convert.theirs import save_tensors
from frontier_lab.stored_weights import check_headers, read_tensor
from frontier_llm.checkpoint import manifest as stored
from frontier_llm.checkpoint.discovery import Checkpoint, find
from frontier_llm.checkpoint.folders import FOLDER, MANIFEST, rank_file_name, step_folder
from frontier_llm.errors import CheckpointError
from frontier_llm.geometry.host_pool import CHUNK_BYTES

STATE = "master"
"""Name under which a checkpoint stores the fp32 master weights."""


class OurWeights:
    """The weights of the checkpoint at a path, or of the newest one in a run directory."""

    def __init__(self, path: Path) -> None:
        self.checkpoint: Checkpoint = find(path)
        check_headers(self.checkpoint)

    def check_names(self, shapes: dict[str, Shape]) -> None:
        """Refuse a checkpoint whose tensors differ from these shapes, by our names."""
        found = {name: tensor.shape for name, tensor in self.checkpoint.manifest.weights.items()}
        for name in sorted(found.keys() | shapes.keys()):
            if found.get(name) != shapes.get(name):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: {name} is {_shape_words(found.get(name))}, "
                    f"config.yaml says {_shape_words(shapes.get(name))}\n"
                    "  do: take config.yaml from the run that wrote the checkpoint"
                )

    def read(self, name: str) -> Tensor:
        """Return a tensor in fp32."""
        return read_tensor(self.checkpoint, name, states=(STATE,))[STATE]


def write_weights(
    run: Path, shards: Iterable[Sequence[tuple[str, Tensor]]], meta: dict[str, Any]
) -> None:
    """Write a checkpoint of step 0 that holds weights but no moments of Adam.

    A shard has (our name, complete tensor) of each tensor of a file. It is freed before the next
    one is requested.
    """
    folder = run / FOLDER / step_folder(0)
    folder.mkdir(parents=True)
    files: dict[str, stored.File] = {}
    tensors: dict[str, stored.Tensor] = {}
    for number, shard in enumerate(shards):
        name = rank_file_name(number)
        # safetensors does not save tensors that share memory, so each is cloned
        states = {f"{key}.{STATE}": value.float().contiguous().clone() for key, value in shard}
        save_tensors(states, folder / name)
        files[name] = _file_entry(folder / name)
        tensors |= dict(_tensor_entries(folder / name, shard))
    content = stored.Manifest(
        step=0,
        world=1,
        chunk_bytes=CHUNK_BYTES,
        files=files,
        tensors=tensors,
        meta=meta,
    )
    (folder / MANIFEST).write_bytes(content.to_bytes())


def _tensor_entries(
    path: Path, shard: Sequence[tuple[str, Tensor]]
) -> Iterator[tuple[str, stored.Tensor]]:
    """Yield (name, entry in the manifest) of each tensor of a file."""
    # a safetensors file begins with the size of its header in 8 bytes
    with path.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
    for name, tensor in shard:
        key, shape = f"{name}.{STATE}", tuple(tensor.shape)
        stored_range = stored.StoredRange(
            file=path.name,
            start=(0,) * len(shape),
            shape=shape,
            first=0,
            count=tensor.numel(),
            keys={STATE: key},
            bytes_at={STATE: 8 + header_bytes + header[key]["data_offsets"][0]},
        )
        yield name, stored.Tensor(shape=shape, stored_ranges=(stored_range,))


def _file_entry(path: Path) -> stored.File:
    """Return the entry of a file in the manifest: its size and the digests of its chunks."""
    chunks = []
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            chunks.append(xxhash.xxh3_128_hexdigest(chunk))
    return stored.File(size=path.stat().st_size, chunks=tuple(chunks))


def _shape_words(shape: Shape | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


def plan_shards(sizes: Sequence[int], limit: int) -> list[range]:
    """Divide tensors into consecutive shards of at most `limit` bytes; return their indices.

    A tensor of more bytes gets a shard of its own.
    """
    ranges, start, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            ranges.append(range(start, index))
            start, total = index, 0
        total += size
    return [*ranges, range(start, len(sizes))]

"""Turn the folder `step_N.partial`, in which all files are written, into a checkpoint."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from frontier_llm.checkpoint.folders import (
    MANIFEST,
    partial_folder,
    remove_folder,
    step_folder,
    sync_folder,
)
from frontier_llm.checkpoint.kill_points import reach
from frontier_llm.checkpoint.manifest import File, Manifest
from frontier_llm.errors import CheckpointError


def check_files(partial: Path, files: Mapping[str, File]) -> None:
    """Check that all written files are in the folder, and remove files of an earlier attempt.

    Raises:
        CheckpointError: a file is absent or has another size.
    """
    size_of = {path.name: path.stat().st_size for path in partial.iterdir()}
    for name, file in files.items():
        if size_of.get(name) != file.size:
            found = f"has {size_of[name]} bytes" if name in size_of else "is not there"
            raise CheckpointError(
                f"rank 0 cannot see what another rank wrote: {partial / name} {found} and should "
                f"have {file.size}; run.dir must be on a file system that all nodes share"
            )
    for name in size_of.keys() - files.keys():
        (partial / name).unlink()


def write_manifest(partial: Path, manifest: Manifest, rank: int) -> None:
    """Write the manifest in two halves, so that tests can kill the process between them."""
    content = manifest.to_bytes()
    middle = len(content) // 2
    with (partial / MANIFEST).open("wb") as stream:
        stream.write(content[:middle])
        stream.flush()
        reach("manifest.half", rank)
        stream.write(content[middle:])
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(partial)
    reach("manifest.synced", rank)


def publish(folder: Path, step: int) -> None:
    """Give the folder its final name, and replace an existing checkpoint of the same step."""
    final = folder / step_folder(step)
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if replaced.exists():
            remove_folder(replaced)
        final.rename(replaced)
    (folder / partial_folder(step)).rename(final)
    sync_folder(folder)
    with contextlib.suppress(OSError):  # the new checkpoint is committed even if this fails
        remove_folder(replaced)

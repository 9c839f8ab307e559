"""Measure how fast a run resumes from a checkpoint whose parts lie at several levels.

    python -m benchmarks.bench_restore_levels                       # 155 MB of states, 9 minutes
    python -m benchmarks.bench_restore_levels --quick               # a smoke test
    python -m benchmarks.bench_restore_levels --rounds 5 --json FILE

Four ranks on two nodes train a GPT of 13M parameters and save it. Then parts of the checkpoint are
removed, and a run with tensor=2 instead of data parallelism alone resumes from what is left:
    run directory   the nodes' disks are lost
    own disks       the run directory is lost; the layout is the old one
    both disks      the run directory is lost
    disk and copy   the run directory and node 1 are lost; the next node has its copy
    disk and rest   node 1 and all copies are lost; the run directory has the rest
    copied first    as `both disks`, but all files are copied to the run directory and read there
Each node's disk and the run directory pass a given number of bytes per second, which all ranks
share: a rank sleeps after each read and write until the level would have passed it. Bytes that a
rank of the same node has read before through the page cache are not read from the level again. The
table shows medians over rounds: bytes of the states on each level (predicted from the manifest),
bytes that the levels have passed, seconds to resume, and the rate, as a share of the rate of the
slowest level that is used. The rate counts each byte of the states once.
"""

import fcntl
import importlib
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # pools do not survive a fork

import torch.distributed as dist
from rich.table import Table

from benchmarks.bench_drain import SIZE
from benchmarks.bench_options import bench_parser
from benchmarks.faults.kill_loop import OVERRIDES, train, write_corpus
from benchmarks.faults.kills.forked_run import ForkedRun
from benchmarks.testbed import machine
from frontier_llm.checkpoint.discovery import Checkpoint
from frontier_llm.checkpoint.manifest import Manifest
from frontier_llm.checkpoint.peer_files import PeerServer
from frontier_llm.checkpoint.range_reader import FileRange, RangeReader
from frontier_llm.checkpoint.rank_file import RankFile
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import run_command
from frontier_llm.errors import TrainingError
from frontier_llm.trainer.node_assembly import NodeAssembly
from frontier_llm.trainer.resume import Restorer

RATES = {"disk 0": 30e6, "disk 1": 30e6, "run directory": 20e6}
"""Bytes per second that each level passes."""
RANKS_PER_NODE = 2
LAYOUT = ("launch.ranks=4", f"launch.ranks_per_node={RANKS_PER_NODE}")
OTHER = ("parallel.tensor=2",)
SAVED, LAST = 2, 3
"""The step that is resumed from, and the last step."""
CONTENDERS = (
    "run directory", "own disks", "both disks", "disk and copy", "disk and rest", "copied first",
)  # fmt: skip


class Levels:
    """The levels, whose rates all processes share."""

    def __init__(self, folder: Path, rates: dict[str, float]) -> None:
        self._folder, self._rates = folder, rates
        folder.mkdir()
        for name in rates:
            (folder / name).write_bytes(bytes(32))

    def read(self, path: Path, start: int, count: int, *, is_direct: bool) -> None:
        """Sleep until some bytes would be in the memory of this rank's node.

        Args:
            path: the file.
            start: first byte.
            count: number of bytes.
            is_direct: whether the read bypasses the page cache.
        """
        if is_direct:
            self.pass_bytes(path, count, reads=True)
            return
        node = dist.get_rank() // RANKS_PER_NODE
        name = "-".join((str(node), *path.parts[-4:], str(start)))
        mark = self._folder / name.replace("/", "-")
        with mark.open("a+") as stream:  # the first reader holds the lock until the bytes are there
            fcntl.flock(stream, fcntl.LOCK_EX)
            if not mark.stat().st_size:
                self.pass_bytes(path, count, reads=True)
                stream.write("read")
                stream.flush()

    def pass_bytes(self, path: Path, count: int, *, reads: bool) -> None:
        """Sleep until the level of a file would have passed some bytes, and count them."""
        name = level_of(path)
        with (self._folder / name).open("r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            free, read, written, _ = struct.unpack("dddd", stream.read(32))
            end = max(free, time.monotonic()) + count / self._rates[name]
            stream.seek(0)
            read, written = read + count * reads, written + count * (not reads)
            stream.write(struct.pack("dddd", end, read, written, 0))
        time.sleep(max(0.0, end - time.monotonic()))

    def passed(self) -> dict[str, tuple[float, float]]:
        """Return the bytes read and written, by level."""
        found = {name: struct.unpack("dddd", (self._folder / name).read_bytes()) for name in RATES}
        return {name: (read, written) for name, (_, read, written, _) in found.items()}


def level_of(path: Path) -> str:
    """Return the level of a checkpoint's file."""
    if "disks" not in path.parts:
        return "run directory"
    folder = path.parent.parent.name
    node = int(folder[-5:])
    return f"disk {(node + 1) % 2 if folder.startswith('copy') else node}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = bench_parser(
        __doc__, rounds=3, folder_for="folder of all checkpoints", quick="a tiny model, one round"
    )
    options = parser.parse_args(arguments)
    for module in ("frontier_llm.cli.train", "frontier_llm.trainer.assemble"):
        importlib.import_module(module)  # once, before the forks
    size = () if options.quick else SIZE
    rates = {name: rate / (25 if options.quick else 1) for name, rate in RATES.items()}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="bench_restore_", dir=options.folder) as name:
        folder = Path(name)
        data = (f"data.path={write_corpus(folder)}", f"data.directory={folder}/corpora")
        bench = Bench(folder, (*OVERRIDES, *size, *data, *LAYOUT, f"trainer.steps={LAST}"), rates)
        bench.save()
        for _ in range(1 if options.quick else options.rounds):
            for contender in CONTENDERS:
                rows[contender].append(bench.resume(contender))
    results = [_row(name, rows[name]) for name in CONTENDERS]
    wide_console().print(_table(results))
    if options.json:
        options.json.write_text(json.dumps({"rates": rates, "contenders": results}, indent=1))
    return 0


class Bench:
    """A saved run, of which copies are resumed."""

    def __init__(self, folder: Path, overrides: Sequence[str], rates: dict[str, float]) -> None:
        self._folder, self._overrides, self._rates = folder, overrides, rates

    def save(self) -> None:
        """Train, and keep what a run leaves that is killed after its second step."""
        keys = ("checkpoint.every_steps=2", "checkpoint.tiers.local.every_steps=2")
        self._train(train, *keys, "checkpoint.partner=true")
        shutil.rmtree(self._run / "checkpoints" / f"step_{LAST:08d}")
        shutil.copytree(self._place, self._folder / "kept")

    def resume(self, contender: str) -> dict[str, Any]:
        """Resume once; return the seconds, and the bytes of each level."""
        shutil.rmtree(self._place)
        shutil.copytree(self._folder / "kept", self._place)
        (root,) = (self._place / "disks").iterdir()
        if contender == "run directory":
            shutil.rmtree(root)
        elif contender != "disk and rest":
            shutil.rmtree(self._run / "checkpoints")
        if contender in ("disk and copy", "disk and rest"):
            for lost in ("node_00001", "copy_of_node_00000"):
                shutil.rmtree(root / lost)
        if contender not in ("disk and copy", "run directory"):
            for copy in root.glob("copy_of_*"):
                shutil.rmtree(copy)
        predicted = _predict(self._place, contender)
        levels, result = Levels(self._folder / "levels", self._rates), self._folder / "seconds"
        layout = () if contender == "own disks" else OTHER
        function = partial(_resume, levels, result, contender == "copied first")
        self._train(function, *layout, "checkpoint=off", "run.resume=required")
        seconds, passed = json.loads(result.read_text())
        shutil.rmtree(self._folder / "levels")
        slowest = min(self._rates[name] for name in predicted)
        return {
            "seconds": seconds,
            "predicted": predicted,
            "read": {name: read for name, (read, _) in passed.items()},
            "written": {name: written for name, (_, written) in passed.items()},
            "share": sum(predicted.values()) / seconds / slowest,
        }

    @property
    def _place(self) -> Path:
        return self._folder / "place"

    @property
    def _run(self) -> Path:
        return self._place / "run"

    def _train(self, function: Callable[[Sequence[str]], int], *keys: str) -> None:
        self._place.mkdir(exist_ok=True)
        disks = f"checkpoint.tiers.local.path={self._place}/disks"
        log = self._folder / "log"
        run = ForkedRun(function, (*self._overrides, f"run.dir={self._run}", disks, *keys), log)
        try:
            run.wait_for_end()
        finally:
            run.end()
        if run.exit_code():
            raise TrainingError(f"a run failed:\n{log.read_text()[-2000:]}")


def _predict(place: Path, contender: str) -> dict[str, int]:
    """Return the bytes of the states that lie on each level, each element once."""
    held: dict[str, int] = {}
    seen: set[tuple[Any, ...]] = set()
    folders = sorted((place / "disks").glob(f"*/*/step_{SAVED:08d}"), reverse=True)
    folders += sorted((place / "run" / "checkpoints").glob(f"step_{SAVED:08d}"))
    for folder in folders:
        for name, tensor in Manifest.load(folder).tensors.items():
            for stored in tensor.stored_ranges:
                key = (name, stored.start, stored.first)
                level = level_of(folder / stored.file)
                if key not in seen:
                    seen.add(key)
                    held[level] = held.get(level, 0) + 4 * stored.count * len(stored.keys)
    return held


def _resume(levels: Levels, result: Path, copies_first: bool, overrides: Sequence[str]) -> int:
    """Resume in this process and its forks, with levels of limited rates."""
    fill, served, write = RangeReader._fill, PeerServer._read, RankFile._write
    restore = Restorer.restore

    def slow_fill(self: RangeReader, opened: int, path: Path, range_: FileRange, to: Any) -> None:
        fill(self, opened, path, range_, to)
        is_direct = bool(self._flags & os.O_DIRECT)
        levels.read(path, range_.first_page, range_.pages_bytes, is_direct=is_direct)

    def slow_served(self: PeerServer, name: str, offset: int, content: memoryview) -> int:
        levels.read(self._files[name], offset, len(content), is_direct=False)
        return served(self, name, offset, content)

    def slow_write(self: RankFile, content: memoryview) -> None:
        write(self, content)
        levels.pass_bytes(self._path, len(content), reads=False)

    def timed(self: Restorer, before: int | None = None) -> Any:
        begin = time.monotonic()
        resumed = restore(self, before)
        seconds = time.monotonic() - begin
        if self._world.rank == 0:
            result.write_text(json.dumps([seconds, levels.passed()]))
        return resumed

    for owner, name, function in (
        (RangeReader, "_fill", slow_fill), (PeerServer, "_read", slow_served),
        (RankFile, "_write", slow_write), (Restorer, "restore", timed),
    ):  # fmt: skip
        setattr(owner, name, function)
    if copies_first:

        def copied(self: NodeAssembly, after: int, shared: Any = None) -> Checkpoint | None:
            folder = self.assemble(after)
            return None if folder is None else Checkpoint.open(folder)

        NodeAssembly.find = copied  # type: ignore[method-assign]
    return train(overrides)


def _row(name: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = [row["seconds"] for row in found]
    shares = [row["share"] for row in found]
    return {
        "contender": name,
        "predicted_bytes": found[0]["predicted"],
        "read_bytes": found[0]["read"],
        "written_bytes": found[0]["written"],
        "seconds": statistics.median(seconds),
        "seconds_range": [min(seconds), max(seconds)],
        "share_of_slowest": statistics.median(shares),
        "share_range": [min(shares), max(shares)],
    }


def _table(results: Sequence[dict[str, Any]]) -> Table:
    levels = list(RATES)
    headings = ("contender", *(f"predicted, {level}" for level in levels), "read", "written",
                "seconds", "share of the slowest level")  # fmt: skip
    table = Table(*headings, title=machine.about()["processor"])
    for row in results:
        low, high = row["share_range"]
        table.add_row(
            row["contender"],
            *(f"{row['predicted_bytes'].get(level, 0) / 1e6:.1f} MB" for level in levels),
            f"{sum(row['read_bytes'].values()) / 1e6:.1f} MB",
            f"{sum(row['written_bytes'].values()) / 1e6:.1f} MB",
            f"{row['seconds']:.2f}",
            f"{row['share_of_slowest']:.0%} ({low:.0%} to {high:.0%})",
        )
    return table


if __name__ == "__main__":
    sys.exit(run_command(main))

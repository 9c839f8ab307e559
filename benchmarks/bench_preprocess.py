"""Compare the tokenization of text with Megatron-LM and Hugging Face: tokens/s and peak memory.

    python -m benchmarks.bench_preprocess                    # 200 MB of text, 2 workers, 3 rounds
    python -m benchmarks.bench_preprocess --peer-python VENV/bin/python --json bench.json

Contenders take turns, each in a new process (benchmarks/peers/preprocess_peers.py):

  ours         the same work as frontier-llm preprocess: tokens, digests, split into training and
               validation, index and manifest
  megatron     megatron-core's IndexedDatasetBuilder, which receives tokens from a multiprocessing
               pool with the same sentencepiece model
  huggingface  datasets.map with a fast tokenizer that has the same vocabulary size, if datasets and
               tokenizers are installed in this environment or in that of --peer-python

The text is taken from this machine: source code, headers and documentation below this environment
and /usr, each file once, one line per file. Times start at the call and end with the last byte
written; imports and the training of tokenizers are not included. CPU seconds add up all processes
of a contender; on a shared machine they are more reliable than times. Memory is the peak of the
summed proportional set sizes of all processes (a page shared by k processes counts 1/k), sampled
ten times per second.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from benchmarks.harness import (
    MEGA,
    ROOT,
    Contender,
    bench_parser,
    fixed,
    mebibytes,
    print_table,
    take_turns,
    work_folder,
    write_json,
)
from frontier_lab.option_values import positive
from frontier_llm.cli.options import at_least, run_command
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.errors import ConfigError, TrainingError
from frontier_llm.units import MIB

TEXT_SUFFIXES = {".py", ".h", ".hpp", ".txt", ".md", ".rst", ".pyi", ".c", ".cpp", ".js", ".html"}
LARGEST_FILE_BYTES = MIB
"""Larger files are not used as text."""
TOKENIZER_TEXT_BYTES = 16 * MIB
"""Amount of text on which the tokenizers are trained."""
SAMPLE_SECONDS = 0.1
"""Interval at which memory is sampled."""


COLUMNS = ("contender", "seconds", "min..max", "CPU s", "MB/s", "tokens/s", "of ours",
           "CPU of ours", "peak MiB")  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Measurements of one contender in a turn."""

    seconds: float
    cpu_seconds: float
    """CPU time of all processes."""
    tokens: int
    peak_bytes: int
    """Peak memory of all processes together."""


Preprocessor = Contender[Figures]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print and write its results; return 1 if a contender failed."""
    options = _options(arguments)
    with work_folder("bench_preprocess", options.folder) as folder:
        text_bytes = make_input(folder / "input.jsonl", options.megabytes * MEGA)
        print(f"{text_bytes / MEGA:.0f} MB of text, {options.workers} workers")
        contenders = [
            Contender(name, partial(turn, name, python, folder, options.workers))
            for name, python in make_models(folder, options).items()
        ]
        take_turns(contenders, options.rounds)
    cells = [cells_of(one, contenders[0], text_bytes) for one in contenders]
    print_table("preprocessing", COLUMNS, cells)
    rows = [
        {"contender": one.name, "error": one.error, "rounds": [asdict(turn) for turn in one.rounds]}
        for one in contenders
    ]
    write_json(options, {"text_bytes": text_bytes, "rows": rows})
    return 1 if any(one.error for one in contenders) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, rounds=3, folder_for="in which to work")
    add = parser.add_argument
    add("--megabytes", type=positive, default=200, help="size of the text (default 200)")
    add("--workers", type=at_least(1), default=2, help="worker processes (default 2)")
    add("--vocabulary", type=at_least(1), default=32000,
        help="size of the vocabulary in tokens (default 32000)")  # fmt: skip
    add("--peer-python", metavar="FILE", help="Python interpreter with datasets and tokenizers")
    options = parser.parse_args(arguments)
    if options.peer_python and not shutil.which(options.peer_python):
        raise ConfigError("--peer-python", options.peer_python, "a program", "name an interpreter")
    return options


def make_input(path: Path, wanted_bytes: float) -> int:
    """Write text files of this machine as JSONL, up to `wanted_bytes`; return the bytes of text."""
    size, seen = 0, set[bytes]()
    with path.open("w", encoding="utf-8") as stream:
        for file in text_files():
            with suppress(OSError, UnicodeDecodeError):
                content = file.read_bytes()
                digest = hashlib.sha256(content).digest()
                if not content or digest in seen:
                    continue
                stream.write(json.dumps({"text": content.decode()}, ensure_ascii=False) + "\n")
                seen.add(digest)
                size += len(content)
            if size >= wanted_bytes:
                break
    return size


def text_files() -> Iterator[Path]:
    """Yield the text files of this machine in a shuffled but fixed order."""
    roots = (Path(sys.prefix, "lib"), Path("/usr"))
    found = (
        Path(folder, name)
        for root in roots
        for folder, _, names in os.walk(root)
        for name in names
        if Path(name).suffix in TEXT_SUFFIXES
    )
    small = [path for path in found if 0 < path.lstat().st_size <= LARGEST_FILE_BYTES]
    return iter(sorted(small, key=lambda path: hashlib.sha256(os.fsencode(path)).digest()))


def make_models(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Train both tokenizers on the same text; return the Python interpreter of each contender."""
    texts = sample_texts(folder)
    train_tokenizer(texts, options.vocabulary, folder / "tokenizer.model")
    pythons = {"ours": sys.executable, "megatron": sys.executable}
    (folder / "sample.txt").write_text("\n".join(texts), encoding="utf-8")
    peer = options.peer_python or sys.executable
    arguments = [peer, "-c", _TRAIN_FAST, str(folder), str(options.vocabulary)]
    if subprocess.run(arguments, capture_output=True).returncode == 0:
        pythons["huggingface"] = peer
    else:
        print("datasets and tokenizers are not installed: huggingface is skipped")
    return pythons


def sample_texts(folder: Path) -> list[str]:
    """Return the first texts of the input, on which tokenizers are trained."""
    texts, size = [], 0
    with (folder / "input.jsonl").open(encoding="utf-8") as lines:
        while size < TOKENIZER_TEXT_BYTES and (line := lines.readline()):
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
    return texts


_TRAIN_FAST = """
import sys
import datasets
from tokenizers import ByteLevelBPETokenizer
tokenizer = ByteLevelBPETokenizer()
tokenizer.train([sys.argv[1] + "/sample.txt"], vocab_size=int(sys.argv[2]),
                special_tokens=["</s>"], show_progress=False)
tokenizer.save(sys.argv[1] + "/tokenizer.json")
"""


def turn(name: str, python: str, folder: Path, workers: int) -> Figures:
    """Run a contender once with its Python interpreter, measure it, and delete its output.

    `folder` has the text and the tokenizers.

    Raises:
        TrainingError: it failed; the message is the last line of its output.
    """
    shutil.rmtree(folder / name, ignore_errors=True)
    command = [python, "-m", "benchmarks.peers.preprocess_peers", name, str(folder), str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    peak_bytes = 0
    while process.poll() is None:
        peak_bytes = max(peak_bytes, _tree_bytes(process.pid))
        time.sleep(SAMPLE_SECONDS)
    output, errors = process.communicate()
    shutil.rmtree(folder / name, ignore_errors=True)
    if process.returncode:
        lines = errors.decode().strip().splitlines()  # empty if the process was killed
        raise TrainingError(lines[-1] if lines else f"ended with exit code {process.returncode}")
    found = json.loads(output.decode().strip().splitlines()[-1])
    return Figures(found["seconds"], found["cpu_seconds"], found["tokens"], peak_bytes)


def _tree_bytes(pid: int) -> int:
    """Return the summed proportional set sizes of a process and its children."""
    total = 0
    with suppress(psutil.Error, OSError):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                total += process.memory_full_info().pss
    return total


def cells_of(one: Preprocessor, ours: Preprocessor, text_bytes: int) -> list[str]:
    """Return the row of a contender; `of ours` is a time divided by ours, median over rounds."""
    if not one.rounds:
        return [one.name, f"failed: {one.error}"]
    every = one.values(lambda turn: turn.seconds)
    seconds = median(every)
    of_ours = one.ratios(ours, lambda turn: turn.seconds)
    cpu_of_ours = one.ratios(ours, lambda turn: turn.cpu_seconds)
    return [
        one.name,
        f"{seconds:.1f}",
        f"{min(every):.1f}..{max(every):.1f}",
        fixed(one.median(lambda turn: turn.cpu_seconds), 1),
        f"{text_bytes / seconds / MEGA:.1f}",
        f"{one.rounds[-1].tokens / seconds:,.0f}",
        fixed(median(of_ours) if of_ours else None),
        fixed(median(cpu_of_ours) if cpu_of_ours else None),
        mebibytes(max(one.values(lambda turn: turn.peak_bytes))),
    ]


if __name__ == "__main__":
    sys.exit(run_command(main))

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
ten times per second. At the end, ours also runs on a quarter of the text, which shows whether its
memory grows with the input.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.box import HORIZONTALS
from rich.table import Table

from benchmarks.bench_options import bench_parser
from benchmarks.testbed import machine
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import at_least, positive, run_command
from frontier_llm.data.sentencepiece_tokenizer import train_tokenizer
from frontier_llm.errors import ConfigError
from frontier_llm.units import MIB

ROOT = Path(__file__).resolve().parents[1]
TEXT_SUFFIXES = {".py", ".h", ".hpp", ".txt", ".md", ".rst", ".pyi", ".c", ".cpp", ".js", ".html"}
LARGEST_FILE_BYTES = MIB
"""Larger files are not used as text."""
TOKENIZER_TEXT_BYTES = 16 * MIB
"""Amount of text on which the tokenizers are trained."""
MEGA = 1e6
SAMPLE_SECONDS = 0.1
"""Interval at which memory is sampled."""


@dataclass
class Outcome:
    """Measurements of one contender."""

    name: str
    seconds: list[float] = field(default_factory=list)
    """Time of each round."""
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time of all processes in each round."""
    tokens: int = 0
    """Number of tokens that one round writes."""
    peak_bytes: int = 0
    """Peak memory of all processes together, over all rounds."""
    error: str = ""
    """Why the contender failed; empty if it did not."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print and write its results; return 1 if a contender failed."""
    options = _options(arguments)
    console = wide_console()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench_preprocess_") as name:
        folder = Path(name)
        text_bytes = make_input(folder / "input.jsonl", options.megabytes * MEGA)
        console.print(f"{text_bytes / MEGA:.0f} MB of text, {options.workers} workers")
        pythons = make_models(folder, options)
        outcomes = {name: Outcome(name) for name in pythons}
        for _ in range(options.rounds):
            for name, python in pythons.items():
                turn(outcomes[name], python, folder, options.workers)
        small = folder / "small"
        small.mkdir()
        make_input(small / "input.jsonl", options.megabytes * MEGA / 4)
        shutil.copy(folder / "tokenizer.model", small)
        quarter = Outcome("ours, a quarter of the text")
        turn(quarter, sys.executable, small, options.workers, "ours")
    console.print(make_table(list(outcomes.values()), text_bytes))
    console.print(
        f"ours on a quarter of the text: peak {quarter.peak_bytes / MIB:.0f} MiB, on all of it "
        f"{outcomes['ours'].peak_bytes / MIB:.0f} MiB"
    )
    all_outcomes = (*outcomes.values(), quarter)
    if options.json:
        rows = [asdict(outcome) for outcome in all_outcomes]
        facts = {**machine.about(), "text_bytes": text_bytes, "workers": options.workers,
                 "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1))
    return 1 if any(outcome.error for outcome in all_outcomes) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, rounds=3, folder_for="in which to work")
    add = parser.add_argument
    add("--megabytes", type=positive, default=200, help="size of the text (default 200)")
    add("--workers", type=at_least(1), default=2, help="worker processes (default 2)")
    add(
        "--vocabulary",
        type=at_least(1),
        default=32000,
        help="size of the vocabulary in tokens (default 32000)",
    )
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


def turn(
    outcome: Outcome, python: str, folder: Path, workers: int, contender: str | None = None
) -> None:
    """Run a contender once, measure it, and delete its output.

    Args:
        outcome: receives the measurements.
        python: interpreter of the contender.
        folder: folder with the text and the tokenizers.
        workers: number of worker processes.
        contender: name of the contender, if it is not that of the outcome.
    """
    name = contender or outcome.name
    shutil.rmtree(folder / name, ignore_errors=True)
    command = [python, "-m", "benchmarks.peers.preprocess_peers", name, str(folder), str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while process.poll() is None:
        outcome.peak_bytes = max(outcome.peak_bytes, _tree_bytes(process.pid))
        time.sleep(SAMPLE_SECONDS)
    output, errors = process.communicate()
    shutil.rmtree(folder / name, ignore_errors=True)
    if process.returncode:
        lines = errors.decode().strip().splitlines()  # empty if the process was killed
        outcome.error = lines[-1] if lines else f"ended with exit code {process.returncode}"
        return
    figures = json.loads(output.decode().strip().splitlines()[-1])
    outcome.seconds.append(figures["seconds"])
    outcome.cpu_seconds.append(figures["cpu_seconds"])
    outcome.tokens = figures["tokens"]


def _tree_bytes(pid: int) -> int:
    """Return the summed proportional set sizes of a process and its children."""
    total = 0
    with suppress(psutil.Error, OSError):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                total += process.memory_full_info().pss
    return total


def make_table(outcomes: Sequence[Outcome], text_bytes: int) -> Table:
    """Return the table; `of ours` is a time divided by ours, as the median over rounds."""
    table = Table(title="preprocessing", title_justify="left", box=HORIZONTALS, pad_edge=False)
    table.add_column("contender")
    headings = ("seconds", "min..max", "CPU s", "MB/s", "tokens/s", "of ours", "CPU of ours",
                "peak MiB")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="right")
    ours = outcomes[0]
    for outcome in outcomes:
        if not outcome.seconds:
            table.add_row(outcome.name, f"failed: {outcome.error}")
            continue
        seconds = statistics.median(outcome.seconds)
        table.add_row(
            outcome.name,
            f"{seconds:.1f}",
            f"{min(outcome.seconds):.1f}..{max(outcome.seconds):.1f}",
            f"{statistics.median(outcome.cpu_seconds):.1f}",
            f"{text_bytes / seconds / MEGA:.1f}",
            f"{outcome.tokens / seconds:,.0f}",
            _times(outcome.seconds, ours.seconds),
            _times(outcome.cpu_seconds, ours.cpu_seconds),
            f"{outcome.peak_bytes / MIB:.0f}",
        )
    return table


def _times(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Return the median ratio of two series of times, round by round."""
    ratios = [their / our for their, our in zip(theirs, ours, strict=False)]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


if __name__ == "__main__":
    sys.exit(run_command(main))

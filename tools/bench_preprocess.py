"""Compare preprocessing with Megatron's way and Hugging Face's: tokens/s and peak memory.

    python tools/bench_preprocess.py                       # 200 MB of text, 2 workers, 3 rounds
    python tools/bench_preprocess.py --peer-python VENV/bin/python --json bench.json

Contenders take turns, each in a process of its own (tools/bench/preprocess_peers.py):

  ours         tools/preprocess.py's work, digests, split, index and manifest included
  megatron     megatron-core's IndexedDatasetBuilder fed by a multiprocessing pool over the same
               sentencepiece model
  huggingface  datasets.map over a fast tokenizer of the same size, where both are installed (in
               this environment, or in that of --peer-python)

The text is what lies on this machine: source, headers and documentation below this environment
and /usr, each file once, a line a file. The time is from the call to the last byte, imports and
training of the tokenizers left out. CPU seconds are those of all its processes: on a machine that
others use too they tell more than the time does. Memory is the highest sum of the processes'
proportional set sizes (pages shared by k processes count 1/k), sampled ten times a second. A last
run of ours on a quarter of the text shows whether memory grows with the input.
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

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from rich.box import HORIZONTALS
from rich.table import Table

from frontier_llm.data.tokenizer import train_tokenizer
from frontier_llm.errors import ConfigError
from frontier_llm.units import MIB
from tools.bench import machine
from tools.console import wide_console
from tools.options import at_least, bench_parser, ending, positive

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {".py", ".h", ".hpp", ".txt", ".md", ".rst", ".pyi", ".c", ".cpp", ".js", ".html"}
LARGEST_FILE_BYTES = MIB
TOKENIZER_TEXT_BYTES = 16 * MIB
MEGA = 1e6
SAMPLE_SECONDS = 0.1


@dataclass
class Outcome:
    """One contender's turns."""

    name: str
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    peak_bytes: int = 0
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; return 1 if a contender failed."""
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
    every = (*outcomes.values(), quarter)
    if options.json:
        rows = [asdict(outcome) for outcome in every]
        facts = {**machine.about(), "text_bytes": text_bytes, "workers": options.workers,
                 "rows": rows}  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1))
    return 1 if any(outcome.error for outcome in every) else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, rounds=3, folder_for="in which to work")
    add = parser.add_argument
    add("--megabytes", type=positive, default=200, help="of text (default 200)")
    add("--workers", type=at_least(1), default=2, help="processes (default 2)")
    add("--pieces", type=at_least(1), default=32000, help="vocabulary (default 32000)")
    add("--peer-python", metavar="FILE", help="an interpreter with datasets and tokenizers")
    options = parser.parse_args(arguments)
    if options.peer_python and not shutil.which(options.peer_python):
        raise ConfigError("--peer-python", options.peer_python, "a program", "name another one")
    return options


def make_input(path: Path, wanted_bytes: float) -> int:
    """Write a line a text file of this machine until there is enough; return the bytes of text."""
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
    """Yield the text files of this machine in a mixed but fixed order."""
    roots = (Path(sys.prefix, "lib"), Path("/usr"))
    found = (
        Path(folder, name)
        for root in roots
        for folder, _, names in os.walk(root)
        for name in names
        if Path(name).suffix in SUFFIXES
    )
    small = [path for path in found if 0 < path.lstat().st_size <= LARGEST_FILE_BYTES]
    return iter(sorted(small, key=lambda path: hashlib.sha256(os.fsencode(path)).digest()))


def make_models(folder: Path, options: argparse.Namespace) -> dict[str, str]:
    """Train both tokenizers on the same text; return the interpreter of each contender."""
    texts, size = [], 0
    with (folder / "input.jsonl").open(encoding="utf-8") as lines:
        while size < TOKENIZER_TEXT_BYTES and (line := lines.readline()):
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
    train_tokenizer(texts, options.pieces, folder / "tokenizer.model")
    pythons = {"ours": sys.executable, "megatron": sys.executable}
    (folder / "sample.txt").write_text("\n".join(texts), encoding="utf-8")
    peer = options.peer_python or sys.executable
    arguments = [peer, "-c", _TRAIN_FAST, str(folder), str(options.pieces)]
    if subprocess.run(arguments, capture_output=True).returncode == 0:
        pythons["huggingface"] = peer
    else:
        print("datasets and tokenizers are not installed: no turn for huggingface")
    return pythons


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
    """Let a contender run once, and clear what it made."""
    name = contender or outcome.name
    shutil.rmtree(folder / name, ignore_errors=True)
    command = [python, "-m", "tools.bench.preprocess_peers", name, str(folder), str(workers)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while process.poll() is None:
        outcome.peak_bytes = max(outcome.peak_bytes, _tree_bytes(process.pid))
        time.sleep(SAMPLE_SECONDS)
    said, errors = process.communicate()
    shutil.rmtree(folder / name, ignore_errors=True)
    if process.returncode:
        words = errors.decode().strip().splitlines()  # none of one that was killed
        outcome.error = words[-1] if words else f"ended with exit code {process.returncode}"
        return
    figures = json.loads(said.decode().strip().splitlines()[-1])
    outcome.seconds.append(figures["seconds"])
    outcome.cpu_seconds.append(figures["cpu_seconds"])
    outcome.tokens = figures["tokens"]


def _tree_bytes(pid: int) -> int:
    """Add up the proportional set sizes of a process and its children."""
    total = 0
    with suppress(psutil.Error, OSError):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.Error, OSError):
                total += process.memory_full_info().pss
    return total


def make_table(outcomes: Sequence[Outcome], text_bytes: int) -> Table:
    """Lay the outcomes out; `of ours` is how many times our time it took, round by round."""
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
    ratios = [a / b for a, b in zip(theirs, ours, strict=False)]
    return f"{statistics.median(ratios):.2f}" if ratios else "-"


if __name__ == "__main__":
    sys.exit(ending(main))

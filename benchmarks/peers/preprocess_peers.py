"""Contenders of benchmarks/bench_preprocess.py, which convert a JSONL file to tokens on disk.

Usage: python -m benchmarks.peers.preprocess_peers NAME FOLDER WORKERS

Each contender runs in a separate process, so that its time and memory can be measured and it may
use another environment. It reads FOLDER/input.jsonl and the trained models in FOLDER, writes to
FOLDER/NAME, and prints one line of JSON with its seconds, CPU seconds and number of tokens. Each
function of this module that runs a contender returns the number of tokens.
"""

import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALIDATION_PERCENT = 1.0
"""Share of the documents that ours puts into the validation split."""
CHUNK_LINES = 32
"""Lines per task of Megatron-LM's pool, the default of its tool."""
_STATE: dict[str, Any] = {}
"""State of a pool's worker, set by its initialiser."""


def ours(folder: Path, workers: int) -> int:
    """Run frontier_llm.data.prepare, which tokenizes parts of the text in parallel."""
    from frontier_llm.cli.compose import compose
    from frontier_llm.config.data import DataConfig
    from frontier_llm.data.prepare import prepare
    from frontier_llm.data.prepared_corpus import open_corpus

    overrides = [
        "data=text", f"data.path={folder}/input.jsonl", f"data.directory={folder}/ours",
        f"data.tokenizer={folder}/tokenizer.model",
        f"data.validation_percent={VALIDATION_PERCENT}",
    ]  # fmt: skip
    config = DataConfig.model_validate(compose(overrides)["data"])
    manifest = open_corpus(prepare(config, workers=workers)).manifest
    return manifest.train.tokens + manifest.validation.tokens


def megatron(folder: Path, workers: int) -> int:
    """Run megatron-core's builder, fed by a pool that uses the same sentencepiece model.

    This is the scheme of Megatron-LM's tool: workers parse and encode lines, and the parent adds
    documents to the builder.
    """
    import sentencepiece
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    model = str(folder / "tokenizer.model")
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=model).vocab_size()
    prefix = folder / "megatron" / "text_document"
    prefix.parent.mkdir()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocabulary))
    tokens = 0
    with (
        (folder / "input.jsonl").open(encoding="utf-8") as lines,
        multiprocessing.Pool(workers, _load_sentencepiece, (model,)) as pool,
    ):
        for ids in pool.imap(_encode_line, lines, CHUNK_LINES):
            builder.add_document(ids, [len(ids)])
            tokens += len(ids)
    builder.finalize(f"{prefix}.idx")
    return tokens


def huggingface(folder: Path, workers: int) -> int:
    """Run datasets.map with a fast tokenizer.

    The tokenizer is a byte-level BPE, which was trained on the same text with the same vocabulary
    size as the tokenizer of the other contenders.
    """
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    cache = str(folder / "huggingface")
    lines = datasets.load_dataset(
        "json", data_files=str(folder / "input.jsonl"), split="train", cache_dir=cache
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("</s>")

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        ids = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(batch["text"])]
        return {"ids": ids, "count": [len(document) for document in ids]}

    encoded = lines.map(encode, batched=True, num_proc=workers, remove_columns=lines.column_names)
    return sum(encoded["count"])


CONTENDERS: dict[str, Callable[[Path, int], int]] = {
    "ours": ours,
    "megatron": megatron,
    "huggingface": huggingface,
}


def _load_sentencepiece(model: str) -> None:
    """Load the tokenizer in a worker of the pool."""
    import sentencepiece

    _STATE["tokenizer"] = sentencepiece.SentencePieceProcessor(model_file=model)


def _encode_line(line: str) -> list[int]:
    tokenizer = _STATE["tokenizer"]
    return [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_id()]


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    """Run one contender and print its measurements."""
    name, folder, workers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    start, cpu_before = time.perf_counter(), _cpu_seconds()
    tokens = CONTENDERS[name](folder, workers)
    figures = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": _cpu_seconds() - cpu_before,
        "tokens": tokens,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

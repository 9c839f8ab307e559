"""Show what a run reads: `python tools/inspect_data.py RUN_DIR INDEX [INDEX ...]`.

INDEX is a sample's number: step t of a run reads data.global_batch samples from (t - 1) *
data.global_batch on; RUN_DIR/ledger.jsonl has each step's `first_sample`. Prints the text of each
sample, where it stands in the corpus, and from which documents of which files it comes; of an
encoder-decoder also what the encoder reads and what the decoder is to say. `--validation` shows
the other split.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.text import Text

from frontier_llm.config import RunConfig
from frontier_llm.config.reading import SENTINELS
from frontier_llm.data.batch import Seq2SeqBatch
from frontier_llm.data.blend import Schedule
from frontier_llm.data.corpora import Corpora, open_data, schedule_of
from frontier_llm.data.origins import find_origins
from frontier_llm.data.reading import make_batch_maker, window_corpus
from frontier_llm.errors import DataError
from frontier_llm.trainer.ledger import blend_of
from tools.console import wide_console
from tools.one_rank import read_config
from tools.options import ending


def main(arguments: Sequence[str] | None = None) -> int:
    """Print samples; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("indices", type=int, nargs="+", metavar="INDEX", help="of a sample")
    parser.add_argument("--validation", action="store_true", help="of the validation split")
    options = parser.parse_intermixed_args(arguments)
    console = wide_console()
    config = read_config(options.run)
    view = View(config, open_data(config.data), options.run, train=not options.validation)
    for index in options.indices:
        console.rule(f"sample {index}", align="left")
        for line in view.lines(index):
            console.print(line, soft_wrap=True)
    return 0


class View:
    """The samples of a run, for people."""

    def __init__(self, config: RunConfig, corpora: Corpora, run: Path, *, train: bool) -> None:
        self._corpora, self._train = corpora, train
        self._samples = [window_corpus(config, one, train=train) for one in corpora.corpora]
        self._make_batch = make_batch_maker(config, corpora)
        self._schedule: Schedule | None = None
        if len(corpora.corpora) > 1:
            self._schedule = schedule_of(corpora, config.trainer.seed)
            if train and (history := blend_of(run)):
                self._schedule = self._schedule.with_history(history)

    def lines(self, index: int) -> Iterator[Text]:
        """Yield what there is to say of a sample.

        Raises:
            DataError: there is no such sample, or the corpus cannot be traced back.
        """
        if index < 0:
            raise DataError(f"there is no sample {index}: they count from 0")
        number, own = self._schedule.locate(index) if self._schedule else (0, index)
        corpus, samples = self._corpora.corpora[number], self._samples[number]
        stream = corpus.train if self._train else corpus.validation
        start, count = samples.place(own)
        epoch = own // len(samples)
        yield Text(
            f"{self._corpora.names[number]}: tokens {start:,} to {start + count - 1:,} of "
            f"{stream.prefix}.bin (window {samples.window(own)} of {len(samples)}, epoch {epoch})"
        )
        for origin in find_origins(stream, start, count):
            yield Text(
                f"  document {origin.document} from token {origin.first_token:,} on: "
                f"{corpus.manifest.source}: {origin.file}, place {origin.place}"
            )
        row = samples[own]
        batch = self._make_batch([row], [index])
        if isinstance(batch, Seq2SeqBatch):
            yield Text("encoder reads", style="bold")
            yield self._show(batch.encoder_tokens[0].tolist())
            yield Text("decoder is to say", style="bold")
            yield self._show(batch.labels[0][batch.loss_mask[0] > 0].tolist())
        else:
            yield self._show(row.tolist())

    def _show(self, tokens: Sequence[int]) -> Text:
        """Decode, with the ends of documents and the sentinels marked."""
        tokenizer = self._corpora.tokenizer
        marks = {tokenizer.eod: "<end>"}
        marks |= {tokenizer.first_sentinel - k: f"<{k}>" for k in range(SENTINELS)}
        shown, plain = Text(), list[int]()
        for token in (*tokens, None):
            if token is not None and token not in marks:
                plain.append(token)
                continue
            shown.append(tokenizer.decode(plain))
            plain = []
            if token is not None:
                shown.append(marks[token], style="reverse")
        return shown


if __name__ == "__main__":
    sys.exit(ending(main))

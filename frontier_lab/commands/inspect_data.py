"""Show the samples that a run reads: `frontier-llm inspect-data RUN_DIR [INDEX ...]`.

First it prints the account of each corpus: what was read, and what was left out.

INDEX is the number of a sample. Step t of a run, counted from 1, reads data.global_batch samples,
beginning with sample (t - 1) * data.global_batch. RUN_DIR/ledger.jsonl has the first sample of each
step in the field `first_sample`. Prints the text of each sample, its position in the corpus, and
the files and documents that it comes from. For an encoder-decoder model prints the input of the
encoder and the text that the decoder must predict. `--validation` shows samples of the validation
split. `--verify` reads all files of the prepared corpora and compares them with their digests.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from frontier_lab.commands.origins import find_origins
from frontier_lab.commands.preprocess import show_account
from frontier_lab.option_values import refuse_useless, run_folder
from frontier_lab.single_process_model import read_config
from frontier_lab.trained_tokenizer import prepare_again
from frontier_llm.cli.console import wide_console
from frontier_llm.cli.options import tool_parser
from frontier_llm.config import RunConfig
from frontier_llm.data.blend import Schedule
from frontier_llm.data.corpora import Corpora, initial_schedule, open_all, set_lengths
from frontier_llm.data.corpus_manifest import find_damage
from frontier_llm.data.document_rows import Row
from frontier_llm.data.run_loader import make_batch_maker, window_corpus
from frontier_llm.data.sample_counts import window_tokens
from frontier_llm.data.sample_order import LengthSegment
from frontier_llm.data.tokenizer_source import mode_tokens
from frontier_llm.errors import DataError, FrontierError
from frontier_llm.saving.ledger_file import blend_of, lengths_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the samples; return the exit code."""
    parser = tool_parser(__doc__)
    parser.add_argument("run", type=run_folder, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("indices", type=int, nargs="*", metavar="INDEX", help="number of a sample")
    parser.add_argument("--verify", action="store_true", help="compare the digests of all files")
    parser.add_argument("--validation", action="store_true", help="show the validation split")
    options = parser.parse_intermixed_args(arguments)
    refuse_useless(parser, options, {"--validation": "INDEX"}, {})
    console = wide_console()
    config = read_config(options.run)
    corpora = open_all(config.data, prepare_again(config))
    for corpus in corpora.corpora if options.verify else ():
        prepared = corpus.train.prefix.parent
        if damage := find_damage(prepared):
            raise FrontierError(damage)
        console.print(f"{prepared}: all files match their digests", soft_wrap=True)
    for name, corpus in zip(corpora.names, corpora.corpora, strict=True):
        console.print(f"{name}: {corpus.manifest.source}", soft_wrap=True, highlight=False)
        show_account(corpus.manifest, config.data.validation_percent, console)
    view = View(config, corpora, options.run, train=not options.validation)
    for index in options.indices:
        console.rule(f"sample {index}", align="left")
        for line in view.lines(index):
            console.print(line, soft_wrap=True)
    return 0


class View:
    """The samples of a run as readable text."""

    def __init__(self, config: RunConfig, corpora: Corpora, run: Path, *, train: bool) -> None:
        self._corpora, self._train = corpora, train
        self._samples = [window_corpus(config, corpus, train=train) for corpus in corpora.corpora]
        self._make_batch = make_batch_maker(config, corpora)
        self._marks = {corpora.tokenizer.eod: "<end>"}
        sentinels = corpora.tokenizer.sentinels(config.data.sentinels)
        self._marks |= {token: f"<{k}>" for k, token in enumerate(sentinels)}
        self._marks |= {token: f"<{mode}>" for mode, token in mode_tokens(config).items()}
        self._schedule: Schedule | None = None
        if config.data.kind == "blend":
            self._schedule = initial_schedule(corpora, config.trainer.seed)
            if train and (history := blend_of(run)):
                self._schedule = self._schedule.with_history(history)
        if not train:
            return
        # the lengths that the samples of the run have had
        segments = lengths_of(run) or [LengthSegment(0, window_tokens(config.data), keeps_all=True)]
        if self._schedule:
            by_name = dict(zip(corpora.names, self._samples, strict=True))
            set_lengths(by_name, self._schedule, segments)
        else:
            self._samples[0].set_lengths(segments)

    def lines(self, index: int) -> Iterator[Text]:
        """Yield the description and the text of a sample, one line each.

        Raises:
            DataError: there is no such sample, or the files of the corpus are unknown.
        """
        if index < 0:
            raise DataError(
                f"there is no sample {index}: samples count from 0\n  do: name 0 or more"
            )
        # a blend of corpora draws each sample from one of them
        corpus_number, in_corpus = 0, index
        if self._schedule:
            number, in_corpus = self._schedule.locate(index)
            name = self._schedule.names[number]
            if name not in self._corpora.names:
                raise DataError(
                    f"the run's configuration has no corpus {name} any more\n"
                    f"  do: name a sample after the last change of data.corpora"
                )
            corpus_number = self._corpora.names.index(name)
        corpus, samples = self._corpora.corpora[corpus_number], self._samples[corpus_number]
        stream = corpus.train if self._train else corpus.validation
        epoch, window = samples.epoch(in_corpus), samples.window(in_corpus)
        for start, count in samples.ranges(in_corpus):
            yield Text(
                f"{self._corpora.names[corpus_number]}: tokens {start:,} to {start + count - 1:,} "
                f"of {stream.prefix}.bin (window {window} of {len(samples)}, epoch {epoch})"
            )
            for origin in find_origins(stream, start, count):
                yield Text(
                    f"  document {origin.document} from token {origin.first_token:,} on: "
                    f"{corpus.manifest.source}: {origin.file}, record {origin.place}"
                )
        row: Any = samples[in_corpus]
        batch = self._make_batch([row], [index])
        if batch.encoder_tokens is not None:
            assert batch.loss_mask is not None
            yield Text("encoder input", style="bold")
            yield self._show(batch.encoder_tokens[0].tolist())
            yield Text("decoder target", style="bold")
            yield self._show(batch.labels[0][batch.loss_mask[0] > 0].tolist())
        else:
            tokens = row.tokens[: row.lengths.sum()] if isinstance(row, Row) else row
            yield self._show(tokens.tolist())

    def _show(self, tokens: Sequence[int]) -> Text:
        """Return the decoded text, with `<end>` after a document and `<0>` for sentinel 0."""
        tokenizer, marks = self._corpora.tokenizer, self._marks
        text, not_decoded = Text(), list[int]()
        for token in (*tokens, None):  # None: decode what is left
            if token is not None and token not in marks:
                not_decoded.append(token)
                continue
            text.append(tokenizer.decode(not_decoded))
            not_decoded = []
            if token is not None:
                text.append(marks[token], style="reverse")
        return text

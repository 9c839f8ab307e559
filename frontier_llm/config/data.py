"""The training data."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from frontier_llm.config.denoisers import (
    T5,
    Denoiser,
    SampleParts,
    modes_of,
    sample_parts,
    sentinels_of,
)
from frontier_llm.config.model import DECODER_MULTIPLE
from frontier_llm.config.paths import PathName
from frontier_llm.config.section import Section

Format = Literal["auto", "mixed", "text", "jsonl", "json", "parquet", "csv", "tsv"]

CORPUS_FILES = ("manifest.json", "train.bin", "train.idx")
"""Files by which the folder of a prepared corpus is recognised."""
FIXED_PIECES = 256 + 3
"""Number of pieces in every vocabulary that is trained: 256 bytes, unknown, end of document, line
break."""


class CorpusConfig(Section):
    """One corpus of a blend."""

    name: str
    """Name of this corpus in the output of a run."""
    kind: Literal["stdlib", "text"] = "text"
    """See `data.kind`."""
    path: PathName | None = None
    """See `data.path`."""
    weight: float | None = Field(default=None, gt=0)
    """Relative share of the samples. null = the number of training tokens of this corpus to the
    power of `data.blend_alpha`. Either all corpora of a blend have a weight, or none of them."""
    format: Format | None = None
    """See `data.format`, which null stands for."""
    text_key: str | None = None
    """See `data.text_key`, which null stands for."""

    @property
    def is_prepared(self) -> bool:
        """Whether the path is a prepared corpus, which is read as it is."""
        return self.path is not None and all(Path(self.path, n).is_file() for n in CORPUS_FILES)


class DataConfig(Section):
    """A corpus, its tokenizer, and the size of a batch."""

    name: str
    """Name of the corpus in the output of a run."""
    kind: Literal["stdlib", "text", "blend"]
    """`stdlib`: the sources of Python's standard library; `text`: the file or directory `path`;
    `blend`: the corpora of `corpora`."""
    path: PathName | None
    """For kind `text`: a file or a directory of text, JSON lines, JSON, Parquet, CSV or TSV, also
    compressed by gzip, zstandard, bzip2 or xz, or the folder of a prepared corpus. Links are
    followed."""
    format: Format = "auto"
    """Format of the files in `path`. `auto`: the content decides, and must agree with the name; of
    a directory, either records or plain text is read. `mixed`: the same, but both are read.
    Otherwise files are read as named here, and others in a directory are left out."""
    corpora: tuple[CorpusConfig, ...] = Field(strict=False)
    """For kind `blend`: [{name: NAME, path: PATH, weight: NUMBER}, ...]. The keys `kind`, `weight`,
    `format` and `text_key` are optional."""
    blend_alpha: float = Field(ge=0, le=1)
    """Exponent for a blend without weights. With 1 the samples of a corpus are proportional to its
    size, with 0 all corpora have equally many samples. mT5 uses 0.3, which favours small
    languages."""
    text_key: str
    """Key (JSON) or column (Parquet, CSV, TSV) that contains the text."""
    directory: PathName
    """Directory of prepared corpora (tokenizer, .bin, .idx, manifest), which later runs reuse."""
    tokenizer: PathName | None
    """A sentencepiece model, a tokenizer.json, or a folder with one of them, as Hugging Face
    publishes it. null = train a tokenizer with `data.vocabulary` tokens on the corpus."""
    end_of_document: str | None = None
    """Token that ends a document, such as `<|endoftext|>`. null = the token that the tokenizer
    names: the end-of-sentence token of a sentencepiece model, or the `eos_token` beside a
    tokenizer.json."""
    vocabulary: int = Field(ge=2)
    """Tokens of the tokenizer that is trained on the corpus, at most model.vocabulary. A given
    `data.tokenizer` has its own."""
    validation_percent: float = Field(gt=0, lt=50)
    """Percentage of the files or documents that are kept for validation."""
    broken: Literal["refuse", "skip"]
    """What happens if a file or a document cannot be read (a link without a target, invalid UTF-8,
    invalid JSON, no `text_key`), or if too much is left out, as text beside records.
    `refuse`: the program stops and names it; `skip`: it is left out and counted, and the first are
    named."""
    unique: bool
    """Whether only the first of several equal documents is kept."""
    objective: Literal["causal", "spans"]
    """`causal`: predict the next token (GPT); `spans`: predict parts that were removed from the
    text (an encoder-decoder), as `data.denoisers` says."""
    denoisers: tuple[Denoiser, ...] = Field(default=T5, strict=False, min_length=1)
    """What is removed from the texts of an encoder-decoder: [{rate: 0.15, span: 3.0}, ...]. Of
    several denoisers, one is drawn for each sample. The keys are optional: `rate` is the share of
    removed tokens (0.15), `span` their mean number in a span (3.0; null: the end of the text is
    cut off, prefix language modelling), `weight` the relative share of samples (1), and `mode` the
    name of a token that is put before the encoder's input (null)."""
    decoder_length: int | None = Field(default=None, ge=8)
    """Tokens per sample that the decoder of an encoder-decoder predicts at most, rounded up to a
    multiple of 8. null = as many as the denoiser with the longest targets needs."""
    documents: Literal["joined", "separate"] = "joined"
    """Whether the documents of a sample read each other. `joined`: as one text; `separate`:
    attention and positions begin anew at each document, and the first token of a document is not
    predicted by a GPT. For an encoder-decoder with `data.packing=best_fit`."""
    packing: Literal["stream", "best_fit"] = "stream"
    """How documents become samples. `stream`: all documents form one sequence, which is cut;
    `best_fit`: only documents longer than a sample are cut, and the samples are filled by
    best-fit-decreasing. In an encoder-decoder both sides limit a sample."""
    read_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the pairs of tokens of a sample that are in the same document, if documents are
    separate. It is the mean of the sum of n^2 over documents of n tokens, divided by the square of
    the sequence length. In an encoder-decoder, pairs within each side and between both are counted
    together. Predictions and MFU count only these pairs. null = that of the prepared corpus; 1 if
    there is none."""
    loss_mean: Literal["samples", "tokens"] = "samples"
    """What has equal weight in the loss. `samples`: each sample, whose loss is the mean over the
    tokens that it predicts; `tokens`: each predicted token of a step or of a validation."""
    sequence_length: int = Field(ge=1)
    """Tokens per sample. With the objective `spans`, tokens that the encoder reads."""
    global_batch: int = Field(ge=1)
    """Samples per step, over all ranks."""
    micro_batch: int = Field(ge=1)
    """Samples per micro-batch, which a rank computes at once. Default: 4, or fewer if 4 do not
    divide the samples per replica."""
    workers: int = Field(default=1, ge=1)
    """Threads per rank that read samples ahead of the training step."""
    prefetch: int = Field(default=1, ge=0)
    """Steps whose samples these threads read ahead. 0 = nothing is read ahead."""

    @property
    def pairs_read(self) -> float:
        """Share of the pairs of tokens of a sample that attention reads; 1 if it is not known."""
        return (self.read_share or 1.0) if self.documents == "separate" else 1.0

    @property
    def sentinels(self) -> int:
        """Number of token ids that the sentinels of removed spans need; 0 without spans."""
        if self.objective != "spans":
            return 0
        return sentinels_of(self.sequence_length, self.denoisers, self.decoder_length)

    @property
    def parts(self) -> SampleParts:
        """The largest lengths of the texts of an encoder-decoder, and of their parts."""
        return sample_parts(self.sequence_length, self.denoisers, self.decoder_length)

    @property
    def decoder_tokens(self) -> int:
        """Tokens per sample that the decoder of an encoder-decoder computes, with padding."""
        targets = self.decoder_length or self.parts.targets
        return -(-targets // DECODER_MULTIPLE) * DECODER_MULTIPLE

    @property
    def modes(self) -> tuple[str, ...]:
        """Names of the modes of the denoisers, each of which needs a token id."""
        return modes_of(self.denoisers) if self.objective == "spans" else ()

    def mode_of_prompt(self, *, has_gaps: bool) -> str | None:
        """Return the mode that is put before a prompt; None if its denoisers have none.

        It is that of the first denoiser that fills gaps, or else continues a text (`span: null`).
        """
        continues = not has_gaps and any(d.span is None for d in self.denoisers)
        modes = (d.mode for d in self.denoisers if (d.span is None) == continues)
        return next((mode for mode in modes if mode is not None), None)

    @property
    def batch_in_words(self) -> str:
        """What a step reads; the samples of an encoder-decoder have a target besides."""
        return f"{self.global_batch:,} samples of {self.sequence_length:,} tokens"

    @property
    def sources(self) -> tuple[CorpusConfig, ...]:
        """The corpora of a blend, or the single corpus."""
        if self.kind == "blend":
            return self.corpora
        return (CorpusConfig(name=self.name, kind=self.kind, path=self.path),)

    @property
    def known_tokenizer(self) -> str | None:
        """The given tokenizer, or that of a prepared corpus; None if one is trained."""
        return self.tokenizer or next((c.path for c in self.sources if c.is_prepared), None)

    @property
    def place(self) -> str:
        """The folder of the prepared corpora, or the prepared corpus that `path` names."""
        is_given = self.kind == "text" and self.sources[0].is_prepared
        return str(self.path) if is_given else self.directory

    def of(self, corpus: CorpusConfig) -> "DataConfig":
        """Return this configuration with the format and the key of the text of one corpus."""
        own = {"format": corpus.format, "text_key": corpus.text_key}
        return self.model_copy(update={key: own[key] for key in own if own[key] is not None})

"""The training data."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class CorpusConfig(Section):
    """One corpus of a blend."""

    name: str
    """Name of this corpus in the output of a run."""
    kind: Literal["stdlib", "text"] = "text"
    """See `data.kind`."""
    path: str | None = None
    """See `data.path`."""
    weight: float | None = Field(default=None, gt=0)
    """Relative share of the samples; null = its training tokens to the power of
    `data.blend_alpha`. Either all corpora of a blend have a weight or none has."""


class DataConfig(Section):
    """A corpus, its tokenizer, and the size of a batch."""

    name: str
    """Name of the corpus in the output of a run."""
    kind: Literal["stdlib", "text", "blend"]
    """`stdlib`: the sources of Python's standard library; `text`: the file or directory `path`;
    `blend`: the corpora of `corpora`."""
    path: str | None
    """For kind `text`: a file or a directory of text, .jsonl, .jsonl.gz, .jsonl.zst or .parquet."""
    corpora: tuple[CorpusConfig, ...] = Field(strict=False)
    """For kind `blend`: [{name: NAME, path: PATH, weight: NUMBER}, ...]; kind and weight are
    optional."""
    blend_alpha: float = Field(ge=0, le=1)
    """Exponent of the weights of a blend that gives none: 1 samples corpora in proportion to their
    sizes, 0 samples all equally; 0.3 is mT5's, which favours small languages."""
    text_key: str
    """Field (JSONL) or column (Parquet) that holds the text."""
    directory: str
    """Directory of prepared corpora (tokenizer, .bin, .idx, manifest), which later runs reuse."""
    tokenizer: str | None
    """File of a sentencepiece model; null = train one with `data.vocabulary` tokens on the
    corpus."""
    vocabulary: int = Field(ge=2)
    """Tokens of the tokenizer that is trained on the corpus, at most model.vocabulary. Without
    effect if `data.tokenizer` is given."""
    validation_percent: float = Field(gt=0, lt=50)
    """Percentage of the files or documents that are kept for validation."""
    broken: Literal["refuse", "skip"]
    """When a document cannot be read (invalid UTF-8, invalid JSON, no such key): `refuse` stops
    and names it; `skip` leaves it out, counts such documents and names the first of them."""
    unique: bool
    """Keep only the first of several equal documents."""
    objective: Literal["causal", "spans"]
    """`causal`: predict the next token (GPT); `spans`: predict spans that were removed from the
    text (T5: 15% of it, in spans of 3 tokens on average)."""
    sequence_length: int = Field(ge=1)
    """Tokens per sample; with `spans`, tokens that the encoder reads."""
    global_batch: int = Field(ge=1)
    """Samples per step, over all ranks."""
    micro_batch: int = Field(ge=1)
    """Samples that a rank computes at once."""

    @property
    def sources(self) -> tuple[CorpusConfig, ...]:
        """The corpora of a blend, or the single corpus."""
        if self.kind == "blend":
            return self.corpora
        return (CorpusConfig(name=self.name, kind=self.kind, path=self.path),)

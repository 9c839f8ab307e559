"""What the model reads."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class CorpusConfig(Section):
    """One corpus of a blend."""

    name: str
    """What the run calls it."""
    kind: Literal["stdlib", "text"] = "text"
    """As `data.kind`."""
    path: str | None = None
    """As `data.path`."""
    weight: float | None = Field(default=None, gt=0)
    """Its share of the samples, in any unit; null = its training tokens to the power of
    `data.blend_alpha`. All corpora have one, or none."""


class DataConfig(Section):
    """A corpus, how it is tokenised and how it is cut into batches."""

    name: str
    """What the run calls this corpus."""
    kind: Literal["stdlib", "text", "blend"]
    """`stdlib`: the interpreter's own Python sources; `text`: a file or a folder; `blend`: several
    of these."""
    path: str | None
    """For `text`: a file or a folder of text, .jsonl, .jsonl.gz, .jsonl.zst or .parquet."""
    corpora: tuple[CorpusConfig, ...] = Field(strict=False)
    """For `blend`: [{name: NAME, path: PATH, weight: NUMBER}, ...]; kind and weight may be left
    out."""
    blend_alpha: float = Field(ge=0, le=1)
    """Where a blend gives no weights: 1 samples corpora as large as they are, 0 all alike; 0.3 is
    mT5's, which lifts small languages."""
    text_key: str
    """For JSONL and Parquet: the field or column that holds the text."""
    directory: str
    """Where prepared corpora (tokenizer, .bin, .idx, manifest) are kept and found again."""
    tokenizer: str | None
    """A sentencepiece model to use; null = train one of `pieces` on the corpus."""
    pieces: int = Field(ge=2)
    """Tokens of the sentencepiece vocabulary that is trained on the corpus, at most
    model.vocabulary."""
    validation_percent: float = Field(gt=0, lt=50)
    """Share of the files or documents kept for validation."""
    broken: Literal["refuse", "skip"]
    """What to do with a document that is no text (broken UTF-8, no JSON, another key): stop and
    name it, or leave it out, count it and name the first of them."""
    unique: bool
    """Whether to keep only the first of several equal documents."""
    objective: Literal["causal", "spans"]
    """`causal`: say the next token (GPT); `spans`: say what was taken out of the text (T5: 15%, in
    spans of 3 tokens on average)."""
    sequence_length: int = Field(ge=1)
    """Tokens a sample; with `spans` those that the encoder reads."""
    global_batch: int = Field(ge=1)
    """Samples a step, over all ranks."""
    micro_batch: int = Field(ge=1)
    """Samples a rank computes at once."""

    @property
    def sources(self) -> tuple[CorpusConfig, ...]:
        """What is read: the corpora of a blend, or the one corpus."""
        if self.kind == "blend":
            return self.corpora
        return (CorpusConfig(name=self.name, kind=self.kind, path=self.path),)

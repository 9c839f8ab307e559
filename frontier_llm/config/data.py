"""What the model reads."""

from typing import Literal

from pydantic import Field

from frontier_llm.config.section import Section


class DataConfig(Section):
    """A corpus, how it is tokenised and how it is cut into batches."""

    name: str
    """What the run calls this corpus."""
    kind: Literal["stdlib", "text"]
    """`stdlib`: the interpreter's own Python sources; `text`: a text or JSONL file or a folder."""
    path: str | None
    """For `text`: the file or folder to read."""
    text_key: str
    """For JSONL: the field that holds the text."""
    directory: str
    """Where prepared corpora (tokenizer, .bin, .idx, manifest) are kept and found again."""
    pieces: int = Field(ge=2)
    """Tokens of the sentencepiece vocabulary that is trained on the corpus, at most
    model.vocabulary."""
    validation_percent: float = Field(gt=0, lt=50)
    """Share of the files or documents kept for validation."""
    sequence_length: int = Field(ge=1)
    """Tokens a sample."""
    global_batch: int = Field(ge=1)
    """Samples a step, over all ranks."""
    micro_batch: int = Field(ge=1)
    """Samples a rank computes at once."""

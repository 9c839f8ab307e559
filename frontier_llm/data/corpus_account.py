"""Account for every file, byte and document of a source: what was read, and what was left out.

The files that were found are those that were read and those that were left out. The documents that
were found are those of both splits and those that were left out. `Account.check` verifies both.
"""

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict, Field

MAX_EXAMPLES = 3
"""Number of names that are kept for each reason."""
HIDDEN = "hidden"
REPEATED = "other paths to files that are read"
BROKEN = "unreadable"
DISAGREES = "whose name and content disagree"
BESIDE = "documentation and other files beside the data"
OTHER_FORMAT = "of another format"
EMPTY = "empty"


class Tally(BaseModel):
    """Number and size of some files, with the names of the first."""

    model_config = ConfigDict(extra="forbid")

    files: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    examples: list[str] = []

    def add(self, name: str, size: int) -> None:
        """Count a file of `size` bytes."""
        self.files += 1
        self.bytes += size
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(name)

    def add_all(self, other: "Tally") -> None:
        """Count all files of another tally."""
        self.files += other.files
        self.bytes += other.bytes
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]


class TextCounts(BaseModel):
    """Counts of the characters of documents."""

    model_config = ConfigDict(extra="forbid")

    characters: int = Field(default=0, ge=0)
    """Number of characters of all documents, copies of earlier documents included."""
    lost: int = Field(default=0, ge=0)
    """Number of characters, except white space, that no token stands for."""
    unknown: int = Field(default=0, ge=0)
    """Number of characters that the unknown token stands for."""
    unknown_tokens: int = Field(default=0, ge=0)
    replaced: int = Field(default=0, ge=0)
    """Number of halves of surrogate pairs, each of which became U+FFFD."""

    def add(self, other: "TextCounts") -> None:
        """Add the counts of other documents."""
        for name in type(self).model_fields:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Account(BaseModel):
    """Account of one source."""

    model_config = ConfigDict(extra="forbid")

    found: Tally
    """All files of the source: regular files with their sizes, and other paths with size 0."""
    read: Tally
    """Files whose documents were read."""
    left_out: dict[str, Tally]
    """Files that were left out, by reason."""
    documents: int = Field(ge=0)
    """Number of lines, rows or sections that were found in the files."""
    empty_documents: int = Field(ge=0)
    broken_documents: int = Field(ge=0)
    """Number of lines, rows or sections that are not text (data.broken=skip)."""
    repeated_documents: int = Field(ge=0)
    """Number of copies of earlier documents (data.unique=true)."""
    examples: list[str]
    """First documents that are not text, with the reasons."""
    text: TextCounts

    def check(self, kept_documents: int) -> None:
        """Verify that the account adds up; `kept_documents` is the number of both splits."""
        files = self.read.files + sum(tally.files for tally in self.left_out.values())
        size = self.read.bytes + sum(tally.bytes for tally in self.left_out.values())
        assert (files, size) == (self.found.files, self.found.bytes), "files are not accounted for"
        left_out = self.empty_documents + self.broken_documents + self.repeated_documents
        assert self.documents == kept_documents + left_out, "documents are not accounted for"

    def left_out_lines(self) -> Iterator[tuple[str, str]]:
        """Yield (count, what was left out or changed) for all counts that are not 0."""
        for reason, tally in self.left_out.items():
            names = ", ".join(tally.examples)
            more = " ..." if tally.files > len(tally.examples) else ""
            yield _files(tally), f"left out, {reason}: {names}{more}"
        for count, what in (
            (self.empty_documents, "documents left out, empty"),
            (self.repeated_documents, "documents left out, repeated"),
            (self.broken_documents, "documents left out, not text"),
            (self.text.lost, "characters that no token stands for"),
            (self.text.unknown, f"characters in {self.text.unknown_tokens:,} unknown tokens"),
            (self.text.replaced, "halves of surrogate pairs, replaced by U+FFFD"),
        ):
            if count:
                yield f"{count:,}", what

    def summary(self) -> str:
        """Return the account in one short line."""
        files = sum(tally.files for tally in self.left_out.values())
        documents = self.empty_documents + self.broken_documents + self.repeated_documents
        counts = (
            (files, f"of {self.found.files:,} files left out"),
            (documents, f"of {self.documents:,} documents left out"),
            (self.text.lost, "characters without a token"),
            (self.text.unknown, "unknown characters"),
            (self.text.replaced, "characters replaced"),
        )
        shown = (f"{count:,} {what}" for count, what in counts if count)
        return ", ".join(shown) or "nothing left out"


def account_rows(account: Account | None, kept: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (amount, what) for each line of the table of an account.

    None: an earlier version prepared the corpus. `kept` has the number of documents per split.
    """
    if account is None:
        yield "", "an earlier version prepared this corpus and kept no account of what it left out"
        return
    yield _files(account.found), "found"
    yield _files(account.read), "read"
    yield f"{account.documents:,}", "documents found in them"
    for split, count in kept.items():
        yield f"{count:,}", f"documents for {split}"
    rows = list(account.left_out_lines())
    yield from rows or [("0", "nothing left out")]
    for example in account.examples:
        yield "", example


def _files(tally: Tally) -> str:
    return f"{tally.files:,} {'file' if tally.files == 1 else 'files'}, {tally.bytes:,} bytes"

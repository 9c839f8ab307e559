"""Choose the files of a source that are read, by their formats and what lies beside them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from frontier_llm.config.data import CorpusConfig, DataConfig
from frontier_llm.data.corpus_manifest import (
    BESIDE,
    BROKEN,
    DISAGREES,
    EMPTY,
    OTHER_FORMAT,
    Tally,
    most_validation,
)
from frontier_llm.data.file_formats import FORMATS, Detected, claim_of, detect
from frontier_llm.data.file_readers import LONG_FILE_BYTES
from frontier_llm.data.source import Document, Source, SourceFile
from frontier_llm.data.source_format import Scan
from frontier_llm.data.worker_pool import run_jobs
from frontier_llm.errors import ConfigError, DataError
from frontier_llm.units import KIB, counted, format_bytes

OTHER_SHARE = 0.1
"""Largest share of the bytes that may be left out because they are in another format. A clone of a
data set has less beside its data, apart from documentation, which does not count."""
CONTENT_DECIDES = ("auto", "mixed")
"""Values of data.format with which the content of each file tells its format."""
_BESIDE_NAMES = re.compile(
    r"readme|licen[cs]e|copying|notice|citation|change|contributing|authors|datasheet|security"
    r"|code_of_conduct|dataset_info|dataset_dict|croissant|meta(data)?\.|state\.|stats\.|index\."
    r"|manifest|_success|_metadata|_common_metadata|_committed|_started|sha\d+|md5|.*sums?(\.|$)",
    re.IGNORECASE,
)
_BESIDE_SUFFIXES = frozenset(
    ".md .rst .html .htm .yaml .yml .toml .cff .bib .py .ipynb .sh .log .lock .idx .index .faiss "
    ".crc .md5 .sha1 .sha256 .sha512 .sig .asc .png .jpg .jpeg .gif .webp .svg .pdf .ico".split()
)
_SMALL_BYTES = 64 * KIB
"""Documentation of at most this size is left out however small the data are."""
_MEND = "repair, restore or remove them"
_USUAL_KEY = "text"
_USUAL_RATIO = 3
"""Size of a text divided by its compressed size, about."""
_OTHER_KEY = (
    "set data.text_key to the key that holds the text, or data.format=text to train on the raw JSON"
)


def choose_files(source: Source, corpus: CorpusConfig, config: DataConfig, workers: int) -> Source:
    """Find the formats of the files of a source, and drop the files that are not read."""
    if corpus.kind == "stdlib":
        return source

    def detect_one(index: int) -> Detected | str:
        try:
            return detect(source.files[index].path, source.text_key)
        except OSError as error:
            return error.strerror or str(error)

    detected = dict(run_jobs(detect_one, range(len(source.files)), workers))
    is_own_key = config.kind == "text" or corpus.text_key is not None
    chooser = _Chooser(source, config.of(corpus), is_own_key)
    for index, file in enumerate(source.files):
        found = detected[index]
        if isinstance(found, str):
            chooser.refuse_or_leave_out(file, found, BROKEN)
        else:
            chooser.files.append(replace(file, detected=found))
    return chooser.run()


class _Chooser:
    """Chooses among the files of one source."""

    def __init__(self, source: Source, config: DataConfig, is_own_key: bool) -> None:
        self._source, self._config, self._is_own_key = source, config, is_own_key
        self.files: list[SourceFile] = []
        self._left_out = {r: tally.model_copy(deep=True) for r, tally in source.left_out.items()}
        self._skips = {"refuse": False, "skip": True}[config.broken]
        self._problems = list(source.broken)
        self._advice = {_MEND} if source.broken else set()

    def run(self) -> Source:
        if self._config.format not in CONTENT_DECIDES:
            self._choose_wanted(self._config.format)
        elif self._source.single:
            for file in self.files:
                self._check_single(file)
        else:
            self._choose_by_content()
        if not self._skips or self._source.single:
            advice = _MEND if len(self._advice) > 1 else next(iter(self._advice), _MEND)
            self._source.refuse(self._problems, advice)
        if not sum(file.size for file in self.files):
            raise DataError(
                f"there is no text in {self._source.root}: all of its files are left out "
                f"({', '.join(self._left_out)})\n  do: set data.path to another file or folder"
            )
        self._check_use_of_key()
        chosen = replace(self._source, files=tuple(self.files), left_out=self._left_out)
        return replace(chosen, divided_from=0 if chosen.single else self._divided_from(chosen))

    def _check_use_of_key(self) -> None:
        """Refuse data.text_key for plain text, unless the key is for all corpora of a blend."""
        key, has_records = self._config.text_key, any(f.detected.is_structured for f in self.files)
        if key != _USUAL_KEY and not has_records and self._is_own_key:
            raise ConfigError(
                "data.text_key",
                key,
                f"JSON, Parquet, CSV or TSV: what is read of {self._source.root} is plain text",
                "leave data.text_key out, or set data.format to the format of the records",
            )

    def _divided_from(self, source: Source) -> int | None:
        """Return the size from which texts must be divided to have both splits; None = none must.

        Each short text is one document, so that few of them, or a long one among them, make bad
        splits. Records beside them have both splits, which does not make the validation like the
        training.
        """
        percent, total, validation = self._config.validation_percent, 0, 0.0
        for index, file in enumerate(source.files):
            if file.detected.format == "text" and not file.detected.is_marked:
                plain = file.size * (_USUAL_RATIO if file.detected.compression else 1)
                name = Document(source.name(index, 0), "")
                is_one = plain <= LONG_FILE_BYTES
                share = name.is_validation(percent) if is_one else percent / 100
                total, validation = total + file.size, validation + share * file.size
        if total and validation in (0, total):
            return 0
        return int(total * percent / 100) if validation > most_validation(percent) * total else None

    def refuse_or_leave_out(
        self, file: SourceFile, problem: str, reason: str, advice: str = _MEND
    ) -> None:
        """Count a file that cannot be used."""
        self._advice.add(advice)
        self._problems.append(f"{file.path}: {problem}")
        self._leave_out(file, reason)

    def _leave_out(self, file: SourceFile, reason: str) -> None:
        self._left_out.setdefault(reason, Tally()).add(file.name, file.size)

    def _keep(self, wanted: Sequence[SourceFile], reason: str) -> None:
        names = {file.name for file in wanted}
        for file in self.files:
            if file.name not in names:
                self._leave_out(file, reason)
        self.files = list(wanted)

    def _choose_wanted(self, wanted: str) -> None:
        """Keep the files of the configured format; if a folder has none, read all files as such."""
        chosen = [
            file
            for file in self.files
            if wanted in (claim_of(file.name)[0], file.detected.format, file.detected.content)
            and (wanted == "text" or not _is_beside(file))
        ]
        self._keep(chosen or self.files, OTHER_FORMAT)
        self.files = [
            replace(file, detected=Detected(wanted, file.detected.compression))
            for file in self.files
        ]

    def _check_single(self, file: SourceFile) -> None:
        detected = file.detected
        if detected.problem is not None:
            raise DataError(f"{file.path}: {detected.problem}\n  do: {detected.advice}")
        if detected.format is None:
            raise DataError(
                f"{file.path}: its content is {detected.title}, which cannot be read\n"
                "  do: convert it to JSON lines, text or Parquet, or set data.path to another file"
            )
        if detected.has_no_text:
            raise DataError(f"{file.path}: it is {detected.title}\n  do: {_OTHER_KEY}")

    def _choose_by_content(self) -> None:
        kept = [file for file in self.files if not _is_beside(file)]
        pages = [f for f in self.files if f.detected.format == "text" and _is_beside(f)]
        data_bytes = _size([file for file in kept if file.detected.is_structured])
        if data_bytes and _size(pages) <= max(data_bytes, _SMALL_BYTES):
            self._keep(kept, BESIDE)
        files, self.files = self.files, []
        for file in files:
            detected = file.detected
            if detected.problem is not None:
                self.refuse_or_leave_out(file, detected.problem, DISAGREES, detected.advice)
            elif detected.is_structured and detected.title == "nothing":
                self.refuse_or_leave_out(file, "it is empty", BROKEN)
            else:
                self.files.append(file)
        records = [file for file in self.files if file.detected.is_structured]
        texts = [file for file in self.files if file.detected.format == "text"]
        if records and self._config.format == "auto":
            self._separate(records, texts)
        else:
            self._check_keys(texts)

    def _separate(self, records: Sequence[SourceFile], texts: Sequence[SourceFile]) -> None:
        """Keep the larger of the records and the texts; refuse a mixture unless it is skipped."""
        limit = (0.5 if self._skips else OTHER_SHARE) * (_size(records) + _size(texts))
        if _size(texts) <= limit:
            self._keep(records, OTHER_FORMAT)
        elif _size(records) <= limit:
            self._keep([f for f in self.files if not f.detected.is_structured], OTHER_FORMAT)
        else:
            names = sorted({str(file.detected.format) for file in records})
            titles = " and ".join(FORMATS[name].title for name in names)
            choices = " or ".join(f"data.format={name}" for name in (*names, "text"))
            larger = "records" if _size(records) > _size(texts) else "text"
            raise DataError(
                f"{self._source.root} mixes {titles} ({_describe(records)}) with plain text "
                f"({_describe(texts)})\n"
                f"  do: read all with data.format=mixed, or one kind with {choices}; "
                f"data.broken=skip reads the {larger}. What is not read is counted"
            )

    def _check_keys(self, texts: Sequence[SourceFile]) -> None:
        """Refuse or skip JSON without the key of the text, unless it is only a little."""
        without = [file for file in texts if file.detected.has_no_text]
        if _size(without) <= OTHER_SHARE * _size(texts):
            return
        if self._skips:
            self._keep([f for f in self.files if not f.detected.has_no_text], OTHER_FORMAT)
        else:
            raise DataError(
                f"{self._source.root} has {without[0].detected.title}: {_describe(without)}\n"
                f"  do: {_OTHER_KEY}, or data.broken=skip to leave it out"
            )


def _is_beside(file: SourceFile) -> bool:
    """Return whether the name of a file says that it is documentation, or another addition."""
    name = Path(file.name).name
    if claim_of(name)[0] in ("jsonl", "parquet", "csv", "tsv"):
        return False
    return Path(name.lower()).suffix in _BESIDE_SUFFIXES or bool(_BESIDE_NAMES.match(name))


def _size(files: Sequence[SourceFile]) -> int:
    return sum(file.size for file in files)


def _describe(files: Sequence[SourceFile]) -> str:
    return (
        f"{counted(len(files), 'file', ',')}, {format_bytes(_size(files))}, such as {files[0].name}"
    )


def files_without_text(
    files: Sequence[SourceFile], scans: Sequence[Scan], wanted: str
) -> Iterator[tuple[SourceFile, str, str]]:
    """Yield (file, reason of the account, problem) for each file whose scan found no text.

    Other formats beside the data may be left out, but no file that should be text: by its name, or
    because `wanted`, the value of data.format, says that all are.
    """
    for file, scan in zip(files, scans, strict=True):
        if not scan.cuts:
            problem = file.detected.title if file.detected.format is None else scan.problem
            is_wanted = wanted not in CONTENT_DECIDES or claim_of(file.name)[0] == "text"
            is_empty = not file.size or problem in ("it is empty", "it has no rows")
            yield file, EMPTY if is_empty else BROKEN if is_wanted else OTHER_FORMAT, problem


def check_left_out(root: Path, left_out: Mapping[str, Tally], read_bytes: int) -> None:
    """Refuse a source of which a large part is in another format."""
    other = left_out.get(OTHER_FORMAT, Tally())
    if other.bytes > OTHER_SHARE * (read_bytes + other.bytes):
        raise DataError(
            f"of {format_bytes(read_bytes + other.bytes)} in {root}, {format_bytes(other.bytes)} "
            f"({other.bytes / (read_bytes + other.bytes):.0%}) are no text: "
            f"{', '.join(other.examples)}\n"
            f"  do: convert or remove {counted(other.files, 'such file', ',')}, or leave them out "
            "and count them with data.broken=skip"
        )

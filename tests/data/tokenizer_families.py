"""Train small byte-level tokenizers that are built like the published ones of model families.

A tokenizer is a folder with tokenizer.json and tokenizer_config.json, as Hugging Face publishes it.
It has the normalizer, the regular expression that splits text, the kind of model, the decoder, the
post-processor and the special tokens of its family; only its vocabulary is small.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TokenizerFamily:
    """How the tokenizers of a family are built."""

    tokenizer_class: str
    """Class in transformers that tokenizer_config.json names."""
    end: str
    """Token that ends a document."""
    other_specials: tuple[str, ...] = ()
    """Other special tokens."""
    tokens_in_text: tuple[str, ...] = ()
    """Added tokens that are no special tokens, so that a text can contain them."""
    split: str | None = None
    """Regular expression that splits text. None: that of GPT-2, which the library contains."""
    nfc: bool = False
    """Whether text is normalized to the form NFC."""
    begins: bool = False
    """Whether the library writes the first of the other special tokens before a text."""
    ignore_merges: bool = False
    """Whether a word that is an entry of the vocabulary becomes one token without any merges."""


LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FAMILIES = {
    "gpt2": TokenizerFamily("GPT2Tokenizer", "<|endoftext|>"),
    "llama3": TokenizerFamily(
        "PreTrainedTokenizerFast", "<|end_of_text|>", ("<|begin_of_text|>", "<|eot_id|>"),
        split=LLAMA_3_SPLIT, begins=True, ignore_merges=True,
    ),
    "qwen2": TokenizerFamily(
        "Qwen2Tokenizer", "<|endoftext|>", ("<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>"), QWEN_2_SPLIT, nfc=True,
    ),
}  # fmt: skip


def train_family(name: str, texts: Iterable[str], vocabulary: int, folder: Path) -> Path:
    """Train a tokenizer of a family and write it to an existing folder.

    Args:
        name: key of FAMILIES.
        texts: texts to train on.
        vocabulary: number of tokens without `tokens_in_text`.
        folder: folder to write to.

    Returns:
        The folder.
    """
    from tokenizers import AddedToken, trainers

    family = FAMILIES[name]
    tokenizer, alphabet = _untrained(family)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1 - len(family.other_specials),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # the published tokenizers have their special tokens after all others
    tokenizer.add_special_tokens([family.end, *family.other_specials])
    in_text = [AddedToken(token, normalized=False) for token in family.tokens_in_text]
    tokenizer.add_tokens(in_text)
    _add_post_processor(tokenizer, family)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": family.tokenizer_class, "eos_token": family.end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _untrained(family: TokenizerFamily) -> tuple[Any, list[str]]:
    """Return an empty tokenizer, and the 256 letters by which it writes bytes."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(ignore_merges=family.ignore_merges))
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    if family.split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(family.split), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizers.ByteLevel.alphabet()


def _add_post_processor(tokenizer: Any, family: TokenizerFamily) -> None:
    """Add the step after encoding, which writes a token before a text if `begins` is set."""
    from tokenizers import processors

    steps: list[Any] = [processors.ByteLevel(trim_offsets=False)]
    if family.begins:
        first = family.other_specials[0]
        specials = [(first, tokenizer.token_to_id(first))]
        steps.append(processors.TemplateProcessing(single=f"{first} $A", special_tokens=specials))
    tokenizer.post_processor = processors.Sequence(steps)

"""Write a sentencepiece model as a tokenizer.json, which transformers reads as it is.

transformers' own class for such models drops the normalisation and the blank before a text. Only
texts with combining marks after full-width letters, or with the mark that sentencepiece uses for a
blank, may be encoded differently.
"""

import re
from pathlib import Path
from typing import Any


def needs_json(model: Path) -> bool:
    """Return whether transformers would encode text differently with the model itself."""
    proto = _read(model)
    rules = proto.normalizer_spec
    normalises = rules.precompiled_charsmap or rules.remove_extra_whitespaces
    is_bpe = proto.trainer_spec.model_type == proto.trainer_spec.BPE
    return bool(normalises or rules.add_dummy_prefix or not is_bpe)


def write_json(model: Path, out: Path) -> None:
    """Write the tokenizer.json of a sentencepiece model (unigram or byte-pair encoding)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    proto = _read(model)
    kinds, rules = type(proto).SentencePiece, proto.normalizer_spec
    whole = [piece.piece for piece in proto.pieces if piece.type == kinds.USER_DEFINED]
    tokenizer = Tokenizer(_model(proto, bool(whole)))
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if rules.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    if whole:
        pattern = "|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    prefix = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *prefix]
    )
    control = [piece.piece for piece in proto.pieces if piece.type == kinds.CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    tokenizer.save(str(out))


def _read(model: Path) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(model.read_bytes())
    return proto


def _model(proto: Any, has_whole: bool) -> Any:
    """Return the vocabulary and the rule that chooses pieces.

    sentencepiece joins the neighbours whose joined piece has the highest score. `tokenizers` joins
    the pair that is the first of a list, so the list has the pairs of each piece by its score.
    """
    from tokenizers import models

    kinds, trainer = type(proto).SentencePiece, proto.trainer_spec
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    if trainer.model_type == trainer.UNIGRAM:
        return models.Unigram(scores, trainer.unk_id, trainer.byte_fallback)
    ids = {text: number for number, (text, _) in enumerate(scores)}
    joined = sorted(
        (piece for piece in proto.pieces if piece.type == kinds.NORMAL),
        key=lambda piece: -piece.score,
    )
    texts = {p.piece for p in proto.pieces if p.type in (kinds.NORMAL, kinds.USER_DEFINED)}
    merges = [
        pair
        for piece in joined
        for pair in sorted(
            (
                (piece.piece[:cut], piece.piece[cut:])
                for cut in range(1, len(piece.piece))
                if {piece.piece[:cut], piece.piece[cut:]} <= texts
            ),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
    ]
    return models.BPE(
        ids,
        merges,
        unk_token=scores[trainer.unk_id][0],
        fuse_unk=True,
        byte_fallback=trainer.byte_fallback,
        ignore_merges=has_whole,  # sentencepiece never cuts a piece that a user has defined
    )

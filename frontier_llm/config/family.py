"""Check that the settings of a model suit its kind, a GPT or an encoder-decoder (T5).

The advice of the rules names numbers of heads and widths that pass all of them.
"""

import math
from typing import Any

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.errors import ConfigError, refuse

FLEX_LEAST_WIDTH = 16
"""Least width of a head that torch's FlexAttention kernels support."""


def check_family(model: ModelConfig) -> None:
    """Refuse settings that a model of this kind does not support."""
    _check_mup(model)
    if model.kind == "t5":
        _check_t5(model)
    else:
        _check_gpt(model)
    _check_biases_and_norms(model)
    _check_rotary_scaling(model)


def check_attention(config: RunConfig) -> None:
    """Refuse FlexAttention where torch has none."""
    if config.attention != "flex":
        return
    model = config.model
    refuse(
        (model.cross_attention == "merged", "attention", "flex, with model.cross_attention=merged",
         "sdpa: our FlexAttention has as many keys as queries",
         "set attention=sdpa, or choose another model"),
        (model.attention_dropout, "model.attention_dropout",
         f"{model.attention_dropout}, with attention=flex",
         "0, because FlexAttention has no dropout",
         "set attention=sdpa, or model.attention_dropout=0"),
    )  # fmt: skip
    for key, width in (("head_dim", model.head_dim), ("encoder_head_dim", model.encoder.head_dim)):
        if width < FLEX_LEAST_WIDTH:
            raise ConfigError(
                f"model.{key}",
                f"{width}, with attention=flex",
                f"at least {FLEX_LEAST_WIDTH}, for which torch has a FlexAttention kernel",
                f"set attention=sdpa, or model.{key}={FLEX_LEAST_WIDTH}",
            )


def _check_mup(model: ModelConfig) -> None:
    base = {"mup_base_hidden": model.mup_base_hidden, "mup_base_head_dim": model.mup_base_head_dim}
    given = [key for key, value in base.items() if value is not None]
    if not given:
        return
    if model.kind == "t5":
        raise ConfigError(
            f"model.{given[0]}",
            base[given[0]],
            "null in an encoder-decoder: muP is for GPTs",
            f"set model.{given[0]}=null",
        )
    for key, own in (("mup_base_hidden", "hidden"), ("mup_base_head_dim", "head_dim")):
        if base[key] is None:
            raise ConfigError(
                f"model.{key}",
                f"null, with model.{given[0]}={base[given[0]]}",
                f"model.{own} of muP's base model, because muP needs both widths",
                f"set model.{key}={getattr(model, own)} or another width, or model.{given[0]}=null",
            )
    if not model.scaled_attention:
        raise ConfigError(
            "model.scaled_attention",
            "false, with muP",
            "true: muP divides attention scores by head_dim",
            "set model.scaled_attention=true, or model.mup_base_hidden=null and "
            "model.mup_base_head_dim=null",
        )


def _check_gpt(model: ModelConfig) -> None:
    refuse(
        (model.encoder_layers, "model.encoder_layers", model.encoder_layers,
         "0: a GPT has no encoder",
         "set model.encoder_layers=0, or choose an encoder-decoder (model=mt5_tiny)"),
        (model.positions == "relative", "model.positions", "relative", "learned or rotary in a GPT",
         "set model.positions=rotary, or choose an encoder-decoder (model=mt5_tiny)"),
    )  # fmt: skip


def _check_t5(model: ModelConfig) -> None:
    refuse(
        (not 0 < model.encoder_layers < model.layers, "model.encoder_layers",
         f"{model.encoder_layers} of model.layers={model.layers}",
         "at least one layer each for the encoder and the decoder",
         f"set model.encoder_layers={max(1, model.layers // 2)}"
         + ("" if model.layers > 1 else " and model.layers=2")),
        (model.positions == "learned", "model.positions", "learned",
         "relative or rotary in an encoder-decoder", "set model.positions=relative"),
        (model.positions == "relative" and model.attention_softcap is not None,
         "model.attention_softcap", model.attention_softcap,
         "null with relative positions, which are added to scores without a bound",
         "set model.attention_softcap=null, or model.positions=rotary"),
        (model.encoder.hidden != model.hidden and not model.encoder_embedding,
         "model.encoder_hidden", f"{model.encoder_hidden}, with model.encoder_embedding=false",
         f"null or model.hidden ({model.hidden}), as both sides share an embedding",
         "set model.encoder_embedding=true, or model.encoder_hidden=null"),
        (model.start_token >= model.vocabulary, "model.start_token", model.start_token,
         f"a token below model.vocabulary ({model.vocabulary})", "set model.start_token=0"),
    )  # fmt: skip
    _check_merged(model)
    _check_buckets(model)


def _check_merged(model: ModelConfig) -> None:
    if model.cross_attention != "merged":
        return
    for key, got, is_possible, wants, todo in (
        ("positions", model.positions, model.positions == "rotary",
         "rotary: relative positions have no distance of tokens on two sides", "rotary"),
        ("qk_norm", model.qk_norm, model.qk_norm != "width",
         "head or none: norms over all heads are not counted for the keys of both sides", "head"),
        ("encoder_hidden", model.encoder_hidden, model.encoder.hidden == model.hidden,
         f"null or model.hidden ({model.hidden}): one matrix reads both sides", "null"),
    ):  # fmt: skip
        if not is_possible:
            raise ConfigError(
                f"model.{key}",
                f"{got}, with model.cross_attention=merged",
                wants,
                f"set model.{key}={todo}, or model.cross_attention=separate",
            )


def _check_buckets(model: ModelConfig) -> None:
    buckets, distance = model.relative_buckets, model.relative_distance
    refuse(
        (buckets % 4, "model.relative_buckets", buckets,
         "a multiple of 4: each direction has half of the buckets, and half of these are for "
         "single distances", f"set model.relative_buckets={-(-buckets // 4) * 4}"),
        (distance <= buckets // 2, "model.relative_distance", distance,
         f"more than half of model.relative_buckets ({buckets})",
         f"set model.relative_distance={4 * buckets}"),
    )  # fmt: skip


def _check_biases_and_norms(model: ModelConfig) -> None:
    refuse(
        (model.bias and not model.qkv_bias, "model.qkv_bias", "false, with model.bias=true",
         "true if the other linear layers have biases",
         "set model.qkv_bias=null, or model.bias=false"),
        (model.norm_placement != "input" and model.residual == "parallel", "model.norm_placement",
         f"{model.norm_placement}, with model.residual=parallel",
         "input in layers with parallel branches",
         "set model.norm_placement=input, or model.residual=sequential"),
        (model.zero_centred_norms and model.qk_norm == "width", "model.qk_norm",
         "width, with model.zero_centred_norms=true",
         "head or none: norms over all heads have no zero-centred form",
         "set model.qk_norm=head, or model.zero_centred_norms=false"),
    )  # fmt: skip
    plain_values: dict[str, Any] = {
        "norm_placement": "input", "qk_norm": "none", "scaled_embedding": False, "score_width": None
    }  # fmt: skip
    for key, plain in plain_values.items():
        if model.mup_base_hidden is not None and (found := getattr(model, key)) != plain:
            wanted = "null" if plain is None else str(plain).lower()
            raise ConfigError(
                f"model.{key}",
                f"{str(found).lower()}, with muP",
                f"{wanted}: muP's factors are for models without further norms and factors",
                f"set model.{key}={wanted}, or model.mup_base_hidden=null and "
                "model.mup_base_head_dim=null",
            )


def _check_rotary_scaling(model: ModelConfig) -> None:
    scaling = model.rotary_scaling
    needs_turns = scaling not in ("none", "linear") and model.positions == "rotary"
    refuse(
        (scaling == "yarn" and model.rotary_local_base is not None, "model.rotary_local_base",
         f"{model.rotary_local_base}, with model.rotary_scaling=yarn",
         "null: yarn's factor of queries and keys would change layers with a window, too",
         "set model.rotary_local_base=null, or model.rotary_scaling=linear"),
        (needs_turns and model.rotary_original_length is None, "model.rotary_original_length",
         f"null, with model.rotary_scaling={scaling}",
         "the tokens per sample for which the wavelengths were chosen",
         "set model.rotary_original_length=8192 or another length, or model.rotary_scaling=none "
         "and model.rotary_factor=1"),
        (needs_turns and model.rotary_slow_turns >= model.rotary_fast_turns,
         "model.rotary_slow_turns", f"{model.rotary_slow_turns:g}, with "
         f"model.rotary_fast_turns={model.rotary_fast_turns:g}",
         "less than model.rotary_fast_turns",
         f"set model.rotary_slow_turns={model.rotary_fast_turns / 4:g}"),
    )  # fmt: skip


def next_heads(config: RunConfig) -> int:
    """Return the next larger number of heads that passes the other rules.

    If there is no such number, return the next multiple of the tensor ranks.
    """
    heads, tensor = config.model.heads, config.parallel.tensor
    return next((n for n in fitting_heads(config) if n > heads), -(-heads // tensor) * tensor)


def next_hidden(config: RunConfig) -> int:
    """Return the next larger model.hidden that passes the other rules with model.heads."""
    model, tensor = config.model, config.parallel.tensor
    first = -(-model.hidden // model.heads)
    widths = range(first, first + 64 * tensor)
    has_own_ffn = model.ffn != 4 * model.hidden
    return model.heads * next(
        (
            width
            for width in widths
            if _rotates(model, width) and (has_own_ffn or 4 * width * model.heads % tensor == 0)
        ),
        first,
    )


def fitting_heads(config: RunConfig) -> list[int]:
    """Return the numbers of heads that divide model.hidden and pass the other rules."""
    model = config.model
    kv_heads = 1 if model.kv_heads == model.heads else model.kv_heads
    step = math.lcm(config.parallel.tensor, kv_heads)
    return [
        heads
        for heads in range(step, model.hidden + 1, step)
        if model.hidden % heads == 0 and _rotates(model, model.hidden // heads)
    ]


def _rotates(model: ModelConfig, head_dim: int) -> bool:
    """Return whether heads of this width have an even number of rotated dimensions, if any."""
    rotated = int(head_dim * model.rotary_fraction)
    return model.positions != "rotary" or is_rotatable(rotated)


def is_rotatable(dimensions: int) -> bool:
    """Return whether so many dimensions of a head can be rotated, which is done in pairs."""
    return dimensions >= 2 and dimensions % 2 == 0

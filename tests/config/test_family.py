"""What does not belong in a GPT or an encoder-decoder is refused; what is advised passes."""

import pytest

from frontier_llm.cli.compose import compose
from frontier_llm.config import decode
from frontier_llm.config.rules import check, data_size
from tests.config.test_rules import _advised, _changed, _refusal

GPT = ()
T5 = ("model=mt5_tiny", "data=stdlib_spans", "parallel.pipeline=1")
MERGED = ("model=t5gemma2_tiny", *T5[1:])

# a row: the model, ranks, what is wrong, the key that is named
REFUSED = {
    "an encoder in a GPT": (GPT, 4, {"model.encoder_layers": 1}, "model.encoder_layers"),
    "relative positions in a GPT": (GPT, 4, {"model.positions": "relative"}, "model.positions"),
    "an encoder that is all": (T5, 4, {"model.encoder_layers": 4}, "model.encoder_layers"),
    "no encoder": (T5, 4, {"model.encoder_layers": 0}, "model.encoder_layers"),
    "odd buckets": (T5, 4, {"model.relative_buckets": 30}, "model.relative_buckets"),
    "more buckets than distances": (
        T5,
        4,
        {"model.relative_buckets": 256},
        "model.relative_distance",
    ),
    "more tensor ranks than cut the decoder's sequence": (
        T5,
        16,
        {
            "parallel.tensor": 16,
            "parallel.sequence": True,
            "model.heads": 16,
            "model.kv_heads": 16,
            "data.global_batch": 64,
        },
        "parallel.tensor",
    ),
    "FlexAttention of merged attention": (MERGED, 4, {"attention": "flex"}, "attention"),
    "relative positions of merged attention": (
        MERGED,
        4,
        {"model.positions": "relative"},
        "model.positions",
    ),
    "merged attention with norms over all heads": (
        MERGED,
        4,
        {"model.qk_norm": "width", "model.zero_centred_norms": False},
        "model.qk_norm",
    ),
    "merged attention to an encoder of another width": (
        MERGED,
        4,
        {"model.encoder_embedding": True, "model.encoder_hidden": 512},
        "model.encoder_hidden",
    ),
    "merged attention that is trained alone": (
        MERGED,
        4,
        {"optimizer.cross_attention_steps": 5},
        "optimizer.cross_attention_steps",
    ),
    "merged attention with context ranks": (MERGED, 4, {"parallel.context": 2}, "model.kind"),
    "a key head that tensor ranks do not divide": (
        MERGED,
        4,
        {"model.kv_heads": 1, "parallel.tensor": 2},
        "model.kv_heads",
    ),
    "FlexAttention with dropout": (
        T5,
        4,
        {"attention": "flex", "model.attention_dropout": 0.1},
        "model.attention_dropout",
    ),
    "FlexAttention for narrow heads": (
        T5,
        4,
        {"attention": "flex", "model.head_dim": 8},
        "model.head_dim",
    ),
    "FlexAttention for narrow heads of an encoder": (
        T5,
        4,
        {"attention": "flex", "model.encoder_head_dim": 8},
        "model.encoder_head_dim",
    ),
    "heads of an encoder that tensor ranks do not divide": (
        T5,
        4,
        {"parallel.tensor": 2, "model.encoder_heads": 5},
        "model.encoder_heads",
    ),
    "queries of an encoder in unequal groups": (
        T5,
        4,
        {"model.encoder_kv_heads": 3},
        "model.encoder_kv_heads",
    ),
    "heads of an encoder that are rotated in odd widths": (
        T5,
        4,
        {"model.positions": "rotary", "model.encoder_head_dim": 15},
        "model.encoder_head_dim",
    ),
    "another width of an encoder with a shared embedding": (
        T5,
        4,
        {"model.encoder_hidden": 128},
        "model.encoder_hidden",
    ),
    "learned positions in an encoder-decoder": (
        T5,
        4,
        {"model.positions": "learned"},
        "model.positions",
    ),
    "capped scores with relative positions": (
        T5,
        4,
        {"model.attention_softcap": 50.0},
        "model.attention_softcap",
    ),
    "separate documents in an encoder-decoder": (
        T5,
        4,
        {"data.documents": "separate"},
        "data.documents",
    ),
    "packed documents in an encoder-decoder": (T5, 4, {"data.packing": "best_fit"}, "data.packing"),
    "muP in an encoder-decoder": (T5, 4, {"model.mup_base_head_dim": 8}, "model.mup_base_head_dim"),
    "muP without the width of a head": (
        GPT,
        4,
        {"model.mup_base_hidden": 64},
        "model.mup_base_head_dim",
    ),
    "muP without the width": (GPT, 4, {"model.mup_base_head_dim": 8}, "model.mup_base_hidden"),
    "muP with scores that are not divided": (
        GPT,
        4,
        {
            "model.mup_base_hidden": 64,
            "model.mup_base_head_dim": 8,
            "model.scaled_attention": False,
        },
        "model.scaled_attention",
    ),
    "all biases but those of attention": (GPT, 4, {"model.qkv_bias": False}, "model.qkv_bias"),
    "norms of the outputs of parallel branches": (
        GPT,
        4,
        {"model.norm_placement": "output", "model.residual": "parallel"},
        "model.norm_placement",
    ),
    "both norms of parallel branches": (
        GPT,
        4,
        {"model.norm_placement": "both", "model.residual": "parallel"},
        "model.norm_placement",
    ),
    "zero-centred norms of all heads": (
        GPT,
        4,
        {"model.norm": "rmsnorm", "model.zero_centred_norms": True, "model.qk_norm": "width"},
        "model.qk_norm",
    ),
    "muP with scaled embeddings": (
        GPT,
        4,
        {
            "model.mup_base_hidden": 64,
            "model.mup_base_head_dim": 8,
            "model.scaled_embedding": True,
        },
        "model.scaled_embedding",
    ),
    "yarn with another base in windows": (
        GPT,
        4,
        {
            "model.positions": "rotary",
            "model.window": 8,
            "model.rotary_local_base": 100,
            "model.rotary_scaling": "yarn",
            "model.rotary_factor": 8.0,
            "model.rotary_original_length": 8192,
        },
        "model.rotary_local_base",
    ),
    "muP with norms of queries": (
        GPT,
        4,
        {
            "model.mup_base_hidden": 64,
            "model.mup_base_head_dim": 8,
            "model.qk_norm": "width",
        },
        "model.qk_norm",
    ),
    "longer wavelengths without a length": (
        GPT,
        4,
        {
            "model.positions": "rotary",
            "model.rotary_scaling": "llama3",
            "model.rotary_factor": 8.0,
        },
        "model.rotary_original_length",
    ),
    "more slow turns than fast ones": (
        GPT,
        4,
        {
            "model.positions": "rotary",
            "model.rotary_scaling": "yarn",
            "model.rotary_factor": 8.0,
            "model.rotary_original_length": 8192,
            "model.rotary_slow_turns": 64.0,
        },
        "model.rotary_slow_turns",
    ),
    "a corpus for the other family": (T5, 4, {"data.objective": "causal"}, "data.objective"),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_and_what_is_advised_passes(row):
    model, ranks, changes, key = row
    values = _changed(compose(model), changes)
    refusal = _refusal(values, ranks)
    assert refusal.key == key
    changed, ranks = _advised(values, ranks, refusal.todo)
    check(decode(changed), ranks)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_the_tiny_model_can_be_cut_every_way(tensor, pipeline):
    layout = (f"parallel.tensor={tensor}", "parallel.sequence=true", "data.global_batch=32")
    values = compose([*T5, *layout, f"parallel.pipeline={pipeline}"])
    config, ranks = decode(values), 2 * tensor * pipeline
    check(config, ranks)
    assert data_size(config, ranks) == 2

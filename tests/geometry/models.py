"""Model configurations for the tests of this folder."""

from hypothesis import strategies as st

from frontier_llm.config.model import ModelConfig


def make_model(**changes):
    """Make a GPT of 4 layers, width 64, with changes."""
    values = {
        "name": "test",
        "kind": "gpt",
        "layers": 4,
        "encoder_layers": None,
        "hidden": 64,
        "heads": 4,
        "kv_heads": None,
        "head_dim": None,
        "ffn": None,
        "vocabulary": 128,
        "positions": "learned",
        "rotary_base": 10000,
        "rotary_fraction": 1.0,
        "relative_buckets": 8,
        "relative_distance": 16,
        "norm": "layernorm",
        "norm_epsilon": 1e-5,
        "activation": "gelu",
        "residual": "sequential",
        "bias": True,
        "tied": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "scaled_attention": True,
        "init_std": 0.02,
    }
    return ModelConfig.model_validate({**values, **changes})


def make_t5(**changes):
    """Make an encoder-decoder of 2 + 2 layers, width 64, with changes."""
    values = {
        "kind": "t5",
        "positions": "relative",
        "norm": "rmsnorm",
        "activation": "geglu",
        "bias": False,
        "tied": False,
        "scaled_attention": False,
        "init_std": 1.0,
    }
    return make_model(**{**values, **changes})


@st.composite
def any_t5_models(draw):
    """Draw an encoder-decoder."""
    layers = draw(st.integers(2, 12))
    return make_t5(
        layers=layers,
        encoder_layers=draw(st.integers(1, layers - 1)),
        hidden=draw(st.integers(1, 64)),
        heads=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 8)),
        ffn=draw(st.integers(1, 200)),
        vocabulary=draw(st.integers(2, 1000)),
        relative_buckets=draw(st.sampled_from([4, 8, 32])),
    )


@st.composite
def any_models(draw):
    """Draw a model of any variant: grouped queries, gated, untied, without biases, ..."""
    kv_heads, head_dim = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 3))
    return make_model(
        layers=draw(st.integers(1, 12)),
        hidden=draw(st.integers(1, 64)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=draw(st.integers(1, 200)),
        vocabulary=draw(st.integers(2, 1000)),
        positions=draw(st.sampled_from(["learned", "rotary"])),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
        qk_norm=draw(st.sampled_from(["none", "head", "width"])),
    )

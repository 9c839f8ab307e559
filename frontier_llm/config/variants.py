"""Check that the variants of a model's norms, biases and rotary positions suit each other."""

from frontier_llm.config.model import ModelConfig
from frontier_llm.errors import ConfigError


def check_variants(model: ModelConfig) -> None:
    """Refuse variants that no module computes.

    Raises:
        ConfigError: the error names the key to change.
    """
    if model.kind == "t5":
        _check_t5(model)
    _check_biases(model)
    _check_norms(model)
    _check_rotary_scaling(model)


def _check_t5(model: ModelConfig) -> None:
    """Refuse what the layers and the head of an encoder-decoder do not have."""
    own = {"norm_placement": "input", "qk_norm": "none", "logit_softcap": None}
    for key, value in own.items():
        if getattr(model, key) != value:
            text = "null" if value is None else value
            raise ConfigError(
                f"model.{key}",
                getattr(model, key),
                f"{text} in an encoder-decoder",
                f"set model.{key}={text}, or choose a GPT",
            )
    if model.qkv_bias != model.bias:
        raise ConfigError(
            "model.qkv_bias",
            _word(model.qkv_bias),
            f"model.bias ({_word(model.bias)}) in an encoder-decoder",
            "set model.qkv_bias=null, or choose a GPT",
        )


def _check_biases(model: ModelConfig) -> None:
    if model.bias and not model.qkv_bias:
        raise ConfigError(
            "model.qkv_bias",
            "false, with model.bias=true",
            "true if the other linear layers have biases",
            "set model.qkv_bias=null, or model.bias=false",
        )


def _check_norms(model: ModelConfig) -> None:
    if model.norm_placement == "output" and model.residual == "parallel":
        raise ConfigError(
            "model.norm_placement",
            "output, with model.residual=parallel",
            "input in layers with parallel branches",
            "set model.norm_placement=input, or model.residual=sequential",
        )
    for key, plain in (("norm_placement", "input"), ("qk_norm", "none")):
        if model.mup_base_hidden is not None and getattr(model, key) != plain:
            raise ConfigError(
                f"model.{key}",
                f"{getattr(model, key)}, with muP",
                f"{plain}: muP's factors are for models without further norms",
                f"set model.{key}={plain}, or model.mup_base_hidden=null and "
                "model.mup_base_head_dim=null",
            )


def _check_rotary_scaling(model: ModelConfig) -> None:
    scaling = model.rotary_scaling
    if scaling == "none" or model.positions != "rotary":
        return
    if model.rotary_original_length is None:
        raise ConfigError(
            "model.rotary_original_length",
            f"null, with model.rotary_scaling={scaling}",
            "the tokens per sample for which the wavelengths were chosen",
            "set model.rotary_original_length=8192 or another length, or model.rotary_scaling=none "
            "and model.rotary_factor=1",
        )
    if model.rotary_slow_turns >= model.rotary_fast_turns:
        raise ConfigError(
            "model.rotary_slow_turns",
            f"{model.rotary_slow_turns:g}, with "
            f"model.rotary_fast_turns={model.rotary_fast_turns:g}",
            "less than model.rotary_fast_turns",
            f"set model.rotary_slow_turns={model.rotary_fast_turns / 4:g}",
        )


def _word(value: bool) -> str:
    return str(value).lower()

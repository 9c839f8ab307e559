"""Encoder-decoders of all variants against the same models written out."""

from typing import Any

import pytest
import torch

from frontier_llm.config.run import RunConfig
from frontier_llm.launch.world import World
from tests.batches import random_batch
from tests.model import plain_variants
from tests.model.test_t5 import renamed, their_values
from tests.ranks import in_turn, run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import assemble, first_gradients
from tests.values import TINY_T5, tiny_values

T5 = (*TINY_T5, "model.layers=5", "model.encoder_layers=2", "data.sequence_length=33")
ROTARY = (*T5, "model.positions=rotary", "model.scaled_attention=true")
MODELS = {
    "tied": (*T5, "model.tied=true"),
    "grouped": (*T5, "model.kv_heads=2", "model.window=6"),
    "rotary": (*ROTARY, "model.kv_heads=1", "model.qk_norm=head", "model.activation=swiglu"),
    "bounded": (
        *ROTARY, "model.attention_softcap=0.7", "model.logit_softcap=1.5", "model.window=2",
        "model.window_every=2",
    ),
    "outputs": (*T5, "model.norm_placement=output", "model.qk_norm=width", "model.tied=true"),
    "parallel": (*ROTARY, "model.residual=parallel", "model.bias=true"),
    "biases": (*ROTARY, "model.qkv_bias=true", "model.kv_heads=2"),
}  # fmt: skip


def run(world: World, values: dict[str, Any]) -> tuple[Any, torch.Tensor, Any]:
    """Return the weights, the logits, and the gradients of a step. Norms and biases are random."""
    rig = make_rig(world, values)
    generator = torch.Generator().manual_seed(3)
    weights: dict[str, Any] = {}
    for record in rig.model.records:
        for placement in record.placements:
            view = placement.local_view(record.parameter.data)
            if record.group == "norms":
                view += 0.3 * torch.randn(view.shape, generator=generator)
            piece = view.clone().numpy()
            weights[placement.name] = placement.global_shape, [(placement.global_start, piece)]
    chunk, config = rig.model.chunks[0], rig.config
    batch = random_batch(config, range(config.data.global_batch))
    with torch.no_grad():
        out = chunk(**batch.inputs())[..., : config.model.vocabulary].clone()
    rig.batches = lambda _: [batch]  # type: ignore[method-assign]
    rig.train(1)
    return weights, out, first_gradients(rig)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    cases = [(tiny_values(*model),) for model in MODELS.values()]
    found = run_ranks(in_turn, 1, run, cases)[0]
    return dict(zip(MODELS, found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_model_written_out(name: str, results: dict[str, Any]) -> None:
    weights, out, gradients = results[name]
    config = RunConfig.model_validate(tiny_values(*MODELS[name]))
    leaves = {
        key: torch.from_numpy(value).requires_grad_() for key, value in assemble([weights]).items()
    }
    batch: Any = random_batch(config, range(config.data.global_batch))
    assert not batch.encoder_mask.all(), "some samples are padded"
    plain = plain_variants.logits(
        leaves, config.model, batch.encoder_tokens, batch.tokens, batch.encoder_mask
    )
    torch.testing.assert_close(out, plain.detach(), rtol=1e-5, atol=1e-5)
    losses = torch.nn.functional.cross_entropy(plain.mT, batch.labels, reduction="none")
    batch.mean_loss(losses).backward()
    found = assemble([gradients])
    assert found.keys() == leaves.keys()
    for key, leaf in leaves.items():
        error = (torch.from_numpy(found[key]) - leaf.grad).norm() / leaf.grad.norm()
        assert error <= 1e-5, f"{key}: relative gradient error {error:.1e}"


@pytest.mark.forked
def test_a_tied_model_equals_transformers(results: dict[str, Any]) -> None:
    """T5 multiplies the input of a tied head by 1 / sqrt(hidden)."""
    transformers = pytest.importorskip("transformers")
    weights, out, _ = results["tied"]
    config = RunConfig.model_validate(tiny_values(*MODELS["tied"]))
    model = config.model
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**their_values(model), tie_word_embeddings=True)
    ).eval()
    assert theirs.config.scale_decoder_outputs
    state = {name: torch.from_numpy(tensor) for name, tensor in assemble([weights]).items()}
    missing, unknown = theirs.load_state_dict(renamed(state), strict=False)
    assert not unknown
    assert set(missing) <= {
        "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"
    }  # fmt: skip
    batch: Any = random_batch(config, range(config.data.global_batch))
    with torch.no_grad():
        expected = theirs(
            input_ids=batch.encoder_tokens,
            attention_mask=batch.encoder_mask.long(),
            decoder_input_ids=batch.tokens,
        ).logits
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

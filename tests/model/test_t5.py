"""The encoder-decoder against mT5 written out, and against transformers' where that is there."""

from functools import cache
from typing import Any

import pytest
import torch

from frontier_llm.config.model import ModelConfig
from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.launch.world import World
from tests.batches import random_batch
from tests.model import plain_t5
from tests.ranks import run_ranks
from tests.trainer.rig import make_rig
from tests.trainer.test_parity import assemble, first_gradients
from tests.values import TINY_T5, tiny_values

VALUES = tiny_values(
    *TINY_T5, "model.layers=5", "model.encoder_layers=2", "data.sequence_length=33"
)
CONFIG = RunConfig.model_validate(VALUES)
Tensors = dict[str, torch.Tensor]


def run(world: World, packed: bool) -> tuple[Any, torch.Tensor, float, Any]:
    """Return the weights, logits, and after one step the loss and the gradients."""
    rig = make_rig(world, VALUES)
    weights: dict[str, Any] = {}
    for record, tensor in rig.states.parameters():
        for placement in record.placements:
            piece = placement.local_view(tensor).clone().numpy()
            weights[placement.name] = placement.global_shape, [(placement.global_start, piece)]
    chunk = rig.model.chunks[0].eval()
    with torch.no_grad():
        out = chunk(**batch(packed).inputs())[..., : CONFIG.model.vocabulary].clone()
    chunk.train()
    rig.batches = lambda _: [batch(packed)]  # type: ignore[method-assign]
    loss = rig.train(1)[0].loss
    return weights, out, loss, first_gradients(rig)


def batch(packed: bool) -> Batch:
    made = random_batch(CONFIG, range(CONFIG.data.global_batch))
    if not packed:
        return made
    mask = torch.ones(made.labels.shape)
    return Batch(made.tokens, made.labels, None, mask, encoder_tokens=made.encoder_tokens)


def renamed(ours: Tensors) -> Tensors:
    """Give tensors the names they have in transformers, and take fused ones apart."""
    model, found = CONFIG.model, {}
    border, heads = model.encoder_layers, model.heads
    for name, tensor in ours.items():
        if not name.startswith("layers."):
            found[OTHERS[name]] = tensor
            continue
        number, module = name.removeprefix("layers.").split(".", 1)
        side = "encoder" if int(number) < border else "decoder"
        block = f"{side}.block.{int(number) - border * (side == 'decoder')}.layer"
        last = 1 if side == "encoder" else 2
        parts = tensor.unflatten(0, (heads, -1)) if tensor.shape[0] % heads == 0 else tensor
        fused = {
            "attention.qkv.weight": (0, "SelfAttention", "qkv"),
            "cross_attention.key_value.weight": (1, "EncDecAttention", "kv"),
        }
        if module in fused:
            layer, kind, letters = fused[module]
            for letter, part in zip(letters, parts.chunk(len(letters), dim=1), strict=True):
                found[f"{block}.{layer}.{kind}.{letter}.weight"] = part.flatten(0, 1)
            continue
        theirs = {
            "attention_norm.weight": "0.layer_norm",
            "attention.output.weight": "0.SelfAttention.o",
            "cross_attention_norm.weight": "1.layer_norm",
            "cross_attention.query.weight": "1.EncDecAttention.q",
            "cross_attention.output.weight": "1.EncDecAttention.o",
            "ffn_norm.weight": f"{last}.layer_norm",
            "ffn.gate.weight": f"{last}.DenseReluDense.wi_0",
            "ffn.up.weight": f"{last}.DenseReluDense.wi_1",
            "ffn.down.weight": f"{last}.DenseReluDense.wo",
        }[module]
        found[f"{block}.{theirs}.weight"] = tensor
    return found


OTHERS = {
    "embedding.tokens.weight": "shared.weight",
    "encoder_norm.weight": "encoder.final_layer_norm.weight",
    "final_norm.weight": "decoder.final_layer_norm.weight",
    "head.weight": "lm_head.weight",
    **{
        f"{side}_positions.weight":
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for side in ("encoder", "decoder")
    },
}  # fmt: skip


@cache
def ours(packed: bool) -> tuple[Tensors, torch.Tensor, float, Tensors]:
    weights, out, loss, gradients = run_ranks(run, 1, packed)[0]
    whole = (
        {n: torch.from_numpy(a) for n, a in assemble([t]).items()} for t in (weights, gradients)
    )
    by_their_names = [renamed(tensors) for tensors in whole]
    return by_their_names[0], out, loss, by_their_names[1]


@pytest.mark.parametrize("packed", [True, False])
def test_equals_mt5_written_out(packed: bool) -> None:
    weights, out, loss, gradients = ours(packed)
    leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
    made, model = batch(packed), CONFIG.model
    plain = plain_t5.logits(
        leaves,
        model.heads,
        made.encoder_tokens,
        made.tokens,
        made.encoder_mask,
        model.relative_distance,
    )
    torch.testing.assert_close(out, plain.detach(), rtol=1e-5, atol=1e-5)
    losses = torch.nn.functional.cross_entropy(plain.mT, made.labels, reduction="none")
    mean = made.mean_loss(losses)
    assert loss == pytest.approx(mean.item(), rel=1e-6)
    mean.backward()
    assert gradients.keys() == leaves.keys()
    for name, leaf in leaves.items():
        error = (gradients[name] - leaf.grad).norm() / leaf.grad.norm()
        assert error <= 1e-5, f"{name}: relative gradient error {error:.1e}"


@pytest.mark.forked
def their_values(model: ModelConfig) -> dict[str, Any]:
    """Return the values of T5Config and MT5Config of transformers."""
    return {
        "vocab_size": model.vocabulary,
        "d_model": model.hidden,
        "d_kv": model.head_dim,
        "d_ff": model.ffn,
        "num_layers": model.encoder_layers,
        "num_decoder_layers": model.layers - model.encoder_layers,
        "num_heads": model.heads,
        "relative_attention_num_buckets": model.relative_buckets,
        "relative_attention_max_distance": model.relative_distance,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
    }


@pytest.mark.parametrize("packed", [True, False])
def test_equals_transformers(packed: bool) -> None:
    """Random weights; transformers builds mT5 tied, and gets its head of its own afterwards."""
    transformers = pytest.importorskip("transformers")
    weights, out, _, _ = ours(packed)
    model = CONFIG.model
    theirs = transformers.MT5ForConditionalGeneration(
        transformers.MT5Config(**their_values(model))
    ).eval()
    theirs.lm_head = torch.nn.Linear(model.hidden, model.vocabulary, bias=False)
    theirs.config.tie_word_embeddings = False
    state = {name: weight.detach() for name, weight in weights.items()}
    missing, unknown = theirs.load_state_dict(state, strict=False)
    assert not unknown
    assert set(missing) <= {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    made = batch(packed)
    mask = None if made.encoder_mask is None else made.encoder_mask.long()
    with torch.no_grad():
        expected = theirs(
            input_ids=made.encoder_tokens,
            attention_mask=mask,
            decoder_input_ids=made.tokens,
        ).logits
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

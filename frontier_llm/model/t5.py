"""Define the module of a model chunk of an encoder-decoder (T5 1.1 and mT5).

The layers of the encoder and then those of the decoder form one list, which is divided into model
chunks at any layer. Each chunk sends one tensor to the next chunk: the activations of the encoder
and those of the decoder, concatenated along the sequence. The first chunk looks up the embeddings
of both. A chunk of encoder layers passes the decoder's embeddings on unchanged, and a chunk of
decoder layers passes the encoder's output on unchanged.

A *stack* has the layers of the encoder or of the decoder that belong to one model chunk. In shapes,
s is the number of tokens of the encoder, t the number of tokens of the decoder, and b the number of
samples.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk, Stack, chunk_stacks
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.flex import FlexScores, uses_flex
from frontier_llm.model.layer_specs import Norm, layer_spec
from frontier_llm.model.linear import ColumnLinear
from frontier_llm.model.loss import TokenLosses, token_losses
from frontier_llm.model.relative import RelativePositions


class LayerStack(nn.Module):
    """Consecutive layers of an encoder or decoder, and their shared table of relative positions.

    If the stack includes the last layer of the encoder or decoder, it also has the final norm. This
    class replaces megatron's TransformerBlock, which cannot recompute layers in the backward pass
    if they share a trainable table. The layout's `recompute` selects the activations that are
    computed again: `full` (of whole layers), `selective` (of attention) or `none`.
    """

    def __init__(
        self,
        stack: Stack,
        layout: ResolvedLayout,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        model = layout.model
        self._config, self._attention = config, layout.attention
        self._recompute_layers = layout.recompute == "full"
        self._causal = causal = stack.name == "decoder"
        self.positions = RelativePositions(
            model.relative_buckets,
            model.relative_distance,
            model.heads // groups.tp.size(),
            causal=causal,
            dtype=config.params_dtype,
        )
        spec = layer_spec(
            model,
            kernels,
            causal=causal,
            reads_encoder=causal,
            recompute=layout.recompute == "selective",
        )
        self.layers = nn.ModuleList(
            build_module(spec, config=config, layer_number=number, pg_collection=groups)
            for number in range(1, len(stack.layers) + 1)
        )
        self.final_layernorm = (
            Norm(config, model.hidden, kernels, model.norm_epsilon) if stack.ends else None
        )

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the layers on [s tokens, b samples, hidden]; the result has the same shape.

        The mask is [b, s] bool, false at padding; None without padding, or if the stack is causal.
        A decoder reads the context, [t, b, hidden], the output of the encoder, whose mask is [b,
        t]. With sequence parallelism the tokens are those of this tensor-parallel rank.
        """
        attention_bias = self._attention_bias(hidden, mask)
        for layer in self.layers:
            run = partial(self._run, layer, mask, context_mask, attention_bias)
            if self._recompute_layers and self.training:
                hidden = _recompute_in_backward(run, hidden, context)
            else:
                hidden = run(hidden, context)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def _attention_bias(self, hidden: Tensor, mask: Tensor | None) -> Tensor | FlexScores:
        """Return the relative positions in the form that the attention of this pass reads.

        Passes without gradients do not use FlexAttention: they have many lengths, for each of which
        it would be compiled again, and without a gradient of the bias torch has better kernels.
        """
        bias: Tensor = self.positions()
        if not (uses_flex(self._attention, hidden.device) and torch.is_grad_enabled()):
            return bias
        parts = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        return FlexScores.of(bias, parts * hidden.shape[0], mask, causal=self._causal)

    def _run(
        self,
        layer: nn.Module,
        mask: Tensor | None,
        context_mask: Tensor | None,
        attention_bias: Tensor | FlexScores,
        hidden: Tensor,
        context: Tensor | None,
    ) -> Tensor:
        """Run one layer.

        With sequence parallelism the tensor-parallel ranks must draw different dropout masks, so
        each uses a random stream of its own.
        """
        needs_own_stream = self._config.sequence_parallel
        with get_cuda_rng_tracker().fork() if needs_own_stream else nullcontext():
            hidden, _ = layer(
                hidden_states=hidden,
                attention_mask=mask,
                context=context,
                context_mask=context_mask,
                attention_bias=attention_bias,
            )
        return hidden


def _recompute_in_backward(
    run: Callable[[Tensor, Tensor | None], Tensor], hidden: Tensor, context: Tensor | None
) -> Tensor:
    """Run a layer so that only its inputs are stored for the backward pass.

    The backward pass runs the layer again, with the same dropout masks. torch could stop the second
    run as soon as all needed activations exist. This is turned off, so that both runs send the same
    number of bytes, as geometry/wire.py assumes.
    """
    states = get_cuda_rng_tracker().get_states()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _random_states(states)

    with set_checkpoint_early_stop(False):
        result: Tensor = checkpoint(run, hidden, context, use_reentrant=False, context_fn=contexts)
    return result


@contextmanager
def _random_states(states: dict[str, Tensor]) -> Iterator[None]:
    """Set megatron's random streams to the given states within this context."""
    tracker = get_cuda_rng_tracker()
    current = tracker.get_states()
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(current)


class EncoderDecoder(MegatronModule):
    """One model chunk of an encoder-decoder, made of megatron's layers."""

    def __init__(
        self,
        layout: ResolvedLayout,
        model_chunk: ModelChunk,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        kernels: Kernels,
    ) -> None:
        super().__init__(config=config)
        model = layout.model
        self.pg_collection = groups
        self.vocabulary = model.vocabulary
        self.model_chunk, self.stacks = model_chunk, chunk_stacks(model, model_chunk)
        self.pre_process, self.post_process = model_chunk.has_embedding, model_chunk.has_head
        self._received: Tensor | None = None
        vocabulary_rows = padded_vocabulary(model, groups.tp.size())
        if model_chunk.has_embedding:
            self.embedding = LanguageModelEmbedding(
                config, vocabulary_rows, 0, position_embedding_type="none", tp_group=groups.tp
            )
        stacks = {
            stack.name: LayerStack(stack, layout, config, groups, kernels) for stack in self.stacks
        }
        self.encoder, self.decoder = stacks.get("encoder"), stacks.get("decoder")
        if model_chunk.has_head:
            self.output_layer = ColumnLinear(
                model.hidden,
                vocabulary_rows,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=groups.tp,
            )

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Receive [s + t, b, hidden] of the previous chunk, or None, from trainer/pipeline.py."""
        self._received = input_tensor

    def forward(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor | TokenLosses:
        """Run this model chunk on [b, s] tokens of the encoder and [b, t] of the decoder, int64.

        With sequence parallelism s and t are divisible by the number of tensor-parallel ranks. The
        mask is [b, s] bool, false at padding; None if there is none.

        The last chunk returns the losses of [b, t] tokens, or without labels the logits, [b, t,
        this tensor rank's part of the padded vocabulary]. Other chunks return the activations for
        the next chunk, [s + t, b, hidden]; with sequence parallelism only those of this rank's
        tokens.
        """
        states = self._embed(encoder_tokens, decoder_tokens) if self.pre_process else self._received
        assert states is not None, "the schedule must set the input of a chunk without embedding"
        lengths = [
            tokens.shape[1] // self._sequence_parts for tokens in (encoder_tokens, decoder_tokens)
        ]
        encoder, decoder = states.split(lengths)
        if self.encoder is not None:
            encoder = self.encoder(encoder, mask=encoder_mask)
        if self.decoder is not None:
            decoder = self.decoder(decoder, context=encoder, context_mask=encoder_mask)
        if not self.post_process:
            return torch.cat([encoder, decoder])
        logits, _ = self.output_layer(decoder)
        if labels is None:
            return logits.transpose(0, 1)
        return token_losses(logits, labels, self.vocabulary, self.pg_collection.tp)

    @property
    def _sequence_parts(self) -> int:
        """Number of parts into which sequence parallelism splits each sequence; 1 without it."""
        return self.pg_collection.tp.size() if self.config.sequence_parallel else 1

    def _embed(self, encoder_tokens: Tensor, decoder_tokens: Tensor) -> Tensor:
        """Look up the embeddings of all tokens.

        With sequence parallelism megatron's embedding gives each tensor-parallel rank one range of
        the tokens. The tokens are ordered so that each range has a part of the encoder's tokens and
        then a part of the decoder's tokens.
        """
        encoder_parts = encoder_tokens.chunk(self._sequence_parts, dim=1)
        decoder_parts = decoder_tokens.chunk(self._sequence_parts, dim=1)
        pairs = zip(encoder_parts, decoder_parts, strict=True)
        alternating = [part for pair in pairs for part in pair]
        states: Tensor = self.embedding(torch.cat(alternating, dim=1), position_ids=None)
        return states

"""Define the module of a model chunk of an encoder-decoder (T5 1.1 and mT5).

The layers of the encoder and then those of the decoder form one list, which is divided into model
chunks at any layer. Each chunk sends one tensor to the next chunk: the activations of the encoder
and those of the decoder, concatenated along the sequence. The first chunk looks up the embeddings
of both. A chunk of encoder layers passes the decoder's embeddings on unchanged, and a chunk of
decoder layers passes the encoder's output on unchanged.

In shapes, s is the number of tokens of the encoder, t the number of tokens of the decoder, and b
the number of samples.
"""

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.layer_stack import LayerStack
from frontier_llm.model.linear import ColumnLinear
from frontier_llm.model.loss import TokenLosses, token_losses


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
        """Run this model chunk.

        Args:
            encoder_tokens: [b, s] int64. With sequence parallelism s and t are divisible by the
                number of tensor-parallel ranks.
            encoder_mask: [b, s] bool, true at tokens, false at padding; None if there is no
                padding.
            labels: [b, t] int64; None = the last chunk returns logits instead of losses.

        Returns:
            On the last chunk the losses of [b, t] tokens, or without labels the logits,
            [b, t, this tensor rank's part of the padded vocabulary]. On other chunks the
            activations for the next chunk, [s + t, b, hidden]; with sequence parallelism only those
            of this rank's tokens.
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

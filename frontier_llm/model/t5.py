"""The encoder-decoder of one piece of the pipeline: T5 1.1 and mT5.

Encoder and decoder layers are one list, cut anywhere. Between pieces travels one tensor: the
encoder's activations, and behind them along the sequence the decoder's. The decoder's embedding
is looked up together with the encoder's, on the first piece, and waits there; the encoder's
output is carried on for every decoder layer to read.

s: tokens of the encoder, t: tokens of the decoder, b: samples.
"""

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.stacks import piece_stacks
from frontier_llm.geometry.stages import Piece
from frontier_llm.model.layer_stack import LayerStack
from frontier_llm.model.loss import token_losses


class EncoderDecoder(MegatronModule):
    """megatron's layers and ends, put together so that a pipeline may be cut anywhere."""

    def __init__(
        self,
        model: ModelConfig,
        piece: Piece,
        recompute: str,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        kernels: Kernels,
    ) -> None:
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.pg_collection = groups
        self.vocabulary = model.vocabulary
        self.piece, self.stacks = piece, piece_stacks(model, piece)
        self.pre_process, self.post_process = piece.has_embedding, piece.has_head
        interleaved = config.virtual_pipeline_model_parallel_size is not None
        self.vp_stage = piece.chunk if interleaved else None
        self._received: Tensor | None = None
        rows = padded_vocabulary(model, groups.tp.size())
        if piece.has_embedding:
            self.embedding = LanguageModelEmbedding(
                config, rows, 0, position_embedding_type="none", tp_group=groups.tp
            )
        built = {
            stack.name: LayerStack(stack, model, recompute, config, groups, kernels, self.vp_stage)
            for stack in self.stacks
        }
        self.encoder, self.decoder = built.get("encoder"), built.get("decoder")
        if piece.has_head:
            self.output_layer = ColumnParallelLinear(
                model.hidden,
                rows,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                tp_group=groups.tp,
            )

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take what the piece before sent: [s + t, b, hidden], or None on the first piece.

        Called by megatron's schedules before each forward pass.
        """
        (self._received,) = input_tensor

    def forward(
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        encoder_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run this piece.

        Args:
            encoder_tokens: [b, s] int64; under sequence parallel tensor ranks divide s and t.
            decoder_tokens: [b, t] int64.
            encoder_mask: [b, s] bool, true where a token is; None = everywhere.
            labels: [b, t] int64.

        Returns:
            On the last piece the losses [b, t] fp32, or without labels the logits [b, t, v] of
            this tensor rank's part of the padded vocabulary; elsewhere what the next piece takes.
        """
        parts = self._parts
        states = self._embed(encoder_tokens, decoder_tokens) if self.pre_process else self._received
        assert states is not None, "a piece without the embedding gets its input by the schedule"
        lengths = [tokens.shape[1] // parts for tokens in (encoder_tokens, decoder_tokens)]
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
        return token_losses(logits, labels, self.vocabulary, self.pg_collection.tp.rank())

    @property
    def _parts(self) -> int:
        """Into how many parts tensor ranks cut the sequences."""
        return self.pg_collection.tp.size() if self.config.sequence_parallel else 1

    def _embed(self, encoder_tokens: Tensor, decoder_tokens: Tensor) -> Tensor:
        """Look up both sides at once, in an order that gives each tensor rank a part of both."""
        parts = [tokens.chunk(self._parts, dim=1) for tokens in (encoder_tokens, decoder_tokens)]
        in_order = [part for both in zip(*parts, strict=True) for part in both]
        states: Tensor = self.embedding(torch.cat(in_order, dim=1), position_ids=None)
        return states

"""Define the module of a GPT's model chunk, a range of consecutive layers."""

from typing import Any, cast

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.confined import Documents
from frontier_llm.model.cut_samples import ContextPart, ContextRanks
from frontier_llm.model.flex import FlexMasks, uses_flex
from frontier_llm.model.layer_specs import decoder_block
from frontier_llm.model.linear import ColumnLinear, ScaledHead
from frontier_llm.model.loss import TokenLosses, token_losses
from frontier_llm.model.rotary import stretched

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "relative": "none"}


class PartAngles(RotaryEmbedding):
    """The angles of the tokens of a context rank; of all tokens if `part` is None."""

    part: ContextPart | None = None

    def forward(self, tokens: int, **options: Any) -> Tensor:
        """Return the angles of so many tokens, [tokens, b samples or 1, 1, r] fp32."""
        if self.part is None:
            return cast(Tensor, super().forward(tokens, **options))
        angles: Tensor = super().forward(self.part.length, **options)
        return angles[self.part.tokens.T.to(angles.device)].squeeze(2)


class Gpt(GPTModel):
    """megatron's GPTModel with a loss that ignores the padding of the vocabulary.

    The vocabulary is padded so that tensor-parallel ranks can divide the embedding.
    """

    def __init__(
        self,
        layout: ResolvedLayout,
        model_chunk: ModelChunk,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        kernels: Kernels,
        context: ContextRanks | None = None,
    ) -> None:
        model = layout.model
        self._context = context
        self._rotates_parts = context is not None and model.positions == "rotary"
        self.vocabulary, self._attention = model.vocabulary, layout.attention
        self._logit_softcap = model.logit_softcap
        self._windows = {model.layer_window(number) for number in model_chunk.layers}
        self._is_confined = model.window is not None or model.attention_softcap is not None
        self.model_chunk, self.stacks = model_chunk, chunk_stacks(model, model_chunk)
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_block(model_chunk.layers, model, kernels),
            vocab_size=padded_vocabulary(model, config.tensor_model_parallel_size),
            max_sequence_length=layout.sequence_length,
            pre_process=model_chunk.has_embedding,
            post_process=model_chunk.has_head,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type=_POSITIONS[model.positions],
            rotary_percent=model.rotary_fraction,
            rotary_base=model.rotary_base,
            pg_collection=groups,
        )
        if model.positions == "rotary":
            embedding = self.rotary_pos_emb
            embedding.inv_freq = stretched(embedding.inv_freq, model)
            if context is not None:
                embedding.__class__ = PartAngles
        if self.post_process:
            # GPTModel builds megatron's layer and has no argument for its class
            self.output_layer.__class__ = ColumnLinear if model.width_factor == 1 else ScaledHead
            self.output_layer.input_factor = model.width_factor

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        labels: Tensor | None = None,
        cumulative_lengths: Tensor | None = None,
        is_part: bool = False,
    ) -> Tensor | TokenLosses:
        """Run this model chunk.

        Tokens, positions and labels are [b, s] int64. Only learned positions need the position of
        each token in its document: rotary scores depend on the difference of two positions alone.
        The borders of documents are [b, k] int32 (model/confined.py); None = a sample is one
        document. With `is_part` the tokens are those of this context rank alone.

        The last chunk returns the losses of [b, s] tokens, or without labels the logits, [b, s,
        this tensor rank's part of the padded vocabulary]. Other chunks return the activations for
        the next chunk, [s, b, hidden]; with sequence parallelism only those of this rank's tokens.
        """
        documents, (samples, tokens) = None, input_ids.shape
        context = self._context if is_part else None
        tokens *= 1 if context is None else context.size
        if cumulative_lengths is not None:
            documents = Documents(cumulative_lengths, tokens)
        part = None if context is None else ContextPart(context, samples, tokens, documents)
        limits = part or self._limits(input_ids, documents)
        if self._rotates_parts:
            self.rotary_pos_emb.part = part
        output: Tensor | TokenLosses = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            labels=labels,
            extra_block_kwargs={"attention_bias": limits},
        )
        cap = self._logit_softcap
        if isinstance(output, Tensor) and self.post_process and cap is not None:
            return torch.tanh(output / cap) * cap
        return output

    def _limits(
        self, input_ids: Tensor, documents: Documents | None
    ) -> FlexMasks | Documents | None:
        """Return what attention reads, in the form that the layers of this pass take.

        Passes without gradients do not use FlexAttention: they have many lengths, for each of which
        it would be compiled again.
        """
        is_confined = self._is_confined or documents is not None
        uses = uses_flex(self._attention, input_ids.device) and torch.is_grad_enabled()
        if not (is_confined and uses):
            return documents
        return FlexMasks.of(self._windows, input_ids.shape[1], documents, input_ids.device)

    def setup_embeddings_and_output_layer(self) -> None:
        """Skip megatron's broadcast of a tied embedding between the first and the last stage.

        model/build.py draws the same weights on both stages, and `ShardedStates`
        (sharding/) sums the gradients of both.
        """

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> TokenLosses:
        """Return the losses of each token over the vocabulary without padding.

        megatron's GPTModel calls this method in its forward pass. The logits, [tokens, samples,
        this tensor rank's part of the padded vocabulary], are overwritten.
        """
        return token_losses(
            logits, labels, self.vocabulary, self.pg_collection.tp, self._logit_softcap
        )

"""Define the module of a GPT's model chunk, a range of consecutive layers."""

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.model_chunks import ModelChunk, chunk_stacks
from frontier_llm.model.layer_specs import decoder_block
from frontier_llm.model.linear import ColumnLinear, ScaledHead
from frontier_llm.model.loss import TokenLosses, token_losses


class Gpt(GPTModel):
    """megatron's GPTModel with a loss that ignores the padding of the vocabulary.

    The vocabulary is padded so that tensor-parallel ranks can divide the embedding.
    """

    def __init__(
        self,
        model: ModelConfig,
        model_chunk: ModelChunk,
        sequence_length: int,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        kernels: Kernels,
    ) -> None:
        """Build the modules of one model chunk.

        Args:
            model: configuration of the whole model.
            model_chunk: layers of this chunk, and whether it has the embedding and the head.
            sequence_length: maximum number of tokens per sample.
            config: megatron's configuration.
            groups: process groups of this rank, as megatron's modules expect them.
            kernels: implementation of the norms.
        """
        self.vocabulary = model.vocabulary
        self.model_chunk, self.stacks = model_chunk, chunk_stacks(model, model_chunk)
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_block(len(model_chunk.layers), model, kernels),
            vocab_size=padded_vocabulary(model, config.tensor_model_parallel_size),
            max_sequence_length=sequence_length,
            pre_process=model_chunk.has_embedding,
            post_process=model_chunk.has_head,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="learned_absolute" if model.positions == "learned" else "rope",
            rotary_percent=model.rotary_fraction,
            rotary_base=model.rotary_base,
            pg_collection=groups,
        )
        if self.post_process:
            # GPTModel builds megatron's layer and has no argument for its class
            self.output_layer.__class__ = ColumnLinear if model.width_factor == 1 else ScaledHead
            self.output_layer.input_factor = model.width_factor

    def setup_embeddings_and_output_layer(self) -> None:
        """Skip megatron's broadcast of a tied embedding between the first and the last stage.

        model/initialise.py draws the same weights on both stages, and `ShardedStates`
        (sharding/) sums the gradients of both.
        """

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> TokenLosses:
        """Return the losses of each token over the vocabulary without padding.

        megatron's GPTModel calls this method in its forward pass.

        Args:
            labels: [samples, tokens] int64.
            logits: [tokens, samples, this tensor rank's part of the padded vocabulary]. They are
                overwritten.
        """
        return token_losses(logits, labels, self.vocabulary, self.pg_collection.tp)

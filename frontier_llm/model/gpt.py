"""The GPT of one piece of the pipeline."""

from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.stacks import piece_stacks
from frontier_llm.geometry.stages import Piece
from frontier_llm.model.layer_specs import decoder_block
from frontier_llm.model.loss import token_losses


class Gpt(GPTModel):
    """megatron's GPTModel with a loss that does not see the vocabulary's padding."""

    def __init__(
        self,
        model: ModelConfig,
        piece: Piece,
        sequence_length: int,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        kernels: Kernels,
    ) -> None:
        self.vocabulary = model.vocabulary
        self.piece, self.stacks = piece, piece_stacks(model, piece)
        interleaved = config.virtual_pipeline_model_parallel_size is not None
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_block(len(piece.layers), model, kernels),
            vocab_size=padded_vocabulary(model, config.tensor_model_parallel_size),
            max_sequence_length=sequence_length,
            pre_process=piece.has_embedding,
            post_process=piece.has_head,
            share_embeddings_and_output_weights=model.tied,
            position_embedding_type="learned_absolute" if model.positions == "learned" else "rope",
            rotary_percent=model.rotary_fraction,
            rotary_base=model.rotary_base,
            pg_collection=groups,
            vp_stage=piece.chunk if interleaved else None,
        )

    def setup_embeddings_and_output_layer(self) -> None:
        """Skip megatron's copy of a tied embedding over the pipeline's ends.

        model/initialise.py gives both ends equal weights from the tensor's name; their gradients
        are added by sharding.
        """

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Cross entropy of each token over the true vocabulary.

        Args:
            labels: [b, s] int64.
            logits: [s, b, v] this tensor rank's part of the padded vocabulary. Overwritten.

        Returns:
            [b, s] fp32.
        """
        return token_losses(logits, labels, self.vocabulary, self.pg_collection.tp.rank())

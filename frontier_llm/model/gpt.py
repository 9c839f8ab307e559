"""The GPT of one piece of the pipeline."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.stages import Piece
from frontier_llm.model.layer_specs import decoder_block


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
        self.piece = piece
        interleaved = config.virtual_pipeline_model_parallel_size is not None
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_block(len(piece.layers), kernels),
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
        mask_padding(logits, self.vocabulary, self.pg_collection.tp.rank())
        loss_sb = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1).contiguous())
        return loss_sb.transpose(0, 1)


def mask_padding(logits: Tensor, vocabulary: int, tensor_rank: int) -> None:
    """Set the logits of rows that only pad the vocabulary to the lowest number, in place.

    Left alone, each padded row is a token of logit 0 that takes probability from all others.

    Args:
        logits: [..., v], this tensor rank's part of the padded vocabulary. Overwritten.
        vocabulary: true size.
        tensor_rank: which part.
    """
    width = logits.shape[-1]
    true = max(0, min(width, vocabulary - tensor_rank * width))
    if true < width:
        logits[..., true:] = torch.finfo(logits.dtype).min

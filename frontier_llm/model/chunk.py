"""Define the module of a model chunk of a GPT or of an encoder-decoder.

A GPT is a decoder without an encoder. The layers of an encoder and then those of the decoder form
one list, which is divided into model chunks at any layer. Each chunk sends one flat tensor to the
next chunk: the activations of the encoder, and after them those of the decoder. If both sides share
an embedding, the first chunk looks up the tokens of both, and a chunk of encoder layers passes the
decoder's on unchanged. With two embeddings, there is nothing of the decoder before its first layer.
A chunk of decoder layers passes the encoder's output on unchanged.

In shapes, s is the number of tokens of the encoder, t the number of tokens of the decoder, and b
the number of samples.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.inventory import padded_vocabulary
from frontier_llm.geometry.lengths import SampleLengths
from frontier_llm.geometry.model_chunks import (
    ModelChunk,
    chunk_stacks,
    chunk_tables,
    received_elements,
)
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.cut_samples import ContextPart, ContextRanks
from frontier_llm.model.layer_stack import LayerStack
from frontier_llm.model.linear import ColumnLinear, ScaledHead
from frontier_llm.model.loss import TokenLosses, token_losses
from frontier_llm.model.reads import Documents, Reads
from frontier_llm.model.transformer import side_config

_EMBEDDED_POSITIONS = {"learned": "learned_absolute", "rotary": "none", "relative": "none"}


class Chunk(MegatronModule):
    """One model chunk.

    `model_chunk` says which layers it has, and `stacks` which part of the encoder and of the
    decoder these are. For each stack there is a submodule of its name, `encoder` or `decoder`. If
    the embedding or the head belongs to the chunk, it is the submodule `embedding` or
    `output_layer`. The vocabulary is padded so that tensor-parallel ranks can divide the embedding.
    """

    def __init__(
        self,
        layout: ResolvedLayout,
        model_chunk: ModelChunk,
        config: TransformerConfig,
        group: dist.ProcessGroup,
        kernels: Kernels,
        context: ContextRanks | None = None,
    ) -> None:
        super().__init__(config=config)
        model = self._model = layout.model
        self._group, self._context = group, context
        self._keeps = layout.recompute == "full"
        self.model_chunk, self.stacks = model_chunk, chunk_stacks(model, model_chunk)
        self._received: Tensor | None = None
        rows = padded_vocabulary(model, group.size())
        positions = _EMBEDDED_POSITIONS[model.positions]
        tables = chunk_tables(model, model_chunk)
        self.encoder_embedding, self.embedding = (
            LanguageModelEmbedding(
                side_config(config, side), rows, layout.sequence_length, positions, tp_group=group
            )
            if unit in tables
            else None
            for unit, side in (("encoder_embedding", model.encoder), ("embedding", model))
        )
        stacks = {
            stack.name: LayerStack(stack, layout, config, group, kernels) for stack in self.stacks
        }
        self.encoder, self.decoder = stacks.get("encoder"), stacks.get("decoder")
        if model_chunk.has_head:
            head = ColumnLinear if model.head_factor == 1 else ScaledHead
            self.output_layer = head(
                model.hidden,
                rows,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=model.tied and self.embedding is not None,
                tp_group=group,
            )
            self.output_layer.input_factor = model.head_factor

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Receive the output of the previous chunk, or None, from trainer/pipeline.py."""
        self._received = input_tensor

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cumulative_lengths: Tensor | None = None,
        encoder_tokens: Tensor | None = None,
        encoder_mask: Tensor | None = None,
        encoder_cumulative_lengths: Tensor | None = None,
        labels: Tensor | None = None,
        is_part: bool = False,
    ) -> Tensor | TokenLosses:
        """Run this model chunk on [b, t] tokens of the decoder and [b, s] of the encoder, int64.

        Only learned positions need the position of each token in its document, [b, t] int64. The
        borders of documents on both sides are [b, k] int32 (model/reads.py); None = a sample is one
        document. The mask of such samples is [b, s] bool, false at padding; None if there is none.
        With `is_part` the tokens are those of this context rank alone. With sequence parallelism s
        and t are divisible by the number of tensor-parallel ranks.

        The last chunk returns the losses of [b, t] tokens, or without labels the logits, [b, t,
        this tensor rank's part of the padded vocabulary]. Other chunks return the activations for
        the next chunk, flat: [s, b, hidden of the encoder] unless this is a GPT, and [t, b, hidden]
        if they exist. With sequence parallelism they are those of this rank's tokens.
        """
        context, decoded = self._inputs(tokens, positions, encoder_tokens)
        context_reads = Reads()
        if encoder_mask is not None:
            context_reads = Reads(keys=Documents.padded(encoder_mask))
        if encoder_cumulative_lengths is not None:
            assert encoder_tokens is not None
            length = encoder_tokens.shape[1]
            context_reads = Reads(keys=Documents(encoder_cumulative_lengths, length))
        if self.encoder is not None:
            reads = context_reads
            if self.encoder.has_windows or encoder_cumulative_lengths is not None:
                reads = replace(reads, queries=reads.keys)  # the padding reads itself
            context = self.encoder(context, reads)
        if self.decoder is not None:
            reads = self._reads(tokens, cumulative_lengths, is_part=is_part)
            context_reads = replace(context_reads, queries=reads.queries)
            decoded = self.decoder(decoded, reads, context, context_reads)
        if self.model_chunk.has_head:
            return self._head(decoded, labels)
        parts = [part.flatten() for part in (context, decoded) if part is not None]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _inputs(
        self, tokens: Tensor, positions: Tensor | None, encoder_tokens: Tensor | None
    ) -> list[Any]:
        """Return the activations of encoder and decoder, received or looked up; None = none."""
        sides = [tokens] if encoder_tokens is None else [encoder_tokens, tokens]
        lengths = SampleLengths(sum(side.shape[1] for side in sides[:-1]), tokens.shape[1])
        samples, inputs = len(tokens), list[Any]([None, None])
        if self._received is not None:
            of_sides = received_elements(self._model, self.model_chunk, lengths)
            parts = self._received.split([n * samples // self._parts for n in of_sides])
            widths = self._model.encoder.hidden, self._model.hidden
            for side, (part, width) in enumerate(zip(parts, widths, strict=True)):
                inputs[side] = part.view(-1, samples, width) if len(part) else None
        if self.encoder_embedding is not None:
            inputs[0] = self._embed(self.encoder_embedding, sides[:1], None)
        if self.embedding is not None:
            read = sides[-1:] if self._model.encoder_embedding else sides
            states = self._embed(self.embedding, read, positions)
            found = states.split([side.shape[1] // self._parts for side in read])
            inputs[-len(found) :] = found
        return inputs

    def _reads(self, tokens: Tensor, cumulative_lengths: Tensor | None, *, is_part: bool) -> Reads:
        """Return the documents of the decoder's tokens."""
        documents, (samples, length) = None, tokens.shape
        context = self._context if is_part else None
        length *= 1 if context is None else context.size
        if cumulative_lengths is not None:
            documents = Documents(cumulative_lengths, length)
        kernel = None
        if context is not None:
            kernel = ContextPart(
                context, samples, length, documents, tokens.device, keeps=self._keeps
            )
        return Reads(queries=documents, keys=documents, kernel=kernel)

    def _head(self, hidden: Tensor, labels: Tensor | None) -> Tensor | TokenLosses:
        table = None
        if self.output_layer.weight is None:  # the embedding of this chunk is the head, too
            assert self.embedding is not None
            table = self.embedding.word_embeddings.weight
        logits, _ = self.output_layer(hidden, table)
        if labels is not None:
            return self.losses(logits, labels)
        cap, logits = self._model.logit_softcap, logits.transpose(0, 1)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def losses(self, logits: Tensor, labels: Tensor) -> TokenLosses:
        """Return the losses of each token over the vocabulary without padding.

        The logits, [tokens, samples, this tensor rank's part of the padded vocabulary], are
        overwritten.
        """
        model = self._model
        return token_losses(logits, labels, model.vocabulary, self._group, model.logit_softcap)

    @property
    def _parts(self) -> int:
        """Number of parts into which sequence parallelism splits each sequence; 1 without it."""
        return self._group.size() if self.config.sequence_parallel else 1

    def _embed(
        self, table: LanguageModelEmbedding, sides: list[Tensor], positions: Tensor | None
    ) -> Tensor:
        """Look up the embeddings of the tokens of the sides that share a table.

        With sequence parallelism megatron's embedding gives each tensor-parallel rank one range of
        the tokens. If both sides share the table, the tokens are ordered so that each range has a
        part of the tokens of each side.
        """
        parts = zip(*(side.chunk(self._parts, dim=1) for side in sides), strict=True)
        in_order = [part for of_rank in parts for part in of_rank]
        tokens = torch.cat(in_order, dim=1) if len(sides) > 1 else sides[0]
        states: Tensor = table(tokens, positions)
        if not self._model.scaled_embedding:
            return states
        # in 16 bits the factor is rounded first, as in the models trained in this way
        return states * torch.tensor(states.shape[-1] ** 0.5, dtype=states.dtype).item()

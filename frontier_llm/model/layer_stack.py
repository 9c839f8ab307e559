"""Define a stack: the layers of an encoder or of a decoder that belong to one model chunk.

Only encoder-decoders use this module (t5.py). A model chunk is a range of consecutive layers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.model_chunks import Stack
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.flex import FlexScores, uses_flex
from frontier_llm.model.layer_specs import Norm, layer_spec
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
        """Run the layers.

        Args:
            hidden: [s tokens, b samples, hidden]; with sequence parallelism only the tokens of this
                tensor-parallel rank.
            mask: [b, s] bool, true at tokens, false at padding; None if there is no padding, or if
                the stack is causal.
            context: [t, b, hidden], output of the encoder for its t tokens (with sequence
                parallelism, for those of this rank); None in an encoder.
            context_mask: [b, t] bool, true at tokens of the encoder, false at padding; None if
                there is no padding.

        Returns:
            [s, b, hidden], for the same tokens as the input.
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

        With sequence parallelism the tensor-parallel ranks have different tokens. They must draw
        different dropout masks, so each uses a random stream of its own.
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

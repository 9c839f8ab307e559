"""The layers of an encoder or decoder that lie on one piece, with what they share."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from frontier_llm.config.model import ModelConfig
from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.stacks import Stack
from frontier_llm.model.layer_specs import layer_spec
from frontier_llm.model.norm import Norm
from frontier_llm.model.relative import RelativePositions


class LayerStack(nn.Module):
    """A table of relative positions, megatron's layers, and behind the last of all a norm.

    It takes the place of megatron's TransformerBlock, which cannot recompute layers that share a
    table with gradients.
    """

    def __init__(
        self,
        stack: Stack,
        model: ModelConfig,
        recompute: str,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        kernels: Kernels,
        vp_stage: int | None,
    ) -> None:
        super().__init__()
        self._config = config
        self._recompute_layers = recompute == "full"
        causal = stack.name == "decoder"
        self.positions = RelativePositions(
            model.relative_buckets,
            model.relative_distance,
            model.heads // groups.tp.size(),
            causal=causal,
            dtype=config.params_dtype,
        )
        spec = layer_spec(
            kernels, causal=causal, reads_encoder=causal, recompute=recompute == "selective"
        )
        self.layers = nn.ModuleList(
            build_module(
                spec, config=config, layer_number=place, pg_collection=groups, vp_stage=vp_stage
            )
            for place in range(1, len(stack.layers) + 1)
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
            hidden: [s, b, hidden]; under sequence parallel this tensor rank's part of s.
            mask: [b, s] bool, true where a token is; None = everywhere, or causal.
            context: [t, b, hidden] (or the part), the encoder's output; None in the encoder.
            context_mask: [b, t] bool, as `mask`.

        Returns:
            [s, b, hidden], as it came.
        """
        of_distance = self.positions()
        for layer in self.layers:
            run = partial(self._run, layer, mask, context_mask, of_distance)
            if self._recompute_layers and self.training:
                hidden = _again_in_backward(run, hidden, context)
            else:
                hidden = run(hidden, context)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def _run(
        self,
        layer: nn.Module,
        mask: Tensor | None,
        context_mask: Tensor | None,
        of_distance: Tensor,
        hidden: Tensor,
        context: Tensor | None,
    ) -> Tensor:
        """Run one layer, under sequence parallel with this tensor rank's own dropout."""
        sequence = self._config.sequence_parallel
        with get_cuda_rng_tracker().fork() if sequence else nullcontext():
            hidden, _ = layer(
                hidden_states=hidden,
                attention_mask=mask,
                context=context,
                context_mask=context_mask,
                attention_bias=of_distance,
            )
        return hidden


def _again_in_backward(
    run: Callable[[Tensor, Tensor | None], Tensor], hidden: Tensor, context: Tensor | None
) -> Tensor:
    """Run, keep the inputs alone, and run again in the backward pass with the same dropout.

    Not stopped early: what is sent again is then all that was sent (geometry/wire.py).
    """
    states = get_cuda_rng_tracker().get_states()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _random_states(states)

    with set_checkpoint_early_stop(False):
        result: Tensor = checkpoint(run, hidden, context, use_reentrant=False, context_fn=contexts)
    return result


@contextmanager
def _random_states(states: dict[str, Tensor]) -> Iterator[None]:
    """Put megatron's random streams back to where they were, for a while."""
    tracker = get_cuda_rng_tracker()
    now = tracker.get_states()
    tracker.set_states(dict(states))
    try:
        yield
    finally:
        tracker.set_states(now)

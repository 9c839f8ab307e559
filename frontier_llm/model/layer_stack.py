"""Run the layers of an encoder or decoder that belong to one model chunk."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from frontier_llm.device.kernels import Kernels
from frontier_llm.geometry.model_chunks import Stack
from frontier_llm.geometry.resolved import ResolvedLayout
from frontier_llm.model.cut_samples import ContextPart
from frontier_llm.model.flex import FlexKernel, needs_flex, uses_flex
from frontier_llm.model.layer import Layer, Norm
from frontier_llm.model.reads import Reads, Scores
from frontier_llm.model.relative import RelativePositions
from frontier_llm.model.rotary import angles, frequencies
from frontier_llm.model.transformer import side_config


class LayerStack(nn.Module):
    """Consecutive layers of an encoder or decoder, and their shared table of relative positions.

    If the stack includes the last layer of the encoder or decoder, it also has the final norm. The
    layout's `recompute` selects the activations that are computed again: `full` (of whole layers),
    `selective` (of attention) or `none`.
    """

    def __init__(
        self,
        stack: Stack,
        layout: ResolvedLayout,
        config: TransformerConfig,
        group: dist.ProcessGroup,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        model = layout.model.side(stack.layers.start)
        self._config = config = side_config(config, model)
        self._attention = layout.attention
        recompute = {"none": None, "selective": "attention", "full": "layers"}[layout.recompute]
        self._recompute_layers = recompute == "layers"
        self._cap = model.attention_softcap
        self._bounds = dict(map(model.layer_bounds, stack.layers))
        self._windows = [model.layer_window(number) for number in stack.layers]
        self._is_merged = model.merges_attention(stack.layers.start)
        self.positions: RelativePositions | None = None
        if model.positions == "relative" and stack.layers:
            self.positions = RelativePositions(
                model.relative_buckets,
                model.relative_distance,
                model.heads // group.size(),
                causal=stack.name == "decoder",
                dtype=config.params_dtype,
            )
        rotated = set(self._windows) if model.positions == "rotary" else ()
        self._frequencies = {window: frequencies(model, window) for window in rotated}
        self.layers = nn.ModuleList(
            Layer(
                config,
                model,
                kernels,
                group,
                reads_encoder=model.reads_encoder(number) and not model.merges_attention(number),
                is_merged=model.merges_attention(number),
                recompute=recompute == "attention",
            )
            for number in stack.layers
        )
        self.final_layernorm = Norm(config, kernels) if stack.ends else None

    def forward(
        self,
        hidden: Tensor,
        reads: Reads,
        context: Tensor | None = None,
        context_reads: Reads | None = None,
    ) -> Tensor:
        """Run the layers on [s tokens, b samples, hidden]; the result has the same shape.

        `reads` has the documents of the tokens; the layers add their bounds. A decoder reads the
        context, [t, b, the encoder's hidden], the output of the encoder. With sequence parallelism
        the tokens are those of this tensor-parallel rank.
        """
        parts = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        tokens = parts * hidden.shape[0]
        if self._is_merged:
            assert context is not None
            assert context_reads is not None
            of_context = parts * context.shape[0], context_reads.keys
            reads = replace(reads, context=of_context[0], context_keys=of_context[1])
        bias = None if self.positions is None else self.positions()
        by_window = self.reads_by_window(reads, tokens, hidden.device, bias)
        turns = {window: self.angles(reads, tokens, window) for window in self._frequencies}
        for layer, window in zip(self.layers, self._windows, strict=True):
            own = {"reads": by_window[window], "bias": bias, "angles": turns.get(window)}
            run = partial(self._run, partial(layer, **own, context_reads=context_reads))
            if self._recompute_layers and self.training:
                hidden = _recompute_in_backward(run, hidden, context)
            else:
                hidden = run(hidden, context)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a window."""
        return any(self._windows)

    def angles(self, reads: Reads, tokens: int, window: int | None) -> Tensor:
        """Return the angles of the tokens in layers with a window: [s, b or 1, 1, r] fp32.

        Positions are counted from the start of a sample, also if it has several documents: scores
        depend on the difference of two positions alone, unless keys of a context are not rotated.
        """
        turns = self._frequencies[window]
        if self._is_merged and reads.queries is not None:
            return angles(turns, tokens)[reads.queries.positions.T].squeeze(2)
        if isinstance(reads.kernel, ContextPart):
            of_sample = angles(turns, reads.kernel.length)
            return of_sample[reads.kernel.tokens.T.to(of_sample.device)].squeeze(2)
        return angles(turns, tokens)

    def reads_by_window(
        self, reads: Reads, tokens: int, device: torch.device, bias: Tensor | None
    ) -> dict[int | None, Reads]:
        """Return what the layers read, by the window of a layer.

        Passes without gradients do not use FlexAttention: they have many lengths, for each of which
        it would be compiled again, and without a gradient of the bias torch has better kernels.
        """
        by_window = {
            window: replace(reads, before=window, after=after)
            for window, after in self._bounds.items()
        }
        scores = Scores(cap=self._cap, bias=bias)
        if reads.kernel is None and uses_flex(self._attention, device) and torch.is_grad_enabled():
            for window, own in by_window.items():
                if needs_flex(own, scores, has_documents=own.queries is not None):
                    kernel = FlexKernel.of(own, tokens, device, bias)
                    by_window[window] = replace(own, kernel=kernel)
        return by_window

    def _run(self, layer: Callable[..., Tensor], hidden: Tensor, context: Tensor | None) -> Tensor:
        """Run one layer.

        With sequence parallelism the tensor-parallel ranks must draw different dropout masks, so
        each uses a random stream of its own.
        """
        needs_own_stream = self._config.sequence_parallel
        with get_cuda_rng_tracker().fork() if needs_own_stream else nullcontext():
            return layer(hidden, context=context)


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

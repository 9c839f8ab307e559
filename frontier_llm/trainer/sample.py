"""Text sampled from the model in whatever layout it lies."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.data.tokenizer import Tokenizer
from frontier_llm.model.build import Model
from frontier_llm.model.gpt import mask_padding
from frontier_llm.parallel.groups import Groups
from frontier_llm.trainer.pipeline import Pipeline

CONTEXT_MULTIPLE = 16


class Sampler:
    """Continues prompts token by token.

    There is no cache of keys and values: this is for looking at a model, not for serving it.
    """

    def __init__(
        self, model: Model, groups: Groups, config: RunConfig, tokenizer: Tokenizer
    ) -> None:
        self._model, self._groups, self._tokenizer = model, groups, tokenizer
        self._vocabulary = min(config.model.vocabulary, tokenizer.vocabulary)
        self._window = config.data.sequence_length
        self._pipeline = Pipeline(model, config)
        self._device = next(model.chunks[0].parameters()).device

    def continue_texts(
        self, prompts: Sequence[str], tokens: int, temperature: float, seed: int
    ) -> list[str]:
        """Sample a continuation of each prompt.

        Collective over all ranks; every rank returns the same texts.

        Args:
            prompts: texts to continue; an empty one starts a new document.
            tokens: how many to add.
            temperature: divides the logits; 0 takes the likeliest token.
            seed: of the draws.
        """
        generator = torch.Generator().manual_seed(seed)
        texts = [[self._tokenizer.eod, *self._tokenizer.encode(prompt)] for prompt in prompts]
        prompt_lengths = [len(text) for text in texts]
        for chunk in self._model.chunks:
            chunk.eval()
        with torch.no_grad():
            for _ in range(tokens):
                for text in texts:
                    text.append(self._next_token(text, temperature, generator))
        for chunk in self._model.chunks:
            chunk.train()
        return [
            self._tokenizer.decode(text[length:])
            for text, length in zip(texts, prompt_lengths, strict=True)
        ]

    def _next_token(
        self, text: Sequence[int], temperature: float, generator: torch.Generator
    ) -> int:
        context = torch.tensor(text[-self._window :])
        logits = self._pipeline.logits(self._batch(context), len(context) - 1)
        chosen = torch.zeros(1, dtype=torch.int64, device=self._device)
        if logits is not None:
            whole = self._whole_vocabulary(logits).cpu()[0, : self._vocabulary]
            if temperature > 0:
                probabilities = torch.softmax(whole / temperature, dim=-1)
                token = torch.multinomial(probabilities, 1, generator=generator)
            else:
                token = whole.argmax(keepdim=True)
            chosen.copy_(token)
        group = self._groups.pipeline
        dist.broadcast(chosen, dist.get_process_group_ranks(group)[-1], group=group)
        return int(chosen.item())

    def _batch(self, context: torch.Tensor) -> Batch:
        """Pad on the right, which a causal model does not see, to a length all layouts can cut."""
        multiple = CONTEXT_MULTIPLE * self._groups.grid.tensor
        length = min(-(-len(context) // multiple) * multiple, self._window)
        tokens = torch.zeros(1, length, dtype=torch.int64)
        tokens[0, : len(context)] = context
        positions = torch.arange(length)[None]
        return Batch(tokens, tokens, positions).to(self._device)

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the tensor ranks' parts of [b, v] logits."""
        mask_padding(logits, self._vocabulary, self._groups.at.tensor)
        parts = [torch.empty_like(logits) for _ in range(self._groups.grid.tensor)]
        dist.all_gather(parts, logits.contiguous(), group=self._groups.tensor)
        return torch.cat(parts, dim=-1)

"""Samples text from a model in any layout."""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from frontier_llm.config.run import RunConfig
from frontier_llm.data.batch import Batch
from frontier_llm.data.corpora import Corpora
from frontier_llm.data.tokenizer import Tokenizer, decode_marked, encode_marked
from frontier_llm.data.tokenizer_source import mode_tokens, tokens_before_text
from frontier_llm.errors import TrainingError
from frontier_llm.geometry.grid import Coordinates
from frontier_llm.model.build import Model
from frontier_llm.model.loss import mask_padding
from frontier_llm.parallel.groups import Groups
from frontier_llm.trainer.pipeline import Pipeline

_LOG = logging.getLogger(__name__)
CONTEXT_MULTIPLE = 16
"""Inputs are padded to a multiple of this number of tokens per tensor rank."""
_SHOWN_CHARACTERS = 40
_NO_TOKEN = -1
"""Sent to all ranks instead of a token if the logits are not finite."""
_Ends = tuple[list[int], list[int], list[int]]
_PROMPTS, _PROMPT_TOKENS = 3, 6
"""Number of prompts from validation documents, and of their tokens."""


class Sampler:
    """Continues prompts token by token.

    A GPT continues the prompt, and so does an encoder-decoder that is trained to continue prefixes.
    Another one is trained to fill gaps, which are marked by sentinel tokens. It gets the prompt
    with a sentinel after it, and writes the text of this gap. If the prompt has sentinels itself,
    as `<extra_id_0>`, the model gets it as it is, and writes the text of each gap after its
    sentinel.
    Keys and values of attention are not cached: sampling is for inspecting a model, not for serving
    it.
    """

    def __init__(
        self, model: Model, groups: Groups, config: RunConfig, tokenizer: Tokenizer
    ) -> None:
        self._groups, self._tokenizer = groups, tokenizer
        self._sentinels = tokenizer.sentinels(config.data.sentinels)
        ids = max([tokenizer.vocabulary, *(token + 1 for token in self._sentinels)])
        self._vocabulary = min(config.model.vocabulary, ids)
        self._window = config.data.sequence_length
        self._has_encoder = config.model.encoder_layers > 0
        # what the encoder reads around a prompt, and the decoder before it writes
        modes, data, start = mode_tokens(config), config.data, config.model.start_token
        marked, unmarked = (data.mode_of_prompt(has_gaps=has_gaps) for has_gaps in (True, False))
        before = [] if unmarked is None else [modes[unmarked]]
        self._marked: _Ends = [] if marked is None else [modes[marked]], [tokenizer.eod], [start]
        self._unmarked: _Ends = before, [tokenizer.eod], [start]
        if self._has_encoder and all(d.span is not None for d in data.denoisers):
            gap = self._sentinels[0]
            self._unmarked = before, [gap, tokenizer.eod], [start, gap]
        self._before = tokens_before_text(config.data, tokenizer)
        self._pipeline = Pipeline(model, groups)

    def continue_texts(
        self, prompts: Sequence[str], tokens: int, temperature: float, seed: int
    ) -> list[str]:
        """Sample a continuation of each prompt; an empty one starts a new document.

        Collective over all ranks; every rank returns the same texts. The temperature divides the
        logits; 0 takes the most likely token. Raises a TrainingError if logits are not finite.
        """
        generator = torch.Generator().manual_seed(seed)
        encoded = [encode_marked(self._tokenizer, prompt, self._sentinels) for prompt in prompts]
        for text, prompt in zip(prompts, encoded, strict=True):
            self._warn_of_cut(text, prompt)
        written: list[list[int]] = [[] for _ in prompts]
        with self._pipeline.evaluating():
            for _ in range(tokens):
                for prompt, tokens_so_far in zip(encoded, written, strict=True):
                    batch, position = self._batch(prompt, tokens_so_far)
                    token = self._next_token(batch, position, temperature, generator)
                    tokens_so_far.append(token)
        return [decode_marked(self._tokenizer, tokens, self._sentinels) for tokens in written]

    def _next_token(
        self, batch: Batch, position: int, temperature: float, generator: torch.Generator
    ) -> int:
        logits = self._pipeline.logits(batch.to(self._pipeline.device), position)
        chosen = torch.zeros(1, dtype=torch.int64, device=self._pipeline.device)
        if logits is not None:
            all_logits = self._whole_vocabulary(logits).cpu()[0, : self._vocabulary]
            if not all_logits.isfinite().all():
                token = torch.tensor([_NO_TOKEN])
            elif temperature > 0:
                probabilities = torch.softmax(all_logits / temperature, dim=-1)
                token = torch.multinomial(probabilities, 1, generator=generator)
            else:
                token = all_logits.argmax(keepdim=True)
            chosen.copy_(token)
        head = Coordinates(tensor=0, data=0, pipeline=self._groups.head_stage)
        dist.broadcast(chosen, src=self._groups.grid.rank(head))
        if int(chosen.item()) == _NO_TOKEN:
            raise TrainingError("the model computes numbers that are not finite: it has no text")
        return int(chosen.item())

    def _batch(self, prompt: Sequence[int], written: Sequence[int]) -> tuple[Batch, int]:
        """Return the model's input, and the position whose logits give the next token."""
        if self._has_encoder:
            return self._encoder_decoder_batch(prompt, written)
        context = [*self._before, *prompt, *written] or [self._tokenizer.eod]
        context = context[-self._window :]
        tokens = self._padded(context)
        positions = torch.arange(tokens.shape[1])[None]
        return Batch(tokens, tokens, positions), len(context) - 1

    def _encoder_decoder_batch(
        self, prompt: Sequence[int], written: Sequence[int]
    ) -> tuple[Batch, int]:
        """As `_batch`: the encoder reads the prompt, the decoder what is written."""
        before, after, start = self._ends(prompt)
        source = [*before, *prompt[-(self._window - len(before) - len(after)) :], *after]
        target = [*start, *written]
        encoder, decoder = self._padded(source), self._padded(target)
        mask = (torch.arange(encoder.shape[1]) < len(source))[None]
        batch = Batch(decoder, decoder, encoder_tokens=encoder, encoder_mask=mask)
        return batch, len(target) - 1

    def _ends(self, prompt: Sequence[int]) -> _Ends:
        is_marked = not set(self._sentinels).isdisjoint(prompt)
        return self._marked if is_marked else self._unmarked

    def _warn_of_cut(self, text: str, prompt: Sequence[int]) -> None:
        ends = map(len, self._ends(prompt)[:2]) if self._has_encoder else ()
        room = self._window - sum(ends)
        if len(prompt) > room and dist.get_rank() == 0:
            _LOG.warning(
                "the prompt %r is longer than a sample (data.sequence_length=%d): the model reads "
                "only the last %d of its %d tokens",
                text[:_SHOWN_CHARACTERS],
                self._window,
                room,
                len(prompt),
            )

    def _padded(self, context: Sequence[int]) -> torch.Tensor:
        """Pad on the right, where no token attends to it, to a multiple of the tensor ranks."""
        multiple = CONTEXT_MULTIPLE * self._groups.grid.tensor
        length = -(-len(context) // multiple) * multiple
        if len(context) <= self._window:
            length = min(length, self._window)
        tokens = torch.zeros(1, length, dtype=torch.int64)
        tokens[0, : len(context)] = torch.tensor(context)
        return tokens

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather [samples, vocabulary / tensor ranks] of all ranks, and mask the padding."""
        mask_padding(logits, self._vocabulary, self._groups.coordinates.tensor)
        parts = [torch.empty_like(logits) for _ in range(self._groups.grid.tensor)]
        dist.all_gather(parts, logits.contiguous(), group=self._groups.tensor)
        return torch.cat(parts, dim=-1)


def prompts_of(config: RunConfig, corpora: Corpora) -> tuple[str, ...]:
    """Return `trainer.sample_prompts`, or by default the first words of validation documents."""
    if config.trainer.sample_prompts is not None:
        return config.trainer.sample_prompts
    prompts = []
    for number in range(_PROMPTS):
        index, corpus = divmod(number, len(corpora.corpora))
        stream = corpora.corpora[corpus].validation
        lengths = stream.document_lengths()
        if index < len(lengths):
            count = min(_PROMPT_TOKENS, int(lengths[index]) - 1)  # the last token ends the document
            tokens = stream.read(stream.document_start(index), count)
            prompts.append(corpora.tokenizer.decode(tokens.tolist()))
    return tuple(prompts)

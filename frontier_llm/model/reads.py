"""Describe an attention: which keys its queries read, and how it computes their scores.

The kernels of attention.py, flex.py and cut_samples.py compute what `Reads` and `Scores` describe.

- A layer of a decoder reads no key after a query, and with a window of w tokens only the query's
  own key and the w - 1 keys before it (Longformer, arXiv:2004.05150, section 3.1; Mistral 7B,
  arXiv:2310.06825, section 2). A layer of an encoder reads keys on both sides.
- If documents are separate, a query reads keys of its own document only. The padding of a sample is
  a document of its own.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

FAR = 1 << 30
"""More than any distance of two tokens."""


class Documents:
    """The documents of the samples of a micro-batch.

    The cumulative lengths are [b samples, k] int32, ascending: 0, then for each document of a
    sample the index of the token after its last one. The last document ends at `tokens`, which is
    repeated at the end of a row with fewer documents.
    """

    def __init__(self, cumulative_lengths: Tensor, tokens: int) -> None:
        self._borders, self._tokens = cumulative_lengths, tokens

    @classmethod
    def padded(cls, is_token: Tensor) -> "Documents":
        """Describe padded samples, [b, tokens] bool, false at the padding after the last token."""
        counts, tokens = is_token.sum(1, dtype=torch.int32), is_token.shape[1]
        ends = [torch.zeros_like(counts), counts, torch.full_like(counts, tokens)]
        return cls(torch.stack(ends, dim=1), tokens)

    @cached_property
    def lengths(self) -> list[list[int]]:
        """The lengths of the documents of each sample; on a GPU the host waits for them."""
        rows = self._borders.diff(dim=1).tolist()
        return [[length for length in row if length] for row in rows]

    @cached_property
    def ids(self) -> Tensor:
        """[b, tokens] int64, for each token the number of its document in the sample, from 1 on."""
        at = torch.arange(self._tokens, dtype=self._borders.dtype, device=self._borders.device)
        at = at.repeat(len(self._borders), 1)
        return torch.searchsorted(self._borders, at, right=True)

    @cached_property
    def positions(self) -> Tensor:
        """[b, tokens] int64, for each token its place in its document, from 0 on."""
        at = torch.arange(self._tokens, device=self._borders.device)
        return at - self._borders.long().gather(1, self.ids - 1)

    @cached_property
    def is_first(self) -> Tensor:
        """[b, 1, 1, tokens] bool, true at the tokens of the first document."""
        return (self.ids == 1)[:, None, None, :]


@dataclass(frozen=True)
class Reads:
    """Which keys a query reads: those of its document that are within both bounds.

    Without bounds and documents a query reads all keys of its sample.
    """

    before: int | None = None
    """Keys up to the query's own position that it reads at most, its own included."""
    after: int | None = None
    """Keys from the query's own position on that it reads at most, its own included; 1 = causal."""
    queries: Documents | None = None
    """The documents of the queries; None = all queries are of the first document."""
    keys: Documents | None = None
    """The documents of the keys; None = all keys are of the first document."""
    context: int = 0
    """The first so many keys are those of a context, to which the bounds do not apply. The queries'
    own keys follow."""
    context_keys: Documents | None = None
    """The documents of the context; None = all of it is of the first document."""
    kernel: "Kernel | None" = None
    """The kernel that computes the attention; None = `attend` of attention.py."""

    def within(self, distance: Any) -> Any:
        """Return whether a key is within the bounds, for the query's position minus the key's."""
        return (distance < (self.before or FAR)) & (distance > -(self.after or FAR))

    def key_range(self, queries: range, keys: int) -> range:
        """Return the range of the keys, of so many, that are within the bounds of some queries."""
        first = queries.start + 1 - (self.before or FAR)
        return range(max(0, first), min(keys, queries.stop - 1 + (self.after or FAR)))

    def is_whole(self, queries: int, keys: int) -> bool:
        """Return whether the bounds exclude no key, or no key but those after each query."""
        is_causal = self.after == 1 and queries == keys and self.key_mask is None
        reaches_after = self.after is None or self.after >= keys
        return (self.before is None or self.before >= keys) and (is_causal or reaches_after)

    @property
    def key_mask(self) -> Tensor | None:
        """[b, 1, 1, t] bool, true at the keys that all queries read, if these are one document.

        With a context the keys are those of the context alone.
        """
        keys = self.context_keys if self.context else self.keys
        return keys.is_first if self.queries is None and keys is not None else None


@dataclass(frozen=True)
class Scores:
    """How a layer computes its scores and weights."""

    scale: float | None = None
    """Factor of the scores; None = 1 / sqrt(d) for heads of width d."""
    cap: float | None = None
    """Bound c of the scores, which become c * tanh(score / c) (Gemma 2, arXiv:2408.00118, section
    2); None = no bound."""
    dropout: float = 0.0
    """Probability with which a weight is dropped."""
    bias: Tensor | None = None
    """[2r + 1, h], the number that is added to a score for each distance (key position - query
    position) from -r to r (see `RelativePositions`)."""
    recompute: bool = False
    """Whether whole scores are computed again in the backward pass, as blocks always are."""


class Kernel(Protocol):
    """Computes an attention."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, reads: Reads, scores: Scores
    ) -> Tensor:
        """Compute the output with the shapes of `attend` in attention.py."""

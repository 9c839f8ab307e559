"""The bytes that context ranks send, predicted from the lengths of documents."""

from collections.abc import Sequence

from frontier_llm.geometry.context_cut import most_rows, sent_tokens
from frontier_llm.geometry.wire import ActivationTraffic


def context_bytes(
    traffic: ActivationTraffic,
    samples: Sequence[Sequence[int]],
    context: int,
    rank: int,
    layers: int,
) -> list[int]:
    """Return the bytes that a context rank sends to each one for a micro-batch.

    Each layer sends keys and values twice, because the backward pass receives them again, and then
    their gradients the other way. Or it sends heads in each pass, also in one that is computed
    again. A sample is given by the lengths of its documents.
    """
    heads, recomputes = traffic.head_exchange(context), traffic.recompute == "full"
    tokens = sum(map(sum, samples)) // context
    if heads.pays(most_rows(samples, context), tokens, recomputes=recomputes):
        sent = [(3 if recomputes else 2) * tokens * heads.sent * traffic.head_bytes] * context
    else:
        read = [sent_tokens(lengths, context) for lengths in samples]
        sent = [
            traffic.row_bytes * sum(2 * of[rank][other] + of[other][rank] for of in read)
            for other in range(context)
        ]
    sent[rank] = 0
    return [layers * size for size in sent]

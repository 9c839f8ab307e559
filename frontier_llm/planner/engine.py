"""What a training program does that decides its speed, whatever the layout."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Engine:
    """Ours by default; others describe the systems of published figures."""

    fused_attention: bool = True
    """Whether scores stay inside one kernel (flash attention) instead of in memory."""
    hides: bool = True
    """Whether gathers, reductions and the refresh run beside computation."""
    message_elements: int | None = None
    """Gathers and reductions are made in messages of so many elements; None = one a unit."""
    sums_bytes: int = 4
    """Of an element of the gradients that replicas add up."""
    second_copy_ranks: int | None = None
    """Where cut parameters have a second copy, cut over so many neighbours, backward passes gather
    from it (ZeRO++, arXiv:2306.10209); None = there is none."""
    split_exchange: bool = False
    """Whether tensor ranks send a stage's output in parts and gather it on the other side."""


OURS = Engine()

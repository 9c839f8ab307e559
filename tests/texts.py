"""A text to train on that is the same on each machine and after each change of this project.

The sources of this project are no such text: losses and tokens would change with each commit.
"""

import random
from functools import cache
from itertools import accumulate

_WORDS = 2000
_SENTENCES = 60


@cache
def _vocabulary() -> tuple[list[str], list[float]]:
    """Return words, most of the short ones first, and their cumulated weights by Zipf's law."""
    draw, words = random.Random(1), {"the": 0.0, "of": 0.0}
    while len(words) < _WORDS:
        count = draw.choices((1, 2, 3, 4), (2, 5, 4, 1))[0]
        syllables = [draw.choice("bdfglmnrstv") + draw.choice("aeiou") for _ in range(count)]
        word = "".join(syllables) + draw.choice(["", "n", "s", "r", "l", "nd", "ng", "m", "é"])
        words[word] = len(word) + 4 * draw.random()
    weights = accumulate(1 / place for place in range(1, _WORDS + 1))
    return sorted(words, key=words.__getitem__), list(weights)


def documents(count: int, first: int = 0) -> list[str]:
    """Return documents of about 3,000 characters: a sentence per line, in paragraphs."""
    return [_document(index) for index in range(first, first + count)]


def _document(index: int) -> str:
    draw, (words, weights), lines = random.Random(index), _vocabulary(), []
    for _ in range(_SENTENCES):
        sentence = draw.choices(words, cum_weights=weights, k=draw.randint(4, 18))
        if draw.random() < 0.2:
            sentence[-1] = str(draw.randrange(2000))
        sentence[0] += draw.choice(["", ",", ":"])
        lines.append(" ".join(sentence).capitalize() + draw.choice("....?!"))
        if draw.random() < 0.2:
            lines.append("")
    return "\n".join(lines)


def prose(count: int, first: int = 0) -> str:
    """Return these documents as one text."""
    return "\n\n".join(documents(count, first))


def paragraphs(count: int) -> list[str]:
    """Return the paragraphs of the first documents, which are short documents."""
    return [part for part in prose(count).split("\n\n") if part.strip()]

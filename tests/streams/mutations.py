"""Change one line of a function while the program runs, to see that a test notices."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from frontier_llm.launch.world import World

Mutation = tuple[Callable[..., Any], str, str]
"""Arguments of `mutate`."""


def mutate(function: Callable[..., Any], old: str, new: str) -> None:
    """Replace a part of a function's source, in this process only.

    Args:
        function: a function, or a method of a class (not of an object).
        old: text that occurs exactly once in the source of the function.
        new: the text in its place.
    """
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {function}"
    namespace: dict[str, Any] = {}
    exec(source.replace(old, new), function.__globals__, namespace)
    changed = inspect.unwrap(namespace[function.__name__])  # of a static method
    function.__code__ = changed.__code__


def mutated(
    world: World, mutation: Mutation | None, function: Callable[..., Any], *args: Any
) -> Any:
    """Call a function on a rank, for `run_ranks`, after a change of the source."""
    if mutation is not None:
        mutate(*mutation)
    return function(world, *args)

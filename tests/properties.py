"""How many examples a property test draws: one place for all of them.

`make test` draws the same examples each time, so that only a change of the code changes its
result. `--hypothesis-profile=thorough` (`make test-properties`) draws 5,000 new ones per test.
"""

from hypothesis import HealthCheck, settings

THOROUGH = 5_000

# No deadline: other processes slow tests down. No database: the examples of an earlier run must
# not decide about this one; a failure prints the decorator that repeats it.
settings.register_profile("repeated", deadline=None, derandomize=True, database=None)
settings.register_profile(
    "thorough",
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    max_examples=THOROUGH,
    suppress_health_check=[HealthCheck.too_slow],
)


def examples(count: int) -> settings:
    """Return the settings of a test that draws another number of examples than hypothesis does."""
    return settings(max_examples=THOROUGH if settings().max_examples == THOROUGH else count)

"""The errors that leave the program for a user; anything else that escapes is our own mistake.

Each says what was wrong and what to do, so that no traceback is needed to act on it. The exit
code of the process is a property of the error's class.
"""


class FrontierError(Exception):
    """A failure that the user can act on."""

    exit_code = 1


class ConfigError(FrontierError):
    """The configuration is wrong: one key, what it got, what it wants, what to do."""

    exit_code = 2

    def __init__(self, key: str, got: object, wants: str, todo: str) -> None:
        self.key, self.got, self.wants, self.todo = key, got, wants, todo
        super().__init__(key, got, wants, todo)

    def __str__(self) -> str:
        return (
            f"configuration error at {self.key}\n"
            f"  got:    {self.got}\n"
            f"  wants:  {self.wants}\n"
            f"  do:     {self.todo}"
        )


class LaunchError(FrontierError):
    """The processes of a run cannot be started or find each other."""


class DataError(FrontierError):
    """A corpus, a tokenizer or a dataset file is absent or unusable."""


class CheckpointError(FrontierError):
    """A checkpoint cannot be written, or is absent, damaged or of another model."""


class TrainingError(FrontierError):
    """The training itself cannot go on: the loss is not finite, samples were lost."""


class RankFailure(FrontierError):
    """A rank stopped because another rank failed first."""


class StopRequested(FrontierError):
    """The run was asked to stop and did so in order, with its state saved."""

    exit_code = 3

"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of keys; a key that is not declared is an error.

    Types are strict: `parallel.tensor=true` is not 1. The string below a field is its
    documentation, which `--help` and docs/configuration.md print.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

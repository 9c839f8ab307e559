"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of keys; a key that is not declared is an error.

    Types are strict: `parallel.tensor=true` is not 1. Numbers are finite. The string below a field
    is its documentation, which `--help` prints.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of keys. Keys that are not declared are refused.

    Types are strict: `parallel.tensor=true` is refused instead of being converted to 1. Numbers
    must be finite. The string below a field is its documentation, which `--help` prints.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

"""The base of every section of the configuration."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen group of keys. Keys that are not declared are refused.

    Types are strict: `parallel.tensor=true` is refused instead of being converted to 1. Numbers
    must be finite. The string below a field is its documentation, which `--help` prints; its first
    sentence must make sense alone.
    """

    # A key that is added after a release has a default, because the configurations of older runs,
    # which may be resumed, lack it.

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

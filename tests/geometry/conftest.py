"""Examples of hypothesis have no deadline: a busy machine is not a wrong result."""

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

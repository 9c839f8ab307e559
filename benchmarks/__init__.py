"""Comparisons with other libraries and with published figures, and fault tests; see README.md."""

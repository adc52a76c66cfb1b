"""Wire models, ids, error codes and versions. Imports no other room."""

PROTOCOL_VERSION = 1
"""Covers behaviour, not only fields: a changed default time-out or side of a truncation raises it.

tests/golden holds it, with a file per version.
"""

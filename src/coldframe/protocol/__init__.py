"""Wire models, ids, error codes and versions. Imports no other room."""

PROTOCOL_VERSION = 1
"""Covers behaviour, not only fields: a changed default raises it."""

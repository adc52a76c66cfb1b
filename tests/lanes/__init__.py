"""Harnesses of others as they come from PyPI, each in an environment of its own."""

# Generated from _async/__init__.py; do not edit.
"""Written by hand; `_sync` is generated from it by `python -m coldframe.client._generate`."""

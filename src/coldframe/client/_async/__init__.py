"""Written by hand; `_sync` is generated from it by `python -m coldframe.client._generate`."""

"""The `coldframe` command: parse, call, print."""

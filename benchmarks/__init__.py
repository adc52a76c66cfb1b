"""Speed and memory, as ratios taken within one run: the machines are shared and noisy.

Each module prints one JSON object on its last line with `--json`. Everything is measured through
the public SDK with the default profile: all namespaces, limits, masks, capabilities, seccomp on.
"""

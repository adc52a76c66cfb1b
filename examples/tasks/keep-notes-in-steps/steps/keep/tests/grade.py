"""Grade the first step."""

import sys

sys.path.insert(0, "/tests")
from bench import basics, many_at_once, verdict  # noqa: E402

verdict(basics, many_at_once)

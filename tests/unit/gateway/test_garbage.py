"""A service looks through each object once, and still finds what became garbage later."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from coldframe.gateway import garbage

class Ring:
    def __init__(self):
        self.ring = self

garbage.look_once()
kept = [[number] for number in range(100_000)]
assert gc.get_freeze_count() > 90_000, gc.get_freeze_count()
assert len(gc.get_objects()) < 10_000, len(gc.get_objects())
ring = Ring()
found = weakref.ref(ring)
kept += [[number] for number in range(10_000)]
del ring
gc.collect(0)
assert found() is not None, "it was looked through again"
gc.collect()
assert found() is None, "it stays for ever"
"""


def test_each_object_is_looked_through_once_and_a_whole_look_finds_the_rest() -> None:
    """Pauses grow with what is looked through: kept results, up to 8,192 of them."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)

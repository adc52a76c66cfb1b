#!/bin/sh
cat > /srv/depot/stock.py <<'END'
"""How many of each item are in the depot."""

import contextlib
import threading


class Shortage(Exception):
    """There is less of an item than was asked for; nothing was changed."""


class Stock:
    """Counts items in a store, which has `read(item)` and `write(item, count)`.

    Each item has a lock. Several are taken in the order of the items, so no two threads can
    wait for each other.
    """

    def __init__(self, store):
        self.store = store
        self._locks = {}
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def _held(self, items):
        with contextlib.ExitStack() as stack:
            for item in sorted(set(items)):
                with self._guard:
                    lock = self._locks.setdefault(item, threading.Lock())
                stack.enter_context(lock)
            yield

    def _taken(self, item, count):
        there = self.store.read(item)
        if there < count:
            raise Shortage(item)
        return there

    def add(self, item, count):
        """Put so many of an item into the depot."""
        with self._held([item]):
            self.store.write(item, self.store.read(item) + count)

    def remove(self, item, count):
        """Take so many of an item out."""
        with self._held([item]):
            self.store.write(item, self._taken(item, count) - count)

    def move(self, source, target, count):
        """Repack so many of one item as another."""
        with self._held([source, target]):
            there = self._taken(source, count)
            if source == target:
                return
            others = self.store.read(target)
            self.store.write(source, there - count)
            try:
                self.store.write(target, others + count)
            except BaseException:
                self.store.write(source, there)
                raise

    def total(self, items):
        """Count several items."""
        items = list(items)
        with self._held(items):
            counts = {item: self.store.read(item) for item in set(items)}
        return sum(counts[item] for item in items)
END

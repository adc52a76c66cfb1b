"""How many of each item are in the depot."""


class Shortage(Exception):
    """There is less of an item than was asked for; nothing was changed."""


class Stock:
    """Counts items in a store, which has `read(item)` and `write(item, count)`."""

    def __init__(self, store):
        self.store = store

    def add(self, item, count):
        """Put so many of an item into the depot."""
        self.store.write(item, self.store.read(item) + count)

    def remove(self, item, count):
        """Take so many of an item out."""
        there = self.store.read(item)
        if there < count:
            raise Shortage(item)
        self.store.write(item, there - count)

    def move(self, source, target, count):
        """Repack so many of one item as another."""
        self.remove(source, count)
        self.add(target, count)

    def total(self, items):
        """Count several items."""
        return sum(self.store.read(item) for item in items)

"""Runs as nobody, with the agent's module: each check forces one meeting of threads.

A thread that is to be held up is held inside the store, where the module cannot see it, until the
others came or a while has passed. So what happens does not depend on luck.
"""

import json
import sys
import threading
import time

sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
sys.setswitchinterval(1e-5)

import stock  # noqa: E402

SHORT, LONG = 0.4, 8.0


class Item(str):
    """An item whose lookup takes a while, so that whoever looks up late is seen."""

    def __hash__(self):
        time.sleep(0.02)
        return str.__hash__(self)

    def __eq__(self, other):
        return str.__eq__(self, other)


class Store:
    """Counts in memory; notes two calls for one item at once."""

    def __init__(self, **counts):
        self.counts, self.busy, self.faults = dict(counts), set(), []
        self.before_read = self.after_write = self.before_write = lambda item: None

    def _call(self, item, action):
        name = str(item)
        if name in self.busy:
            self.faults.append(f"two threads use {name!r} at once")
        self.busy.add(name)
        try:
            return action(name)
        finally:
            self.busy.discard(name)

    def read(self, item):
        def action(name):
            self.before_read(name)
            return self.counts[name]

        return self._call(item, action)

    def write(self, item, count):
        def action(name):
            self.before_write(name)
            self.counts[name] = count
            self.after_write(name)

        return self._call(item, action)


def together(*actions):
    """Run actions in threads; return what each raised. One that hangs is a fault."""
    raised = [None] * len(actions)

    def run(number, action):
        try:
            action()
        except BaseException as error:
            raised[number] = type(error).__name__

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(actions)]
    for one in threads:
        one.start()
    deadline = time.monotonic() + LONG
    for one in threads:
        one.join(max(deadline - time.monotonic(), 0))
    if any(one.is_alive() for one in threads):
        raise AssertionError("threads wait for ever")
    return raised


def meeting(parties, wait):
    """Return a function that returns once so many threads have called it, or after `wait`."""
    barrier = threading.Barrier(parties)

    def meet(item):
        try:
            barrier.wait(wait)
        except threading.BrokenBarrierError:
            pass

    return barrier, meet


def updates_are_not_lost():
    store = Store(a=0)
    keeper = stock.Stock(store)
    store.before_read = meeting(2, SHORT)[1]
    together(lambda: keeper.add("a", 1), lambda: keeper.add("a", 1))
    assert store.counts == {"a": 2}, f"two threads added 1 each to 0, and now there are {store.counts['a']}"
    return store


def the_last_item_is_taken_once():
    store = Store(a=1)
    keeper = stock.Stock(store)
    store.before_read = meeting(2, SHORT)[1]
    raised = together(lambda: keeper.remove("a", 1), lambda: keeper.remove("a", 1))
    assert sorted(raised, key=str) == [None, "Shortage"], f"two threads took the last one: {raised}"
    assert store.counts == {"a": 0}
    return store


def other_items_do_not_wait():
    store = Store(a=0, b=0, c=5, d=5)
    keeper = stock.Stock(store)
    barrier, store.before_read = meeting(3, 4.0)
    together(lambda: keeper.add("a", 1), lambda: keeper.remove("c", 1), lambda: keeper.total(["d"]))
    assert not barrier.broken, "work on different items does not go on at the same time"
    return store


def opposite_moves_end():
    store = Store(a=50, b=50)
    keeper = stock.Stock(store)
    store.before_read = meeting(2, 0.05)[1]
    for _ in range(10):
        together(
            lambda: keeper.move(Item("a"), Item("b"), 1), lambda: keeper.move(Item("b"), Item("a"), 1)
        )
    store.before_read = lambda item: None
    back_and_forth = [lambda s=s, t=t: [keeper.move(s, t, 1) for _ in range(2000)] for s, t in ("ab", "ba")]
    together(*back_and_forth, lambda: [keeper.total("ba") for _ in range(2000)])
    assert sum(store.counts.values()) == 100, f"moves changed the sum: {store.counts}"
    return store


def a_total_sees_no_half_move():
    store = Store(a=5, b=0)
    keeper = stock.Stock(store)
    written, seen = threading.Event(), []

    def after(item):
        if not written.is_set():
            written.set()
            time.sleep(SHORT)

    store.after_write = after
    together(
        lambda: keeper.move("a", "b", 5),
        lambda: written.wait(LONG) and seen.append(keeper.total(iter(["b", "a", "a", "b"]))),
    )
    assert seen == [10], f"total(b, a, a, b) of 5 items is {seen}"
    return store


def an_item_moves_to_itself():
    store = Store(a=3)
    keeper = stock.Stock(store)
    assert together(lambda: keeper.move("a", "a", 3)) == [None]
    assert together(lambda: keeper.move("a", "a", 4)) == ["Shortage"]
    assert store.counts == {"a": 3}
    return store


def shortage_changes_nothing():
    store = Store(a=3, b=1)
    keeper = stock.Stock(store)
    raised = together(lambda: keeper.move("a", "b", 4)) + together(lambda: keeper.remove("b", 2))
    assert raised == ["Shortage", "Shortage"], raised
    assert store.counts == {"a": 3, "b": 1}
    assert together(lambda: keeper.move("a", "b", 3)) == [None]
    assert store.counts == {"a": 0, "b": 4}
    return store


def a_failing_store_is_survived():
    store = Store(a=3, b=1)
    keeper = stock.Stock(store)

    def fail_on(wanted):
        def fail(item):
            if item == wanted:
                raise OSError("broken")

        return fail

    store.before_read = fail_on("a")
    assert together(lambda: keeper.add("a", 1)) == ["OSError"]
    assert together(lambda: keeper.total("ab")) == ["OSError"]
    store.before_read, store.before_write = (lambda item: None), fail_on("b")
    assert together(lambda: keeper.move("a", "b", 2)) == ["OSError"]
    assert store.counts == {"a": 3, "b": 1}, f"a move whose second write failed left {store.counts}"
    store.before_write = lambda item: None
    assert together(lambda: keeper.move("a", "b", 2), lambda: keeper.add("b", 1)) == [None, None]
    assert store.counts == {"a": 1, "b": 4}
    return store


def main():
    checks = (
        shortage_changes_nothing, an_item_moves_to_itself, updates_are_not_lost, the_last_item_is_taken_once,
        a_total_sees_no_half_move, other_items_do_not_wait, a_failing_store_is_survived, opposite_moves_end,
    )  # fmt: skip
    for check in checks:
        try:
            store = check()
            assert not store.faults, store.faults[0]
        except BaseException as error:
            return f"{check.__name__}: {type(error).__name__}: {error}"
    return "right"


print(json.dumps({"word": sys.argv[2], "said": main()}), flush=True)

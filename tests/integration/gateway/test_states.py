"""Creates, commands, deletes and renewals at once, as hypothesis likes; the ledger after each step.

A step is a handful of requests that are sent at the same moment. What each may come to follows
from the others of its step; what the ledger must say, from all of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from coldframe import (
    ConflictError,
    ExecResult,
    Reason,
    Sandbox,
    SandboxClient,
    SandboxGoneError,
)
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import SandboxStateError
from tests.fixtures.service import serving

AT_ONCE = 8
REFUSED = (SandboxGoneError, SandboxStateError)
ACTIONS = ("create", "exec", "again", "delete", "renew", "stale")

numbers = itertools.count()


@dataclass
class Expected:
    """What is known of a sandbox without asking."""

    sandbox: Sandbox
    wanted: Counter[str]
    """Words that commands have written into its file, and how often each must stand there."""


class Life(RuleBasedStateMachine):
    """A service, and what it must have."""

    def __init__(self, client: SandboxClient, image: str) -> None:
        super().__init__()
        self.client, self.image = client, image
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.live: dict[str, Expected] = {}
        self.made = self.ended = 0

    @initialize()
    def begin(self) -> None:
        """Note where the counts stand."""
        self.before = self.client.ledger()

    @rule(
        actions=st.lists(
            st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), min_size=1, max_size=AT_ONCE
        )
    )
    def step(self, actions: list[tuple[str, int]]) -> None:
        """Send some requests at once and look at every answer."""
        pairs = [(action, self._chosen(index)) for action, index in actions]
        doomed = {id(one) for action, one in pairs if action == "delete" and one is not None}
        checks = [
            self.pool.submit(getattr(self, f"_{action}"), one, id(one) in doomed)
            for action, one in pairs
            if one is not None or action == "create"
        ]
        for check in checks:
            check.result()
        for sandbox_id, one in list(self.live.items()):
            if id(one) in doomed:
                del self.live[sandbox_id]
                self.ended += 1

    def _chosen(self, index: int) -> Expected | None:
        known = list(self.live.values())
        return known[index % len(known)] if known else None

    def _create(self, _: Expected | None, __: bool) -> None:
        """Ask twice with one id, at once: one sandbox."""
        operation_id = f"create-{next(numbers)}"

        def ask() -> Sandbox:
            return self.client.create_sandbox(self.image, operation_id=operation_id)

        with ThreadPoolExecutor(2) as two:
            first, second = [asked.result() for asked in (two.submit(ask), two.submit(ask))]
        assert first.id == second.id
        self.live[first.id] = Expected(first, Counter())
        self.made += 1

    def _exec(self, one: Expected, doomed: bool) -> None:
        word = f"word-{next(numbers)}"
        self._run(one, doomed, word, lambda: [_write(one.sandbox, word, None)])

    def _again(self, one: Expected, doomed: bool) -> None:
        """Ask for one command twice, at once: it runs once and both get the same answer."""
        word = f"word-{next(numbers)}"

        def ask() -> list[ExecResult]:
            with ThreadPoolExecutor(2) as two:
                asked = [two.submit(_write, one.sandbox, word, f"op-{word}") for _ in range(2)]
                return [each.result() for each in asked]

        self._run(one, doomed, word, ask)

    def _run(
        self, one: Expected, doomed: bool, word: str, ask: Callable[[], list[ExecResult]]
    ) -> None:
        try:
            results = ask()
        except REFUSED:
            assert doomed
            return
        assert all(result == results[0] for result in results)
        if results[0].reason is Reason.SANDBOX_GONE:
            assert doomed
            return
        assert results[0].ok, results
        assert results[0].text == f"{word}\n"
        one.wanted[word] += 1

    def _delete(self, one: Expected, _: bool) -> None:
        one.sandbox.delete()
        assert one.sandbox.info.state == "deleted"

    def _renew(self, one: Expected, doomed: bool) -> None:
        try:
            one.sandbox.renew(3600.0)
        except REFUSED:
            assert doomed

    def _stale(self, one: Expected, doomed: bool) -> None:
        try:
            one.sandbox.exec("true", expected_version=1)
        except ConflictError:
            return
        except REFUSED:
            assert doomed
            return
        raise AssertionError("a version that is long past was taken")

    @invariant()
    def ledger_says_what_was_done(self) -> None:
        """Not one sandbox more or less than was asked for, by the records and by the kernel."""
        if not hasattr(self, "before"):
            return
        now = self.client.ledger()
        assert now.balanced
        assert now.leaked == 0, now.leaks
        assert now.live == len(self.live)
        assert now.created - self.before.created == self.made
        assert now.deleted - self.before.deleted == self.ended
        assert (now.expired, now.failed, now.lost) == (
            self.before.expired,
            self.before.failed,
            self.before.lost,
        )
        assert {one.id for one in self.client.list_sandboxes()} == self.live.keys()

    @invariant()
    def every_command_ran_as_often_as_it_was_asked_for(self) -> None:
        """Each wrote one line."""
        for one in self.live.values():
            if one.wanted:
                assert Counter(one.sandbox.files.read("/words").decode().split()) == one.wanted

    def teardown(self) -> None:
        """Leave nothing to the next one."""
        self.pool.shutdown()
        for one in self.live.values():
            one.sandbox.delete()


def _write(sandbox: Sandbox, word: str, operation_id: str | None) -> ExecResult:
    return sandbox.exec(f"echo {word} >> words; echo {word}", operation_id=operation_id)


def _settings(examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


@pytest.fixture(scope="module", params=["fake", pytest.param("native", marks=pytest.mark.root)])
def life(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Life]]:
    """What makes a state machine on a service of its own."""
    images, name, directory = None, "any", tmp_path_factory.mktemp("states")
    if request.param == "native":
        store: ImageStore = request.getfixturevalue("image_store")
        image: Image = request.getfixturevalue("busybox_image")
        images, name = store.layers_directory.parent, image.name
    with (
        serving(directory, request.param, images=images) as service,
        SandboxClient(url=service.tcp) as client,
    ):
        yield lambda: Life(client, name)


def test_whatever_is_asked_for_at_once_the_ledger_is_exact(life: Any) -> None:
    """Races between requests are where sandboxes get lost and commands run twice."""
    run_state_machine_as_test(life, settings=_settings(10, 8))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_whatever_is_asked_for_at_once_the_ledger_is_exact_for_long(life: Any) -> None:
    """The same, wider."""
    run_state_machine_as_test(life, settings=_settings(200, 25))

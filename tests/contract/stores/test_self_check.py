"""Every store keeps every promise of the seam: the real file, the real server."""

from __future__ import annotations

import asyncio
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from coldframe.gateway.store import STORES, open_store
from coldframe.gateway.store.base import KeyRecord, Store
from coldframe.gateway.store.fake import FakeStore
from coldframe.gateway.store.redis import RedisStore
from coldframe.gateway.store.self_check import CHECKS, Check, CheckFailedError, run_self_check
from coldframe.gateway.store.self_check import run_check as make_check
from coldframe.gateway.store.sqlite import SqliteStore
from coldframe.protocol.errors import CapabilityError, InvalidRequestError, StoreUnreachableError
from tests.fixtures.certificates import self_signed
from tests.fixtures.ports import kept_port
from tests.fixtures.redis import RedisServer, redis_running

Make = Callable[[], Store]


@pytest.fixture(params=["fake", "sqlite", "redis", "redis+unix"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> Iterator[Make]:
    """Opens a store on one empty place, as often as it is called."""
    urls = {"redis": redis_server.url, "redis+unix": redis_server.unix_url}
    with redis_server.client() as client:
        client.flushall()
    if request.param == "fake":
        yield lambda: FakeStore(f"fake:{tmp_path}")
    elif request.param == "sqlite":
        yield lambda: SqliteStore(f"sqlite:{tmp_path / 'keys'}")
    else:
        yield lambda: RedisStore(urls[request.param])


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_store_keeps_its_promise(make: Make, check: Check) -> None:
    """Two gateways on one store must not disagree on who may do what."""
    await make_check(check, make)


async def test_store_that_forgets_a_revocation_is_found_out(tmp_path: Path) -> None:
    """A suite that passes whatever a store does holds nothing."""

    class Forgetful(FakeStore):
        async def revoke_key(self, key_id: str, at: float) -> bool:
            return await self.find_key(key_id) is not None

    with pytest.raises(CheckFailedError, match="to another"):
        await run_self_check(lambda: Forgetful(f"fake:{tmp_path}"))


async def test_store_that_waits_and_says_it_does_not_is_found_out(tmp_path: Path) -> None:
    """A service would let nobody in by the short way of commands."""

    class Waiting(FakeStore):
        async def find_key(self, key_id: str) -> KeyRecord | None:
            await asyncio.sleep(0)
            return await super().find_key(key_id)

    with pytest.raises(CheckFailedError, match="no call waits"):
        await run_self_check(lambda: Waiting(f"fake:{tmp_path}"))


async def test_redis_that_is_gone_or_hangs_is_said_within_seconds(
    redis_server: RedisServer,
) -> None:
    """Whoever asks must not wait for ever, nor be let in; the password is not shown."""
    record = KeyRecord("k", "amber", ("read",), bytes(32), 1.0)
    for url in ("redis://:hunter2@127.0.0.1:1/0", redis_server.url):
        store = RedisStore(url)
        redis_server.send(signal.SIGSTOP)
        try:
            began = time.monotonic()
            with pytest.raises(StoreUnreachableError, match=r"Redis at 127\.0\.0\.1") as refused:
                await store.add_key(record)
            assert time.monotonic() - began < 10
            assert "hunter2" not in str(refused.value)
        finally:
            redis_server.send(signal.SIGCONT)
        await store.close()


async def test_redis_is_reached_by_tls_with_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Digests and quotas on the way between machines are nobody else's to read or change.

    The machine's authorities are read once: that takes 60 ms in which no other request is served.
    """
    cert, key = self_signed(tmp_path)
    options = ("--tls-cert-file", str(cert), "--tls-key-file", str(key))
    options += ("--tls-auth-clients", "no", "--requirepass", "hunter2")
    with (
        kept_port() as port,
        redis_running(tmp_path / "redis", "--tls-port", str(port), *options) as server,
    ):
        place = f"127.0.0.1:{port}/0?ssl_ca_certs={cert}"
        await run_self_check(lambda: RedisStore(f"rediss://:hunter2@{place}"))
        made = Mock(wraps=ssl.create_default_context)
        monkeypatch.setattr(ssl, "create_default_context", made)
        async with open_store(f"rediss://:hunter2@{place}", tmp_path) as store:
            await asyncio.gather(*(store.quota("amber") for _ in range(8)))
        assert made.call_count == 1
        for url in (
            f"rediss://:wrong@{place}",
            f"rediss://:hunter2@127.0.0.1:{port}/0",  # whose certificate nobody vouches for
            server.url,
        ):
            async with open_store(url, tmp_path) as store:
                with pytest.raises(StoreUnreachableError) as refused:
                    await store.keys()
                assert "hunter2" not in str(refused.value)


async def test_what_others_wrote_into_redis_is_no_key(redis_server: RedisServer) -> None:
    """A hash that is not whole must neither let anybody in nor be a fault of ours."""
    store = RedisStore(redis_server.url)
    with redis_server.client() as client:
        client.hset("coldframe:key:odd", "owner", "amber")
        client.set("coldframe:key:text", "x")
        client.set("coldframe:quota:amber", '{"sandboxes": -1}')
    for asked in (store.find_key("odd"), store.find_key("text"), store.quota("amber")):
        with pytest.raises(StoreUnreachableError):
            await asked
    await store.close()


async def test_store_that_is_not_known_is_named_with_those_that_are(tmp_path: Path) -> None:
    """A typing error must not end as another store."""
    for url in ("mongo://x", "/var/lib/keys"):
        with pytest.raises(InvalidRequestError, match="redis"):
            async with open_store(url, tmp_path):
                pass
    for url in ("sqlite:", "sqlite:///x", f"sqlite:{tmp_path}", "redis://h:port"):
        with pytest.raises(InvalidRequestError, match="store"):
            async with open_store(url, tmp_path):
                pass
    with pytest.raises(CapabilityError, match="cannot be written"):
        async with open_store("sqlite:/proc/nowhere/keys", tmp_path):
            pass
    assert set(STORES) == {"fake", "redis", "rediss", "redis+unix", "sqlite"}

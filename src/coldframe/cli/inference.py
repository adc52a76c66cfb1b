"""`coldframe inference`: the proxy that keeps tokens, as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coldframe.cli import groups
from coldframe.protocol.errors import CapabilityError, InvalidRequestError
from coldframe.protocol.text import lacking
from coldframe.rollouts.settings import RolloutSettings
from coldframe.trajectories.calls import Level
from coldframe.trajectories.holding import held

if TYPE_CHECKING:
    from coldframe.inference.proxy import ProxySettings

app = groups.group()

ADMIN_KEY_FILE = "admin.key"


@app.callback()
def group() -> None:
    """Serve a model's engine, and keep its exact tokens."""


@app.command("serve")
def serve(
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="Of the engine's API, such as http://HOST:8000/v1.")
    ],
    model: Annotated[str, typer.Option(help="The model's name at the engine.")],
    journals: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the journal of each attempt is kept.")
    ],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Port 0 takes a free one.")
    ] = "127.0.0.1:8100",
    capture: Annotated[
        Level, typer.Option(help="How much is captured; only `tokens` can be trained on.")
    ] = Level.TOKENS,
    policy_version: Annotated[
        str | None, typer.Option(help="Digest of the weights that answer.")
    ] = None,
    upstream_key_env: Annotated[
        str | None, typer.Option(help="Variable that holds the engine's key.")
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(help="Limit on one answer of the engine in seconds.")
    ] = 600.0,
    retries: Annotated[int, typer.Option(help="Further tries of a call that failed.")] = 4,
) -> int:
    """Answer chat completions, responses and Anthropic messages from one engine.

    Each attempt has a key of its own, minted by POST /coldframe/attempts with the administrator's
    key, which lies in admin.key of --journals. See docs/inference.md.
    """
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidRequestError(f"--listen {listen!r} is no HOST:PORT, such as 127.0.0.1:8100")
    if not upstream.startswith(("http://", "https://")):
        raise InvalidRequestError(
            f"--upstream {upstream!r} does not begin with http:// or https://"
        )
    try:
        from coldframe.inference.engine import EngineSettings
        from coldframe.inference.proxy import ProxySettings
    except ImportError as error:
        raise CapabilityError(lacking("coldframe inference", error, "cli,inference")) from error
    key = None
    if upstream_key_env is not None:
        key = RolloutSettings.from_environment().api_key(upstream_key_env)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    engine = EngineSettings(upstream, key, request_s=request_timeout, retries=retries)
    settings = ProxySettings(engine, model, capture, policy_version)
    return asyncio.run(_serve(settings, journals, host.strip("[]"), int(port)))


async def _serve(settings: ProxySettings, journals: Path, host: str, port: int) -> int:
    from coldframe.inference import standing
    from coldframe.inference.admin import Admin
    from coldframe.inference.app import ProxyApp
    from coldframe.inference.proxy import Proxy
    from coldframe.inference.server import serving

    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    with _held(journals):
        admin_key = _admin_key(journals)
        async with Proxy(settings) as proxy:
            await proxy.check()
            standing.restore(journals, proxy)
            adopted = proxy.adopt(journals)
            app = ProxyApp(proxy, Admin(proxy, admin_key, journals))
            async with serving(app, host, port) as url:
                print(f"serving {url}/v1, capture {settings.capture.value}", flush=True)
                if proxy.paused_for_s is not None:
                    print("paused, as before", flush=True)
                if adopted:
                    print(f"going on with {adopted} attempts", flush=True)
                await stopped.wait()
    return 0


@contextlib.contextmanager
def _held(journals: Path) -> Iterator[None]:
    """Make the directory if need be, and hold it: two writers would mix an attempt's tokens."""
    taken = InvalidRequestError(
        f"--journals {journals}: another proxy writes there; end it, or name another directory"
    )
    with contextlib.ExitStack() as stack:
        try:
            journals.mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(held(journals, taken))
        except OSError as error:
            raise InvalidRequestError(f"--journals {journals}: {error.strerror}") from error
        yield


def _admin_key(journals: Path) -> str:
    """Return the administrator's key, made at the first start; the directory is held."""
    path = journals / ADMIN_KEY_FILE
    with contextlib.suppress(FileNotFoundError):
        if known := path.read_text("ascii").strip():  # else who made it was killed over it
            return known
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
        key = f"sk-coldframe-admin-{secrets.token_urlsafe(32)}"
        file.write(key + "\n")
    return key

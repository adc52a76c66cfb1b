"""Keys, pauses and journals, for whoever runs attempts against a proxy that is a process."""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coldframe.inference import standing
from coldframe.inference.dialects import RefusedError
from coldframe.inference.dialects.base import openai_error
from coldframe.inference.engine import MAX_RETRY_AFTER_S
from coldframe.inference.journal import check_name
from coldframe.inference.proxy import Proxy
from coldframe.inference.wire import Receive, Scope, Send, read_body, send_bytes, send_json
from coldframe.protocol.errors import InvalidRequestError
from coldframe.trajectories.calls import Budget

MAX_BODY_BYTES = 1 << 16


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Mint(_Request):
    attempt_id: str
    budget: Budget = Budget()


class _Step(_Request):
    name: str


class _Pause(_Request):
    retry_after_s: float | None = Field(default=None, gt=0, le=MAX_RETRY_AFTER_S)
    drain: bool = True


class _Resume(_Request):
    policy_version: str | None = None


class Admin:
    """Answers `/coldframe/...` to who has the administrator's key."""

    def __init__(self, proxy: Proxy, key: str, journals: Path) -> None:
        self.proxy, self.journals = proxy, journals
        self._bearer = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        try:
            if not hmac.compare_digest(given, self._bearer):
                raise RefusedError(401, "this is not the administrator's key")
            body = await read_body(receive, MAX_BODY_BYTES)
            if body is not None:
                await self._answer(scope["method"], scope["path"], body, send)
        except RefusedError as refused:
            await send_json(send, refused.status, openai_error(refused))
        except ValidationError as error:
            first = error.errors()[0]
            wrong = f"{'.'.join(map(str, first['loc'])) or 'request'}: {first['msg']}"
            await send_json(send, 400, openai_error(RefusedError(400, wrong)))
        except InvalidRequestError as error:
            await send_json(send, 400, openai_error(RefusedError(400, str(error))))

    async def _answer(self, method: str, path: str, body: bytes, send: Send) -> None:
        match [method, *path.strip("/").split("/")[1:]]:
            case ["POST", "attempts"]:
                mint = _Mint.model_validate_json(body)
                check_name(mint.attempt_id)
                key = self.proxy.mint(mint.attempt_id, self._journal(mint.attempt_id), mint.budget)
                await send_json(send, 201, {"attempt_id": mint.attempt_id, "api_key": key})
            case ["POST", "attempts", name, "step"]:
                self.proxy.begin_step(name, _Step.model_validate_json(body).name)
                await send_json(send, 200, {})
            case ["DELETE", "attempts", name]:
                self.proxy.end(name)
                await send_json(send, 200, {})
            case ["GET", "attempts", name, "calls"]:
                check_name(name)
                await send_bytes(send, 200, self._content(name), b"application/jsonl")
            case ["POST", "pause"]:
                pause = _Pause.model_validate_json(body or b"{}")
                self.proxy.pause(pause.retry_after_s)
                standing.keep(self.journals, self.proxy)
                if pause.drain:
                    await self.proxy.drained()
                await send_json(send, 200, self._state())
            case ["POST", "resume"]:
                self.proxy.resume(_Resume.model_validate_json(body or b"{}").policy_version)
                standing.keep(self.journals, self.proxy)
                await send_json(send, 200, self._state())
            case _:
                raise RefusedError(404, f"no such path: {method} {path}")

    def _state(self) -> dict[str, Any]:
        paused = self.proxy.paused_for_s is not None
        return {"paused": paused, "policy_version": self.proxy.policy_version}

    def _journal(self, name: str) -> Path:
        return self.journals / f"{name}.jsonl"

    def _content(self, name: str) -> bytes:
        try:
            return self._journal(name).read_bytes()
        except OSError:
            raise RefusedError(404, f"no attempt {name!r} has a journal") from None

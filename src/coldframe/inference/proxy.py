"""The proxy's own state: attempts by key, the policy that answers, what is in flight."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldframe.inference.attempts import Attempt, Place, new_attempt
from coldframe.inference.dialects import Asked, Dialect, RefusedError
from coldframe.inference.engine import Engine, EngineFailedError, EngineSettings
from coldframe.inference.evidence import CAPTURE, Evidence, examine
from coldframe.inference.journal import digest_of
from coldframe.inference.prompts import held_to_prompt
from coldframe.protocol.errors import InferenceError, InvalidRequestError
from coldframe.trajectories.base import DIGEST
from coldframe.trajectories.calls import Budget, CallLine, Level, Retry

log = logging.getLogger("coldframe.inference")

_LIMITS = ("max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class ProxySettings:
    """What is in front of which engine."""

    engine: EngineSettings
    model: str
    """The engine's name of it; whatever name a harness asks for, this one answers."""
    capture: Level = Level.TOKENS
    policy_version: str | None = None
    """Digest of the weights that answer, until another is announced."""
    keep_alive_s: float = 10.0
    """Of a stream that waits for the engine."""
    pause_s: float = 5.0
    """What callers are told to wait while the proxy is paused."""


@dataclass(frozen=True)
class Outcome:
    """An answer for the client, and what is to be recorded of it; nothing if it is a stop."""

    answer: dict[str, Any]
    evidence: Evidence | None = None
    retries: tuple[Retry, ...] = ()
    sent: dict[str, Any] | None = None
    policy: str | None = None
    policy_changed: bool = False
    started_at: float = 0.0
    latency_s: float = 0.0


class Proxy:
    """Use it as an async context manager; `app.ProxyApp` serves it."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.engine = Engine(settings.engine)
        self.policy_version = self._digest(settings.policy_version)
        self.paused_for_s: float | None = None
        self._by_key: dict[str, Attempt] = {}
        self._by_name: dict[str, Attempt] = {}
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Proxy:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.engine.__aexit__()
        for attempt in self._by_name.values():
            attempt.journal.close()
        self._by_key.clear()
        self._by_name.clear()

    async def check(self) -> None:
        """Ask the engine once, and see that it gives what is to be captured, as it sampled it.

        Raises:
            InferenceError: it does not; what is missing, and how an engine is told to give it.
        """
        level = self.settings.capture
        answer = await self.engine.probe(self.settings.model, CAPTURE[level])
        evidence = examine(answer, level)
        if evidence.flaws:
            raise InferenceError(
                f"the engine gives too little to capture {level.value}: "
                f"{'; '.join(evidence.flaws)}. "
                f"vLLM gives all of it from 0.10.2 on, SGLang from the version on whose chat "
                f"completions take return_token_ids; "
                f"--capture {Level.TEXT.value} needs none, and cannot be trained on"
            )
        if level is Level.TOKENS and any(one < -1e-4 for one in evidence.logprobs or ()):
            raise InferenceError(
                "the engine gives log-probabilities of another distribution than it samples from: "
                "start vLLM with --logprobs-mode processed_logprobs"
            )
        if level is not Level.TOKENS:
            log.warning("capture level %s: nothing of this can be trained on", level.value)

    # --- attempts ------------------------------------------------------------------------

    def mint(self, attempt_id: str, journal: Path, budget: Budget | None = None) -> str:
        """Begin an attempt and return its key, which is its identity.

        Raises:
            InvalidRequestError: the id is taken, or no name of a file, or the journal is there.
        """
        if attempt_id in self._by_name:
            raise InvalidRequestError(f"attempt {attempt_id!r} has a key already")
        key = f"sk-coldframe-{secrets.token_urlsafe(32)}"
        model, capture = self.settings.model, self.settings.capture
        budget = budget or Budget()
        self._add(
            new_attempt(journal, attempt_id, key, model=model, capture=capture, budget=budget)
        )
        return key

    def adopt(self, directory: Path) -> int:
        """Go on with every attempt of a directory of journals that had not ended.

        One whose journal is damaged has no key any more, and stops no other.
        """
        found = 0
        for path in sorted(directory.glob("*.jsonl")):
            try:
                attempt = Attempt.adopt(path)
            except InferenceError as error:
                log.error("an attempt is not gone on with: %s", error)
                continue
            if attempt is not None:
                self._add(attempt)
                found += 1
        return found

    def _add(self, attempt: Attempt) -> None:
        self._by_key[attempt.line.key_sha256] = attempt
        self._by_name[attempt.line.attempt_id] = attempt

    def by_key(self, key: str | None) -> Attempt | None:
        """Return the attempt that a key is of."""
        return None if key is None else self._by_key.get(digest_of(key))

    def by_name(self, attempt_id: str) -> Attempt:
        """Return an attempt whose key is valid.

        Raises:
            InvalidRequestError: there is none.
        """
        if attempt_id not in self._by_name:
            raise InvalidRequestError(f"no attempt {attempt_id!r} has a key")
        return self._by_name[attempt_id]

    def begin_step(self, attempt_id: str, name: str) -> None:
        """Tell that what comes is of another step of the task: a conversation of its own."""
        self.by_name(attempt_id).begin_step(name)

    def end(self, attempt_id: str) -> list[str]:
        """Take the key back, close the journal, and return what stands against training on it."""
        attempt = self.by_name(attempt_id)
        del self._by_name[attempt_id], self._by_key[attempt.line.key_sha256]
        attempt.end()
        return attempt.doubts()

    # --- the policy ----------------------------------------------------------------------

    def pause(self, retry_after_s: float | None = None) -> None:
        """Answer 429 from now on."""
        self.paused_for_s = retry_after_s or self.settings.pause_s

    async def drained(self) -> None:
        """Return when nothing is in flight."""
        await self._idle.wait()

    def resume(self, policy_version: str | None = None) -> None:
        """Answer again; by other weights, if they are named.

        Raises:
            InvalidRequestError: by something else than their digest; it stays paused.
        """
        self.policy_version = self._digest(policy_version) or self.policy_version
        self.paused_for_s = None

    def _digest(self, version: str | None) -> str | None:
        """Return what names weights by their content; below `tokens` any name will do."""
        tokens = self.settings.capture is Level.TOKENS
        if version is not None and tokens and not DIGEST.fullmatch(version):
            raise InvalidRequestError(
                f"policy version {version!r:.120} is no digest (32 hex digits or more, as "
                "sha256:...): by any other name nothing of this could be trained on"
            )
        return version

    # --- calls ---------------------------------------------------------------------------

    async def ask(self, attempt: Attempt, asked: Asked) -> Outcome:
        """Return an answer: the engine's, or a stop when a budget is used up.

        Raises:
            RefusedError: there is none.
        """
        await attempt.room()
        stop = attempt.exhausted()
        if stop is not None:
            return self._stop(attempt, stop)
        if self.paused_for_s is not None:
            raise RefusedError(429, "paused: the policy is being changed", wait_s=self.paused_for_s)
        body = self._body(attempt, asked)
        started_at, begun, policy = time.time(), time.monotonic(), self.policy_version
        self._in_flight += 1
        self._idle.clear()
        try:
            with attempt.charged(_promised(attempt, body)):
                answered = await self.engine.ask(body, deadline_s=attempt.remaining_s())
        except EngineFailedError as failure:
            attempt.event("failed", str(failure), failure.retries)
            raise RefusedError(
                failure.status,
                f"the engine: {failure}",
                code=failure.code,
                wait_s=failure.retry_after,
            ) from failure
        except TimeoutError:
            return self._stop(attempt, f"{attempt.line.budget.wall_s:g} s")
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        examined = examine(answered.body, attempt.line.capture)
        evidence = held_to_prompt(examined, asked.body["messages"])
        attempt.tokens += evidence.completion_tokens or 0
        return Outcome(
            answer=answered.body,
            evidence=evidence,
            retries=answered.retries,
            sent=body,
            policy=policy,
            policy_changed=policy != self.policy_version,
            started_at=started_at,
            latency_s=time.monotonic() - begun,
        )

    def _body(self, attempt: Attempt, asked: Asked) -> dict[str, Any]:
        capture = dict(CAPTURE[attempt.line.capture])
        wanted = asked.body.get("top_logprobs")
        if type(wanted) is int and "top_logprobs" in capture:
            capture["top_logprobs"] = wanted
        body = {**asked.body, "model": self.settings.model, **capture}
        given = {name: body[name] for name in _LIMITS if body.get(name) is not None}
        for name, value in given.items():
            if type(value) is not int or value < 1:
                raise RefusedError(400, f"{name} is no integer from 1")
        left = attempt.left()
        if left is not None:
            body |= {name: min(left, value) for name, value in given.items()} or {
                "max_tokens": left
            }
        return body

    def _stop(self, attempt: Attempt, what: str) -> Outcome:
        attempt.event("budget", what)
        text = f"The budget of this attempt is used up ({what}). Stop here."
        return Outcome(
            {
                "id": f"stop-{secrets.token_hex(8)}",
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self.settings.model,
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": text},
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            }
        )

    def record(
        self, attempt: Attempt, dialect: Dialect, asked: Asked, outcome: Outcome
    ) -> tuple[CallLine, Place | None]:
        """Write an answer of the engine's, before it is handed over."""
        evidence = outcome.evidence
        assert evidence is not None and outcome.sent is not None
        place = None
        if evidence.prompt is not None:
            place = attempt.place(evidence.prompt, asked.declared)
        choice = outcome.answer["choices"][0]
        call = CallLine(
            call_id=f"call-{secrets.token_hex(8)}",
            step=attempt.step,
            segment=0 if place is None else place.segment.index,
            extends=0 if place is None else place.extends,
            declared=asked.declared,
            broke=None if place is None else place.broke,
            level=evidence.level,
            flaws=evidence.flaws,
            prompt_token_ids=_tuple(evidence.prompt, 0 if place is None else place.extends),
            completion_token_ids=_tuple(evidence.completion),
            logprobs=_tuple(evidence.logprobs),
            prompt_tokens=evidence.prompt_tokens,
            completion_tokens=evidence.completion_tokens,
            finish_reason=choice.get("finish_reason"),
            message=choice["message"],
            dialect=dialect.name,
            model_asked=asked.model,
            model=outcome.answer.get("model"),
            sampling_asked=asked.parameters,
            sampling_sent=_sampling(outcome.sent),
            policy_version=outcome.policy,
            policy_changed=outcome.policy_changed,
            retries=outcome.retries,
            started_at=outcome.started_at,
            latency_s=outcome.latency_s,
        )
        attempt.record(call, place)
        if evidence.flaws:
            log.warning(
                "attempt %s, call %s: captured as %s only, so the attempt cannot be trained on: %s",
                attempt.line.attempt_id,
                call.call_id,
                evidence.level.value,
                "; ".join(evidence.flaws),
            )
        return call, place


def _promised(attempt: Attempt, body: dict[str, Any]) -> int:
    """Return how many tokens a call may produce of a budget that there is."""
    limits: list[int] = [body[name] for name in _LIMITS if body.get(name) is not None]
    return 0 if attempt.line.budget.tokens is None else min(limits)


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    left_out = {"messages", "tools", "model", *CAPTURE[Level.TOKENS]}
    return {name: value for name, value in body.items() if name not in left_out}


def _tuple(values: list[Any] | None, start: int = 0) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values[start:])

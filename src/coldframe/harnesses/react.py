"""A plain tool-calling agent: one bash tool, one conversation, no memory outside of it.

Each turn is one answer of the endpoint. An answer without a tool call ends the episode. What
does not follow the tool schema is told to the model, counted and typed; so many in a row end
the episode as the policy's failure, which the verifier still judges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from coldframe.harnesses.base import Ending, Episode, Offers, Outcome
from coldframe.harnesses.chat import Answer, ChatClient, Spent
from coldframe.harnesses.scripts import shell_of
from coldframe.harnesses.skills import SKILLS_LIST, list_skills
from coldframe.harnesses.windows import HEAD_TAIL_10K, RULES, WHOLE
from coldframe.protocol.errors import (
    HarnessError,
    InferenceError,
    NotExecutedError,
)
from coldframe.protocol.models import ExecResult, Reason
from coldframe.protocol.text import excerpt
from coldframe.trajectories.recorder import StepRecord, plain_text
from coldframe.trajectories.schema import Termination

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": (
            "Run a bash command in the sandbox and return its output. Every call is a new "
            "shell in the working directory: variables and `cd` do not carry over, files and "
            "background processes do."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string", "description": "The command line to run."}
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}
SYSTEM_PROMPT = (
    "You solve a task in a Linux sandbox, whose network may be limited or absent. Work with the "
    "bash tool: look first, change what is needed, check that it works. When the task is done, "
    "answer with a short summary and no tool call; that ends the episode."
)


@dataclass(frozen=True)
class BashCall:
    """A tool call that follows the schema."""

    id: str
    command: str


@dataclass(frozen=True)
class Malformed:
    """A tool call, or an answer, that does not."""

    code: str
    message: str
    id: str | None = None


class ReactHarness:
    """Reason, act, observe, over `/chat/completions`."""

    name = "react"
    version = "3"
    needs_model = True
    needs_solution = False
    window_rule = HEAD_TAIL_10K

    def settings(self) -> dict[str, Any]:
        """Return the rules of what the model is shown."""
        return {"window_rule": self.window_rule, "skills_rule": SKILLS_LIST}

    def refuses(self, offers: Offers) -> str | None:
        """Return MCP servers: it has one tool, and connects to none."""
        names = ", ".join(server.name[:50] for server in offers.mcp_servers[:10])
        return f"MCP servers ({names})" if names else None

    async def run(self, episode: Episode) -> Outcome:
        """Converse until the model is done or a limit is reached; see the seam for raises."""
        if episode.model is None:
            raise HarnessError("react needs a model: give --model and --base-url")
        refused = self.refuses(episode.offers)
        if refused is not None:
            raise HarnessError(f"react cannot pass on the task's {refused}")
        directory = episode.offers.skills_dir
        skills = None if directory is None else await list_skills(episode.sandbox, directory)
        async with ChatClient(episode.model) as chat:
            conversation = _Conversation(
                episode, chat, await shell_of(episode.sandbox), self.window_rule, skills
            )
            try:
                return await conversation.run()
            except Ending as ending:
                return ending.outcome
            finally:
                episode.recorder.close()


class _Conversation:
    def __init__(
        self, episode: Episode, chat: ChatClient, shell: str, rule: str, skills: str | None
    ) -> None:
        self.episode, self.chat, self.shell, self.rule = episode, chat, shell, rule
        self.recorder = episode.recorder
        self.failures_in_row = 0
        self.tokens = 0
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": "\n\n".join(filter(None, (SYSTEM_PROMPT, skills)))},
            {"role": "user", "content": episode.instruction},
        ]
        self.recorder.tool_schemas = [BASH_TOOL]
        self.recorder.prompt = [
            self.recorder.blob(json.dumps(one, ensure_ascii=False).encode())
            for one in self.messages
        ]

    async def run(self) -> Outcome:
        for _ in range(self.episode.limits.steps):
            step = self.recorder.step("model")
            answer = await self._ask(step)
            calls = read_calls(answer.message)
            if not calls:
                ended = self._without_call(step, answer)
                if ended is not None:
                    return ended
                continue
            self.messages.append(_echo(answer.message))
            well_formed = True
            for call in calls:
                if isinstance(call, Malformed):
                    well_formed = False
                    self._tell_malformed(step, call)
                else:
                    await self._bash(step, call)
            self._count_failure(well_formed)
        limit = self.episode.limits.steps
        return Outcome(Termination.STEP_LIMIT, f"{limit} steps without a final answer")

    async def _ask(self, step: StepRecord) -> Answer:
        limit = self.episode.limits.tokens
        left = None if limit is None else limit - self.tokens
        if left is not None and left <= 0:
            raise Ending(Termination.TOKEN_LIMIT, f"{self.tokens} of {limit} tokens are used")
        spent = Spent()
        try:
            answer = await self.chat.ask(
                self.messages, [BASH_TOOL], max_tokens=left, seed=self.episode.seed, spent=spent
            )
        finally:
            step.model_attempts = spent.attempts
            step.model_s, step.model_queue_s = spent.model_s, spent.wait_s
        step.set_action(answer.raw)
        step.finish_reason, step.usage = answer.finish_reason, answer.usage
        self.recorder.reported_model = answer.model or self.recorder.reported_model
        used = answer.usage.completion_tokens
        if limit is not None and used is None:
            raise InferenceError(
                "the model endpoint reports no usage.completion_tokens, so the token limit "
                "cannot be kept"
            )
        self.tokens += used or 0
        return answer

    def _without_call(self, step: StepRecord, answer: Answer) -> Outcome | None:
        """Return the end of the episode, or None if the model is told what was wrong."""
        content = answer.message.get("content")
        if isinstance(content, str) and content.strip() and answer.finish_reason != "length":
            return Outcome(Termination.FINISHED)
        if answer.finish_reason == "length":
            wrong = Malformed("truncated", "The answer was cut at its token limit.")
        else:
            wrong = Malformed("empty_answer", "The answer has neither text nor a tool call.")
        self.messages.append({"role": "assistant", "content": content or ""})
        self._tell_malformed(step, wrong)
        self._count_failure(False)
        return None

    def _tell_malformed(self, step: StepRecord, wrong: Malformed) -> None:
        step.parse_failure(wrong.code, wrong.message, wrong.id)
        text = (
            f"[{wrong.code}] {wrong.message} Call the tool `bash` with a JSON object "
            '{"command": "..."}, or answer in text to end the task.'
        )
        self._tell(step, text, rule=WHOLE, call_id=wrong.id)

    def _count_failure(self, well_formed: bool) -> None:
        self.failures_in_row = 0 if well_formed else self.failures_in_row + 1
        if self.failures_in_row >= self.episode.limits.parse_failures_in_row:
            raise Ending(
                Termination.PARSE_FAILURES,
                f"{self.failures_in_row} answers in a row did not follow the tool schema",
            )

    async def _bash(self, step: StepRecord, call: BashCall) -> None:
        try:
            result = await self.episode.execute(
                call.command, shell=self.shell, step=step, tool_call_id=call.id
            )
        except NotExecutedError as error:
            text = f"[{error.code}] The command was not started: {error}"
            self._tell(step, text, rule=WHOLE, call_id=call.id)
            return
        not_kept = result.out.omitted_bytes + result.err.omitted_bytes
        window = RULES[self.rule](observation(result), not_kept)
        self._tell(
            step, window.text, rule=window.rule, call_id=call.id, omitted=window.omitted_characters
        )

    def _tell(
        self,
        step: StepRecord,
        text: str,
        *,
        rule: str,
        call_id: str | None,
        omitted: int = 0,
    ) -> None:
        """Show the model a text, and keep it exactly as it was shown."""
        text = plain_text(text)  # arguments that are quoted may hold halves of surrogate pairs
        role = "tool" if call_id is not None else "user"
        message: dict[str, Any] = {"role": role, "content": text}
        if call_id is not None:
            message["tool_call_id"] = call_id
        self.messages.append(message)
        step.show(text, rule=rule, role=role, omitted_characters=omitted, tool_call_id=call_id)


def observation(result: ExecResult) -> str:
    """Return a command's end as text: stdout, stderr under its name, how it ended."""
    parts = [result.stdout.decode("utf-8", "replace")]
    if result.err.total_bytes:
        parts.append("[stderr]\n" + result.stderr.decode("utf-8", "replace"))
    body = "\n".join(part.rstrip("\n") for part in parts if part)
    return f"{body}\n{_ending(result)}" if body else _ending(result)


def _ending(result: ExecResult) -> str:
    if result.reason is Reason.EXIT:
        text = f"[exit code {result.exit_code}]"
    elif result.reason is Reason.DEADLINE:
        text = f"[killed with all its children: not done after {result.request.deadline_s:g} s]"
    elif result.reason is Reason.OOM:
        text = "[killed: out of memory]"
    elif result.reason is Reason.OUTPUT_LIMIT:
        text = "[killed: too much output]"
    else:
        text = f"[killed by signal {result.signal}]"
    if result.leftovers:
        text += f"\n[{len(result.leftovers)} process(es) still running in the background]"
    return text


def _echo(message: dict[str, Any]) -> dict[str, Any]:
    """Return the model's message as it goes back into the conversation.

    Only tool calls that can be answered by their id: the API refuses any other.
    """
    calls = message["tool_calls"] if isinstance(message["tool_calls"], list) else []
    kept = [call for call in calls if _call_id(call) is not None]
    echo: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    return echo | {"tool_calls": kept} if kept else echo


def _call_id(call: Any) -> str | None:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return None
    return call["id"] if isinstance(call.get("id"), str) else None


def read_calls(message: dict[str, Any]) -> list[BashCall | Malformed]:
    """Return the tool calls of a message, each well-formed or typed as what is wrong with it."""
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return []
    if not isinstance(calls, list):
        return [Malformed("tool_calls_invalid", "tool_calls is not a list.")]
    return [_read_call(call) for call in calls]


def _read_call(call: Any) -> BashCall | Malformed:
    call_id = _call_id(call)
    if call_id is None:
        return Malformed("tool_calls_invalid", "A tool call has no id or no function.")
    function = call["function"]
    if function.get("name") != "bash":
        name = excerpt(str(function.get("name")), 100)
        return Malformed("unknown_tool", f"There is no tool {name}.", call_id)
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (ValueError, TypeError, RecursionError):
        return Malformed("arguments_not_json", "The arguments are not JSON.", call_id)
    wrong = _wrong_with(arguments)
    if wrong is not None:
        return Malformed("arguments_invalid", wrong, call_id)
    return BashCall(call_id, arguments["command"])


def _wrong_with(arguments: Any) -> str | None:
    command = arguments.get("command") if isinstance(arguments, dict) else None
    if not isinstance(command, str) or not command.strip():
        return "`command` must be a non-empty string."
    if len(arguments) > 1:
        extra = ", ".join(sorted(set(arguments) - {"command"}))[:200]
        return f"Unknown arguments: {extra}."
    if "\0" in command or _has_surrogate(command):
        return "`command` holds a NUL character or a lone surrogate."
    return None


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)

"""The plain agent against a scripted endpoint over real HTTP, in a sandbox that runs commands."""

from __future__ import annotations

import asyncio
import json

import pytest

from coldframe.harnesses.base import Episode, McpServer, Offers
from coldframe.harnesses.react import ReactHarness
from coldframe.protocol.errors import HarnessError, InferenceError, Side
from coldframe.trajectories.schema import Termination
from coldframe.trajectories.steps import CallOutcome
from tests.doubles.model_endpoint import (
    Bash,
    Calls,
    HangUp,
    Http,
    ModelEndpoint,
    Once,
    Reply,
    Say,
    Stall,
    tool_call,
)
from tests.fixtures.waiting import until_asked
from tests.integration.harnesses.conftest import MakeEpisode


def shown(episode: Episode) -> list[str]:
    """What the model was shown after its actions, in order."""
    blobs = episode.recorder.blobs
    return [
        blobs.get(message.shown.text).decode()
        for step in episode.recorder.steps
        for message in step.shown
    ]


async def test_react_runs_commands_until_the_model_is_done(make_episode: MakeEpisode) -> None:
    """The control: what the model does happens, and what comes out is what it is shown next."""
    script = {"the task": [Bash("echo one > f; cat f; echo two >&2; exit 3"), Say("Done.")]}
    with ModelEndpoint(script) as endpoint:
        episode = make_episode(endpoint.base_url)
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.FINISHED
    assert shown(episode) == ["one\n[stderr]\ntwo\n[exit code 3]"]
    told = endpoint.requests[1]["messages"][-1]
    assert (told["role"], told["content"]) == ("tool", shown(episode)[0])
    first, second = episode.recorder.steps
    assert first.calls[0].exit_code == 3
    assert first.usage.completion_tokens and first.model_s > 0
    assert second.calls == ()
    assert episode.recorder.reported_model == "policy-scripted"


async def test_react_several_calls_of_one_answer_are_answered_by_id(
    make_episode: MakeEpisode,
) -> None:
    """An answer without its result makes a real API refuse the next request."""
    with ModelEndpoint({"the task": [Bash("echo a", "echo b")]}) as endpoint:
        episode = make_episode(endpoint.base_url)
        await ReactHarness().run(episode)

    messages = endpoint.requests[-1]["messages"]
    asked = [call["id"] for call in messages[2]["tool_calls"]]
    assert [one["tool_call_id"] for one in messages[3:]] == asked
    assert [one["content"].split("\n")[0] for one in messages[3:]] == ["a", "b"]


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Calls([tool_call("{not json")]), "arguments_not_json"),
        (Calls([tool_call("[" * 50_000)]), "arguments_not_json"),
        (Calls([tool_call({"cmd": "ls"})]), "arguments_invalid"),
        (Calls([tool_call({"command": 1})]), "arguments_invalid"),
        (Calls([tool_call({"command": " "})]), "arguments_invalid"),
        (Calls([tool_call({"command": "a\0b"})]), "arguments_invalid"),
        (Calls([tool_call('{"command": "\\ud800"}')]), "arguments_invalid"),
        (Calls([tool_call({"command": "ls", "cwd": "/"})]), "arguments_invalid"),
        (Calls([tool_call({"command": "ls"}, name="python")]), "unknown_tool"),
        (Calls([{"function": {"name": "bash"}}]), "tool_calls_invalid"),
        (Calls({"id": "x"}), "tool_calls_invalid"),
        (Say(None), "empty_answer"),
        (Say("I was about to", finish_reason="length"), "truncated"),
    ],
)
async def test_react_malformed_answer_is_typed_and_told_to_the_model(
    make_episode: MakeEpisode, reply: Reply, code: str
) -> None:
    """A policy learns from the message; dropping the turn would teach it nothing."""
    with ModelEndpoint({"the task": [reply, Bash("echo fine")]}) as endpoint:
        episode = make_episode(endpoint.base_url)
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.FINISHED
    assert [one.code for one in episode.recorder.steps[0].parse_failures] == [code]
    assert shown(episode)[0].startswith(f"[{code}] ")
    assert shown(episode)[1] == "fine\n[exit code 0]"


async def test_react_parse_failures_in_a_row_end_the_episode_as_the_policys(
    make_episode: MakeEpisode,
) -> None:
    """A policy that babbles must not hold a sandbox until its time is over."""
    bad = Calls([tool_call("{")])
    script = {"the task": [bad, bad, Bash("true"), bad, bad, bad, Bash("echo too late")]}
    with ModelEndpoint(script) as endpoint:
        episode = make_episode(endpoint.base_url, parse_failures_in_row=3)
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.PARSE_FAILURES
    assert sum(len(step.parse_failures) for step in episode.recorder.steps) == 5
    assert len(episode.recorder.steps) == 6


async def test_react_step_limit_ends_the_episode(make_episode: MakeEpisode) -> None:
    """The limit counts actions of the model, not requests or commands."""
    with ModelEndpoint(lambda messages: Bash("true", "true")) as endpoint:
        episode = make_episode(endpoint.base_url, steps=2)
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.STEP_LIMIT
    assert [len(step.calls) for step in episode.recorder.steps] == [2, 2]


async def test_react_token_limit_ends_the_episode_and_bounds_each_answer(
    make_episode: MakeEpisode,
) -> None:
    """What is left is asked for, so that the limit is not overshot by a long answer."""
    with ModelEndpoint(lambda messages: Bash("true")) as endpoint:
        episode = make_episode(endpoint.base_url, tokens=100)
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.TOKEN_LIMIT
    asked = [request["max_tokens"] for request in endpoint.requests]
    assert asked[0] == 100
    assert asked == sorted(asked, reverse=True)


async def test_react_token_limit_without_usage_is_an_inference_failure(
    make_episode: MakeEpisode,
) -> None:
    """A limit that cannot be kept must not be kept silently."""
    with (
        ModelEndpoint(lambda messages: Bash("true"), usage=False) as endpoint,
        pytest.raises(InferenceError, match="usage"),
    ):
        await ReactHarness().run(make_episode(endpoint.base_url, tokens=100))


async def test_react_command_past_its_deadline_is_told_and_the_episode_goes_on(
    make_episode: MakeEpisode,
) -> None:
    """A hanging command is the policy's to learn from, with what it printed."""
    with ModelEndpoint({"the task": [Bash("echo before; sleep 60")]}) as endpoint:
        episode = make_episode(endpoint.base_url, command_s=0.3)
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.FINISHED
    assert shown(episode) == ["before\n[killed with all its children: not done after 0.3 s]"]


async def test_react_command_that_is_not_started_is_told_to_the_model(
    make_episode: MakeEpisode,
) -> None:
    """An agent that removed its own directory must hear it, and may go on."""
    with ModelEndpoint({"the task": [Bash("true")]}) as endpoint:
        episode = make_episode(endpoint.base_url)
        episode.user = "nobody-of-this-name"
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.FINISHED
    assert shown(episode)[0].startswith("[user_not_found] The command was not started")
    assert episode.recorder.steps[0].calls[0].outcome is CallOutcome.NOT_EXECUTED


async def test_react_long_output_is_shown_by_the_named_rule_and_kept_whole(
    make_episode: MakeEpisode,
) -> None:
    """What the model saw and what came out are both in the record, apart."""
    command = "i=0; while [ $i -lt 3000 ]; do echo 0123456789; i=$((i+1)); done"
    with ModelEndpoint({"the task": [Bash(command)]}) as endpoint:
        episode = make_episode(endpoint.base_url)
        await ReactHarness().run(episode)

    step = episode.recorder.steps[0]
    assert step.shown[0].shown.rule == "head_tail_10k@2"
    assert step.shown[0].shown.omitted_characters > 20_000
    assert len(shown(episode)[0]) < 10_100
    assert step.calls[0].stdout is not None
    assert step.calls[0].stdout.complete
    assert len(episode.recorder.blobs.get(step.calls[0].stdout.stored)) == 33_000


async def test_react_counts_what_nobody_kept_of_an_output_among_what_is_left_out(
    make_episode: MakeEpisode,
) -> None:
    """Of 20 MB the model was told of the 8 MiB that the record keeps, and of no more."""
    with ModelEndpoint({"the task": [Bash("yes | head -c 20000000")]}) as endpoint:
        episode = make_episode(endpoint.base_url)
        await ReactHarness().run(episode)

    (message,) = episode.recorder.steps[0].shown
    assert 19_990_000 < message.shown.omitted_characters < 19_991_000
    assert f"[{message.shown.omitted_characters} characters omitted]" in shown(episode)[0]


@pytest.mark.parametrize(
    "fault", [Http(500), Http(503), Http(429, headers=(("Retry-After", "0"),)), HangUp(),
              Http(200, b"not json"), Http(200, b'{"choices": []}'), Http(200, b"[" * 50_000)],
)  # fmt: skip
async def test_react_passing_fault_of_the_endpoint_is_retried(
    make_episode: MakeEpisode, fault: Reply
) -> None:
    """An overloaded endpoint is no reason to lose an episode."""
    with ModelEndpoint({"the task": [Once(fault, Bash("echo ok"))]}) as endpoint:
        episode = make_episode(endpoint.base_url, retries=1)
        outcome = await ReactHarness().run(episode)

    assert outcome.termination is Termination.FINISHED
    assert [step.model_attempts for step in episode.recorder.steps] == [2, 1]


@pytest.mark.parametrize(
    ("fault", "tries"), [(Http(500), 3), (HangUp(), 3), (Http(200, b"{}"), 3), (Http(401), 1)]
)
async def test_react_lasting_fault_of_the_endpoint_is_an_inference_failure(
    make_episode: MakeEpisode, fault: Reply, tries: int
) -> None:
    """It must never reach the policy as an observation or as a reward."""
    with ModelEndpoint({"the task": [fault]}) as endpoint, pytest.raises(InferenceError) as caught:
        await ReactHarness().run(make_episode(endpoint.base_url, retries=2))

    assert caught.value.side is Side.INFERENCE
    assert len(endpoint.requests) == tries


async def test_react_endpoint_that_stalls_is_an_inference_failure(
    make_episode: MakeEpisode,
) -> None:
    """A byte now and then keeps a per-read time-out alive for ever."""
    with (
        ModelEndpoint({"the task": [Stall()]}) as endpoint,
        pytest.raises(InferenceError, match=r"within 0\.3 s"),
    ):
        await ReactHarness().run(make_episode(endpoint.base_url, request_s=0.3))


async def test_react_endpoint_that_is_not_there_is_an_inference_failure(
    make_episode: MakeEpisode,
) -> None:
    """The message names the endpoint, without its password."""
    with ModelEndpoint({}) as endpoint:
        url = endpoint.base_url.replace("http://", "http://me:hunter22@")
    with pytest.raises(InferenceError, match=r"127\.0\.0\.1") as caught:
        await ReactHarness().run(make_episode(url))

    assert "hunter22" not in str(caught.value)


async def test_react_full_context_ends_the_episode_as_the_policys(
    make_episode: MakeEpisode,
) -> None:
    """The endpoint works; the conversation grew too long, which the policy caused."""
    full = Http(400, json.dumps({"error": {"code": "context_length_exceeded"}}).encode())
    with ModelEndpoint({"the task": [Bash("true"), full]}) as endpoint:
        outcome = await ReactHarness().run(make_episode(endpoint.base_url))

    assert outcome.termination is Termination.CONTEXT_LIMIT


async def test_react_cancelled_in_a_command_keeps_its_record(make_episode: MakeEpisode) -> None:
    """The deadline cancels the harness; the last command must be found and killed."""
    with ModelEndpoint({"the task": [Bash("echo started > f; sleep 60")]}) as endpoint:
        episode = make_episode(endpoint.base_url)
        running = asyncio.create_task(ReactHarness().run(episode))
        await until_asked(lambda: episode.sandbox.files.exists("/f"))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    call = episode.recorder.steps[0].calls[0]
    assert call.outcome is CallOutcome.INTERRUPTED
    assert episode.running == {call.operation_id}


async def test_react_key_is_sent_and_appears_nowhere_in_the_record(
    make_episode: MakeEpisode,
) -> None:
    """The record is shared; even a policy that prints the key must not leak it."""
    with ModelEndpoint({"the task": [Bash("echo sk-test-key")]}) as endpoint:
        episode = make_episode(endpoint.base_url)
        await ReactHarness().run(episode)

    assert endpoint.headers[0]["Authorization"] == "Bearer sk-test-key"
    record = b"".join(
        path.read_bytes() for path in episode.recorder.blobs.root.rglob("*") if path.is_file()
    )
    assert b"sk-test-key" not in record
    assert b"[redacted]" in record
    assert "sk-test-key" not in str(episode.recorder.steps)


async def test_react_without_a_model_is_a_harness_failure(make_episode: MakeEpisode) -> None:
    """The command line refuses it first; a third party's caller may not."""
    with pytest.raises(HarnessError, match="--model"):
        await ReactHarness().run(make_episode())


async def test_react_shows_the_skills_that_a_task_offers_in_its_prompt(
    make_episode: MakeEpisode,
) -> None:
    """A skill that nobody is told of is not there; the list is part of the record."""
    with ModelEndpoint({"the task": [Say("Done.")]}) as endpoint:
        episode = make_episode(endpoint.base_url, offers=Offers(skills_dir="/skills"))
        files = episode.sandbox.files
        await files.write(
            "/skills/pdf/SKILL.md",
            "---\nname: pdf-forms\ndescription: >\n  Fill in\n  forms.\n---\nbody",
            parents=True,
        )
        await files.write("/skills/bare/SKILL.md", "no front matter", parents=True)
        await files.write("/skills/none/other.md", "x", parents=True)
        await files.write(
            "/skills/two\nlines/SKILL.md",
            f"---\nname: {'n' * 5000}\ndescription: {'d' * 5000}\n---\n",
            parents=True,
        )
        await ReactHarness().run(episode)

    told = endpoint.requests[0]["messages"][0]["content"]
    listed = told.split("\n\n")[1].splitlines()[1:]
    assert listed == [
        "- bare:  (/skills/bare/SKILL.md)",
        "- pdf-forms: Fill in forms. (/skills/pdf/SKILL.md)",
        f"- {'n' * 100}: {'d' * 1000} ('/skills/two\\nlines/SKILL.md')",
    ]
    assert json.loads(episode.recorder.blobs.get(episode.recorder.prompt[0]))["content"] == told
    assert ReactHarness().settings()["skills_rule"] == "skills_list@2"


async def test_react_with_more_skills_than_can_be_shown_fails_by_name(
    make_episode: MakeEpisode,
) -> None:
    """What is left out in silence would make it another task."""
    with ModelEndpoint({"the task": [Say("Done.")]}) as endpoint:
        episode = make_episode(endpoint.base_url, offers=Offers(skills_dir="/skills"))
        for number in range(201):
            await episode.sandbox.files.write(f"/skills/{number}/SKILL.md", "x", parents=True)
        with pytest.raises(HarnessError, match="200 skills"):
            await ReactHarness().run(episode)


async def test_react_without_the_skills_that_were_offered_fails_by_name(
    make_episode: MakeEpisode,
) -> None:
    """The control: a directory that is missing is no empty list."""
    with ModelEndpoint({"the task": [Say("Done.")]}) as endpoint:
        episode = make_episode(endpoint.base_url, offers=Offers(skills_dir="/absent"))
        with pytest.raises(HarnessError, match="/absent"):
            await ReactHarness().run(episode)

    assert endpoint.requests == []


async def test_react_refuses_mcp_servers_before_it_asks_the_model(
    make_episode: MakeEpisode,
) -> None:
    """A model without the tools that the task speaks of learns to do without."""
    offers = Offers(mcp_servers=(McpServer("tools", "sse", url="http://127.0.0.1:1"),))
    with ModelEndpoint({"the task": [Say("Done.")]}) as endpoint:
        episode = make_episode(endpoint.base_url, offers=offers)
        with pytest.raises(HarnessError, match=r"MCP servers \(tools\)"):
            await ReactHarness().run(episode)

    assert endpoint.requests == []

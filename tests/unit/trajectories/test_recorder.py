"""The record must explain an attempt without the harness, and hold no secret."""

from __future__ import annotations

import json
from pathlib import Path

from coldframe.protocol.errors import Execution, ProgramNotFoundError, SpawnerLostError
from coldframe.protocol.models import ExecRequest, Output, ProcessInfo, Resources
from coldframe.trajectories.recorder import Recorder
from coldframe.trajectories.redaction import Redactor
from coldframe.trajectories.steps import CallOutcome, Usage
from coldframe.trajectories.store import BlobStore
from coldframe.trajectories.totals import totals
from tests.unit.trajectories.samples import exec_result

SECRET = "sk-very-secret"


def recorder(tmp_path: Path) -> Recorder:
    return Recorder(BlobStore(tmp_path), Redactor([SECRET]))


def test_call_splits_its_time_into_exec_and_queue(tmp_path: Path) -> None:
    """Waiting for the node and running the command are different things to fix."""
    call = recorder(tmp_path).result(exec_result(), started_at=5.0, wall_s=1.25, tool_call_id=None)

    assert (call.exec_s, call.queue_s, call.ended_at) == (1.0, 0.25, 6.25)


def test_output_with_a_secret_is_stored_without_it_and_says_so(tmp_path: Path) -> None:
    """The whole keeps its digest; what is stored is marked as not being the whole."""
    record = recorder(tmp_path)
    whole = f"key {SECRET}\n".encode()

    ref = record.output(Output(total_bytes=len(whole), head=whole))

    assert record.blobs.get(ref.stored) == b"key [redacted]\n"
    assert (ref.redacted, ref.complete, ref.total_bytes) == (True, False, len(whole))


def test_output_beyond_its_window_is_marked_incomplete(tmp_path: Path) -> None:
    """A reader must not take head and tail for the whole."""
    ref = recorder(tmp_path).output(Output(total_bytes=100, head=b"a", tail=b"z"))

    assert not ref.complete
    assert not ref.redacted


def test_request_hides_secrets_and_keeps_bytes_that_are_not_text(tmp_path: Path) -> None:
    """The request is replayed from the record, so nothing else in it may change."""
    request = ExecRequest(argv=("echo", b"\xff", SECRET), env={"TOKEN": "x", "A": "b", "C": None})

    found = recorder(tmp_path).request(request)

    assert found["argv"] == ["echo", {"base64": "/w=="}, "[redacted]"]
    assert found["env"] == {"TOKEN": "[redacted]", "A": "b", "C": None}
    assert json.loads(json.dumps(found)) == found


def test_message_about_an_action_holds_no_secret(tmp_path: Path) -> None:
    """It quotes what the model wrote, and the model may have read one."""
    step = recorder(tmp_path).step("model")
    step.parse_failure("bad_arguments", f"no JSON: {{{SECRET}")

    assert [one.message for one in step.parse_failures] == ["no JSON: {[redacted]"]


def test_call_without_result_says_what_is_known_of_it(tmp_path: Path) -> None:
    """Not executed, perhaps executed and ended by us are three different things."""
    record = recorder(tmp_path)
    options = {"operation_id": "op-1", "env": {"TOKEN": "x"}, "user": "a"}

    def outcome(error: ProgramNotFoundError | SpawnerLostError | None) -> CallOutcome:
        call = record.error(error, "ls", options, started_at=0.0, wall_s=1.0, tool_call_id=None)
        assert call.request["env"] == {"TOKEN": "[redacted]"}
        return call.outcome

    assert outcome(ProgramNotFoundError("no ls")) is CallOutcome.NOT_EXECUTED
    assert outcome(SpawnerLostError("gone", execution=Execution.UNKNOWN)) is CallOutcome.LOST
    assert outcome(None) is CallOutcome.INTERRUPTED


def test_interrupted_step_is_kept_as_far_as_it_went(tmp_path: Path) -> None:
    """The last thing before a deadline is what one wants to read."""
    record = recorder(tmp_path)
    record.step("model").set_action(b"first")
    record.step("model").set_action(b"second")
    record.close()
    record.close()

    assert [record.blobs.get(step.action) for step in record.steps if step.action] == [
        b"first",
        b"second",
    ]


def test_process_name_that_is_not_text_can_be_written(tmp_path: Path) -> None:
    """A process may call itself anything; the record must still be valid JSON."""
    result = exec_result(leftovers=(ProcessInfo(pid=7, name="\udcff"),))

    call = recorder(tmp_path).result(result, started_at=0.0, wall_s=1.0, tool_call_id=None)

    assert "\\\\udcff" in call.model_dump_json()


def test_totals_over_something_unknown_are_unknown(tmp_path: Path) -> None:
    """A sum that leaves out what was not measured looks small and is wrong."""
    record = recorder(tmp_path)
    used = Resources(cpu_user_s=1.0, cpu_system_s=0.5, memory_peak_bytes=10)
    for resources, tokens in ((used, 5), (Resources(), None)):
        step = record.step("model")
        step.usage = Usage(completion_tokens=tokens, prompt_tokens=3)
        result = exec_result(resources=resources)
        step.calls.append(record.result(result, started_at=0.0, wall_s=1.0, tool_call_id=None))
    record.close()

    whole, half = totals(record.steps), totals(record.steps[:1])

    assert (whole.cpu_s, whole.memory_peak_bytes, whole.completion_tokens) == (None, None, None)
    assert (half.cpu_s, half.memory_peak_bytes, half.completion_tokens) == (1.5, 10, 5)
    assert whole.prompt_tokens == 6

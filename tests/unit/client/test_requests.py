"""What a caller says becomes one exact request, or one clear sentence."""

from __future__ import annotations

import inspect

import pytest

from coldframe import AsyncSandboxClient, InvalidRequestError
from coldframe.client._requests import ExecOptions, exec_request, sandbox_spec, signal_number
from coldframe.protocol.models import ExecRequest, PtySize, SandboxSpec


def test_exec_request_text_is_a_command_and_a_list_is_argv() -> None:
    """A list that were joined would be quoted wrongly sooner or later."""
    assert exec_request("echo a b").command == "echo a b"
    assert exec_request(["echo", "a b", b"\xff"]).argv == ("echo", "a b", b"\xff")


def test_exec_request_always_carries_an_operation_id() -> None:
    """Without one an interrupted call could not kill its command."""
    assert exec_request("x").operation_id != exec_request("x").operation_id
    assert exec_request("x", operation_id="mine").operation_id == "mine"


@pytest.mark.parametrize(
    ("pty", "size"), [(True, (24, 80)), ((10, 20), (10, 20)), (PtySize(rows=5, cols=6), (5, 6))]
)
def test_exec_request_pty_takes_what_people_write(pty: object, size: tuple[int, int]) -> None:
    """A size is what terminals are asked for; True is the usual one."""
    made = exec_request("x", pty=pty).pty  # type: ignore[arg-type]
    assert made is not None
    assert (made.rows, made.cols) == size


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"deadline_s": -1}, "deadline_s: .*greater than 0.*-1"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"window_bytes": 1 << 40}, "window_bytes"),
        ({"pty": (0, 80)}, "rows"),
        ({"operation_id": "no blanks"}, "operation id 'no blanks'"),
        ({"env": {"A": 3}}, "env"),
    ],
)
def test_exec_request_bad_value_is_named(options: dict[str, object], says: str) -> None:
    """One sentence that names the value, not a page of validation errors."""
    with pytest.raises(InvalidRequestError, match=says) as caught:
        exec_request("x", **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_exec_request_empty_argv_is_refused() -> None:
    """There is nothing to run."""
    with pytest.raises(InvalidRequestError, match="argv is empty"):
        exec_request([])


def test_exec_request_unknown_option_is_a_type_error() -> None:
    """A misspelt deadline must not be ignored."""
    with pytest.raises(TypeError, match="deadline"):
        exec_request("x", deadline=3)


def test_exec_options_are_those_of_the_request() -> None:
    """The SDK must not lack or invent an option."""
    own = {"argv", "command", "stdin_open", "status_pipe"}
    assert set(ExecOptions.__annotations__) == set(ExecRequest.model_fields) - own


def test_create_sandbox_defaults_are_those_of_the_specification() -> None:
    """Two places that state a default must say the same."""
    signature = inspect.signature(AsyncSandboxClient.create_sandbox)
    given = {
        name: p.default for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY
    }
    del given["operation_id"]

    assert sandbox_spec("x", **given) == SandboxSpec(image="x")
    assert set(given) == set(SandboxSpec.model_fields) - {"image"}


def test_sandbox_spec_absurd_limit_is_named() -> None:
    """A typo in a limit is said before anything is made."""
    with pytest.raises(InvalidRequestError, match="memory_bytes"):
        sandbox_spec("x", memory_bytes=1)


@pytest.mark.parametrize(("given", "number"), [("TERM", 15), ("sigkill", 9), (2, 2), (50, 50)])
def test_signal_number_takes_names_and_numbers(given: int | str, number: int) -> None:
    """People write all of these."""
    assert signal_number(given) == number


@pytest.mark.parametrize("given", ["NOPE", 0, 65, -9])
def test_signal_number_unknown_is_refused(given: int | str) -> None:
    """0 would only ask whether a process exists, and be taken for a kill."""
    with pytest.raises(InvalidRequestError, match="no signal"):
        signal_number(given)

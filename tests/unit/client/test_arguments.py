"""Arguments of the SDK: one rule for all of them, whatever the method."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import coldframe
from coldframe import InvalidRequestError, SandboxClient
from coldframe.client._arguments import typed_arguments
from coldframe.client._requests import exec_request, signal_scope
from coldframe.protocol.network import network_policy

CLASSES = ["SandboxClient", "Sandbox", "Process", "Session", "Files"]
STREAMED = {"content"}
"""Looked at as it is read: whatever has `read` or can be iterated will do."""


def parameters() -> Iterator[Any]:
    """Every parameter of every public method of both SDKs."""
    for name in [*CLASSES, *(f"Async{name}" for name in CLASSES)]:
        of = getattr(coldframe, name)
        for method, function in inspect.getmembers(of, inspect.isfunction):
            if method.startswith("_"):
                continue
            for parameter in list(inspect.signature(function).parameters.values())[1:]:
                if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in STREAMED:
                    case = (of, method, parameter.name)
                    yield pytest.param(*case, id=f"{name}.{method}.{parameter.name}")


@pytest.mark.parametrize(("of", "method", "name"), list(parameters()))
def test_argument_of_another_type_is_refused_by_its_name(of: type, method: str, name: str) -> None:
    """An AttributeError from deep within does not say which argument was meant."""
    call = getattr(object.__new__(of), method)
    with pytest.raises(InvalidRequestError, match=rf"^{name}: .* is expected, not the object"):
        answer = call(**{name: object()})
        if inspect.iscoroutine(answer):
            asyncio.run(answer)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"deadline_s": True}, r"deadline_s: float \| None is expected, not the bool True"),
        ({"deadline_s": "5"}, "deadline_s: .*not the str '5'"),
        ({"stdin": 12}, "stdin: .*not the int 12"),
        ({"pty": "x"}, "pty: .*not the str 'x'"),
        ({"pty": (1, 2, 3)}, "pty: .*not the tuple"),
        ({"operation_id": 5}, "operation_id: .*not the int 5"),
        ({"user": 1.5}, "user: "),
        ({"window_bytes": 1 << 70}, "window_bytes: .*not the int of 71 bits"),
        ({"deadline_s": 10**5000}, "deadline_s: .*not the int of 16610 bits"),
        ({"env": {1: "x"}}, "env: .*not the dict of int to str"),
        ({"env": {"A": 1, "B": "x"}}, "env: .*not the dict of str to int, str"),
    ],
)
def test_option_of_another_type_is_refused_by_its_name(options: dict[str, Any], says: str) -> None:
    """True is no number of seconds, and a number of seconds is no text."""
    with pytest.raises(InvalidRequestError, match=says):
        exec_request("x", **options)


def test_option_that_does_not_exist_is_told_which_do() -> None:
    """`timeout=` is what other libraries call it."""
    with pytest.raises(TypeError, match=r"no option 'timeout'; there are .*deadline_s"):
        exec_request("x", timeout=5)


def test_environment_that_is_refused_is_not_shown() -> None:
    """Errors end up in logs, and secrets must not."""
    with pytest.raises(InvalidRequestError) as caught:
        exec_request("x", env={"TOKEN": "secret", "A": 1})  # type: ignore[dict-item]
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("command", [None, 5, [1], {"a": 1}, bytearray(b"x")])
def test_command_of_another_type_is_refused(command: Any) -> None:
    """`None` must not become an argv of nothing."""
    with pytest.raises(InvalidRequestError, match=r"^command: "):
        exec_request(command)


def test_command_with_a_number_in_it_says_so() -> None:
    """That a list is expected and not a list helps nobody."""
    with pytest.raises(InvalidRequestError, match="not the list of int, str"):
        exec_request(["sleep", 1])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("int", [0, -1, signal.SIGTERM, (1 << 63) - 1], [True, 1.0, "1", None, 1 << 63]),
        ("float", [1, 1.5, float("inf")], [True, "1", None]),
        ("bool", [True], [1, None, "yes"]),
        ("str | bytes | None", ["", b"", None], [1, bytearray()]),
        ("tuple[int, int] | None", [(1, 2), None], [[1, 2], (1,), (1, True)]),
        ("Mapping[str, str | None]", [{}, {"a": None}], [{"a": 1}, [("a", "b")]]),
        ("Sequence[str | bytes]", [[], ["a", b"b"], ("a",)], ["ab", b"ab", [1], None]),
        ("Iterable[str]", ["a", ["a"], iter("a")], [1, None]),
        ("Literal['a', 'b']", ["a"], ["c", 1, ["a"], None]),
    ],
)
def test_types_are_taken_as_written(annotation: str, good: list[Any], bad: list[Any]) -> None:
    """The signature is the documentation: what it allows passes, and nothing else."""
    call = _taking(annotation)
    for value in good:
        call(None, value)
    for value in bad:
        with pytest.raises(InvalidRequestError, match=r"^value: "):
            call(None, value)


def _taking(annotation: str) -> Callable[[Any, Any], Any]:
    scope: dict[str, Any] = {}
    imports = "from collections.abc import *\nfrom typing import Literal\n"
    exec(f"{imports}def take(self, value): return value", scope)
    scope["take"].__annotations__["value"] = annotation
    take: Callable[[Any, Any], Any] = typed_arguments(scope["take"])
    return take


def test_call_that_python_refuses_stays_a_type_error() -> None:
    """A misspelt name is a fault of the program, not of a request."""
    client = object.__new__(SandboxClient)
    with pytest.raises(TypeError, match=r"no option .memory.; there are .*memory_bytes"):
        client.create_sandbox("x", memory=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="image"):
        client.create_sandbox()  # type: ignore[call-arg]


def test_values_that_only_look_right_are_refused() -> None:
    """Of the right type, and still none: the name is in the sentence."""
    with pytest.raises(InvalidRequestError, match="scope: 'all' is none of leader, group"):
        signal_scope("all")
    with pytest.raises(InvalidRequestError, match="network: "):
        network_policy([5])  # type: ignore[list-item]
    with pytest.raises(InvalidRequestError, match="encoding: there is no 'no-such'"):
        object.__new__(coldframe.Files).read_text("/x", encoding="no-such")

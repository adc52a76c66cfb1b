"""What is said is what is understood, byte for byte."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from coldframe.protocol import errors, wire
from coldframe.protocol.errors import ColdframeError, Execution, InvalidRequestError
from coldframe.protocol.models import ExecRequest, ExecResult, Output, Reason, SandboxSpec
from coldframe.protocol.network import Credential, NetworkPolicy

words = st.one_of(st.text(max_size=20), st.binary(max_size=20))
requests = st.builds(
    ExecRequest,
    argv=st.lists(words, min_size=1, max_size=4).map(tuple),
    env=st.dictionaries(words | st.sampled_from(["stdin", "head"]), st.none() | words, max_size=4),
    cwd=st.none() | words,
    stdin=st.none() | st.binary(max_size=50),
)


def _as_bytes(word: str | bytes) -> bytes:
    return word if isinstance(word, bytes) else os.fsencode(word)


def _meaning(request: ExecRequest) -> object:
    """What a command gets: bytes."""
    assert request.argv is not None
    env = {_as_bytes(k): v and _as_bytes(v) for k, v in request.env.items()}
    cwd = None if request.cwd is None else _as_bytes(request.cwd)
    return [_as_bytes(word) for word in request.argv], env, cwd, request.stdin


@given(requests)
def test_request_means_the_same_on_the_other_side(request: ExecRequest) -> None:
    """An argument that is no UTF-8 is an argument all the same."""
    text = wire.dump(request)
    received = wire.load(ExecRequest, text)

    assert _meaning(received) == _meaning(request)
    assert json.loads(wire.dump(received)) == json.loads(text)


@given(requests, st.binary(max_size=50), st.binary(max_size=50))
def test_result_keeps_its_output(request: ExecRequest, out: bytes, err: bytes) -> None:
    """Output is bytes, whatever the request that it comes with."""
    result = ExecResult(
        operation_id="op-1",
        sandbox_id="sb-1",
        reason=Reason.EXIT,
        exit_code=0,
        out=Output(total_bytes=len(out), head=out),
        err=Output(total_bytes=len(err), head=err),
        started_at=1.0,
        ended_at=2.0,
        duration_s=1.0,
        request=request,
    )

    received = wire.load(ExecResult, wire.dump(result))

    assert (received.stdout, received.stderr) == (out, err)


def test_secrets_are_told_only_to_whom_they_are_for() -> None:
    """The service needs a credential's value; an answer or a record never has it."""
    policy = NetworkPolicy(credentials=(Credential(host="a.example", value=SecretStr("hush")),))
    spec = SandboxSpec(image="x", network=policy, labels={"odd": "\udcff", "\udcfe": "name"})

    assert wire.load(SandboxSpec, wire.dump(spec, secrets=True)) == spec
    assert b"hush" not in wire.dump(spec)
    assert b"hush" not in wire.dump(spec.model_copy(update={"labels": {}}))


@pytest.mark.parametrize("kind", sorted(wire.CODES.values(), key=lambda kind: kind.code))
def test_error_comes_back_as_its_class(kind: type[ColdframeError]) -> None:
    """`except PathNotFoundError` must not depend on where the node is."""
    error = kind("a sentence", execution=Execution.UNKNOWN)

    body = json.dumps(wire.error_body(error)).encode()
    received = wire.read_error(body, 500)

    assert type(received) is kind
    assert (str(received), received.execution) == ("a sentence", Execution.UNKNOWN)
    assert isinstance(wire.read_error(b"<html>", 502), ColdframeError)


def test_every_error_has_a_code_of_its_own() -> None:
    """Two classes of one code could not be told apart."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, ColdframeError)
    ]

    assert len({kind.code for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"argv":[]}', b'{"argv":["a"],"x":1}'])
def test_what_is_no_request_is_refused_in_one_sentence(text: bytes) -> None:
    """A caller must learn which field, and no value of it."""
    with pytest.raises(InvalidRequestError) as raised:
        wire.load(ExecRequest, text)

    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", [b'"\\ud800",' + b"[" * 100_000, b"[" * 100_000])
def test_body_that_is_nested_too_deeply_is_refused(text: bytes) -> None:
    """Half a character is read another way, which must be bounded as the first one is."""
    with pytest.raises(InvalidRequestError):
        wire.load(SandboxSpec, b'{"image": "any", "labels": [' + text)

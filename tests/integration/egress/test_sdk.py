"""Network policies through the SDK, on the native runtime and where they cannot be enforced."""

from __future__ import annotations

import pytest

from coldframe import (
    CapabilityError,
    ConflictError,
    Credential,
    InvalidRequestError,
    NetworkPolicy,
    SandboxClient,
)

IMAGE = "debian:bookworm"
CONNECT = (
    "python3 -c \"import socket; c = socket.create_connection(('169.254.169.254', 80)); c.recv(1)\""
)


@pytest.mark.root
def test_policy_of_a_sandbox_is_enforced_changed_and_recorded(
    native_client: SandboxClient,
) -> None:
    """The first and the last thing that a task's author says of the network."""
    with native_client.create_sandbox(IMAGE, network=["public", "mirror.example:443"]) as sandbox:
        first = sandbox.fingerprint()
        sandbox.exec(CONNECT)
        refused = [e for e in sandbox.egress_events().events if e.decision == "refused"]
        info = sandbox.set_network("web.example", expected_version=sandbox.info.version)
        second = sandbox.fingerprint()
        with pytest.raises(ConflictError):
            sandbox.set_network(None, expected_version=info.version + 1)
        sandbox.set_network(None)

        assert [(e.address, e.port) for e in refused] == [("169.254.169.254", 80)]
        assert info.spec.network == NetworkPolicy.parse("web.example")
        assert (first.network, first.limits) != (second.network, second.limits)
        assert first.network != second.network
        assert sandbox.info.spec.network.empty
        third = sandbox.fingerprint()
    with native_client.create_sandbox(IMAGE) as other:
        assert other.fingerprint().network == third.network
        assert other.egress_events().events == ()


@pytest.mark.root
def test_secret_of_a_policy_is_in_no_description_of_the_sandbox(
    native_client: SandboxClient,
) -> None:
    """Descriptions are printed and recorded; a record cannot be used as a policy."""
    policy = NetworkPolicy.parse(
        "web.example", credentials=[Credential(host="web.example", value="the-secret")]
    )
    with native_client.create_sandbox(IMAGE, network=policy) as sandbox:
        recorded = sandbox.info.model_dump_json()
        assert "the-secret" not in recorded + repr(sandbox.info)
        again = type(sandbox.info).model_validate_json(recorded)
        with pytest.raises(InvalidRequestError):
            sandbox.set_network(again.spec.network)


def test_policy_where_it_cannot_be_enforced_is_refused_and_nothing_is_made(
    client: SandboxClient,
) -> None:
    """The fake's commands use the host's network: a policy would be a lie."""
    with pytest.raises(CapabilityError):
        client.create_sandbox(IMAGE, network="public")
    with client.create_sandbox(IMAGE) as sandbox:
        with pytest.raises(CapabilityError):
            sandbox.set_network("public")
        sandbox.set_network("none")
        assert sandbox.egress_events().events == ()
    ledger = client.ledger()
    assert (ledger.created, ledger.failed) == (1, 0)


def test_text_that_is_no_rule_is_refused_before_anything_is_made(client: SandboxClient) -> None:
    """The message must hold the words that are wrong."""
    with pytest.raises(InvalidRequestError, match="ftp"):
        client.create_sandbox(IMAGE, network=["ftp://files.example"])
    assert client.ledger().created == 0

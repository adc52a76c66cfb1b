"""What is refused was never created: one rule for every reason, in process and by a service.

So `created` of the ledger counts sandboxes that had an id, and `failed` those of them that could
not be made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from pydantic_core import to_jsonable_python

from coldframe import InvalidRequestError, SandboxClient
from coldframe.host import space
from coldframe.images.base import Image
from coldframe.protocol.errors import (
    ColdframeError,
    ImageNotFoundError,
    NameInUseError,
    StorageFullError,
)
from coldframe.protocol.network import HIDDEN, Credential, NetworkPolicy
from tests.fixtures.service import Service

pytestmark = pytest.mark.root

_READ_FROM_A_RECORD = Credential(host="files.example", value=SecretStr(HIDDEN))
REFUSALS: dict[str, tuple[dict[str, Any], type[ColdframeError]]] = {
    "image is not there": ({"image": "nowhere"}, ImageNotFoundError),
    "image is no name": ({"image": "a b"}, InvalidRequestError),
    "no processor": ({"cpu": 0}, InvalidRequestError),
    "too little memory": ({"memory_bytes": 1}, InvalidRequestError),
    "no processes": ({"pids": 0}, InvalidRequestError),
    "no disk": ({"disk_bytes": 0}, InvalidRequestError),
    "no lease": ({"ttl_s": 0.0}, InvalidRequestError),
    "empty user": ({"user": ""}, InvalidRequestError),
    "relative workdir": ({"workdir": "here"}, InvalidRequestError),
    "workdir with a NUL": ({"workdir": "/a\0b"}, InvalidRequestError),
    "environment name with =": ({"env": {"a=b": "c"}}, InvalidRequestError),
    "empty environment name": ({"env": {"": "c"}}, InvalidRequestError),
    "environment with a NUL": ({"env": {"a": "\0"}}, InvalidRequestError),
    "label with =": ({"labels": {"a=b": "c"}}, InvalidRequestError),
    "name of another": ({"name": "taken"}, NameInUseError),
    "policy from a record": (
        {"network": NetworkPolicy(public=True, credentials=(_READ_FROM_A_RECORD,))},
        InvalidRequestError,
    ),
}
refusals = pytest.mark.parametrize(
    ("given", "error"), REFUSALS.values(), ids=[name.replace(" ", "-") for name in REFUSALS]
)


@pytest.fixture(scope="module")
def served(native_service: Service, busybox_image: Image) -> Iterator[SandboxClient]:
    """A client of a service in which a name is taken."""
    with (
        SandboxClient(url=native_service.unix) as client,
        client.create_sandbox(busybox_image.name, name="taken"),
    ):
        yield client


@refusals
def test_create_refused_in_process_counts_nothing(
    native_client: SandboxClient,
    busybox_image: Image,
    given: dict[str, Any],
    error: type[ColdframeError],
) -> None:
    """Whether the SDK, the node or the runtime sees what is wrong is nobody's business."""
    native_client.create_sandbox(busybox_image.name, name="taken")
    before = native_client.ledger()

    with pytest.raises(error) as refused:
        native_client.create_sandbox(**{"image": busybox_image.name, **given})

    assert "sb-" not in str(refused.value)
    assert native_client.ledger() == before


@refusals
def test_create_refused_by_a_service_counts_nothing(
    native_service: Service,
    served: SandboxClient,
    busybox_image: Image,
    given: dict[str, Any],
    error: type[ColdframeError],
) -> None:
    """Asked without the SDK, which would refuse most of these itself."""
    before = served.ledger()
    asked = to_jsonable_python({"image": busybox_image.name, **given})

    socket = httpx.HTTPTransport(uds=native_service.unix.removeprefix("unix:"))
    with httpx.Client(transport=socket, base_url="http://node") as caller:
        answer = caller.post("/v1/sandboxes", json=asked)

    assert answer.status_code < 500
    assert answer.json()["code"] == error.code
    assert served.ledger() == before


def test_create_refused_by_a_full_disk_counts_nothing(
    native_client: SandboxClient, busybox_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before anything is made."""
    monkeypatch.setattr(space, "RESERVE_BYTES", 1 << 60)

    with pytest.raises(StorageFullError, match="make room there"):
        native_client.create_sandbox(busybox_image.name)

    assert native_client.ledger().created == 0

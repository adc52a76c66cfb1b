"""Images are built on the service's machine from a context that is sent to it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe import CapabilityError, ImageError, InvalidRequestError, SandboxClient
from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.errors import DockerfileError, OperationMismatchError
from coldframe.protocol.ids import new_operation_id
from tests.fixtures.faults import POINTS, Fault, faulty
from tests.fixtures.service import Service
from tests.integration.gateway.conftest import http

NAME = "test-service-build:1"

pytestmark = pytest.mark.root


@pytest.fixture
def builder(native_service: Service) -> Iterator[SandboxClient]:
    """The SDK on its socket."""
    with SandboxClient(url=native_service.unix) as client:
        yield client


def test_build_by_a_service_gives_the_image_that_a_build_here_gives(
    builder: SandboxClient,
    native_client: SandboxClient,
    busybox_image: Image,
    image_store: ImageStore,
    tmp_path: Path,
) -> None:
    """A task must not depend on where its image was built."""
    context = tmp_path / "context"
    (context / "sub").mkdir(parents=True)
    (context / "sub/Dockerfile").write_text(
        f"FROM {busybox_image.name}\nARG A\nCOPY tool left-out* /app/\nRUN echo $A > /app/a\n"
    )
    (context / "tool").write_text("#!/bin/sh\necho ran\n")
    (context / "tool").chmod(0o755)
    (context / "left-out").write_text("x")
    (context / ".dockerignore").write_text("left-out\n")
    options = {"dockerfile": context / "sub/Dockerfile", "build_args": {"A": "given"}}
    try:
        there = builder.build_image(NAME, context, network=None, **options)  # type: ignore[arg-type]
        here = native_client.build_image(NAME, context, network=None, **options)  # type: ignore[arg-type]
        with builder.create_sandbox(NAME) as sandbox:
            shown = sandbox.exec("/app/tool; cat /app/a; ls /app").text
    finally:
        image_store.remove(NAME)
    assert there == here
    assert shown == "ran\ngiven\na\ntool\n"


@pytest.mark.parametrize("where", ["service", "here"])
def test_build_under_an_id_is_made_once(
    request: pytest.FixtureRequest,
    where: str,
    busybox_image: Image,
    image_store: ImageStore,
    tmp_path: Path,
) -> None:
    """A replay must not put back what was removed, or build what has changed meanwhile."""
    fixture = "builder" if where == "service" else "native_client"
    client: SandboxClient = request.getfixturevalue(fixture)
    (tmp_path / "Dockerfile").write_text(f"FROM {busybox_image.name}\nENV A=1\n")
    named, name = new_operation_id(), "test-service-build:once"
    first = client.build_image(name, tmp_path, operation_id=named)
    image_store.remove(name)

    assert client.build_image(name, tmp_path, operation_id=named) == first
    assert name not in {one.name for one in client.list_images()}
    with pytest.raises(OperationMismatchError):
        client.build_image(f"{name}-other", tmp_path, operation_id=named)


async def test_context_whose_connection_breaks_is_sent_again(
    native_service: Service, busybox_image: Image, image_store: ImageStore, tmp_path: Path
) -> None:
    """It is there to be read again, and a build is the most expensive thing to lose."""
    name = "test-service-build:lost"
    (tmp_path / "Dockerfile").write_text(f"FROM {busybox_image.name}\nCOPY large /\n")
    (tmp_path / "large").write_bytes(bytes(3 << 20))
    try:
        for point in POINTS:
            async with faulty(native_service) as (proxy, client):
                proxy.fault = Fault(b"POST /v1/images", point)
                assert await client.build_image(name, tmp_path)
                assert proxy.fault.cuts == 1
    finally:
        image_store.remove(name)


def test_bad_line_and_missing_context_are_named(
    builder: SandboxClient, busybox_image: Image, tmp_path: Path
) -> None:
    """By the names that the caller knows, not by where they lay on the service."""
    (tmp_path / "Dockerfile").write_text(f"FROM {busybox_image.name}\nCOPY nothing /x\n")
    with pytest.raises(DockerfileError, match=r"^Dockerfile:2: "):
        builder.build_image(NAME, tmp_path)
    with pytest.raises(InvalidRequestError, match="not in the context"):
        builder.build_image(NAME, tmp_path, dockerfile=tmp_path.parent / "Dockerfile")
    with pytest.raises(FileNotFoundError):
        builder.build_image(NAME, tmp_path / "none")


def _tar(**links: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, target in links.items():
            member = tarfile.TarInfo(name.replace("__", "."))
            member.type, member.linkname = tarfile.SYMTYPE, target
            archive.addfile(member)
    return made.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        _tar(Dockerfile="/etc/passwd"),
        _tar(Dockerfile="../../../../../../etc/passwd"),
        _tar(__dockerignore="/etc/shadow"),
        _tar(**{"../../escaped": "x"}),
        b"no tar at all" * 100,
        b"",
    ],
)
def test_hostile_context_reads_and_writes_nothing_of_the_host(
    native_service: Service, content: bytes
) -> None:
    """A link in an archive must not make the service read its own files aloud."""
    with http(native_service.unix) as caller:
        answer = caller.post("/v1/images", params={"name": NAME}, content=content)

    assert answer.status_code in {400, 422}, answer.text
    assert "root:" not in answer.text


def test_service_without_a_store_names_the_remedy(service: Service, tmp_path: Path) -> None:
    """The fake runtime has no images; the message must say what has."""
    with SandboxClient(url=service.unix) as client, pytest.raises(CapabilityError, match="native"):
        client.build_image("x", tmp_path)
    assert issubclass(DockerfileError, ImageError)

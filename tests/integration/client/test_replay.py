"""Changes that are asked for again under their id: in process, by a socket, by HTTP."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coldframe import Sandbox, SandboxClient
from coldframe.protocol.errors import (
    InvalidRequestError,
    NameInUseError,
    OperationExpiredError,
    OperationMismatchError,
    PathExistsError,
    PathNotFoundError,
)
from coldframe.protocol.ids import new_operation_id
from tests.fixtures.client import BACKENDS, a_sandbox

DIFF = "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n"
LARGE = b"0123456789abcdef" * (5 << 16)
"""More than is sent at once."""


WAYS = [
    *BACKENDS,
    pytest.param("tcp", id="tcp"),
    pytest.param("native-tcp", id="native-tcp", marks=pytest.mark.root),
]


@pytest.fixture(params=WAYS)
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox by every way to a node."""
    with a_sandbox(request) as sandbox:
        yield sandbox


@pytest.fixture
def named() -> str:
    """An id that nobody has used."""
    return new_operation_id()


def _archive(name: str, data: bytes) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize("content", [b"first", LARGE], ids=["small", "large"])
def test_write_under_an_id_writes_once(box: Sandbox, named: str, content: bytes) -> None:
    """What another wrote meanwhile must not be written over by a replay."""
    assert box.files.write("/t/f", content, operation_id=named) == len(content)
    box.files.write("/t/f", b"another's")

    assert box.files.write("/t/f", content, operation_id=named) == len(content)
    assert box.files.read("/t/f") == b"another's"
    with pytest.raises(OperationMismatchError):
        box.files.write("/t/f", content[:-1], operation_id=named)
    with pytest.raises(OperationMismatchError):
        box.files.write("/t/g", content, operation_id=named)
    assert not box.files.exists("/t/g")


def test_upload_and_archive_under_an_id_are_unpacked_once(
    box: Sandbox, named: str, tmp_path: Path
) -> None:
    """Contents that stream are no other kind of change."""
    (tmp_path / "local").write_bytes(LARGE)
    archive = _archive("m", LARGE)
    for _ in range(2):
        assert box.files.upload(tmp_path / "local", "/t/u", operation_id=named) == len(LARGE)
        assert box.files.tar_up("/t", archive, operation_id=f"{named}-tar") == 1
        for path in ("/t/u", "/t/m"):
            if box.files.exists(path):
                box.files.remove(path)
    assert box.files.list("/t") == ()


def test_names_change_once_under_an_id(box: Sandbox, named: str) -> None:
    """A move that is made again has nothing to move, or moves what is another's by now."""
    box.files.write("/t/f", b"x")
    for _ in range(2):
        box.files.move("/t/f", "/t/g", operation_id=named)
        box.files.mkdir("/t/d", exist_ok=False, operation_id=f"{named}-mkdir")
        box.files.chmod("/t/g", 0o600, operation_id=f"{named}-chmod")
        box.files.chown("/t/g", 1, 2, operation_id=f"{named}-chown")
    box.files.chmod("/t/g", 0o644)
    box.files.chmod("/t/g", 0o600, operation_id=f"{named}-chmod")
    assert box.files.stat("/t/g").mode & 0o777 == 0o644

    for _ in range(2):
        box.files.remove("/t/g", operation_id=f"{named}-remove")
        box.files.write("/t/g", b"new")
    assert box.files.read("/t/g") == b"new"


def test_change_that_failed_fails_so_again(box: Sandbox, named: str) -> None:
    """The first answer is the answer, though it would do well by now."""
    with pytest.raises(PathNotFoundError):
        box.files.remove("/t/f", operation_id=named)
    box.files.write("/t/f", b"x")
    with pytest.raises(PathNotFoundError):
        box.files.remove("/t/f", operation_id=named)
    assert box.files.exists("/t/f")
    with pytest.raises(PathExistsError):
        box.files.mkdir("/t", exist_ok=False, operation_id=f"{named}-mkdir")
    with pytest.raises(InvalidRequestError):
        box.files.remove("/t/f", operation_id="no/id")


def test_patch_under_an_id_is_applied_once(box: Sandbox, named: str) -> None:
    """It does not fit any more where it was applied."""
    box.files.write("/t/f", b"x\n")
    first = box.apply_patch(DIFF, root="/t", operation_id=named)
    assert box.apply_patch(DIFF, root="/t", operation_id=named) == first
    assert (first.written, box.files.read("/t/f")) == (("f",), b"y\n")
    with pytest.raises(OperationMismatchError):
        box.apply_patch(DIFF, root="/", operation_id=named)


def test_command_is_fed_and_signalled_once_under_an_id(box: Sandbox, named: str) -> None:
    """Twice the same input is another input."""
    fed = box.start(["cat"], stdin_open=True)
    for _ in range(2):
        fed.write_stdin(b"once\n", operation_id=named)
    for _ in range(2):
        fed.close_stdin(operation_id=f"{named}-close")
    assert fed.wait().stdout == b"once\n"

    struck = box.start(["sleep", "60"])
    for _ in range(2):
        assert struck.signal("KILL", operation_id=f"{named}-kill") == 1
        struck.wait()
    left = box.start(["sleep", "60"])
    killed = box.kill_processes(idempotency_key=f"{named}-all")
    assert [one.operation_id for one in killed] == [left.operation_id]
    left = box.start(["sleep", "60"])
    assert box.kill_processes(idempotency_key=f"{named}-all") == killed
    assert left.poll() is None
    left.kill()


def test_terminal_is_resized_once_under_an_id(box: Sandbox, named: str) -> None:
    """A replay that comes late must not undo what came after it."""
    process = box.start("read line; stty size", pty=True)
    process.resize(30, 90, operation_id=named)
    process.resize(40, 80)
    process.resize(30, 90, operation_id=named)
    process.write_stdin("\n")
    assert b"40 80" in process.wait().stdout


def test_lease_and_policy_change_once_under_an_id(box: Sandbox, named: str) -> None:
    """What one expected of the version was so when it was asked for first."""
    first = box.renew(1000.0, operation_id=named)
    later = box.renew(5000.0)
    assert box.renew(1000.0, operation_id=named) == first
    assert box.refresh().expires_at == later.expires_at
    box.extend_disk(1 << 20, operation_id=f"{named}-disk")
    box.extend_disk(1 << 20, operation_id=f"{named}-disk")
    with pytest.raises(OperationMismatchError):
        box.extend_disk(1 << 21, operation_id=f"{named}-disk")
    version = box.info.version
    for _ in range(2):
        setting = box.set_network(None, expected_version=version, operation_id=f"{named}-network")
        assert setting.version == first.version


def test_delete_by_name_under_an_id_ends_no_other(client: SandboxClient, named: str) -> None:
    """By the time it is asked for again the name may be another's."""
    client.create_sandbox("any", name="mine")
    client.delete_sandbox("mine", operation_id=named)
    other = client.create_sandbox("any", name="mine")
    client.delete_sandbox("mine", operation_id=named)
    assert other.refresh().state == "ready"
    with pytest.raises(NameInUseError):
        client.create_sandbox("any", name="mine")


def test_id_whose_answer_is_kept_no_longer_is_refused(
    tmp_path: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To do it again would be to do it twice."""
    monkeypatch.setenv("COLDFRAME_RESULT_COUNT", "2")
    with SandboxClient(in_process=True, runtime="fake", home=tmp_path) as client:
        files = client.create_sandbox("any").files
        files.mkdir("/d", operation_id=named)
        for number in range(2):
            files.mkdir("/e", operation_id=f"{named}-{number}")
        files.remove("/d")
        with pytest.raises(OperationExpiredError):
            files.mkdir("/d", operation_id=named)
        assert not files.exists("/d")

"""A change that is asked for again under its key is not made again, also by the next process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import httpx
import pytest

from coldframe import SandboxClient
from tests.fixtures.restart import IMAGE, Services
from tests.fixtures.service import Service
from tests.fixtures.waiting import wait_until

DIFF = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n"


@pytest.fixture
def files(service: Service) -> Iterator[httpx.Client]:
    """Requests to a sandbox with a file `/f`."""
    with SandboxClient(url=service.unix) as client:
        sandbox = client.create_sandbox("any")
        sandbox.files.write("/f", b"x\n")
        with _requests(service.unix, f"/v1/sandboxes/{sandbox.id}") as requests:
            yield requests


def _requests(url: str, below: str = "") -> httpx.Client:
    transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
    return httpx.Client(transport=transport, base_url=f"http://node{below}", timeout=60)


def _key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": f"{name}-{os.urandom(4).hex()}"}


def test_change_with_a_key_is_made_once_and_gives_its_first_answer(files: httpx.Client) -> None:
    """A move that is sent again has nothing to move any more."""
    key = _key("move")
    first = [files.post("/files/move?path=/f&target=/g", headers=key) for _ in range(3)]
    assert [one.status_code for one in first] == [204, 204, 204]
    assert files.post("/files/move?path=/f&target=/g").status_code == 404

    gone = _key("gone")
    assert files.delete("/files?path=/f", headers=gone).json()["code"] == "path_not_found"
    files.put("/files?path=/f", content=b"x\n")
    again = files.delete("/files?path=/f", headers=gone)
    assert (again.status_code, again.json()["code"]) == (404, "path_not_found")
    assert files.get("/files?path=/f").content == b"x\n"

    patch = _key("patch")
    done = [files.post("/patch?root=/", content=DIFF, headers=patch) for _ in range(2)]
    assert [one.status_code for one in done] == [200, 200]
    assert done[0].json() == done[1].json()


def test_key_of_a_change_stands_for_nothing_else(files: httpx.Client) -> None:
    """Another place, other bytes, or a command under the same id would be done or lost unseen."""
    key = _key("write")
    assert files.put("/files?path=/a", content=b"one", headers=key).status_code == 201
    others = [
        files.put("/files?path=/b", content=b"one", headers=key),
        files.put("/files?path=/a", content=b"two", headers=key),
        files.delete("/files?path=/a", headers=key),
        files.post("/execs", json={"command": "true", "operation_id": key["Idempotency-Key"]}),
    ]
    assert [one.json()["code"] for one in others] == ["operation_mismatch"] * 4
    assert files.get("/files?path=/a").content == b"one"

    key = _key("empty")
    assert files.put("/files?path=/a", content=b"", headers=key).status_code == 201
    removal = files.delete("/files?path=/a", headers=key)  # the same place, and the same bytes
    assert removal.json()["code"] == "operation_mismatch"


def test_stdin_with_a_key_is_written_once(files: httpx.Client, service: Service) -> None:
    """Input that is written twice is another input."""
    wanted = {"argv": ["cat"], "operation_id": "cat", "stdin_open": True}
    assert files.post("/execs?wait_s=0", json=wanted).status_code == 202
    with _requests(service.unix, "/v1/execs") as execs:
        key = _key("stdin")
        for _ in range(2):
            assert execs.post("/cat/stdin", content=b"once\n", headers=key).status_code == 204
        assert execs.post("/cat/stdin?close=true").status_code == 204
        result = execs.get("/cat?wait_s=30").json()
    assert result["out"]["total_bytes"] == len(b"once\n")


@pytest.mark.root
def test_answers_of_changes_are_the_first_ones_from_the_next_process(services: Services) -> None:
    """What was begun and whose end nobody knows is said to be so, and not done again."""
    services.start()
    client = services.client()
    sandbox = client.create_sandbox(IMAGE)
    sandbox.files.write("/f", b"x\n")
    full = sandbox.start(["sleep", "600"], stdin_open=True)
    below = f"/v1/sandboxes/{sandbox.id}"
    move, stdin = _key("move"), _key("stdin")
    target = f"{below}/files/move?path=/f&target=/g"
    write = (f"/v1/execs/{full.operation_id}/stdin", b"z" * (1 << 20))

    def write_and_wait() -> None:
        with _requests(services.url) as other, pytest.raises(httpx.HTTPError):
            other.post(write[0], content=write[1], headers=stdin)

    with _requests(services.url) as requests:
        assert requests.post(target, headers=move).status_code == 204
        waits = threading.Thread(target=write_and_wait)
        waits.start()
        journal = next((services.home / "nodes").iterdir()) / "effects"
        wait_until(lambda: stdin["Idempotency-Key"] in journal.read_text())
        services.kill()
        waits.join()
    services.start()
    with _requests(services.url) as requests:
        assert requests.post(target, headers=move).status_code == 204
        told = requests.post(write[0], content=write[1], headers=stdin)
        assert (told.status_code, told.json()["execution"]) == (503, "perhaps_executed")
        assert requests.post(target).status_code == 404
    client.close()

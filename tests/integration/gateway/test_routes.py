"""What the routes say that only plain callers use: policies, cancelling, traces, resources,
patches.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256

import httpx
import pytest

from coldframe import Sandbox
from coldframe.protocol import tracing

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_policy_in_force_is_read_where_it_is_put(caller: httpx.Client) -> None:
    """Who audits a sandbox asks what it may reach now, not what it was made with."""
    made = caller.post("/v1/sandboxes", json={"image": "any"}).json()
    url = f"/v1/sandboxes/{made['id']}/network"

    assert caller.get(url).json() == made["spec"]["network"]
    assert caller.put(url, json={"max_bytes": 5}).status_code == 200
    assert caller.get(url).json() == {**made["spec"]["network"], "max_bytes": 5}
    assert caller.get("/v1/sandboxes/sb-none/network").status_code == 404


def test_cancelled_command_ends_with_all_that_it_started(
    caller: httpx.Client, served: Sandbox
) -> None:
    """An agent's daemon must not outlive the command that nobody wants any more."""
    url = f"/v1/sandboxes/{served.id}/execs?wait_s=0"
    words = "setsid sleep 300 & sleep 300"
    assert caller.post(url, json={"command": words, "operation_id": "can"}).status_code == 202

    ends = [caller.post("/v1/execs/can/cancel") for _ in range(2)]

    assert [end.status_code for end in ends] == [200, 200]
    assert ends[0].json() == ends[1].json() == caller.get("/v1/execs/can").json()
    assert (ends[0].json()["reason"], ends[0].json()["signal"]) == ("signal", 9)
    assert served.processes() == ()
    assert caller.post("/v1/execs/none-such/cancel").status_code == 404


def test_cancelling_an_ended_command_ends_what_it_left_running(
    caller: httpx.Client, served: Sandbox
) -> None:
    """Its result stays as it was."""
    words = "setsid sleep 300 >/dev/null 2>&1 & echo done"
    before = served.exec(words, operation_id="left")
    assert len(served.processes()) == 1

    after = caller.post("/v1/execs/left/cancel").json()

    assert (after["reason"], after["ended_at"]) == ("exit", before.ended_at)
    assert served.processes() == ()


def test_method_that_is_not_taken_is_told_which_are(caller: httpx.Client) -> None:
    """Of all routes of the path, not of the first alone."""
    for path, taken in (("/v1/sandboxes", "GET, POST"), ("/v1/execs/any", "GET")):
        answer = caller.head(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, taken)


@pytest.mark.parametrize("path", ["/v1/capabilities", "/v1/sandboxes/sb-none", "/v1/nonsense"])
def test_answer_names_the_trace_that_it_belongs_to(caller: httpx.Client, path: str) -> None:
    """Whoever has only the answer finds the log lines of it, of refusals too."""
    told = caller.get(path, headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    assert tracing.read(told.headers["traceparent"]) == TRACE

    for none in ({}, {"traceparent": "nonsense"}):
        assert "traceparent" not in caller.get(path, headers=none).headers


def test_resources_are_the_machines_and_grow_with_sandboxes(caller: httpx.Client) -> None:
    """Whoever places sandboxes must know what is left, and what was promised already."""
    before = caller.get("/v1/resources").json()
    spec = {"image": "any", "cpu": 0.5, "memory_bytes": 64 << 20}
    made = caller.post("/v1/sandboxes", json=spec).json()
    command = {"command": "sleep 300", "operation_id": "busy"}
    assert caller.post(f"/v1/sandboxes/{made['id']}/execs?wait_s=0", json=command).is_success

    after = caller.get("/v1/resources").json()

    used = before["in_use"]
    assert after["in_use"] == {
        "sandboxes": used["sandboxes"] + 1,
        "cpu": used["cpu"] + 0.5,
        "memory_bytes": used["memory_bytes"] + (64 << 20),
        "disk_bytes": used["disk_bytes"],
    }
    node = after["node"]
    assert (node["in_use"], after["quota"]) == (after["in_use"], None)
    assert node["running"] == before["node"]["running"] + 1
    assert node["free"]["sandboxes"] == before["node"]["free"]["sandboxes"] - 1
    assert node["capacity"]["cpu"] == len(os.sched_getaffinity(0))
    assert node["capacity"]["memory_bytes"] == pytest.approx(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), rel=0.05
    )
    for name, whole in node["capacity"].items():
        assert 0 <= node["free"][name] <= whole
    assert set(node["waiting"]) == {"creates", "destroys", "commands"}
    caller.delete(f"/v1/sandboxes/{made['id']}")
    assert caller.get("/v1/resources").json()["in_use"] == used


PATCH = b"""--- a/one
+++ b/one
@@ -1,2 +1,2 @@
 1
-2
+two
--- a/two
+++ /dev/null
@@ -1 +0,0 @@
-x
"""


def _patch(caller: httpx.Client, sandbox: Sandbox, **options: object) -> httpx.Response:
    url = f"/v1/sandboxes/{sandbox.id}/patch"
    return caller.post(url, content=PATCH, params={"root": "/repo", **options})


def test_patch_is_applied_as_a_whole_on_the_base_that_it_names(
    caller: httpx.Client, served: Sandbox
) -> None:
    """The SDK's promise is the route's: a stale base changes nothing, and the answer is a base."""
    served.files.write("/repo/one", b"1\n2\n")
    served.files.write("/repo/two", b"not x\n")
    right, wrong = (f"one={sha256(data).hexdigest()}" for data in (b"1\n2\n", b"other"))

    stale = _patch(caller, served, base_sha256=wrong)
    assert (stale.status_code, stale.json()["code"]) == (409, "stale_base")
    misfit = _patch(caller, served, base_sha256=right)
    assert (misfit.status_code, misfit.json()["code"]) == (422, "patch_rejected")
    assert served.files.read("/repo/one") == b"1\n2\n"
    for odd in ("one", "one=12", "=" + "0" * 64):
        assert _patch(caller, served, base_sha256=odd).status_code == 400
    assert _patch(caller, served, root="repo").status_code == 400

    served.files.write("/repo/two", b"x\n")
    two = "two=" + sha256(b"x\n").hexdigest()
    done = _patch(caller, served, base_sha256=[right, two])
    assert done.json() == {
        "written": ["one"],
        "removed": ["two"],
        "sha256": {"one": sha256(b"1\ntwo\n").hexdigest()},
    }
    assert [entry.name for entry in served.files.list("/repo")] == [b"one"]


def test_patch_names_files_whose_names_are_no_text(caller: httpx.Client, served: Sandbox) -> None:
    """A path is bytes: what is in a repository must be reachable, and checked as what it is."""
    served.files.write(b"/repo/\xff", b"1\n")
    diff = b'--- "a/\\377"\n+++ "b/\\377"\n@@ -1 +1 @@\n-1\n+2\n'
    url = f"/v1/sandboxes/{served.id}/patch?root=/repo&base_sha256=%FF%3D"
    assert caller.post(url + "0" * 64, content=diff).status_code == 409

    done = caller.post(url + sha256(b"1\n").hexdigest(), content=diff)

    assert json.loads(done.text)["written"] == ["\udcff"]
    assert served.files.read(b"/repo/\xff") == b"2\n"


def test_patch_that_would_take_much_of_the_service_is_refused(
    caller: httpx.Client, served: Sandbox
) -> None:
    """It is worked out in the service's memory, which is everybody's."""
    url = f"/v1/sandboxes/{served.id}/patch?root=/repo"
    large = caller.post(url, content=b"x" * ((4 << 20) + 1))
    assert (large.status_code, large.json()["code"]) == (413, "too_large")

    diff = ""
    for name in ("one", "two"):
        served.files.write(f"/repo/{name}", b"1\n" * (5 << 20))
        diff += f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-1\n+2\n"
    many = caller.post(url, content=diff)
    assert (many.status_code, many.json()["code"]) == (413, "file_too_large")
    assert served.files.read("/repo/one", max_bytes=64 << 20)[:4] == b"1\n1\n"

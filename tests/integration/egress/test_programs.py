"""Programs of other kinds than Python: a static busybox, curl-like tools, musl's resolver."""

from __future__ import annotations

from pathlib import Path

from coldframe.images.base import Image
from coldframe.images.store import ImageStore
from coldframe.protocol.ids import new_sandbox_id
from coldframe.protocol.models import SandboxSpec
from coldframe.protocol.network import NetworkPolicy
from tests.fixtures.egress import OTHER, WEB, Fenced, Internet, fenced_runtime


async def test_busybox_without_any_setting_reaches_what_is_allowed(
    servers: Internet, tmp_path: Path, image_store: ImageStore, busybox_image: Image
) -> None:
    """An image may have no libc, no /etc and one static program that resolves by itself."""
    async with fenced_runtime(tmp_path, image_store, servers) as runtime:
        spec = SandboxSpec(
            image="busybox", network=NetworkPolicy.parse("web.example", f"{OTHER}:7")
        )
        sandbox = await runtime.create(new_sandbox_id(runtime.node_id), spec, busybox_image)
        box = Fenced(sandbox)

        page = await box.run("busybox", "wget", "-qO-", "http://web.example/page")
        proxied = await box.run(
            "busybox",
            "wget",
            "-qO-",
            "http://web.example/other",
            env={"http_proxy": "http://127.0.0.53:3128"},
        )
        refused = await box.run("busybox", "wget", "-O-", "http://other.example/")
        said = await box.run("sh", "-c", f"busybox nc {OTHER} 7 </dev/null")
        looked = await box.run("busybox", "nslookup", "web.example")

    assert page.startswith("GET /page HTTP/1.1\r\nHost: web.example")
    assert proxied.startswith("GET /other HTTP/1.1")
    assert "GET" not in refused
    assert {event.name for event in box.events(decision="refused")} == {"other.example"}
    assert said == "hello\n"
    assert WEB in looked

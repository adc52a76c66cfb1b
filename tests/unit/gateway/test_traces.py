"""Traces: what is taken from a header, and what OpenTelemetry is told where it is configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import httpx
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from coldframe.gateway.app import make_app, routes
from coldframe.gateway.context import Service
from coldframe.gateway.guard import Guard, by_socket
from coldframe.gateway.traces import Spans, Traced
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol import tracing


async def test_request_is_a_span_of_its_callers_trace(tmp_path: Path) -> None:
    """Whoever looks at a trace sees where its time went, on our side too."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    node = Node(NodeSettings(home=tmp_path, runtime="fake"))
    async with node:
        app = make_app(Service(node, cast(Any, None)))
        spans = Traced(Spans(Guard(app, by_socket), routes(), tracer))
        transport = httpx.ASGITransport(spans)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as caller:
            with tracer.start_as_current_span("task") as task:
                header = tracing.traceparent()
                assert header is not None
                headers = {"traceparent": header}
                made = await caller.post("/v1/sandboxes", json={"image": "any"}, headers=headers)
                await caller.get("/v1/sandboxes/sb-none", headers=headers)
    trace_id = f"{task.get_span_context().trace_id:032x}"
    assert made.json()["trace_id"] == trace_id
    told = {span.name: span for span in exporter.get_finished_spans()}
    create, look = told["POST /v1/sandboxes"], told["GET /v1/sandboxes/{sandbox_id}"]
    assert {f"{span.context.trace_id:032x}" for span in told.values()} == {trace_id}
    assert create.parent is not None
    assert create.parent.span_id == task.get_span_context().span_id
    assert create.attributes is not None
    assert look.attributes is not None
    assert create.attributes["http.response.status_code"] == 201
    assert look.attributes["coldframe.sandbox_id"] == "sb-none"
    # What is answered names the span of the answer, once.
    span = f"{create.context.span_id:016x}"
    assert made.headers["traceparent"] == f"00-{trace_id}-{span}-01"


def test_own_trace_goes_before_that_of_the_surroundings() -> None:
    """An attempt is a trace, whatever the program around it measures."""
    assert tracing.traceparent() is None
    with TracerProvider().get_tracer("tests").start_as_current_span("program") as span:
        around = f"{span.get_span_context().trace_id:032x}"
        assert tracing.current() == around
        own = tracing.new_trace_id()
        with tracing.traced(own):
            assert tracing.current() == own
            header = tracing.traceparent()
            assert header is not None
            assert tracing.read(header) == own

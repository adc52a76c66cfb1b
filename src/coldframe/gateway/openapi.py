"""Write docs/openapi.json and docs/api.md from the routes.

`python -m coldframe.gateway.openapi DIRECTORY` writes both; a test compares them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from coldframe.gateway.app import make_app
from coldframe.gateway.context import Service
from coldframe.node.node import Node
from coldframe.node.settings import NodeSettings
from coldframe.protocol.wire import CODES

_FAULT = 500
_INTRODUCTION = """# HTTP interface

Written by `python -m coldframe.gateway.openapi docs`; the whole, with schemas, is in
[openapi.json](openapi.json).

`Authorization: Bearer KEY` on TCP; on the unix socket nothing. Bodies are JSON up to 32 MiB, or raw
bytes of any size. Bytes in JSON are base64 in the URL-safe alphabet; a byte of a name or argument
that is no UTF-8 is a lone surrogate (`\\udc80` to `\\udcff`), in a URL it is percent-encoded. What
waits takes `wait_s`, at most 60; whoever wants to wait longer asks again.

What has effects is done once for each operation id, and a replay gives the first answer: commands
and sessions have it in the body (`operation_id`), everything else in `Idempotency-Key`. To cancel a
command and to drain its pipes are the same however often they are asked for, and take none.
"""


def document() -> dict[str, Any]:
    """Return the OpenAPI document. Nothing is started."""
    node = Node(NodeSettings(home=Path("/nonexistent"), runtime="fake"))
    app = make_app(Service(node, cast(Any, None)))
    return app.openapi()


def as_json(described: dict[str, Any]) -> str:
    """Return the document as it is committed."""
    return json.dumps(described, indent=1, sort_keys=True) + "\n"


def as_markdown(described: dict[str, Any]) -> str:
    """Return a page with every route, and every error code with its status."""
    lines = [_INTRODUCTION, "## Routes", "", "| route | what it does |", "|---|---|"]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            text = operation.get("description", operation["summary"]).split("\n\n")[0]
            lines.append(f"| `{method.upper()} {path}` | {_cell(text)} |")
    lines += [
        "| WebSocket `/v1/execs/{operation_id}/attach` | A command's output as binary frames "
        "(a byte 1: stdout, 2: stderr), its stdin the other way; text frames: result, signal, "
        "resize, close_stdin |",
        "| WebSocket `/v1/sandboxes/{sandbox_id}/ports/{port}/websocket` | A connection to a port "
        "in binary frames; an empty one is end of file |",
        "| any method and WebSocket `/p/{token}/...` | What listens on the port that the token of "
        "`POST /v1/sandboxes/{sandbox_id}/ports/{port}/url` is for; needs no key |",
        "",
        "## Errors",
        "",
        "`{code, message, retryable, side, execution}`; 409 has the sandbox as it is at present "
        "in `sandbox`. What comes to no request is answered so, too: 400 no HTTP or two readings, "
        "403 another user of the unix socket, 431 a head that is too large; a fault of the service "
        "is `internal`, whose log has it whole.",
        "",
        "| code | status | may be tried again | means |",
        "|---|---|---|---|",
    ]
    for code, status, again, text in sorted(_errors()):
        lines.append(f"| `{code}` | {status} | {again} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _errors() -> list[tuple[str, int, str, str]]:
    from coldframe.gateway.failures import status_of
    from coldframe.protocol.errors import ColdframeError

    rows = []
    for code, kind in CODES.items():
        text = "A fault of the service." if kind is ColdframeError else kind.__doc__ or ""
        status = status_of(kind(""))
        if status != _FAULT or kind is ColdframeError:  # others are no service's to raise
            rows.append((code, status, "yes" if kind.retryable else "no", text))
    return rows


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()).removesuffix(".")


def main(directory: Path) -> None:
    """Write both files."""
    described = document()
    (directory / "openapi.json").write_text(as_json(described))
    (directory / "api.md").write_text(as_markdown(described))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""/v1/sandboxes/ID/patch: a unified diff, all of it or nothing."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from coldframe.gateway.context import RAW_BODY, body_bytes, enter, json_answer, service_of
from coldframe.gateway.identity import Scope
from coldframe.gateway.models import PatchApplied
from coldframe.gateway.once import Once
from coldframe.protocol.errors import InvalidRequestError, TooLargeError
from coldframe.protocol.patching import apply_patch

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}", tags=["files"], route_class=Once)

_FILES_TO_PATCH = 4
_BASE = re.compile(r"(.+)=([0-9a-fA-F]{64})", re.DOTALL)


@router.post("/patch", response_model=PatchApplied, openapi_extra=RAW_BODY)
async def patch(
    request: Request,
    sandbox_id: str,
    *,
    base_sha256: Annotated[
        list[str] | None,
        Query(description="`PATH=DIGEST`, a path of the patch's and what is there; repeated."),
    ] = None,
    root: Annotated[
        str | None, Query(description="Where its paths are; else the sandbox's workdir.")
    ] = None,
    strip: Annotated[int, Query(ge=0, le=99, description="As `patch -p`.")] = 1,
) -> Response:
    """Apply a unified diff, all of it or nothing; hunks must fit exactly where they say.

    The patch has at most 4 MiB, all files that it changes together 16 MiB. 409 `stale_base` when
    a file is not what `base_sha256` says.
    """
    del base_sha256, root  # which may be bytes that are no UTF-8
    tenant = enter(request, Scope.EXEC)
    query = parse_qsl(
        request.scope["query_string"].decode("latin-1"), True, errors="surrogateescape"
    )
    base = dict(_base(value) for name, value in query if name == "base_sha256")
    where = dict(query).get("root") or (await tenant.get(sandbox_id)).workdir
    files = tenant.node.files(tenant.sandbox(sandbox_id))
    diff = await body_bytes(request)
    service = service_of(request)
    most = service.settings.patch_bytes
    if len(diff) > most:
        raise TooLargeError(f"the patch has more than {most} bytes: send it in parts")
    async with service.patching:
        done = await apply_patch(
            files, diff, base, root=where, strip=strip, total_bytes=_FILES_TO_PATCH * most
        )
    return json_answer(PatchApplied(written=done.written, removed=done.removed, sha256=done.sha256))


def _base(value: str) -> tuple[str, str]:
    match = _BASE.fullmatch(value)
    if match is None:
        raise InvalidRequestError("base_sha256: write PATH=DIGEST, the digest in 64 hex digits")
    return match[1], match[2]

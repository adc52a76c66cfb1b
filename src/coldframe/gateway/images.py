"""/v1/images: what sandboxes are made of."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from coldframe.gateway.context import RAW_BODY, enter, json_answer, json_list
from coldframe.gateway.identity import Scope
from coldframe.gateway.models import Built
from coldframe.gateway.once import OnceShared
from coldframe.protocol.errors import InvalidRequestError
from coldframe.protocol.models import ImageInfo
from coldframe.protocol.network import PRESETS, NetworkPolicy
from coldframe.protocol.wire import load

router = APIRouter(prefix="/v1/images", tags=["images"], route_class=OnceShared)


@router.get("", response_model=list[ImageInfo])
async def list_(request: Request) -> Response:
    """Return the named images of the node's store."""
    return json_list(await enter(request, Scope.READ).node.list_images() or ())


@router.post("", status_code=201, response_model=Built, openapi_extra=RAW_BODY)
async def build(
    request: Request,
    name: Annotated[str, Query(description="repository[:tag]")],
    *,
    dockerfile: Annotated[str, Query(description="Path in the context.")] = "Dockerfile",
    build_arg: Annotated[list[str] | None, Query(description="`NAME=VALUE`; repeatable.")] = None,
    target: Annotated[str | None, Query(description="The stage to build.")] = None,
    network: Annotated[
        str | None, Query(description="What RUN may reach: a NetworkPolicy; default: presets.")
    ] = None,
    deadline_s: Annotated[float, Query(gt=0, description="Of each RUN step.")] = 600.0,
    cached: bool = True,
) -> Response:
    """Build a Dockerfile whose context is the body, a tar. Images are everybody's: needs `admin`.

    Answers when it is built. It goes on when the client goes away; asked for again, what was done
    is there already.
    """
    tenant = enter(request, Scope.ADMIN)
    pairs = [one.partition("=") for one in build_arg or ()]
    if not all(equals for _, equals, _ in pairs):
        raise InvalidRequestError("build_arg: write NAME=VALUE")
    policy = NetworkPolicy(presets=PRESETS)
    if network is not None:
        policy = load(NetworkPolicy, network.encode("utf-8", "surrogateescape"))
    image = await tenant.node.build_image_from(
        name,
        request.stream(),
        dockerfile=dockerfile,
        build_args={key: value for key, _, value in pairs},
        target=target,
        network=policy,
        deadline_s=deadline_s,
        cached=cached,
    )
    return json_answer(Built(name=image.name, digest=image.digest), 201)

"""Which route a request is for, by its template: also for what is refused before it is routed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.routing import BaseRoute
from starlette.types import Scope

from coldframe.gateway.tickets import PREFIX

UNKNOWN = "-"
KNOWN = "coldframe.route"
"""Where a request's scope has the template of a route that was found already."""


class Routes:
    """The routes of an application, to be looked up."""

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes: list[Any] = [route for route in routes if hasattr(route, "path_regex")]

    def find(self, scope: Scope) -> tuple[str, str]:
        """Return a route's template and the sandbox that its path names, or `-` and nothing."""
        if KNOWN in scope:
            return scope[KNOWN], scope["path_params"]["sandbox_id"]
        if scope["path"].startswith(PREFIX):
            return f"{PREFIX}{{token}}", ""
        method = scope.get("method")
        for route in self._routes:
            match = route.path_regex.match(scope["path"])
            methods = getattr(route, "methods", None)
            if match is not None and (method is None) == (methods is None):
                if methods is not None and method not in methods:
                    continue
                return route.path, match.groupdict().get("sandbox_id", "")
        return UNKNOWN, ""

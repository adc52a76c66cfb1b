"""Presets come from the tools' own settings, whatever those are on this machine."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from coldframe.host.egress import presets

ANSWERS = {
    "apt-get": "http://mirror.example/debian\nhttps://mirror.example:8443/other\ncdrom:[x]/\n",
    "npm": json.dumps(
        {"registry": "https://npm.example/", "@own:registry": "http://10.9.8.7:4873"}
    ),
    "config": ":env:.index-url='https://index.example/simple'\n"
    "global.extra-index-url='file:///opt https://more.example/simple'\n"
    "global.index-url='https://overridden.example'\nglobal.timeout='5'\n",
    "--version": "pip",
    "-c": json.dumps(["https://default.example/simple", "https://files.example"]),
}


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that answer as above, and names that resolve nowhere but one."""

    def ask(*command: str) -> str:
        return next((text for word, text in ANSWERS.items() if word in command), "")

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        if host != "npm.example":
            raise socket.gaierror(socket.EAI_NONAME, "no such host")
        return [
            (socket.AF_INET, 1, 6, "", ("10.1.1.1", port)),
            (2, 1, 6, "", ("203.0.113.5", port)),
        ]

    monkeypatch.setattr(presets, "_ask", ask)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(presets, "_kept", {})


def test_presets_are_what_the_tools_say_and_private_mirrors_are_named() -> None:
    """A mirror in a private network would else be refused as private."""
    apt = [str(rule) for rule in presets.preset_rules(["apt"])]
    npm = [str(rule) for rule in presets.preset_rules(["npm"])]

    assert apt == ["mirror.example:80", "mirror.example:8443"]
    assert npm == ["npm.example:443", "10.1.1.1:443", "10.9.8.7:4873"]


def test_pip_preset_has_index_files_and_extra_indexes() -> None:
    """The files' host is in no setting: pip itself knows it."""
    found = {str(rule) for rule in presets.preset_rules(["pip"])}

    assert found == {"index.example:443", "files.example:443", "more.example:443"}


def test_answers_are_kept_so_that_a_create_does_not_wait_for_tools() -> None:
    """npm takes a third of a second to say where its registry is."""
    assert presets.cached_preset_rules(["npm"]) is None
    first = presets.preset_rules(["npm"])
    assert presets.cached_preset_rules(["npm"]) == first
    assert presets.cached_preset_rules([]) == ()

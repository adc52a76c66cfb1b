"""Stands in for `docker compose` where there is none: what Harbor asks of it, for one service."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VALUES = {"-e", "-w", "-u", "--env", "--workdir", "--user"}


def told(files: list[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return volumes and limits of `main` in those files that are JSON, which Harbor writes."""
    volumes: list[dict[str, Any]] = []
    limits: dict[str, Any] = {}
    for path in files:
        if path.endswith(".json"):
            main = json.loads(Path(path).read_text()).get("services", {}).get("main", {})
            volumes += main.get("volumes", [])
            limits |= main.get("deploy", {}).get("resources", {}).get("limits", {})
    return volumes, limits


def command(name: str, verb: str, rest: list[str], files: list[str]) -> list[str]:
    """Return the docker command that does the same."""
    if verb == "up":
        volumes, limits = told(files)
        run = ["run", "-d", "--name", name, "--network", "none"]
        for one in volumes:
            run += ["-v", f"{one['source']}:{one['target']}"]
        if "cpus" in limits:
            run += ["--cpus", str(limits["cpus"])]
        if "memory" in limits:
            run += ["-m", str(limits["memory"])]
        return [*run, os.environ["PREBUILT_IMAGE_NAME"], "sh", "-c", "sleep infinity"]
    if verb == "exec":
        at = 0
        options: list[str] = []
        while rest[at].startswith("-"):
            taken = 2 if rest[at] in VALUES else 1
            options += [] if rest[at] == "-T" else rest[at : at + taken]
            at += taken
        stdin = [] if "-it" in options else ["-i"]
        return ["exec", *stdin, *options, name, *rest[at + 1 :]]
    if verb == "cp":
        return ["cp", *(one.replace("main:", f"{name}:", 1) for one in rest)]
    return ["rm", "-f", name]  # down, stop


def main() -> None:
    """Answer as a plugin of docker's command line."""
    if sys.argv[1] == "docker-cli-plugin-metadata":
        print('{"SchemaVersion": "0.1.0", "Vendor": "benchmarks", "Version": "v2.0.0"}')
        return
    words, project = sys.argv[2:], ""
    files: list[str] = []
    while words[0].startswith("-"):
        option, value, words = words[0], words[1], words[2:]
        if option == "-f":
            files.append(value)
        elif option == "--project-name":
            project = value
    argv = command(f"{project}-main", words[0], words[1:], files)
    os.execvp("docker", ["docker", *argv])


if __name__ == "__main__":
    main()

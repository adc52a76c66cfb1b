#!/bin/sh
set -eu
cat > /srv/make-notes <<'END'
#!/usr/bin/python3
import re
import subprocess
import sys

SUBJECT = re.compile(r"([a-z]+)(?:\(([^)]*)\))?(!)?: (.*)")
SECTIONS = {"feat": "Added", "fix": "Fixed", "perf": "Faster"}
WORDS = [
    (re.compile(r"\butili[sz](e|es|ed)\b", re.IGNORECASE), lambda m: ("U" if m[0][0] == "U" else "u") + "s" + m[1].lower()),
    (re.compile(r"\bcolors\b", re.IGNORECASE), lambda m: ("C" if m[0][0] == "C" else "c") + "olours"),
    (re.compile(r"\bmultiple\b", re.IGNORECASE), lambda m: ("S" if m[0][0] == "M" else "s") + "everal"),
]


def git(repository, *words):
    command = ["git", "-c", "safe.directory=*", "-C", repository, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def text(words):
    for pattern, replacement in WORDS:
        words = pattern.sub(replacement, words)
    return words[:1].upper() + words[1:]


def main(repository):
    versions = []
    for tag in git(repository, "tag", "--merged", "main").split():
        match = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)", tag)
        if match:
            versions.append(tuple(map(int, match.groups())))
    last = max(versions)
    log = git(repository, "log", "--reverse", "--format=%B%x00", "v{}.{}.{}..main".format(*last))
    found = {name: [] for name in ("Breaking", "Added", "Fixed", "Faster")}
    for message in filter(None, (one.strip() for one in log.split("\0"))):
        first, *body = message.split("\n")
        subject = SUBJECT.fullmatch(first)
        if subject is None or subject[1] not in SECTIONS or "Internal: yes" in body:
            continue
        kind, area, mark, words = subject.groups()
        breaking = next((line[17:] for line in body if line.startswith("BREAKING CHANGE: ")), words if mark else None)
        if breaking is not None:
            found["Breaking"].append(((True, ""), text(breaking)))
            continue
        numbers = sorted(int(line[8:]) for line in body if re.fullmatch(r"Fixes: #\d+", line))
        item = (f"{area}: " if area else "") + text(words)
        item += " ({})".format(", ".join(f"#{one}" for one in numbers)) if numbers else ""
        found[SECTIONS[kind]].append(((not area, area or ""), item))
    if not any(found.values()):
        return
    major, minor, patch = last
    version = (major + 1, 0, 0) if found["Breaking"] else (major, minor + 1, 0) if found["Added"] else (major, minor, patch + 1)
    parts = ["# v{}.{}.{}".format(*version)]
    for name, items in found.items():
        if items:
            items.sort(key=lambda one: one[0])
            parts += [f"## {name}", "\n".join(f"- {item}" for _, item in items)]
    print("\n\n".join(parts))


main(sys.argv[1])
END
chmod 755 /srv/make-notes
/srv/make-notes /srv/tool > /srv/tool-notes.md

"""Grade the notes, and the program on repositories of the grader's own."""

import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile

NOTES = "/srv/tool-notes.md"
PROGRAM = "/srv/make-notes"
NOBODY = 65534
GIVEN = """# v2.0.0

## Breaking

- --wait is in seconds now
- Errors are no longer 2

## Added

- api: Use several files at once (#7)

## Fixed

- parser: Count lines from 1 (#9)
- Do not use a lock twice (#10, #12)

## Faster

- parser: Read in blocks
"""
SECTIONS = {"feat": "Added", "fix": "Fixed", "perf": "Faster"}
# what is written → what the notes say
WORDS = {
    "read files": "Read files", "utilize the cache": "Use the cache", "it utilises colors": "It uses colours", "Utilised by none": "Used by none",
    "Multiple colors": "Several colours", "discolors nothing": "Discolors nothing", "5 lines": "5 lines", "ärger": "Ärger",
}  # fmt: skip


def git(place, *words, **env):
    base = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        base |= {f"GIT_{who}_NAME": "G", f"GIT_{who}_EMAIL": "g@example.test"}
    subprocess.run(["git", *words], cwd=place, env=base | env, check=True, capture_output=True, timeout=30)


def made(seed, place):
    """Make a repository; return its notes."""
    rng = random.Random(seed)
    git(place, "init", "-q", "-b", "main")
    before = rng.choice([(0, 9, 0), (1, 2, 3), (2, 10, 0)])
    hour = 0

    def commit(*paragraphs):
        nonlocal hour
        hour += 1
        date = f"2024-01-{1 + hour // 24:02d}T{hour % 24:02d}:00:00Z"
        messages = [word for one in paragraphs for word in ("-m", one)]
        git(place, "commit", "-q", "--allow-empty", *messages, GIT_AUTHOR_DATE=date, GIT_COMMITTER_DATE=date)

    commit("feat: older", "BREAKING CHANGE: long ago")
    git(place, "tag", "v0.8.9" if before[0] else "v0.1.0")
    commit("feat: old")
    git(place, "tag", "v{}.{}.{}".format(*before))
    git(place, "tag", "latest")
    found = {name: [] for name in ("Breaking", "Added", "Fixed", "Faster")}
    kinds = rng.choice([["fix", "perf", "docs"], ["feat", "fix", "perf", "docs", "chore"], ["docs"]])
    for _ in range(rng.randint(0, 12)):
        kind, area = rng.choice(kinds), rng.choice([None, None, "cli", "api", "Parser"])
        written, shown = rng.choice(list(WORDS.items()))
        mark = "!" if len(kinds) == 5 and rng.random() < 0.15 else ""
        body, numbers = [], []
        if len(kinds) == 5 and rng.random() < 0.15:
            body.append("BREAKING CHANGE: multiple things")
        for number in rng.sample(range(1, 200), rng.choice([0, 0, 1, 2, 3])):
            body.append(f"Fixes: #{number}")
            numbers.append(number)
        internal = rng.random() < 0.15
        if internal:
            body.append("Internal: yes")
        rng.shuffle(body)
        where = f"({area})" if area else ""
        commit(f"{kind}{where}{mark}: {written}", *(["\n".join(body)] if body else []))
        if kind not in SECTIONS or internal:
            continue
        if mark or "BREAKING CHANGE: multiple things" in body:
            told = "Several things" if "BREAKING CHANGE: multiple things" in body else shown
            found["Breaking"].append(("", told))
        else:
            told = ", ".join(f"#{one}" for one in sorted(numbers))
            found[SECTIONS[kind]].append((area or "", (f"{area}: " if area else "") + shown + (f" ({told})" if told else "")))
    if not any(found.values()):
        return ""
    if found["Breaking"]:
        version = (before[0] + 1, 0, 0)
    elif found["Added"]:
        version = (before[0], before[1] + 1, 0)
    else:
        version = (before[0], before[1], before[2] + 1)
    text = "# v{}.{}.{}\n".format(*version)
    for name, items in found.items():
        if items:
            ordered = sorted(items, key=lambda one: (one[0] == "", one[0]))
            text += f"\n## {name}\n\n" + "".join(f"- {item}\n" for _, item in ordered)
    return text


def difference(said, right):
    for number, (a, b) in enumerate(zip(said.splitlines(), right.splitlines()), start=1):
        if a != b:
            return f"line {number} is {a[:80]!r} instead of {b[:80]!r}"
    return "another number of lines, or another end"


def check():
    if os.path.islink(NOTES) or not os.path.isfile(NOTES):
        return f"{NOTES}: no such file"
    said = pathlib.Path(NOTES).read_text("utf-8", "replace")
    if said != GIVEN:
        return f"{NOTES}: {difference(said, GIVEN)}"
    for number in range(14):
        place = tempfile.mkdtemp()
        try:
            wanted = made(f"write-by-the-house-skills/{number}", place)
            subprocess.run(["chmod", "-R", "a+rX", place], check=True)
            ended = subprocess.run(
                [PROGRAM, place], user=NOBODY, group=NOBODY, extra_groups=[], cwd="/", timeout=30, capture_output=True,
                env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", "GIT_CONFIG_COUNT": "1",
                     "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            if ended.returncode:
                return f"exit code {ended.returncode}: {ended.stderr[-300:]!r}"
            said = ended.stdout.decode("utf-8", "replace")
            if said != wanted:
                return f"repository {number}: {difference(said, wanted)}"
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return None


def main():
    try:
        problem = check()
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"it could not be run: {error}"
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()

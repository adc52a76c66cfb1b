"""Make the repository whose notes are to be written; the same hashes every time."""

import os
import pathlib
import subprocess
import sys

COMMITS = [
    ("feat: read files", "", "v1.0.0"),
    ("fix(parser): accept empty lines", "Fixes: #4", None),
    ("chore: tidy up", "", None),
    ("feat(cli): print a summary", "", "v1.1.0"),
    ("fix(parser): count lines from 1", "Fixes: #9\nReported-by: Birch", None),
    ("feat!: take seconds, not minutes", "BREAKING CHANGE: --wait is in seconds now", None),
    ("docs: explain --wait", "", None),
    ("feat(cli): colours", "Internal: yes", None),
    ("fix: do not utilize a lock twice", "Fixes: #12\nFixes: #10", None),
    ("feat(api): utilise several files at once", "Fixes: #7", None),
    ("perf(parser): read in blocks", "", None),
    ("fix(cli): exit with 1 on errors", "BREAKING CHANGE: errors are no longer 2", None),
]


def main(place):
    root = pathlib.Path(place)
    root.mkdir(parents=True)
    env = os.environ | {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
                        (("NAME", "Tool"), ("EMAIL", "tool@example.test"))}  # fmt: skip

    def git(*words, hour=0):
        when = {f"GIT_{who}_DATE": f"2024-03-01T{hour:02d}:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        subprocess.run(["git", *words], cwd=root, env=env | when, check=True)

    git("init", "-q", "-b", "main")
    for number, (subject, body, tag) in enumerate(COMMITS, start=1):
        (root / "LOG").write_text(f"{number}\n")
        git("add", ".")
        git("commit", "-q", "-m", subject, *(["-m", body] if body else []), hour=number)
        if tag:
            git("tag", tag, hour=number)


main(sys.argv[1])

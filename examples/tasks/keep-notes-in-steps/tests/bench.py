"""What the graders of all steps share: run the program as nobody, on a directory of its own."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor

PROGRAM = "/srv/notes/notes"
NOBODY = 65534


class Wrong(Exception):
    """What the program does is not what was asked for."""


class Notes:
    """One directory of notes, and a model of what must be in it."""

    def __init__(self, data=None):
        self.place = tempfile.mkdtemp()
        os.chown(self.place, NOBODY, NOBODY)
        self.data = data or os.path.join(self.place, "deep", "er")

    def run(self, *words, user=NOBODY):
        env = {"PATH": "/usr/bin:/bin", "NOTES_DATA": self.data, "HOME": "/nonexistent", "LANG": "C.UTF-8"}
        try:
            ended = subprocess.run(
                [PROGRAM, *words], user=user, group=user, extra_groups=[], cwd="/", env=env, timeout=30,
                stdin=subprocess.DEVNULL, capture_output=True,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Wrong(f"{words[:3]}: {error}") from error
        return ended.returncode, ended.stdout

    def expect(self, words, code, out):
        said = self.run(*words)
        wanted = out if isinstance(out, bytes) else out.encode()
        if said != (code, wanted):
            raise Wrong(f"notes {words[:3]}: {said} instead of {(code, wanted)}")

    def at_once(self, commands):
        with ThreadPoolExecutor(20) as pool:
            return list(pool.map(lambda words: self.run(*words), commands))

    def close(self):
        shutil.rmtree(self.place, ignore_errors=True)


def verdict(*checks, **parts):
    """Run checks until one fails, and write the reward; `parts` are checks with a part of their own."""
    rewards = {}
    for name, group in {"reward": checks, **{part: (check,) for part, check in parts.items()}}.items():
        problem = None
        for check in group:
            notes = Notes()
            try:
                check(notes)
            except (Wrong, OSError) as error:
                problem = f"{check.__name__}: {error}"
            finally:
                notes.close()
            if problem:
                break
        print(f"{name}: {problem or 'all is right'}")
        rewards[name] = 0.0 if problem else 1.0
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps(rewards))


def basics(notes):
    """What every step must still do."""
    notes.expect(["list"], 0, "")
    texts = [b"first", b"", b"  two\nlines\n", b"\xff\xfe", b"-n", "Ærø".encode(), b"last\n\n"]
    for number, text in enumerate(texts, start=1):
        notes.expect([b"add", text], 0, f"{number}\n")
    for number, text in enumerate(texts, start=1):
        notes.expect(["show", str(number)], 0, text)
    notes.expect(["remove", "7"], 0, "")
    notes.expect(["remove", "2"], 0, "")
    notes.expect(["remove", "2"], 1, "")
    notes.expect(["show", "2"], 1, "")
    notes.expect(["list"], 0, "1\n3\n4\n5\n6\n")
    notes.expect(["add", "new"], 0, "8\n")
    notes.expect(["list"], 0, "1\n3\n4\n5\n6\n8\n")
    for word in ("0", "9", "x", "", "../1"):
        notes.expect(["show", word], 1, "")
    for word in ("-1", "1.0", "1 "):
        notes.expect(["remove", word], 1, "")
    for words in ([], ["add"], ["add", "a", "b"], ["show"], ["list", "1"], ["remove"], ["forget", "1"]):
        notes.expect(words, 2, "")


def many_at_once(notes):
    """Twenty at a time."""
    said = notes.at_once([["add", f"note {number}"] if number % 4 else ["list"] for number in range(40)])
    if any(code for code, _ in said):
        raise Wrong(f"of many at once one failed: {[one for one in said if one[0]][0]}")
    given = sorted(int(out) for number, (_, out) in enumerate(said) if number % 4)
    if given != list(range(1, 31)):
        raise Wrong(f"30 notes added at once have the numbers {given}")
    for number in (1, 15, 30):
        if not notes.run("show", str(number))[1].startswith(b"note "):
            raise Wrong(f"note {number} is lost")

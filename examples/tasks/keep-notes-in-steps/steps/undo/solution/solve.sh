#!/bin/sh
cat > /srv/notes/notes <<'END'
#!/usr/bin/python3
import fcntl
import json
import os
import re
import stat
import sys

DATA = os.environb.get(b"NOTES_DATA") or b"/srv/notes/data"


class Refused(Exception):
    """Exit code 1."""


class Misused(Exception):
    """Exit code 2."""


def load(file):
    """Return the state: notes by number (latin-1 texts, so that any bytes fit), the highest number."""
    text = file.read()
    return json.loads(text) if text else {"highest": 0, "notes": {}}


def save(file, state):
    whole = json.dumps(state)
    file.seek(0)
    file.truncate()
    file.write(whole)
    file.flush()


def number(word):
    if not word.isascii() or not word.isdigit() or word != str(int(word)):
        raise Refused
    return word


def keep(state, content):
    state["highest"] += 1
    state["notes"][str(state["highest"])] = content.decode("latin-1")
    return state["highest"]


def done(state, kind, numbers, text=None):
    """Note what can be taken back."""
    state.setdefault("done", []).append([kind, numbers, text])


def add(state, text):
    kept = keep(state, os.fsencode(text))
    done(state, "add", [kept])
    return f"{kept}\n".encode()


def imported(state, place):
    place = os.fsencode(place)
    try:
        names = sorted(name for name in os.listdir(place) if name.endswith(b".txt"))
        contents = []
        for path in (os.path.join(place, name) for name in names):
            if stat.S_ISREG(os.lstat(path).st_mode):
                with open(path, "rb") as file:
                    contents.append(file.read())
    except OSError:
        raise Refused from None
    kept = [keep(state, one) for one in contents]
    done(state, "import", kept)
    return "".join(f"{one}\n" for one in kept).encode()


def find(state, word):
    if not re.fullmatch("[A-Za-z0-9_]+", word):
        raise Misused
    pattern = re.compile(rf"(?<![A-Za-z0-9_]){word}(?![A-Za-z0-9_])", re.IGNORECASE | re.ASCII)
    found = [one for one, text in state["notes"].items() if pattern.search(text)]
    return "".join(f"{one}\n" for one in sorted(map(int, found))).encode()


def show(state, word):
    try:
        return state["notes"][number(word)].encode("latin-1")
    except KeyError:
        raise Refused from None


def remove(state, word):
    text = state["notes"].pop(number(word), None)
    if text is None:
        raise Refused
    done(state, "remove", [int(word)], text)
    return b""


def undo(state):
    if not state.get("done"):
        raise Refused
    kind, numbers, text = state["done"].pop()
    if kind == "remove":
        state["notes"][str(numbers[0])] = text
        return f"remove {numbers[0]}\n".encode()
    for one in numbers:
        del state["notes"][str(one)]
    if kind == "add":
        return f"add {numbers[0]}\n".encode()
    return (f"import {numbers[0]}-{numbers[-1]}\n" if numbers else "import none\n").encode()


def listed(state):
    return "".join(f"{one}\n" for one in sorted(map(int, state["notes"]))).encode()


COMMANDS = {
    "add": (add, 1),
    "show": (show, 1),
    "remove": (remove, 1),
    "list": (listed, 0),
    "import": (imported, 1),
    "find": (find, 1),
    "undo": (undo, 0),
}


def main(words):
    command, count = COMMANDS.get(words[0], (None, -1)) if words else (None, -1)
    if command is None or len(words) != count + 1:
        return 2
    os.makedirs(DATA, exist_ok=True)
    fd = os.open(os.path.join(DATA, b"notes.json"), os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(fd, "r+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = load(file)
        before = json.dumps(state)
        try:
            out = command(state, *words[1:])
        except Refused:
            return 1
        except Misused:
            return 2
        if json.dumps(state) != before:
            save(file, state)
    sys.stdout.buffer.write(out)
    return 0


sys.exit(main(sys.argv[1:]))
END
chmod 755 /srv/notes/notes

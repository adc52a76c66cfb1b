#!/bin/sh
# Gives the number of a removed note to the next one.
cat > /srv/notes/notes <<'END'
#!/usr/bin/python3
import fcntl
import json
import os
import sys

DATA = os.environb.get(b"NOTES_DATA") or b"/srv/notes/data"


class Refused(Exception):
    """Exit code 1."""


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


def add(state, text):
    state["highest"] = max(map(int, state["notes"]), default=0) + 1
    state["notes"][str(state["highest"])] = os.fsencode(text).decode("latin-1")
    return f"{state['highest']}\n".encode()


def show(state, word):
    try:
        return state["notes"][number(word)].encode("latin-1")
    except KeyError:
        raise Refused from None


def remove(state, word):
    if state["notes"].pop(number(word), None) is None:
        raise Refused
    return b""


def listed(state):
    return "".join(f"{one}\n" for one in sorted(map(int, state["notes"]))).encode()


COMMANDS = {"add": (add, 1), "show": (show, 1), "remove": (remove, 1), "list": (listed, 0)}


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
        if json.dumps(state) != before:
            save(file, state)
    sys.stdout.buffer.write(out)
    return 0


sys.exit(main(sys.argv[1:]))
END
chmod 755 /srv/notes/notes

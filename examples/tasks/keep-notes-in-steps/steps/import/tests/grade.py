"""Grade the second step: the new commands, what was imported, and whether the old ones are kept."""

import os
import pathlib
import sys

sys.path.insert(0, "/tests")
from bench import NOBODY, PROGRAM, Notes, Wrong, basics, verdict  # noqa: E402

INBOX = "/srv/notes/inbox"
DATA = "/srv/notes/data"


def inbox(notes, **files):
    place = pathlib.Path(notes.place, f"in{len(os.listdir(notes.place))}")
    place.mkdir()
    place.chmod(0o755)
    for name, text in files.items():
        (place / f"{name}.txt").write_bytes(text)
    return str(place)


def imports(notes):
    notes.expect(["add", "before"], 0, "1\n")
    place = inbox(notes, b=b"two", a=b"one\n", B=b"\xff", c=b"")
    os.mkfifo(os.path.join(place, "e.txt"))
    os.symlink("a.txt", os.path.join(place, "f.txt"))
    os.mkdir(os.path.join(place, "g.txt"))
    pathlib.Path(place, "h.md").write_text("no")
    notes.expect(["import", place], 0, "2\n3\n4\n5\n")
    for number, text in ((2, b"\xff"), (3, b"one\n"), (4, b"two"), (5, b"")):
        notes.expect(["show", str(number)], 0, text)
    notes.expect(["import", inbox(notes)], 0, "")
    bad = inbox(notes, a=b"x", b=b"y")
    os.chmod(os.path.join(bad, "b.txt"), 0)
    notes.expect(["import", bad], 1, "")
    notes.expect(["import", os.path.join(place, "a.txt")], 1, "")
    notes.expect(["import", "/nonexistent"], 1, "")
    notes.expect(["list"], 0, "1\n2\n3\n4\n5\n")
    if sorted(os.listdir(place)) != ["B.txt", "a.txt", "b.txt", "c.txt", "e.txt", "f.txt", "g.txt", "h.md"]:
        raise Wrong("an import has changed its directory")


def imports_at_once(notes):
    place = inbox(notes, **{f"n{number:02d}": b"%d" % number for number in range(12)})
    said = notes.at_once([["import", place] if number % 2 else ["add", "x"] for number in range(12)])
    for number, (code, out) in enumerate(said):
        numbers = [int(line) for line in out.split()]
        if code or (number % 2 and numbers != list(range(numbers[0], numbers[0] + 12))):
            raise Wrong(f"an import among others said {code}, {numbers}")
    if sorted(int(n) for _, out in said for n in out.split()) != list(range(1, 79)):
        raise Wrong("imports at once gave numbers twice, or none")


def finds(notes):
    texts = ["The peas are sown", "PEAS!", "chickpeas", "peas_2 peas-3", "pea\npeas", "2peas", "\xe9peas\xe9"]
    for number, text in enumerate(texts, start=1):
        notes.expect(["add", text.encode("latin-1")], 0, f"{number}\n")
    notes.expect(["find", "peas"], 0, "1\n2\n4\n5\n7\n")
    notes.expect(["find", "Pea"], 0, "5\n")
    notes.expect(["remove", "2"], 0, "")
    notes.expect(["find", "PEAS"], 0, "1\n4\n5\n7\n")
    notes.expect(["find", "beans"], 0, "")
    for word in ("", "a b", "pea.", "-x", "\u00e9"):
        notes.expect(["find", word], 2, "")
    notes.expect(["find"], 2, "")


def the_inbox_was_imported_once(notes):
    own = Notes(data=DATA)
    owner = os.stat(PROGRAM).st_uid or NOBODY
    code, out = own.run("list", user=owner)
    last = [int(one) for one in out.split()][-3:]
    texts = [own.run("show", str(one), user=owner)[1] for one in last]
    right = [pathlib.Path(INBOX, f"{name}.txt").read_bytes() for name in "abc"]
    found = own.run("find", "chard", user=owner)[1].split()
    own.close()
    if code or texts != right or len(found) != 1:
        raise Wrong(f"{INBOX} was not imported, or more than once: {texts}, {found}")


verdict(imports, imports_at_once, finds, the_inbox_was_imported_once, kept=basics)

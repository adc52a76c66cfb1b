"""Grade the third step."""

import os
import pathlib
import random
import sys

sys.path.insert(0, "/tests")
from bench import Wrong, basics, verdict  # noqa: E402


def undoes(notes):
    notes.expect(["undo"], 1, "")
    notes.expect(["add", "one"], 0, "1\n")
    notes.expect(["add", "two"], 0, "2\n")
    notes.expect(["remove", "1"], 0, "")
    notes.expect(["remove", "7"], 1, "")
    notes.expect(["show", "2"], 0, "two")
    notes.expect(["undo"], 0, "remove 1\n")
    notes.expect(["show", "1"], 0, "one")
    notes.expect(["undo"], 0, "add 2\n")
    notes.expect(["list"], 0, "1\n")
    notes.expect(["add", "three"], 0, "3\n")
    notes.expect(["undo"], 0, "add 3\n")
    notes.expect(["undo"], 0, "add 1\n")
    notes.expect(["undo"], 1, "")
    notes.expect(["list"], 0, "")
    notes.expect(["add", "four"], 0, "4\n")
    notes.expect(["undo", "1"], 2, "")


def like_a_model(notes):
    rng = random.Random("keep-notes-in-steps/1")
    place = pathlib.Path(notes.place, "in")
    place.mkdir()
    place.chmod(0o755)
    there, history, highest = {}, [], 0
    for turn in range(60):
        what = rng.choice(["add", "add", "remove", "import", "undo", "undo"])
        if what == "add":
            highest += 1
            there[highest] = b"note %d" % highest
            history.append(("add", [highest], None))
            notes.expect(["add", there[highest]], 0, f"{highest}\n")
        elif what == "import":
            for one in place.iterdir():
                one.unlink()
            numbers = list(range(highest + 1, highest + 1 + rng.randint(0, 3)))
            for number in numbers:
                (place / f"{number:05d}.txt").write_bytes(b"file %d" % number)
                there[number] = b"file %d" % number
            highest += len(numbers)
            history.append(("import", numbers, None))
            notes.expect(["import", str(place)], 0, "".join(f"{one}\n" for one in numbers))
        elif what == "remove":
            number = rng.randint(1, highest + 1)
            known = number in there
            if known:
                history.append(("remove", [number], there.pop(number)))
            notes.expect(["remove", str(number)], 0 if known else 1, "")
        elif not history:
            notes.expect(["undo"], 1, "")
        else:
            kind, numbers, text = history.pop()
            if kind == "remove":
                there[numbers[0]] = text
            else:
                for number in numbers:
                    del there[number]
            told = f"{numbers[0]}-{numbers[-1]}" if kind == "import" and numbers else str(numbers[0]) if numbers else "none"
            notes.expect(["undo"], 0, f"{kind} {told}\n")
        if turn % 3 == 0:
            notes.expect(["list"], 0, "".join(f"{one}\n" for one in sorted(there)))
        if there and turn % 6 == 0:
            number = rng.choice(sorted(there))
            notes.expect(["show", str(number)], 0, there[number])


def undoes_at_once(notes):
    for number in range(1, 21):
        notes.expect(["add", str(number)], 0, f"{number}\n")
    said = sorted(notes.at_once([["undo"]] * 20))
    if said != sorted((0, b"add %d\n" % number) for number in range(1, 21)):
        raise Wrong(f"20 undos at once said {said}")
    notes.expect(["list"], 0, "")
    if os.path.exists(os.path.join(notes.place, "in")):
        raise Wrong("something was written beside the notes")


verdict(basics, undoes, like_a_model, undoes_at_once)

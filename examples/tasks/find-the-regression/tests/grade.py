"""Grade the hash, the history and what is committed; the module runs apart from the grader."""

import json
import os
import pathlib
import random
import secrets
import shutil
import subprocess
import tempfile
from fractions import Fraction

REPOSITORY = "/srv/invoices"
CULPRIT = "/srv/culprit"
BROKEN = "5808773d7246f5c64fcc298ed10ef71a06a587e9"
LATEST = "267c872f1fdde0eb138aabb0298ae411cb230262"
NOBODY = 65534

DRIVER = '''
import json, sys
sys.dont_write_bytecode = True
sys.path.insert(0, ".")
import invoices
word, calls = json.loads(sys.stdin.read())
answers = []
for name, arguments in calls:
    if arguments and isinstance(arguments[0], list):
        arguments = [iter([tuple(line) for line in arguments[0]]), *arguments[1:]]
    try:
        answer = getattr(invoices, name)(*arguments)
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    answers.append(answer)
print(json.dumps([word, answers]), flush=True)
'''


def rounded(value):
    sign = -1 if value < 0 else 1
    return sign * int(abs(value) + Fraction(1, 2))


def line_total(quantity, cents, discount=0):
    return quantity * cents - rounded(Fraction(quantity * cents * discount, 100))


def amount(cents):
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100}.{abs(cents) % 100:02d}"


def calls():
    """Return [(call, right answer)]."""
    rng = random.Random("find-the-regression/1")
    pairs = [
        (["tax", [[[1, 33]] * 3, 19]], 18), (["total", [[[1, 33]] * 3, 19]], 117), (["tax", [[], 19]], 0),
        (["tax", [[[1, 50]], -1]], "ValueError: negative tax"), (["total", [[[1, 50]], -0.5]], "ValueError: negative tax"),
    ]  # fmt: skip
    for _ in range(300):
        lines = [[rng.randint(-9, 40), rng.choice([0, 5, 33, 50, rng.randint(1, 9999)])] for _ in range(rng.randint(0, 7))]
        lines = [line + ([rng.randint(0, 100)] if rng.random() < 0.4 else []) for line in lines]
        tenths = rng.choice([0, 70, 190, 200, 55, rng.randint(1, 400)])
        percent = tenths // 10 if tenths % 10 == 0 else tenths / 10
        net = sum(line_total(*line) for line in lines)
        tax = sum(rounded(Fraction(line_total(*line) * tenths, 1000)) for line in lines)
        pairs += [
            (["net", [lines]], net), (["tax", [lines, percent]], tax), (["total", [lines, percent]], net + tax),
            (["summary", [lines, percent]], " ".join(map(amount, (net, tax, net + tax)))),
            (["credit", [lines]], [[-line[0], *line[1:]] for line in lines]), (["amount", [net]], amount(net)),
        ]  # fmt: skip
    return pairs


def git(*words):
    return subprocess.run(
        ["git", "-c", f"safe.directory={REPOSITORY}", "-c", "core.fsmonitor=false", "-C", REPOSITORY, *words],
        capture_output=True, timeout=30, env={"PATH": "/usr/bin:/bin", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent"},
    )  # fmt: skip


def check_history():
    if os.path.islink(CULPRIT) or not os.path.isfile(CULPRIT):
        return f"{CULPRIT}: no such file"
    said = pathlib.Path(CULPRIT).read_bytes()[:200].strip().decode("ascii", "replace")
    if said != BROKEN:
        return f"{CULPRIT} says {said!r}"
    parent = git("rev-parse", "main^@").stdout.decode().split()
    if parent != [LATEST]:
        return f"main is not one commit after {LATEST}: {parent}"
    if git("status", "--porcelain").stdout:
        return "the working tree is not clean"
    if git("diff", "--name-only", LATEST, "main").stdout.decode().split() != ["invoices.py"]:
        return "another file than invoices.py was changed"
    return None


def check_module():
    place, word, pairs = tempfile.mkdtemp(), secrets.token_hex(8), calls()
    try:
        os.chmod(place, 0o755)
        pathlib.Path(place, "invoices.py").write_bytes(git("show", "main:invoices.py").stdout)
        ended = subprocess.run(
            ["python3", "-c", DRIVER], user=NOBODY, group=NOBODY, extra_groups=[], cwd=place, timeout=60, capture_output=True,
            env={"PATH": "/usr/bin:/bin"}, input=json.dumps([word, [call for call, _ in pairs]]).encode(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the module does not come to an end"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    try:
        back, answers = json.loads(ended.stdout.splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return f"the module gave no answers: {ended.stderr[-300:]!r}"
    if back != word or len(answers) != len(pairs):
        return "the module gave other answers than it was asked for"
    for (call, right), answer in zip(pairs, answers, strict=True):
        if answer != right:
            return f"{call}: {answer!r} instead of {right!r}"
    return None


def main():
    problem = check_history() or check_module()
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()

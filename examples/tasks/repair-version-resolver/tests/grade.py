"""Grade the repair: HEAD's content against a reference of its own, on inputs made here."""

import hashlib
import json
import os
import pathlib
import random
import subprocess
import tempfile

REPO = "/srv/pinfold"
VISIBLE = "tests/test_pinfold.py"
VISIBLE_SHA256 = "f02dacac0922bb9396bb1a75f10dd09583da957d8504293479d2ce64a9c65e8f"
HISTORY = [
    "Parse and compare versions",
    "Add requirements with caret and tilde",
    "Resolve a requirement against a list",
]
NOBODY = 65534


# --- the reference ---------------------------------------------------------------------------


def parse(text):
    """Return (numbers, identifiers) or None."""
    body, plus, build = text.partition("+")
    numbers, dash, prerelease = body.partition("-")
    allowed = set("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-")
    digits = set("0123456789")

    def number(one):
        return bool(one) and set(one) <= digits and (one == "0" or one[0] != "0")

    def identifiers(text, zeros):
        parts = text.split(".")
        if not all(part and set(part) <= allowed for part in parts):
            return None
        if not zeros and any(set(part) <= digits and not number(part) for part in parts):
            return None
        return parts

    parts = numbers.split(".")
    if len(parts) != 3 or not all(map(number, parts)):
        return None
    before = identifiers(prerelease, zeros=False) if dash else []
    if before is None or (plus and identifiers(build, zeros=True) is None):
        return None
    return tuple(map(int, parts)), tuple(before)


def order(a, b):
    if a[0] != b[0]:
        return -1 if a[0] < b[0] else 1
    if not a[1] or not b[1]:
        return bool(b[1]) - bool(a[1])
    for left, right in zip(a[1], b[1]):
        if left == right:
            continue
        if left.isdigit() and right.isdigit():
            return -1 if int(left) < int(right) else 1
        if left.isdigit() != right.isdigit():
            return -1 if left.isdigit() else 1
        return -1 if left < right else 1
    return (len(a[1]) > len(b[1])) - (len(a[1]) < len(b[1]))


def comparators(requirement):
    """Return alternatives of (operator, version), or None if malformed."""
    alternatives = []
    for alternative in requirement.split("||"):
        group = []
        for part in alternative.split(","):
            part = part.strip()
            operator = next((o for o in ("<=", ">=", "^", "~", "<", ">", "=") if part.startswith(o)), "")
            version = parse(part[len(operator) :].strip())
            if version is None:
                return None
            group.append((operator or "=", version))
        alternatives.append(group)
    return alternatives


def holds(version, operator, bound):
    (major, minor, patch), _ = bound
    if operator in "^~":
        if operator == "~":
            end = (major, minor + 1, 0)
        elif major:
            end = (major + 1, 0, 0)
        elif minor:
            end = (0, minor + 1, 0)
        else:
            end = (0, 0, patch + 1)
        return order(version, bound) >= 0 and order(version, (end, ())) < 0
    sign = order(version, bound)
    return {"=": sign == 0, "<": sign < 0, "<=": sign <= 0, ">": sign > 0, ">=": sign >= 0}[operator]


def resolve(available, requirement):
    alternatives = comparators(requirement)
    if alternatives is None:
        return ["ValueError", None]
    best = None
    for text in available:
        version = parse(text)
        if version is None:
            continue
        fits = any(
            all(holds(version, *one) for one in group)
            and (not version[1] or any(b[1] and b[0] == version[0] for _, b in group))
            for group in alternatives
        )
        if fits and (best is None or order(version, parse(best)) > 0):
            best = text
    return ["value", best]


# --- inputs ----------------------------------------------------------------------------------


def make_version(rng, *, build=True):
    text = ".".join(str(rng.choice([0, 0, 1, 2, 9, 10])) for _ in range(3))
    if rng.random() < 0.4:
        pool = ["alpha", "beta", "rc", "0", "1", "2", "10", "x-y", "A", "1a", "-"]
        text += "-" + ".".join(rng.choice(pool) for _ in range(rng.randint(1, 3)))
    if build and rng.random() < 0.25:
        text += "+" + ".".join(rng.choice(["b1", "001", "z", "a-b"]) for _ in range(rng.randint(1, 2)))
    return text


def make_requirement(rng):
    def comparator():
        operator = rng.choice(["", "=", "<", "<=", ">", ">=", "^", "^", "~", "~"])
        return operator + rng.choice(["", " "]) + make_version(rng, build=rng.random() < 0.2)

    def alternative():
        return rng.choice([",", ", ", " , "]).join(comparator() for _ in range(rng.randint(1, 2)))

    return rng.choice(["||", " || "]).join(alternative() for _ in range(rng.randint(1, 2)))


BAD_VERSIONS = [
    "latest", "", "1", "1.2", "1.2.3.4", "01.2.3", "1.02.3", "1.2.03", "v1.2.3", "1.2.3-", "1.2.3+",
    "1.2.3-a..b", "1.2.3-01", "1.2.3-a.00", "1.2.3+a..b", "1.2.3 ", " 1.2.3", "1.2.3\n", "1.2.3-a_b",
    "1.2.3+a+b", "-1.2.3", "1.2.3-\u00e4", "\u0661.2.3",
]  # fmt: skip
BAD_REQUIREMENTS = ["", "^", "^1.2", "1.0.0,,2.0.0", "1.0.0 ||", "!1.0.0", "=>1.0.0", ">=1.0.0 <2.0.0"]


def make_calls():
    rng = random.Random("repair-version-resolver/1")
    calls, expected = [], []

    def add(name, arguments, answer):
        calls.append([name, arguments])
        expected.append(answer)

    for text in BAD_VERSIONS:
        add("parse", [text], ["ValueError", None])
    for text in ("0.0.0", "1.2.3-0", "1.2.3--", "1.2.3+001", "1.0.0-0a.1", "10.20.30-a-b.9+z.0"):
        add("parse", [text], ["value", None])
    for _ in range(1500):
        a, b = make_version(rng), make_version(rng)
        if rng.random() < 0.5:
            b = a.split("-")[0].split("+")[0] + rng.choice(["", "-alpha", "-alpha.1", "-rc.10", "+b"])
        add("compare", [a, b], ["value", order(parse(a), parse(b))])
    for _ in range(2500):
        available = [make_version(rng) for _ in range(rng.randint(0, 30))]
        if rng.random() < 0.3:
            available.insert(rng.randint(0, len(available)), rng.choice(BAD_VERSIONS))
        requirement = make_requirement(rng)
        add("resolve", [available, requirement], resolve(available, requirement))
    for requirement in BAD_REQUIREMENTS:
        add("resolve", [["1.0.0"], requirement], ["ValueError", None])
    return calls, expected


# --- the grade -------------------------------------------------------------------------------


def git(*arguments):
    """Run git on the repository; its own configuration may not make it run anything."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*"]
    return subprocess.run([*command, "-C", REPO, *arguments], capture_output=True, timeout=60)


def unprivileged(arguments, cwd, **keywords):
    return subprocess.run(
        arguments, cwd=cwd, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True,
        timeout=60, env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}, **keywords,
    )  # fmt: skip


def committed():
    if git("symbolic-ref", "HEAD").stdout.strip() != b"refs/heads/main":
        return "HEAD is not the branch main"
    subjects = git("log", "--reverse", "--format=%s", "main").stdout.decode().splitlines()
    if subjects[: len(HISTORY)] != HISTORY:
        return "the history that was there is gone"
    if git("diff", "--quiet", "HEAD").returncode != 0:
        return "tracked files have changes that are not committed"
    visible = git("show", f"HEAD:{VISIBLE}").stdout
    if hashlib.sha256(visible).hexdigest() != VISIBLE_SHA256:
        return f"{VISIBLE} was changed"
    return None


def behaves(checkout):
    suite = unprivileged(["python3", "-m", "unittest", "discover", "-s", "tests"], checkout)
    if suite.returncode != 0:
        return "the visible tests fail"
    calls, expected = make_calls()
    driver = pathlib.Path("/tests/driver.py").read_text()
    run = unprivileged(["python3", "-c", driver], checkout, input=json.dumps(calls).encode())
    try:
        answers = json.loads(run.stdout)
    except ValueError:
        return f"the package gave no answers: {run.stderr[-500:]!r}"
    if not isinstance(answers, list) or len(answers) != len(expected):
        return "the package gave another number of answers"
    for call, answer, right in zip(calls, answers, expected):
        if answer != right:
            return f"{call}: {answer} instead of {right}"
    return None


def check():
    problem = committed()
    if problem:
        return problem
    with tempfile.TemporaryDirectory() as checkout:
        archive = git("archive", "HEAD").stdout
        subprocess.run(["tar", "-x", "-C", checkout], input=archive, check=True)
        os.chmod(checkout, 0o755)
        try:
            return behaves(checkout)
        except subprocess.TimeoutExpired:
            return "the package does not come to an end"


problem = check()
print(problem or "all as it should be")
pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))

"""Grade the program: what a TOML parser reads from what it writes."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import tomllib

PROGRAM = "/srv/config/migrate"
OLD = "/srv/config/old"
NEW = "/srv/config/services.toml"
NOBODY = 65534

GIVEN = {
    "shop": {
        "listen": "0.0.0.0:8080", "timeout_seconds": 30, "tags": ["public", "http"], "debug": False,
        "extra": {"data": "/var/lib/shop", "motto": "  open; all night  "},
    },
    "mail": {
        "listen": "[::1]:80", "timeout_seconds": 300, "tags": [], "debug": False, "retries": 3,
        "extra": {"greeting": "${site} is example.test"},
    },
}  # fmt: skip

# files → services, or None: an error
CASES = [
    ({"a.conf": ""}, {}),
    ({"a.conf": "[service a]", "notes.txt": "[service b]"}, {"a": {"listen": "localhost:80"}}),
    ({"a.conf": "[service a]\nport = 0443\nhost = h\n retries=007 \n"}, {"a": {"listen": "h:443", "retries": 7}}),
    ({"a.conf": "[template t]\nx = 1\ny=1\n[template u]\nx=2\n[service a]\nextends =  t   u\nz = 3"},
     {"a": {"listen": "localhost:80", "extra": {"x": "2", "y": "1", "z": "3"}}}),
    ({"a.conf": "[template t]\nx=1\ndebug=on\n[template u]\nextends=t\nx=2\n[template v]\nextends=t\ny=3\n[service a]\nextends=u v"},
     {"a": {"listen": "localhost:80", "debug": True, "extra": {"x": "1", "y": "3"}}}),
    ({"b.conf": "[service a]\nx = late\n[vars]\nv = 1", "a.conf": "[service a]\nx = early\ny = ${v}\n[vars]\nv = 0"},
     {"a": {"listen": "localhost:80", "extra": {"x": "late", "y": "1"}}}),
    ({"a.conf": "[vars]\nv = ${w}$\nw = no\n[service a]\nx = <${v}> $$ $${v} $$${v}\ny = a=b # c ; d"},
     {"a": {"listen": "localhost:80", "extra": {"x": "<${w}$> $ ${v} $${w}$", "y": "a=b # c ; d"}}}),
    ({"a.conf": '[service a]\nx = "a\\"b"\ny = "\nz = ""\nq = "  "\nback = \\n\ttab\nname = Ærø\x7f'},
     {"a": {"listen": "localhost:80", "extra": {"x": 'a\\"b', "y": '"', "z": "", "q": "  ", "back": "\\n\ttab", "name": "Ærø\x7f"}}}),
    ({"a.conf": "[service a]\ndebug = YES\n[service b]\ndebug = 0\n[service c]\ndebug = Off\n[service d]\ndebug = True"},
     {name: {"listen": "localhost:80", "debug": right} for name, right in zip("abcd", (True, False, False, True), strict=True)}),
    ({"a.conf": "[service a]\ntimeout = 90\n[service b]\ntimeout = 2h\n[service c]\ntimeout = 00s"},
     {name: {"listen": "localhost:80", "timeout_seconds": right} for name, right in zip("abc", (90, 7200, 0), strict=True)}),
    ({"a.conf": "[service a]\ntags = b, a,,b , c d,\n"}, {"a": {"listen": "localhost:80", "tags": ["b", "a", "c d"]}}),
    ({"a.conf": "[service a-1]\nhost = fe80::1\nport=1\n[service 1_a]\nlisten = mine\nextra = e"},
     {"a-1": {"listen": "[fe80::1]:1"}, "1_a": {"listen": "localhost:80", "extra": {"listen": "mine", "extra": "e"}}}),
    ({"a.conf": "[template bad]\nport = many\ndebug = ?\nextends = bad\n[template t]\nport=x\n[service a]\nextends = t\nport = 5"},
     {"a": {"listen": "localhost:5"}}),
    ({"a.conf": "[vars]\np = 70\nt = web\n[template web]\nport = ${p}\n[service a]\nextends = ${t}"}, {"a": {"listen": "localhost:70"}}),
    ({"a.conf": "[template t]\nhost = ${gone}\n[service a]\nextends = t\nhost = h"}, {"a": {"listen": "h:80"}}),
    ({"a.conf": "\t; c\r\n  [ service   a ]  \r\n  x  =  1  \r\n"}, {"a": {"listen": "localhost:80", "extra": {"x": "1"}}}),
    *(({"a.conf": text}, None) for text in (
        "x = 1", "[service a]\nnonsense", "[service]", "[service a b]", "[group a]", "[service a", "[service a]\n= 1", "[service a]\nx y = 1",
        "[service a]\nx = ${gone}", "[service a]\nx = 5$", "[service a]\nx = ${", "[service a]\nx = $x", "[service a]\nextends = gone",
        "[template t]\nextends = u\n[template u]\nextends = t\n[service a]\nextends = t", "[template t]\nextends = t\n[service a]\nextends = t",
        "[service b]\n[service a]\nextends = b", "[service a]\nport = 0", "[service a]\nport = 65536", "[service a]\nport = +5", "[service a]\nport =",
        "[service a]\ndebug = maybe", "[service a]\ndebug =", "[service a]\ntimeout = 5 m", "[service a]\ntimeout = -1", "[service a]\ntimeout = 1d",
        "[service a]\nretries = 1.0", "[service a]\nretries = two", "[template never]\nwhat is this",
    )),
]  # fmt: skip


def services(path):
    """Return what the file says, or what is wrong with it."""
    if os.path.islink(path) or not os.path.isfile(path):
        return f"{path}: no such file"
    try:
        said = tomllib.loads(pathlib.Path(path).read_bytes().decode())
    except (ValueError, RecursionError) as error:
        return f"no TOML: {error}"
    extra = set(said) - {"services"}
    return f"it holds {sorted(extra)} too" if extra else said.get("services", {})


def same(said, right):
    """Equal, types included: a 1 is no true."""
    return json.dumps(said, sort_keys=True, default=str) == json.dumps(right, sort_keys=True)


def run(files):
    place = tempfile.mkdtemp()
    try:
        os.chmod(place, 0o755)
        old, work = os.path.join(place, "old"), os.path.join(place, "work")
        os.mkdir(old)
        os.mkdir(work)
        for name, text in files.items():
            pathlib.Path(old, name).write_bytes(text.encode())
        new = os.path.join(work, "new.toml")
        pathlib.Path(new).write_text("before = 1\n")
        for one in (work, new):
            os.chown(one, NOBODY, NOBODY)
        ended = subprocess.run(
            [PROGRAM, old, new], user=NOBODY, group=NOBODY, extra_groups=[], cwd=work, timeout=30, capture_output=True,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if ended.returncode == 0:
            return services(new)
        if ended.returncode != 1 or not ended.stderr.strip() or ended.stderr.strip().count(b"\n"):
            return f"exit code {ended.returncode}: {ended.stderr[-200:]!r}"
        return None if pathlib.Path(new).read_text() == "before = 1\n" else "an error, and a file was written"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def check():
    if not same(said := services(NEW), GIVEN):
        return f"{NEW}: {said} instead of {GIVEN}"
    for files, right in CASES:
        if not same(said := run(files), right):
            return f"{files}: {said} instead of {'an error' if right is None else right}"
    return None


def main():
    try:
        problem = check()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"it could not be run: {error}"
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()

"""Grade publish: what its run left in /srv/outbox, then runs on directories made here."""

import grp
import os
import pathlib
import pwd
import random
import shutil
import stat
import subprocess
import tempfile

PROGRAM = "/home/clerk/publish"
CLERK = pwd.getpwnam("clerk")
PRESS = grp.getgrnam("press").gr_gid


def look(outbox):
    """Return {name: (kind is regular, mode, uid, gid, content)} of a directory."""
    found = {}
    for entry in os.scandir(os.fsencode(outbox)):
        info = entry.stat(follow_symlinks=False)
        regular = stat.S_ISREG(info.st_mode)
        content = pathlib.Path(os.fsdecode(entry.path)).read_bytes() if regular else b""
        found[entry.name] = (regular, stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, content)
    return found


def published(content):
    return (True, 0o640, CLERK.pw_uid, PRESS, content)


def compare(where, found, right):
    for name in sorted(set(found) | set(right)):
        if name not in found:
            return f"{where}: {name!r} is missing"
        if name not in right:
            return f"{where}: {name!r} should not be there"
        if found[name] != right[name]:
            return f"{where}: {name!r} is {found[name]} instead of {right[name]}"
    return None


def check_first_run():
    right = {
        b"april.total": published(b"3 rows, total 130000\n"),
        b"may draft.total": published(b"2 rows, total 3\n"),
        b"june.total": published(b"0 rows, total 0\n"),
        b"SKIPPED": published(b"archive.csv\nlatest.csv\npipe.csv\nsalaries.csv\nshadow.csv\n"),
        b"NOTICE": (True, 0o644, 0, 0, b"keep me\n"),
    }
    found = look("/srv/outbox")
    if b"NOTICE" in found:  # a set-group-ID directory gave it its group when it was made
        right[b"NOTICE"] = (*right[b"NOTICE"][:3], found[b"NOTICE"][3], b"keep me\n")
    return compare("/srv/outbox", found, right)


NAMES = [b"plain", b"two  blanks ", b"-rf", b".hidden", b"a\xffb", b"semi;colon", b"$(id)", b"x.csv", b"*"]


def make_inbox(rng, inbox):
    """Fill a directory; return the outbox that is right for it."""
    right, skipped = {}, []
    base = os.fsencode(inbox)
    for name in rng.sample(NAMES, rng.randint(3, len(NAMES))):
        path = os.path.join(base, name + b".csv")
        draw = rng.random()
        if draw < 0.6:
            amounts = [rng.choice([rng.randint(-999, 999), rng.randint(-(10**18) + 1, 10**18 - 1)]) for _ in range(rng.randint(0, 40))]
            text = b"".join(b"row %d,%d\n" % one for one in enumerate(amounts))
            if text and rng.random() < 0.4:
                text = text[:-1]
            pathlib.Path(os.fsdecode(path)).write_bytes(text)
            os.chmod(path, rng.choice([0o644, 0o444, 0o604]))
            right[name + b".total"] = published(b"%d rows, total %d\n" % (len(amounts), sum(amounts)))
            continue
        skipped.append(name + b".csv")
        if draw < 0.7:
            os.symlink(rng.choice([b"plain.csv", b"/etc/hostname", b"nowhere"]), path)
        elif draw < 0.8:
            os.mkdir(path)
            pathlib.Path(os.fsdecode(path), "inner.csv").write_text("a,1\n")
        elif draw < 0.9:
            os.mkfifo(path, 0o666)
        else:
            pathlib.Path(os.fsdecode(path)).write_text("secret,1\n")
            os.chmod(path, 0o600)
    for name in (b".csv", b"notes.txt", b"table.csv.bak"):
        pathlib.Path(os.fsdecode(os.path.join(base, name))).write_text("a,1\n")
    right[b"SKIPPED"] = published(b"".join(name + b"\n" for name in sorted(skipped)))
    return right


def make_outbox(rng, outbox, right, victim):
    """Put files of earlier runs and of others there."""
    os.chown(outbox, 0, PRESS)
    os.chmod(outbox, 0o2775)
    base = os.fsencode(outbox)
    for name in sorted(right):
        path = os.path.join(base, name)
        draw = rng.random()
        if draw < 0.3:
            pathlib.Path(os.fsdecode(path)).write_text("old\n")
            os.chown(path, 0, 0)
            os.chmod(path, rng.choice([0o600, 0o644]))
        elif draw < 0.45:
            os.symlink(victim, path)
    other = pathlib.Path(outbox, "other.total")
    other.write_text("not yours\n")
    os.chown(other, 0, 0)
    os.chmod(other, 0o664)
    return {**right, b"other.total": (True, 0o664, 0, 0, b"not yours\n")}


def snapshot(inbox):
    lines = []
    for root, directories, files in os.walk(os.fsencode(inbox)):
        for name in sorted(directories + files):
            info = os.lstat(os.path.join(root, name))
            lines.append((root, name, info.st_mode, info.st_uid, info.st_size, info.st_mtime_ns))
    return sorted(lines)


def run(inbox, outbox, umask):
    return subprocess.run(
        [PROGRAM, inbox, outbox], user="clerk", group=CLERK.pw_gid, extra_groups=[PRESS], umask=umask,
        cwd="/", timeout=20, capture_output=True, stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", "HOME": CLERK.pw_dir, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip


def check_run(seed, directory):
    rng = random.Random(f"publish-as-clerk/{seed}")
    os.chmod(directory, 0o755)
    inbox, outbox = os.path.join(directory, "in box"), os.path.join(directory, "out")
    os.mkdir(inbox)
    os.mkdir(outbox)
    victim = os.path.join(directory, "victim")
    pathlib.Path(victim).write_text("untouched\n")
    os.chown(victim, CLERK.pw_uid, CLERK.pw_gid)
    os.chmod(victim, 0o666)
    right = make_outbox(rng, outbox, make_inbox(rng, inbox), victim)
    before = snapshot(inbox)
    umask = rng.choice([0o022, 0o077, 0o000, 0o027, 0o777])
    where = f"run {seed}, umask {umask:03o}"
    try:
        ended = run(inbox, outbox, umask)
    except subprocess.TimeoutExpired:
        return f"{where}: no end within 20 s"
    except OSError as error:
        return f"{where}: {error}"
    if ended.returncode != 0:
        return f"{where}: exit {ended.returncode}: {ended.stderr[-300:]!r}"
    if snapshot(inbox) != before:
        return f"{where}: the inbox was changed"
    if pathlib.Path(victim).read_text() != "untouched\n" or stat.S_IMODE(os.stat(victim).st_mode) != 0o666:
        return f"{where}: a link in the outbox was written through"
    return compare(where, look(outbox), right)


def check():
    problem = check_first_run()
    for seed in range(25):
        if problem:
            return problem
        directory = tempfile.mkdtemp()
        try:
            problem = check_run(seed, directory)
        finally:
            shutil.rmtree(directory)
    return problem


if __name__ == "__main__":
    problem = check()
    print(problem or "all as it should be")
    pathlib.Path("/logs/verifier/reward.txt").write_text("0\n" if problem else "1\n")

#!/bin/sh
set -eu
cat > /home/clerk/publish <<'PY'
#!/usr/bin/python3
"""Publish the totals of the readable reports of a directory."""

import os
import stat
import sys
import tempfile


def read_report(directory, name):
    """Return the report's bytes, or None if it is none. Never waits on a FIFO."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    with open(fd, "rb") as file:
        return file.read()


def write(outbox, name, content):
    fd, temporary = tempfile.mkstemp(dir=outbox)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o640)
        os.rename(temporary, os.path.join(outbox, name))
    except BaseException:
        os.unlink(temporary)
        raise


def main(inbox, outbox):
    inbox, outbox = os.fsencode(inbox), os.fsencode(outbox)
    directory = os.open(inbox, os.O_RDONLY | os.O_DIRECTORY)
    skipped = []
    for name in os.listdir(inbox):
        if not name.endswith(b".csv") or name == b".csv":
            continue
        report = read_report(directory, name)
        if report is None:
            skipped.append(name)
            continue
        rows = report.splitlines()
        total = sum(int(row.split(b",")[1]) for row in rows)
        write(outbox, name[:-4] + b".total", b"%d rows, total %d\n" % (len(rows), total))
    write(outbox, b"SKIPPED", b"".join(name + b"\n" for name in sorted(skipped)))


main(*sys.argv[1:])
PY
chmod 755 /home/clerk/publish
/home/clerk/publish /srv/inbox /srv/outbox

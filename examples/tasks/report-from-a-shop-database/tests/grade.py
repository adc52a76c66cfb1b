"""Grade the script on made databases, against the same sums in Python."""

import json
import os
import pathlib
import random
import shutil
import sqlite3
import subprocess
import tempfile
from collections import Counter

SCRIPT = "/srv/shop/report.sql"
SCHEMA = "/srv/shop/schema.sql"
NOBODY = 65534
TABLES = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER NOT NULL, placed_on TEXT NOT NULL, status TEXT NOT NULL);
CREATE TABLE lines (order_id INTEGER NOT NULL, sku TEXT NOT NULL, quantity INTEGER NOT NULL, cents INTEGER NOT NULL);
CREATE TABLE refunds (order_id INTEGER NOT NULL, cents INTEGER NOT NULL);
"""
GIVEN = "2023-11|2|6250|2|seeds\n2023-12|0|0|0|\n2024-01|0|0|0|\n2024-02|2|12750|0|frame\n"


def made(seed):
    """Return the rows of a database: customers, orders, lines, refunds."""
    rng = random.Random(seed)
    count = rng.choice([0, 1, 3, 20, 60])
    customers = [(number, f"c{number}") for number in range(1, 12)]
    orders, lines, refunds = [], [], []
    for number in rng.sample(range(1, 1000), count):
        date = f"{rng.choice([2022, 2023])}-{rng.choice([1, 2, 3, 6, 11, 12]):02d}-{rng.randint(1, 28):02d}"
        orders.append((number, rng.randint(1, 9), date, rng.choice(["paid", "shipped", "paid", "open", "cancelled"])))
        for _ in range(rng.choice([0, 1, 1, 2, 4])):
            lines.append((number, rng.choice(["a", "B", "b", "ab", "é", "Z"]), rng.randint(1, 4), rng.randint(1, 999)))
        for _ in range(rng.choice([0, 0, 1, 2])):
            refunds.append((number, rng.choice([100, 250, 3000])))
    return customers, orders, lines, refunds


def right(orders, lines, refunds):
    if not orders:
        return ""
    first, last = (f(order[2][:7] for order in orders) for f in (min, max))
    counted = {number: (customer, date[:7]) for number, customer, date, status in orders if status in ("paid", "shipped")}
    new = {}
    for customer, month in counted.values():
        new[customer] = min(month, new.get(customer, month))
    out, month = [], first
    while month <= last:
        ours = {number for number, (_, when) in counted.items() if when == month}
        revenue = sum(q * c for number, _, q, c in lines if number in ours) - sum(c for number, c in refunds if number in ours)
        sold = Counter()
        for number, sku, quantity, _ in lines:
            if number in ours:
                sold[sku] += quantity
        best = min(sold, key=lambda sku: (-sold[sku], sku.encode()), default="")
        out.append(f"{month}|{len(ours)}|{revenue}|{sum(when == month for when in new.values())}|{best}\n")
        year, number = int(month[:4]), int(month[5:])
        month = f"{year + number // 12}-{number % 12 + 1:02d}"
    return "".join(out)


def run(database, script):
    with open(script, "rb") as file:
        ended = subprocess.run(
            ["/usr/bin/sqlite3", "-readonly", "-batch", database], stdin=file, user=NOBODY, group=NOBODY, extra_groups=[],
            cwd=os.path.dirname(database), timeout=30, capture_output=True, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        )  # fmt: skip
    if ended.returncode or ended.stderr:
        return f"exit code {ended.returncode}: {ended.stderr[-200:]!r}"
    return ended.stdout.decode("utf-8", "replace")


def check():
    if os.path.islink(SCRIPT) or not os.path.isfile(SCRIPT):
        return f"{SCRIPT}: no such file"
    lines = pathlib.Path(SCRIPT).read_text("utf-8", "replace").splitlines()
    if any(line.lstrip().startswith(".") for line in lines):
        return "the script gives orders to the shell"
    place = tempfile.mkdtemp()
    try:
        os.chmod(place, 0o755)
        script = os.path.join(place, "report.sql")
        shutil.copyfile(SCRIPT, script)
        for number in range(40):
            database = os.path.join(place, f"{number}.db")
            connection = sqlite3.connect(database)
            if number:
                connection.executescript(TABLES)
                rows = made(f"report-from-a-shop-database/{number}")
                for table, values in zip(("customers", "orders", "lines", "refunds"), rows, strict=True):
                    if values:
                        marks = ",".join("?" * len(values[0]))
                        connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
                wanted = right(*rows[1:])
            else:
                connection.executescript(pathlib.Path(SCHEMA).read_text() + pathlib.Path(SCHEMA).with_name("example.sql").read_text())
                wanted = GIVEN
            connection.commit()
            connection.close()
            said = run(database, script)
            if said != wanted:
                pairs = zip(said.splitlines(), wanted.splitlines())
                pair = next(((a, b) for a, b in pairs if a != b), (said[:100], "other lines"))
                return f"database {number}: {pair[0]!r} instead of {pair[1]!r}"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return None


def main():
    try:
        problem = check()
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"it could not be run: {error}"
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()

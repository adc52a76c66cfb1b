"""Make the repository: one small change per commit, the same bytes and hashes every time."""

import os
import pathlib
import subprocess
import sys

FIRST = '''"""Invoices in whole cents."""


def line_total(quantity, cents):
    """Price of one line."""
    return quantity * cents


def rounded(numerator, denominator):
    """Divide, halves away from zero."""
    sign = -1 if (numerator < 0) != (denominator < 0) else 1
    return sign * ((2 * abs(numerator) + abs(denominator)) // (2 * abs(denominator)))


def tax(lines, percent):
    """Tax of an invoice; lines are (quantity, cents)."""
    return sum(rounded(line_total(*line) * percent, 100) for line in lines)


def total(lines, percent):
    """What is to be paid."""
    return sum(line_total(*line) for line in lines) + tax(lines, percent)
'''

# subject, file, text to replace (None: add at the end), its replacement
CHANGES = [
    ("Say what this is", "README.md", None, "# invoices\n\nInvoices in whole cents, tax in whole percent.\n"),
    ("Format amounts", "invoices.py", None, '\n\ndef amount(cents):\n    """As text."""\n    return f"{cents // 100}.{cents % 100:02d}"\n'),
    ("Format negative amounts", "invoices.py", '    return f"{cents // 100}.{cents % 100:02d}"\n',
     '    sign = "-" if cents < 0 else ""\n    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"\n'),
    ("Note how tax is rounded", "README.md", None, "\nThe tax of each line is rounded to whole cents, halves away from zero; that of an invoice is their sum.\n"),
    ("Refuse negative tax", "invoices.py", '    """Tax of an invoice; lines are (quantity, cents)."""\n',
     '    """Tax of an invoice; lines are (quantity, cents)."""\n    if percent < 0:\n        raise ValueError("negative tax")\n'),
    ("Add discounts", "invoices.py", "def line_total(quantity, cents):\n    \"\"\"Price of one line.\"\"\"\n    return quantity * cents\n",
     "def line_total(quantity, cents, discount=0):\n    \"\"\"Price of one line, less a discount in percent.\"\"\"\n    return quantity * cents - rounded(quantity * cents * discount, 100)\n"),
    ("Accept lines from any iterable", "invoices.py", '    """What is to be paid."""\n', '    """What is to be paid."""\n    lines = list(lines)\n'),
    ("Share the sum of an invoice", "invoices.py", '''def tax(lines, percent):
    """Tax of an invoice; lines are (quantity, cents)."""
    if percent < 0:
        raise ValueError("negative tax")
    return sum(rounded(line_total(*line) * percent, 100) for line in lines)


def total(lines, percent):
    """What is to be paid."""
    lines = list(lines)
    return sum(line_total(*line) for line in lines) + tax(lines, percent)
''', '''def net(lines):
    """What an invoice comes to before tax; lines are (quantity, cents[, discount])."""
    return sum(line_total(*line) for line in lines)


def tax(lines, percent):
    """Tax of an invoice."""
    if percent < 0:
        raise ValueError("negative tax")
    return rounded(net(lines) * percent, 100)


def total(lines, percent):
    """What is to be paid."""
    lines = list(lines)
    return net(lines) + tax(lines, percent)
'''),
    ("Name the lines' fields in the README", "README.md", None, "\nA line is (quantity, cents) or (quantity, cents, discount in percent).\n"),
    ("Allow tax in tenths of a percent", "invoices.py", "def tax(lines, percent):\n    \"\"\"Tax of an invoice.\"\"\"\n    if percent < 0:\n        raise ValueError(\"negative tax\")\n    return rounded(net(lines) * percent, 100)\n",
     "def tax(lines, percent):\n    \"\"\"Tax of an invoice; percent has at most one decimal.\"\"\"\n    if percent < 0:\n        raise ValueError(\"negative tax\")\n    return rounded(net(lines) * round(percent * 10), 1000)\n"),
    ("Say tenths in the README", "README.md", "tax in whole percent", "tax in tenths of a percent"),
    ("Add a credit note", "invoices.py", None, '\n\ndef credit(lines):\n    """The lines that take an invoice back."""\n    return [(-quantity, *rest) for quantity, *rest in lines]\n'),
    ("Tax nothing that is free of tax", "invoices.py", "    return rounded(net(lines) * round(percent * 10), 1000)\n",
     "    return rounded(net(line for line in lines if line[1]) * round(percent * 10), 1000) if percent else 0\n"),
    ("Show whole invoices", "invoices.py", None, '\n\ndef summary(lines, percent):\n    """Net, tax and total as text."""\n    lines = list(lines)\n    return " ".join(map(amount, (net(lines), tax(lines, percent), total(lines, percent))))\n'),
    ("Thank the readers", "README.md", None, "\nReports of mistakes are welcome.\n"),
]  # fmt: skip


def main(place):
    root = pathlib.Path(place)
    root.mkdir(parents=True)
    env = os.environ | {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
                        (("NAME", "Invoices"), ("EMAIL", "invoices@example.test"))}  # fmt: skip

    def git(*words, hour=0):
        when = {f"GIT_{who}_DATE": f"2024-02-{1 + hour // 24:02d}T{hour % 24:02d}:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        subprocess.run(["git", "-c", "core.abbrev=12", *words], cwd=root, env=env | when, check=True)

    git("init", "-q", "-b", "main")
    (root / "invoices.py").write_text(FIRST)
    git("add", ".")
    git("commit", "-q", "-m", "Count in cents")
    for number, (subject, name, old, new) in enumerate(CHANGES, start=1):
        path = root / name
        text = path.read_text() if path.exists() else ""
        assert old is None or text.count(old) == 1, subject
        path.write_text(text + new if old is None else text.replace(old, new))
        git("add", ".")
        git("commit", "-q", "-m", subject, hour=7 * number)


main(sys.argv[1])

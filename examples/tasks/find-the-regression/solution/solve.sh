#!/bin/sh
set -eu
cd /srv/invoices
git log --format=%H --grep='^Share the sum of an invoice$' > /srv/culprit
python3 - <<'END'
import pathlib

path = pathlib.Path("invoices.py")
old = "    return rounded(net(line for line in lines if line[1]) * round(percent * 10), 1000) if percent else 0\n"
new = """    tenths = round(percent * 10)
    return sum(rounded(line_total(*line) * tenths, 1000) for line in lines)
"""
text = path.read_text()
assert old in text
path.write_text(text.replace(old, new))
END
git -c user.name=Repair -c user.email=repair@example.test commit -qam "Round the tax of each line again"

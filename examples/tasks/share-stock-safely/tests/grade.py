"""Run the module under forced meetings of threads, apart from the grader."""

import json
import os
import pathlib
import secrets
import shutil
import subprocess
import tempfile

MODULE = "/srv/depot/stock.py"
NOBODY = 65534


def check():
    if os.path.islink(MODULE) or not os.path.isfile(MODULE):
        return f"{MODULE} is no file"
    place, word = tempfile.mkdtemp(), secrets.token_hex(8)
    try:
        os.chmod(place, 0o755)
        shutil.copyfile(MODULE, os.path.join(place, "stock.py"))
        ended = subprocess.run(
            ["python3", "-c", pathlib.Path("/tests/driver.py").read_text(), place, word],
            user=NOBODY, group=NOBODY, extra_groups=[], cwd=place, timeout=90, capture_output=True,
            env={"PATH": "/usr/bin:/bin"}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "it does not come to an end"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
        said = answer["said"] if answer["word"] == word else None
    except (ValueError, KeyError, IndexError, TypeError):
        said = None
    if said is None:
        return f"the module gave no answer: {ended.stderr[-300:]!r}"
    return None if said == "right" else said


def main():
    problem = check()
    print(problem or "all is right")
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": 0.0 if problem else 1.0}))


main()

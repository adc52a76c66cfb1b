"""Write a new task that `task check` passes as it is, with comments that say what to change."""

from __future__ import annotations

import json
from pathlib import Path

from coldframe.protocol.errors import TaskError

TASK_TOML = """\
schema_version = "1.4"
{strategy}
[task]
name = {name}
description = "Write a small program."
keywords = ["shell"]

[metadata]
category = "software-engineering"
difficulty = "easy"

[metadata.coldframe]
# Kill everything of the agent's before the tests arrive. Leave it out if a service is graded.
full_kill = true

[agent]
timeout_sec = 600.0
# user = "somebody"         # a user of the image; default: the image's own

[verifier]
timeout_sec = 60.0

[environment]
# What the agent may reach: "no-network", "public", or "allowlist" with allowed_hosts = [...].
# A task that says nothing is public.
network_mode = "no-network"
cpus = 1
memory_mb = 512
{image}"""
STRATEGY = """\
# "mean" of the steps' rewards, or that of the "final" step.
multi_step_reward_strategy = "mean"
"""
STEPS = """
[[steps]]
name = "total"
# Less than this, and the later steps are not run.
min_reward = 1.0

[[steps]]
name = "mean"
[steps.agent]
timeout_sec = 300.0
"""
WITH_IMAGE = "# An image of the store (`coldframe image ls`).\ndocker_image = {image}\n"
WITH_DOCKERFILE = "# Made from environment/Dockerfile.\nbuild_timeout_sec = 300.0\n"
DOCKERFILE = """\
# What the agent finds. No tests and no solution: they come later, from their own directories.
FROM debian:bookworm
WORKDIR /srv
"""
INSTRUCTION = """\
Write a program `/usr/local/bin/total` that reads whole numbers from its standard input, one per
line, and prints their sum. Blank lines count for nothing. No numbers have the sum 0.
"""
SECOND_INSTRUCTION = """\
Give `/usr/local/bin/total` an option: `total --mean` prints the mean of the numbers instead,
rounded to two decimals (`2.50`), and nothing at all if there are none. Without the option it does
what it did.
"""
TEST = """\
#!/bin/sh
# Runs as root in the working directory after the agent is gone; what lies beside it is in /tests.
# Its verdict is /logs/verifier/reward.txt, one number, or reward.json, a map of numbers; without
# one there is no verdict. Test what the instruction demands and nothing else, with cases that it
# does not show.
passed=1

expect() {{
    got=$(printf "$1" | timeout 5 /usr/local/bin/total{option})
    if [ "$got" != "$2" ]; then
        echo "input '$1': got '$got' instead of '$2'"
        passed=0
    fi
}}

{cases}
echo "$passed" > /logs/verifier/reward.txt
"""
CASES = r"""expect '1\n2\n3\n' 6
expect '' 0
expect '5\n\n-7\n' -2
expect '40\n' 40
"""
SECOND_CASES = r"""expect '1\n2\n' 1.50
expect '' ''
expect '1\n\n1\n2\n' 1.33
"""
SOLUTION = """\
#!/bin/sh
# The reference: it must pass. Run as the agent's user.
mkdir -p /usr/local/bin
cat > /usr/local/bin/total <<'END'
#!/bin/sh
exec awk '{ sum += $1 } END { print sum + 0 }'
END
chmod 755 /usr/local/bin/total
"""
SECOND_SOLUTION = """\
#!/bin/sh
# Each step has a reference of its own. It begins where the one before has ended.
cat > /usr/local/bin/total <<'END'
#!/bin/sh
[ "$1" = --mean ] || exec awk '{ sum += $1 } END { print sum + 0 }'
exec awk 'NF { sum += $1; n++ } END { if (n) printf "%.2f\\n", sum / n }'
END
"""
WRONG_CONSTANT = """\
#!/bin/sh
# Prints what the first example wants. Wrong solutions must fail: they show what the tests see.
mkdir -p /usr/local/bin
printf '#!/bin/sh\\necho 6\\n' > /usr/local/bin/total
chmod 755 /usr/local/bin/total
"""
WRONG_BLANK = """\
#!/bin/sh
# Stops at the first blank line.
mkdir -p /usr/local/bin
cat > /usr/local/bin/total <<'END'
#!/bin/sh
exec awk 'NF == 0 { exit } { sum += $1 } END { print sum + 0 }'
END
chmod 755 /usr/local/bin/total
"""
WRONG_MEAN = """\
#!/bin/sh
# Counts blank lines. Only this step is done wrongly; the reference does the others.
cat > /usr/local/bin/total <<'END'
#!/bin/sh
[ "$1" = --mean ] || exec awk '{ sum += $1 } END { print sum + 0 }'
exec awk '{ sum += $1 } END { if (NR) printf "%.2f\\n", sum / NR }'
END
"""


def write_new_task(
    directory: Path, *, name: str | None = None, image: str | None = None, multi_step: bool = False
) -> None:
    """Write a task into a directory that is new or empty.

    Args:
        name: ORG/NAME; None: after the directory.
        image: start from this image of the store; None: from a Dockerfile.
    Raises:
        TaskError: something lies there already, or it cannot be written.
    """
    directory = directory.absolute()
    try:
        if directory.exists() and any(directory.iterdir()):
            raise TaskError(f"{directory}: is not empty; name a directory that is not there yet")
        for path, text in _files(name or f"my/{directory.name}", image, multi_step).items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            if file.suffix == ".sh":
                file.chmod(0o755)
    except OSError as error:
        raise TaskError(f"{error.filename or directory}: {error.strerror}") from error


def _quoted(text: str) -> str:
    """Return a text as a TOML string.

    Raises:
        TaskError: TOML has no way to write it.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TaskError(f"{text!r}: not UTF-8, so no task.toml can hold it") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _files(name: str, image: str | None, multi_step: bool) -> dict[str, str]:
    toml = TASK_TOML.format(
        name=_quoted(name),
        strategy=STRATEGY if multi_step else "",
        image=WITH_IMAGE.format(image=_quoted(image)) if image else WITH_DOCKERFILE,
    )
    files = {"task.toml": toml + (STEPS if multi_step else "")}
    if image is None:
        files["environment/Dockerfile"] = DOCKERFILE
    first = TEST.format(option="", cases=CASES)
    if not multi_step:
        return files | {
            "instruction.md": INSTRUCTION,
            "tests/test.sh": first,
            "solution/solve.sh": SOLUTION,
            "wrong/only-the-example/solve.sh": WRONG_CONSTANT,
            "wrong/stops-at-blank-lines/solve.sh": WRONG_BLANK,
        }
    return files | {
        "steps/total/instruction.md": INSTRUCTION,
        "steps/total/tests/test.sh": first,
        "steps/total/solution/solve.sh": SOLUTION,
        "steps/mean/instruction.md": SECOND_INSTRUCTION,
        "steps/mean/tests/test.sh": TEST.format(option=" --mean", cases=SECOND_CASES),
        "steps/mean/solution/solve.sh": SECOND_SOLUTION,
        "wrong/stops-at-blank-lines/total/solve.sh": WRONG_BLANK,
        "wrong/counts-blank-lines/mean/solve.sh": WRONG_MEAN,
    }

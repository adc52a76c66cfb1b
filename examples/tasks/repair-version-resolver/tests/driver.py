"""Run in a checkout of HEAD without privileges: answer the calls on stdin, one JSON list."""

import json
import sys

sys.path.insert(0, ".")
import pinfold  # noqa: E402

calls = json.load(sys.stdin)
answers = []
for name, arguments in calls:
    try:
        value = getattr(pinfold, name)(*arguments) if name != "parse" else None
        if name == "parse":
            pinfold.Version.parse(*arguments)
        answers.append(["value", value])
    except ValueError:
        answers.append(["ValueError", None])
    except Exception as error:  # reported, not hidden: the grader counts it as a wrong answer
        answers.append(["error", type(error).__name__])
json.dump(answers, sys.stdout)

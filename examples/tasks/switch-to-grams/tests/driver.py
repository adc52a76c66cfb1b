"""Run without privileges beside a copy of the package: answer the calls on stdin."""

import dataclasses
import inspect
import json
import sys

sys.path.insert(0, ".")
from parcel import quote, rates  # noqa: E402


def call(name, arguments, keywords):
    function = {"price": rates.price, "quote": quote.quote}[name]
    try:
        value = function(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]
    except Exception as error:  # reported, not hidden: the grader counts it as a wrong answer
        return ["error", type(error).__name__]
    return ["value", value if name == "price" else value.as_dict()]


calls = json.load(sys.stdin)
one = quote.quote("inland", 1200)
json.dump(
    {
        "price": list(inspect.signature(rates.price).parameters),
        "quote": list(inspect.signature(quote.quote).parameters),
        "fields": [field.name for field in dataclasses.fields(quote.Quote)],
        "attribute": one.weight_g,
        "total": quote.total_weight_g([one, quote.quote("far", 800)]),
        "old": hasattr(quote, "total_weight_kg"),
        "answers": [call(*one) for one in calls],
    },
    sys.stdout,
)

"""What programs and people look up by name is in the documentation: error codes and metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from coldframe.gateway.meters import Meters
from coldframe.node.durations import Durations
from coldframe.node.sandboxes import Load
from coldframe.protocol.errors import ColdframeError
from coldframe.protocol.models import Ledger, SandboxState

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"


def _errors() -> Iterator[type[ColdframeError]]:
    """Every class in the sources that gives itself a code."""
    for file in sorted((ROOT / "src" / "coldframe").rglob("*.py")):
        found = [
            node.name
            for node in ast.walk(ast.parse(file.read_text("utf-8")))
            if isinstance(node, ast.ClassDef) and any(map(_is_code, node.body))
        ]
        if found:
            name = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
            module = import_module(name)
            kinds = (getattr(module, one) for one in found)
            yield from (kind for kind in kinds if issubclass(kind, ColdframeError))


def _is_code(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign):
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return False
    return (
        isinstance(target, ast.Name)
        and target.id == "code"
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _rows(page: str) -> dict[str, list[str]]:
    text = (DOCS / page).read_text("utf-8")
    rows = re.findall(r"^\| `([a-z_]+)` \|(.+)\|$", text, re.MULTILINE)
    return {code: [cell.strip() for cell in rest.split("|")] for code, rest in rows}


def test_every_error_code_is_documented_as_it_is() -> None:
    """A code that nobody can look up is a code that nobody can handle."""
    codes = {kind.code: kind for kind in _errors()}
    answered, others = _rows("api.md"), _rows("errors.md")

    assert len(codes) > 60
    documented = answered.keys() | others.keys()
    assert codes.keys() - documented == set(), "add a row for each to the table of docs/errors.md"
    assert documented - codes.keys() == set(), "no error has these codes any more"
    assert answered.keys() & others.keys() == set()
    for code, (side, again, *_) in others.items():
        kind = codes[code]
        assert (side, again) == (kind.side, "yes" if kind.retryable else "no"), code


def test_every_metric_is_documented_and_every_documented_one_is_there() -> None:
    """An alert on a name that is not there never rings."""
    meters = Meters()
    meters.count(200)
    meters.boot.add(0.1)
    took = Durations()
    took.add(0.1)
    live = {("any", state): 1 for state in SandboxState}
    load = Load(live, {}, 0, {"creates": 0}, None, 0, took)
    ledger = Ledger(created=0, deleted=0, expired=0, failed=0, lost=0, live=0, leaked=0)
    text = meters.render(load, ledger).decode()

    served = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    page = (DOCS / "service.md").read_text("utf-8")
    assert set(re.findall(r"`(coldframe_[a-z_]+)(?:\{[a-z,]+\})?`", page)) == served
    labels = {
        (name, ",".join(re.findall(r"(\w+)=", inner)))
        for name, inner in re.findall(r"^(coldframe_[a-z_]+)\{(.+)\} ", text, re.MULTILINE)
        if not inner.startswith("quantile=")
    }
    assert set(re.findall(r"`(coldframe_[a-z_]+)\{([a-z,]+)\}`", page)) == labels

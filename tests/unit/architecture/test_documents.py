"""What the documents name is there: commands, options, rooms, links; their Python compiles."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from coldframe.cli import main as entry

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src/coldframe"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*DOCUMENTS, *ROOT.glob("*.md"), *ROOT.glob("docs/adr/*"), ROOT / "examples/README.md"]


def blocks(document: Path, language: str) -> Iterator[str]:
    """Yield the fenced blocks of a language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.M)


def commands(document: Path) -> Iterator[list[str]]:
    """Yield the words of each `coldframe` command in a document's shell blocks."""
    for block in blocks(document, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            parts = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
            parts.whitespace_split = True
            words: list[str] = []
            for word in [*parts, ";"]:
                if set(word) <= set("();<>|&"):
                    if words[:1] == ["coldframe"]:
                        yield words[1:]
                    words = []
                elif words or not re.match(r"[A-Z_]+=", word):  # what is set for it alone
                    words.append(word)


def unknown_words(words: list[str]) -> list[str]:
    """Return what of a command line is no command and no option."""
    before = words[: words.index("--")] if "--" in words else words
    found: Any = typer.main.get_command(entry.build(before[0] if before else None))
    options: set[str] = {"--help"}
    rest = list(before)
    while True:
        options |= {text for one in found.params for text in (*one.opts, *one.secondary_opts)}
        if not hasattr(found, "commands") or not rest or rest[0].startswith("-"):
            break
        name = rest.pop(0)
        if name not in found.commands:
            return [name]
        found = found.commands[name]
    asked = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    return [word for word in asked if word not in options]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_commands_and_options_exist(document: Path) -> None:
    """A line that is copied from a document must not be refused."""
    wrong = {" ".join(words): bad for words in commands(document) if (bad := unknown_words(words))}
    assert wrong == {}


def test_unknown_words_are_found() -> None:
    """The check must be able to fail."""
    assert unknown_words(["sandbox", "mk", "x"]) == ["mk"]
    assert unknown_words(["sandbox", "ls", "--labels", "a=b"]) == ["--labels"]
    assert unknown_words(["run", "img", "--", "ls", "--none"]) == []
    assert len(list(commands(ROOT / "README.md"))) > 8


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documented_python_compiles(document: Path) -> None:
    """Nobody reads an example as carefully as a compiler does."""
    for number, block in enumerate(blocks(document, "python")):
        compile(block, f"{document.name}, block {number}", "exec", flags=0x2000)  # top-level await


def broken_links(document: Path, text: str) -> list[str]:
    """Return the links to files and headings of the repository that lead nowhere."""

    def leads(link: str) -> bool:
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        return target.exists() and (not heading or heading in headings(target))

    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.M))
    return [link for link in links if not re.match(r"\w+:", link) and not leads(link)]


def headings(document: Path) -> set[str]:
    """Return the headings of a document as links name them."""
    found = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in found}


def test_links_lead_somewhere() -> None:
    """A page that was renamed takes with it all that names it."""
    broken = {path.name: bad for path in LINKING if (bad := broken_links(path, path.read_text()))}
    assert broken == {}
    text = "[a](sdk.md) [b](none.md) [c](sdk.md#sessions) [d](sdk.md#none) [e](#none)"
    assert broken_links(ROOT / "docs/api.md", text) == ["none.md", "sdk.md#none", "#none"]


def test_decisions_have_numbers_of_their_own() -> None:
    """Code and documents name them by these."""
    for path in sorted((ROOT / "docs/adr").iterdir()):
        assert path.read_text().startswith(f"# {int(path.name[:4])}. "), path.name
    numbers = [path.name[:4] for path in (ROOT / "docs/adr").iterdir()]
    assert len(set(numbers)) == len(numbers)


def test_map_of_the_rooms_is_true() -> None:
    """A newcomer begins with it."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = set(re.findall(r"^\| `(\w+)/` \|", text, re.M))
    there = {path.parent.name for path in PACKAGE.glob("[a-z]*/*.py")}
    assert there - rooms == set()
    assert there >= {"node", "protocol"}
    within = r"^\| `(node|runtimes|protocol/models)/` \| (.*;.*) \|$"
    for room, row in re.findall(within, text, re.M):
        modules = {path.stem for path in (PACKAGE / room).glob("*.py")}
        assert set(re.findall(r"`([a-z_]+)`", row)) - modules == set(), room
    assert len(re.findall(within, text, re.M)) == 3

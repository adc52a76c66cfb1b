"""Variables and quotes in Dockerfile words: the subset of the shell's rules that Docker has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from coldframe.images.affixes import replaced, without_prefix, without_suffix

_SPECIAL = "@*#?-$!"
_DEEPEST = 50
_LONGEST_CUT = 1 << 16
MOST_TEXT = 1 << 17
"""Characters that a word may become: what one argument or variable can hold on Linux."""

_MOST_DOCUMENT = 1 << 20


class WordError(ValueError):
    """A word is not well formed; the message says why."""


def expand(word: str, env: Mapping[str, str], escape: str = "\\", *, quotes: bool = True) -> str:
    """Return `word` with variables replaced and quotes and escapes taken away.

    Args:
        escape: the character that takes the meaning of the next one away.
        quotes: whether quotes mean something; in a here-document they do not.

    Knows `$name`, `${name}`, `${name:-word}`, `${name-word}`, `${name:+word}`,
    `${name+word}`, `${name:?word}`, `${name?word}`, `${name#pattern}`, `##`, `%`, `%%`,
    `${name/pattern/word}`, `//`. Unset variables are empty. Nothing is
    expanded in single quotes.

    Raises:
        WordError: a quote or brace is not closed, a required variable is not set, or an
            operator is not supported.
    """
    return _Reader(word, env, escape, quotes).text(stop="")


def unquoted(word: str) -> str:
    """Return a word without its quotes and escapes, nothing replaced."""
    return re.sub(r"""\\(.)|["']""", lambda match: match[1] or "", word)


def split_words(line: str, escape: str = "\\") -> Iterator[str]:
    """Yield words split at blanks that are neither quoted nor escaped; quotes stay in.

    Raises:
        WordError: a quote is not closed.
    """
    word, quote, i = "", "", 0
    while i < len(line):
        char = line[i]
        if char == escape and quote != "'" and i + 1 < len(line):
            word += line[i : i + 2]
            i += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in " \t":
            if word:
                yield word
            word = ""
            i += 1
            continue
        word += char
        i += 1
    if quote:
        raise WordError(f"a quote ({quote}) is not closed")
    if word:
        yield word


class _Reader:
    def __init__(self, source: str, env: Mapping[str, str], escape: str, quotes: bool) -> None:
        self._source, self._env, self._at = source, env, 0
        self._escape, self._quotes, self._depth = escape, quotes, 0
        self._raw = False
        self._most = MOST_TEXT if quotes else _MOST_DOCUMENT
        self._shown = repr(source[:80])

    def text(self, stop: str) -> str:
        """Read up to `stop` (not consumed) or the end."""
        result = ""
        while self._at < len(self._source):
            char = self._source[self._at]
            if char == stop:
                return result
            if len(result) > self._most:
                raise WordError(f"{self._shown} becomes more than {self._most} characters")
            if char == "'" and self._quotes:
                result += self._single()
            elif char == '"' and self._quotes:
                result += self._double()
            elif char == "$":
                result += self._variable()
            elif char == self._escape:
                result += "\\" * self._raw + self._source[self._at + 1 : self._at + 2]
                self._at += 2
            else:
                result += char
                self._at += 1
        if stop:
            raise WordError(f"{self._shown}: a brace is not closed")
        return result

    def _single(self) -> str:
        end = self._source.find("'", self._at + 1)
        if end < 0:
            raise WordError(f"{self._shown}: a quote (') is not closed")
        result = self._source[self._at + 1 : end]
        self._at = end + 1
        return result

    def _double(self) -> str:
        result = ""
        self._at += 1
        while self._at < len(self._source) and len(result) <= self._most:
            char = self._source[self._at]
            if char == '"':
                self._at += 1
                return result
            if char == "$":
                result += self._variable()
                continue
            following = self._source[self._at + 1 : self._at + 2]
            if char == self._escape and following and following in ('"', "$", self._escape):
                char = following
                self._at += 1
            result += char
            self._at += 1
        if len(result) > self._most:
            raise WordError(f"{self._shown} becomes more than {self._most} characters")
        raise WordError(f'{self._shown}: a quote (") is not closed')

    def _variable(self) -> str:
        self._at += 1
        if self._source[self._at : self._at + 1] == "{":
            self._at += 1
            return self._braced()
        name = self._name()
        return self._env.get(name, "") if name else "$"

    def _name(self) -> str:
        begin = self._at
        first = self._source[begin : begin + 1]
        if first and (first.isdigit() or first in _SPECIAL):
            self._at += 1
            return first
        while self._at < len(self._source) and _is_name(self._source[self._at]):
            self._at += 1
        return self._source[begin : self._at]

    def _braced(self) -> str:
        name = self._name()
        if not name:
            raise WordError(f"{self._shown}: a variable without a name")
        operator = self._source[self._at : self._at + 1]
        if operator == "}":
            self._at += 1
            return self._env.get(name, "")
        colon = operator == ":"
        if colon:
            self._at += 1
            operator = self._source[self._at : self._at + 1]
        if not operator:
            raise WordError(f"{self._shown}: a brace is not closed")
        if operator in "#%/" and not colon:
            return self._cut(operator, self._env.get(name, ""))
        if operator not in "-+?":
            shown = ":" * colon + operator
            raise WordError(f"{self._shown}: ${{{name}{shown}...}} is not supported")
        self._at += 1
        word = self._until("}")
        value = self._env.get(name)
        there = value is not None and not (colon and value == "")
        if operator == "+":
            return word if there else ""
        if value is not None and there:
            return value
        if operator == "?":
            raise WordError(f"{name}: {word or 'is not set'}")
        return word

    def _cut(self, operator: str, value: str) -> str:
        """Read what follows `#`, `%` or `/`, and return the value without or with it."""
        if len(value) > _LONGEST_CUT:
            raise WordError(f"{self._shown}: a value of {len(value)} characters is too long to cut")
        doubled = self._source[self._at + 1 : self._at + 2] == operator
        self._at += 1 + doubled
        if operator == "/":
            pattern = self._until("/", raw=True)
            return replaced(value, pattern, self._until("}"), everywhere=doubled)
        cut = without_prefix if operator == "#" else without_suffix
        return cut(value, self._until("}", raw=True), longest=doubled)

    def _until(self, stop: str, *, raw: bool = False) -> str:
        """Read a word inside braces, and the character that ends it; `raw` keeps escapes."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise WordError(f"braces are nested deeper than {_DEEPEST} levels")
        before, self._raw = self._raw, raw
        word = self.text(stop)
        self._raw = before
        self._depth -= 1
        self._at += 1
        return word


def _is_name(char: str) -> bool:
    return char == "_" or (char.isascii() and char.isalnum())

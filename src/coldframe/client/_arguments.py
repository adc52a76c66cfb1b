"""Arguments are what the signatures say, or one sentence tells which is not.

Both SDKs' public methods check the types of their arguments against their own annotations before
anything else happens. Ranges are checked where they are known: by the models and the node.
"""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from coldframe.protocol.errors import InvalidRequestError

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_Test = Callable[[Any], bool]
_PLAIN: tuple[type, ...] = (type(None), bool, str, bytes, float)
_LIMIT = 1 << 63
"""System calls cannot hold larger numbers."""
_MODULE = re.compile(r"(?:\w+\.)+(?=\w)")


class _Argument:
    """What one parameter takes."""

    def __init__(self, hint: object) -> None:
        self._fits = _test(hint)
        self._plain = _plain_types(hint)
        """Whatever is exactly one of these fits: most values are, and are not looked at further."""
        text = hint.__name__ if isinstance(hint, type) else str(hint)
        self._text = _MODULE.sub("", text)

    def check(self, name: str, value: object) -> None:
        if type(value) not in self._plain and not self._fits(value):
            raise InvalidRequestError(f"{name}: {self._text} is expected, not {_shown(value)}")


def _shown(value: object) -> str:
    kind = f"the {type(value).__name__}"
    if isinstance(value, int) and not -_LIMIT <= value < _LIMIT:
        return f"{kind} of {value.bit_length()} bits"  # it may be too long to be written
    if isinstance(value, str | int | float):
        return f"{kind} {repr(value)[:80]}"
    # Kinds only, not what is in it: an environment holds secrets.
    if isinstance(value, Mapping) and value:
        return f"{kind} of {_kinds(value)} to {_kinds(value.values())}"
    if isinstance(value, list | tuple) and value:
        return f"{kind} of {_kinds(value)}"
    return kind


def _kinds(values: Iterable[object]) -> str:
    return ", ".join(sorted({type(one).__name__ for one in values}))


def typed_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Make a method check its arguments; InvalidRequestError names the first that does not fit.

    What Python refuses itself (a missing argument, one too many, an unknown name) stays a
    TypeError; of an unknown name it says which are known. Keyword options as a whole
    (`**options`) are the method's own business.
    """
    wrapped = cast(Callable[..., Any], function)
    arguments = functools.cache(functools.partial(_arguments_of, wrapped))
    parameters = inspect.signature(wrapped).parameters.values()
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        known = arguments()
        # `self` has no place in `known`.
        for name, value in (*zip(known, args[1:], strict=False), *kwargs.items()):
            if name in known:
                known[name].check(name, value)
            elif not open_ended:
                raise _unknown(name, known)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(wrapped)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            check(args, kwargs)
            return await wrapped(*args, **kwargs)

        return cast(Callable[P, T], call_async)

    @functools.wraps(wrapped)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return wrapped(*args, **kwargs)

    return cast(Callable[P, T], call)


def typed_methods(of: C) -> C:
    """Make every public method of a class check its arguments."""
    for name, member in list(vars(of).items()):
        if not name.startswith("_") and inspect.isfunction(member):
            setattr(of, name, typed_arguments(member))
    return of


def check_options(of: type, options: Mapping[str, Any]) -> None:
    """Check keyword options against a TypedDict.

    Raises:
        InvalidRequestError: names the first that does not fit.
        TypeError: there is no such option.
    """
    known = _options_of(of)
    for name, value in options.items():
        if name not in known:
            raise _unknown(name, known)
        known[name].check(name, value)


def _unknown(name: str, known: Iterable[str]) -> TypeError:
    return TypeError(f"there is no option {name!r}; there are {', '.join(known)}")


@functools.cache
def _options_of(of: type) -> dict[str, _Argument]:
    return {name: _Argument(hint) for name, hint in get_type_hints(of).items()}


def _arguments_of(function: Callable[..., Any]) -> dict[str, _Argument]:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    # Without what is returned: often a name that only type checkers import.
    taken = types.SimpleNamespace(__annotations__={p.name: p.annotation for p in named})
    hints = get_type_hints(taken, function.__globals__)
    return {name: _Argument(hint) for name, hint in hints.items()}


def _test(hint: object) -> _Test:
    """Return what tells whether a value is of a type."""
    origin, of = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        return _any_test([_test(one) for one in of])
    if origin is Literal:
        return lambda value: isinstance(value, str) and value in of
    if origin is tuple:
        return _tuple_test([_test(one) for one in of])
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_test(*map(_test, of))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _sequence_test(_test(of[0]), _plain_types(of[0]))
    # Iterables of any other kind are looked at as they are read.
    return _plain_test(hint if origin is None else origin)


def _plain_test(of: object) -> _Test:
    if of is int:
        return _is_whole
    if of is float:
        return _is_number
    if isinstance(of, type) and not getattr(of, "_is_protocol", False):
        return lambda value: isinstance(value, of)
    return lambda _: True


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_LIMIT <= value < _LIMIT


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


def _plain_types(hint: object) -> frozenset[type]:
    """Types of a hint whose values all fit; not int, whose values have a limit."""
    union = get_origin(hint) in {Union, types.UnionType}
    return frozenset(of for of in (get_args(hint) if union else (hint,)) if of in _PLAIN)


def _any_test(tests: Sequence[_Test]) -> _Test:
    def fits(value: Any) -> bool:
        for test in tests:  # noqa: SIM110 - a generator costs more than the tests
            if test(value):
                return True
        return False

    return fits


def _tuple_test(tests: Sequence[_Test]) -> _Test:
    def fits(value: Any) -> bool:
        return (
            isinstance(value, tuple)
            and len(value) == len(tests)
            and all(test(one) for test, one in zip(tests, value, strict=True))
        )

    return fits


def _mapping_test(key: _Test, item: _Test) -> _Test:
    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(key(k) and item(v) for k, v in value.items())

    return fits


def _sequence_test(item: _Test, plain: frozenset[type]) -> _Test:
    def fits(value: Any) -> bool:
        if type(value) not in {list, tuple}:
            if isinstance(value, str | bytes | bytearray | memoryview):
                return False
            if not isinstance(value, Sequence):
                return False
        return plain.issuperset(map(type, value)) or all(map(item, value))

    return fits

"""Specs: frozen data that checks itself, serialises to canonical JSON and has a digest.

A spec is a frozen dataclass of ints, floats, strings, booleans, tuples and specs. `@spec("kind")`
makes one and enters it in the registry, which is closed: JSON that names another kind, another
field or another format is refused, so a program never guesses what it was asked to do. A field that
was added to a kind `later` is written only if it is not at its default, so digests of old specs
stay.

Canonical JSON is RFC 8785 (keys sorted, no spaces, numbers as ECMAScript prints them), and
integers stay below 2**53, so any language computes the same digest from the same spec.

    >>> from sfumato.sketch import CountSketch
    >>> print(to_json(CountSketch(rows=5, width=64, seed=1)))
    {"bucket_round":0,"kind":"count_sketch","rows":5,"seed":1,"sfumato":1,"sign_round":0,"width":64}
    >>> from_json(to_json(CountSketch(rows=5, width=64, seed=1))).width
    64
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from decimal import Decimal
from typing import Any, TypeVar, dataclass_transform

from sfumato.errors import SpecError

FORMAT = 1  # inside everything that is hashed; a change of meaning is a new number
LARGEST_INTEGER = 2**53 - 1  # what every JSON reader keeps exact

_KINDS: dict[str, type] = {}
_HINTS: dict[type, Mapping[str, Any]] = {}  # resolving a class's annotations is slow
_PLAIN_JSON = json.JSONEncoder(ensure_ascii=False).encode
_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def spec(kind: str) -> Callable[[type[_T]], type[_T]]:
    """Make a class a spec of this kind; its `check` method, if any, runs when one is built."""

    def make(cls: type[_T]) -> type[_T]:
        check = getattr(cls, "check", None)

        def check_itself(self: _T) -> None:
            _check_types(self)
            if check is not None:
                check(self)

        cls.__post_init__ = check_itself  # type: ignore[attr-defined]  # dataclass calls it
        spec_class = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        if kind in _KINDS:
            raise SpecError(f"a kind has one meaning; {kind!r} is taken by {_KINDS[kind].__name__}")
        _KINDS[kind] = spec_class
        return spec_class

    return make


def later(default: Any) -> Any:
    """A field that was added to a kind later: at its default, it is not in the JSON."""
    return field(default=default, metadata={"later": True})


def members(value: object) -> dict[str, Any]:
    """The fields of a spec by name, without those added `later` that are at their default."""
    every = [(each, getattr(value, each.name)) for each in fields(value)]  # type: ignore[arg-type]  # specs are dataclasses
    return {each.name: item for each, item in every if not _is_silent(each, item)}


def kind_of(value: object) -> str:
    """The registered name of a spec's class."""
    for kind, cls in _KINDS.items():
        if type(value) is cls:
            return kind
    raise SpecError(f"{type(value).__name__} is not a registered kind of spec")


def kinds() -> Mapping[str, type]:
    """Every registered kind; conformance tests walk this."""
    return types.MappingProxyType(_KINDS)


class Requirement:
    """`require(condition, message)` raises an error unless the condition holds.

    Its methods state bounds once, and name the values in the message. A value of None is not set,
    and passes; NaN never does. `within` includes both bounds.

        >>> require.at_least(1, rows=5, width=0)
        Traceback (most recent call last):
        ...
        sfumato.errors.SpecError: width must be at least 1; got 0
    """

    def __init__(self, error: type[SpecError]) -> None:
        self._error = error

    def __call__(self, condition: bool, message: str, *, hint: str | None = None) -> None:
        if not condition:
            raise self._error(message, hint=hint)

    def at_least(self, least: float, /, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None and not value >= least:  # "not": NaN is out of bounds, too
                raise self._error(f"{name} must be at least {least}; got {value}")

    def above(self, bound: float, /, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None and not value > bound:
                raise self._error(f"{name} must be above {bound}; got {value}")

    def within(self, least: int, most: int, /, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None and not least <= value <= most:
                raise self._error(f"{name} must be {least} to {_in_powers(most)}; got {value}")


require = Requirement(SpecError)


def _in_powers(number: int) -> str:
    """A large power of two as such, and what is one less: 2**31, 2**53 - 1."""
    if number >= 1 << 31 and number & (number - 1) == 0:
        return f"2**{number.bit_length() - 1}"
    if number > 1 << 31 and number & (number + 1) == 0:
        return f"2**{number.bit_length()} - 1"
    return str(number)


def to_json(value: object) -> str:
    """Canonical JSON of a spec, its format number included."""
    return canonical({**_plain(value), "sfumato": FORMAT})


def from_json(text: str) -> Any:
    """The spec that `text` describes; unknown kinds, fields and formats raise SpecError."""
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:
        raise SpecError(f"a spec must be JSON; {problem}") from problem
    version = data.pop("sfumato", None) if isinstance(data, dict) else None
    if type(version) is not int or version != FORMAT:
        raise SpecError(f'a spec must be a JSON object with "sfumato": {FORMAT}')
    return _build(data)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless a key appears twice: readers would differ in which value they take."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return members


def digest(value: object) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal: the spec's name for machines."""
    return hashlib.sha256(to_json(value).encode()).hexdigest()


def canonical(data: object) -> str:
    """RFC 8785 JSON of plain data (dict, list, str, int, float, bool, None)."""
    if isinstance(data, dict):
        keys = sorted(data, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{canonical(key)}:{canonical(data[key])}" for key in keys) + "}"
    if isinstance(data, list | tuple):
        return "[" + ",".join(canonical(item) for item in data) + "]"
    if isinstance(data, float):
        return _number(data)
    if isinstance(data, int) and not isinstance(data, bool) and abs(data) > LARGEST_INTEGER:
        raise SpecError(f"an integer in a spec must be below 2**53 in size; got {data}")
    if isinstance(data, str) and not data.isascii():
        try:
            data.encode()
        except UnicodeEncodeError as problem:
            raise SpecError("a string in a spec must be Unicode without surrogates") from problem
    return _PLAIN_JSON(data)


def _number(value: float) -> str:
    """A float as ECMAScript prints it: the shortest digits that read back exactly."""
    if not math.isfinite(value):
        raise SpecError(f"a number in a spec must be finite; got {value}")
    if value == 0:
        return "0"
    parts = Decimal(repr(value)).normalize().as_tuple()
    digits = "".join(map(str, parts.digits))
    point = len(digits) + int(parts.exponent)
    sign = "-" if parts.sign else ""
    if 0 < point <= 21:
        body = digits.ljust(point, "0")
        return sign + (body if point >= len(digits) else f"{body[:point]}.{body[point:]}")
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{'+' if point > 0 else '-'}{abs(point - 1)}"


def _hints(cls: type) -> Mapping[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _listed(options: Sequence[str]) -> str:
    """The options as in a sentence: a, b or c."""
    return " or ".join(filter(None, [", ".join(options[:-1]), options[-1]]))


def _check_types(value: Any) -> None:
    hints = _hints(type(value))
    for each in fields(value):
        member = getattr(value, each.name)
        if not _fits(member, hints[each.name]):
            options = _options(hints[each.name])
            raise SpecError(
                f"{each.name} of {type(value).__name__} must be {_listed(options)}; got {member!r}",
                hint=suggestion(member, options) if isinstance(member, str) else None,
            )


_WORDS = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false"}


def _options(hint: Any) -> list[str]:
    """What a value of this type may be, in words."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return [option for part in parts if part is not type(None) for option in _options(part)]
    if origin is typing.Literal:
        return [str(part) for part in parts]
    if origin is tuple:
        return [f"a tuple of {' or '.join(_options(parts[0]))}"]
    return [_WORDS.get(hint, getattr(hint, "__name__", str(hint)))]


def suggestion(word: str, options: Iterable[str]) -> str | None:
    """A question whether the most similar option was meant, if one is similar."""
    names = {option.lower(): option for option in options}
    close = difflib.get_close_matches(word.lower(), names, n=1)
    return f"did you mean {names[close[0]]}?" if close else None


def _fits(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # a Literal makes the latter
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(_fits(item, inner) for item in value)
    if hint is int:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and abs(value) <= LARGEST_INTEGER  # type: ignore[arg-type]  # whole: an int
    if hint is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and _is_finite(value)  # type: ignore[arg-type]  # number: int or float
    if hint in (str, bool, type(None)):
        return isinstance(value, hint)
    # A kind of spec, or a protocol that some kinds implement.
    return type(value) in _KINDS.values() and isinstance(value, hint)


def _is_finite(value: float) -> bool:
    """Whether a number, which may be a very large integer, fits in a float."""
    return abs(value) <= sys.float_info.max


def _plain(value: object) -> Any:
    if type(value) in _KINDS.values():
        return {"kind": kind_of(value)} | {k: _plain(v) for k, v in members(value).items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _is_silent(what: Field[Any], item: object) -> bool:
    return "later" in what.metadata and item == what.default


def _build(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_build(item) for item in data)
    if not isinstance(data, dict):
        return data
    kind = data.pop("kind", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise SpecError(f"kind must be one of {', '.join(sorted(_KINDS))}; got {kind!r}")
    names = {
        each.name for each in fields(cls) if not _is_silent(each, data.get(each.name, each.default))
    }
    if data.keys() != names:
        wrong = sorted(data.keys() ^ names)
        raise SpecError(f"{kind} must have exactly the fields {sorted(names)}; differs in {wrong}")
    hints = _hints(cls)
    values = {name: _build(item) for name, item in data.items()}
    for name, item in values.items():
        wants_float = float in (hints[name], *typing.get_args(hints[name]))
        if wants_float and type(item) is int and _is_finite(item):
            values[name] = float(item)  # canonical JSON prints 1.0 as 1
    return cls(**values)

"""How a collector is set up: a TOML file, and SFUMATO_… in the environment, which goes first.

Every setting has a default that is right for one machine; docs/guides/deploy.md has the list.
Relative paths are relative to the folder that the collector is started in.

    >>> Settings.load(environment={"SFUMATO_LISTEN": "127.0.0.1:0"}).listen
    '127.0.0.1:0'
"""

from __future__ import annotations

import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sfumato.errors import SpecError
from sfumato.privacy import Budget
from sfumato.spec import require

PREFIX = "SFUMATO_"
NEVER = "never"  # what a file says where None differs from the default
LEVELS = ("debug", "info", "warning", "error")
MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every key of a collector's file is a field here, under the same name."""

    store: str = field(default="sqlite:///sfumato.db", repr=False)  # may hold a password
    listen: str = "127.0.0.1:8420"  # port 0: one that is free
    signing_key: str = "sfumato.key"  # a file; made at the first start
    tls_cert: str | None = None
    tls_key: str | None = None
    budget_epsilon: float | None = None  # what all central studies may spend; None: no limit
    budget_delta: float = 1e-6
    retention_days: int | None = 30  # of sealed data after a release; None, in a file "never"
    open_metrics: bool = False  # /metrics without a token
    log_level: str = "info"
    upload_bytes: int = 4 * MEBIBYTE  # of one body
    upload_reports: int = 10_000  # in one body
    upload_seconds: float = 30.0  # that a body may take to arrive
    study_bytes: int = 64 * MEBIBYTE  # of a request to make a study: its items are in it
    queue_bytes: int = 64 * MEBIBYTE  # that wait to be stored; beyond, devices are told to wait
    queue_uploads: int = 10_000
    commit_bytes: int = 8 * MEBIBYTE  # stored in one transaction, about
    reports_per_second: int | None = None  # of one task; beyond, devices are told to wait
    connections: int = 1_000
    idle_seconds: int = 15  # before a connection that asks nothing is closed
    shutdown_seconds: int = 30  # for what is under way when the collector is stopped
    worker_seconds: float = 1.0  # between looks at a store with nothing to do
    seal_seconds: float = 60.0  # that reports wait for others to be mixed with
    cohort_seconds: float = 600.0  # that a masked round waits for its last devices
    phase_seconds: float = 120.0  # that its devices have for each answer
    round_tries: int = 5  # rounds that may be aborted before their study fails

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Settings)
        for name, hint in hints.items():
            value = getattr(self, name)
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            if float in kinds and type(value) is int:
                object.__setattr__(self, name, float(value))  # the way to set a frozen field
                value = float(value)
            require(type(value) in kinds, f"{name} must be {_words(kinds)}; got {value!r}")
            if type(value) in (int, float) and name != "budget_delta":
                require(0 < value < math.inf, f"{name} must be above 0; got {value}")
        require(
            self.log_level in LEVELS,
            f"log_level must be one of {', '.join(LEVELS)}; got {self.log_level}",
        )
        require(
            (self.tls_cert is None) == (self.tls_key is None),
            "tls_cert and tls_key go together; got one of them",
        )
        _ = self.address, self.budget  # they check themselves

    @property
    def address(self) -> tuple[str, int]:
        """Host and port to listen on."""
        host, colon, port = self.listen.rpartition(":")
        require(
            bool(colon and host) and port.isdecimal() and int(port) < 1 << 16,
            f"listen must be HOST:PORT, such as 127.0.0.1:8420 or [::1]:8420; got {self.listen}",
        )
        return host.removeprefix("[").removesuffix("]"), int(port)

    @property
    def budget(self) -> Budget:
        return Budget(epsilon=self.budget_epsilon, delta=self.budget_delta)

    @classmethod
    def load(
        cls, path: Path | str | None = None, *, environment: Mapping[str, str] | None = None
    ) -> Settings:
        """Settings from a file, if one is given, and the environment; unknown keys raise."""
        given = {} if path is None else _read(path)
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise SpecError(
                f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} in {path}",
                hint=f"the keys are {', '.join(known)}",
            )
        hints = typing.get_type_hints(cls)
        for name, value in (os.environ if environment is None else environment).items():
            key = name.removeprefix(PREFIX).lower()
            if name == PREFIX + key.upper() and key in known:
                is_never = key == "retention_days" and value == NEVER
                given[key] = value if is_never else _parsed(name, value, hints[key])
        if given.get("retention_days") == NEVER:
            given["retention_days"] = None
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """The effective settings, as a file has them: without the store's password."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.retention_days is None:
            shown["retention_days"] = NEVER
        return shown | {"store": without_secrets(self.store)}


def without_secrets(store: str) -> str:
    """A store's address as it may be shown: no password, and no options, which may hold one.

    >>> without_secrets("postgresql://collector:hunter2@db.example/sfumato?sslpassword=x")
    'postgresql://collector@db.example/sfumato'
    """
    parts = urlsplit(store)
    if not parts.netloc:
        return store
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, user.partition(":")[0] + at + host, parts.path, "", ""))


def _read(path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise SpecError(f"the settings {path} cannot be read: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise SpecError(f"the settings {path} are not TOML: {problem}") from problem


def _parsed(name: str, text: str, hint: Any) -> Any:
    """What a variable of the environment says; an empty one says nothing, where that can be."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not text and type(None) in kinds:
        return None
    if bool in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                break
    require(str in kinds, f"{name} must be {_words(kinds)}; got {text!r}")
    return text


def _words(kinds: tuple[Any, ...]) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return " or ".join(names[kind] for kind in kinds if kind is not types.NoneType)

"""The settings of a collector: a TOML file, overridden by SFUMATO_… in the environment.

Every setting has a default that suits a single machine; docs/guides/deploy.md lists them. Relative
paths are relative to the folder in which the collector is started.

    >>> Settings.load(environment={"SFUMATO_LISTEN": "127.0.0.1:0"}).listen
    '127.0.0.1:0'
"""

from __future__ import annotations

import ipaddress
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sfumato.errors import SpecError
from sfumato.privacy import Budget
from sfumato.spec import require, suggestion

PREFIX = "SFUMATO_"
OTHERS = {  # variables that are not settings
    f"{PREFIX}{name}"
    for name in ("SERVER", "SERVER_KEY", "TOKEN", "DEVICE_HOME", "DATA", "TEST_SEED")
}
NEVER = "never"  # stands for None in a file
LEVELS = ("debug", "info", "warning", "error")
MEBIBYTE = 1 << 20
_TEXTS = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every key of a collector's file is a field here, under the same name."""

    store: str = field(default="sqlite:///sfumato.db", repr=False)  # may contain a password
    listen: str = "127.0.0.1:8420"  # port 0: any free port
    signing_key: str = "sfumato.key"  # a file, created at the first start
    tls_cert: str | None = None
    tls_key: str | None = None
    hosts: tuple[str, ...] = ()  # names that requests may be for; empty: any
    proxies: tuple[str, ...] = ()  # addresses whose X-Forwarded-Proto is believed
    budget_epsilon: float | None = None  # for the sums of all studies together; None: no limit
    budget_delta: float = 1e-6
    retention_days: int | None = 30  # of sealed data after a release; None, in a file "never"
    lake: str | None = None  # folder or address to which sealed reports of local studies move
    open_metrics: bool = False  # /metrics without a token
    log_level: str = "info"
    upload_bytes: int = 4 * MEBIBYTE  # most bytes in one body
    upload_reports: int = 10_000  # most reports in one body
    upload_seconds: float = 30.0  # how long a body may take to arrive
    study_bytes: int = 16 * MEBIBYTE  # most bytes in a request for a study, which has its items
    queue_bytes: int = 64 * MEBIBYTE  # most that waits to be stored of a study; of all, twice this
    queue_uploads: int = 10_000
    commit_bytes: int = 8 * MEBIBYTE  # about the most bytes stored in one transaction
    reports_per_second: int | None = None  # for one task; None: by its plan (http/task_cache.py)
    connections: int = 1_000
    idle_seconds: int = 15  # before an idle connection is closed
    shutdown_seconds: int = 30  # to finish requests when the collector is stopped
    worker_seconds: float = 1.0  # between checks of a store with nothing to do
    seal_seconds: float = 60.0  # how long reports wait for others to be mixed with
    cohort_seconds: float = 600.0  # how long a masked round waits for its last devices
    phase_seconds: float = 120.0  # how long its devices have for each answer
    round_tries: int = 5  # how many rounds may be aborted before their study fails

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Settings)
        for name, hint in hints.items():
            value = getattr(self, name)
            if hint == _TEXTS:
                is_valid = isinstance(value, tuple) and all(type(x) is str and x for x in value)
                require(is_valid, f"{name} must be a list of texts; got {value!r}")
                continue
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
            "tls_cert and tls_key must both be set, or neither; got one of them",
        )
        for host in self.hosts:
            require(
                "*" not in host.removeprefix("*.") and "/" not in host,
                f"hosts must be names such as example.com or *.example.com; got {host}",
            )
        for proxy in self.proxies:
            _check_network(proxy)
        _ = self.address, self.budget  # these raise for invalid values

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
        """Settings from a file, if any, and the environment. Unknown keys and SFUMATO_… variables
        raise SpecError."""
        values = {} if path is None else _read(path)
        keys = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(keys)):
            raise _unknown(unknown, keys, str(path))
        hints = typing.get_type_hints(cls)
        variables = os.environ if environment is None else environment
        names = {PREFIX + key.upper(): key for key in keys}
        present = {name for name in variables if name.startswith(PREFIX)} - OTHERS
        if unknown := sorted(present - names.keys()):
            raise _unknown(unknown, list(names), "the environment")
        for name in present:
            key, value = names[name], variables[name]
            is_never = key == "retention_days" and value == NEVER
            values[key] = value if is_never else _parse(name, value, hints[key])
        if values.get("retention_days") == NEVER:
            values["retention_days"] = None
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(**values | lists)

    def to_dict(self) -> dict[str, Any]:
        """The effective settings, as in a file, but without the store's password."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.retention_days is None:
            values["retention_days"] = NEVER
        return values | {"store": without_secrets(self.store)}


def without_secrets(store: str) -> str:
    """A store's address without a password, and without options, which may contain one.

    >>> without_secrets("postgresql://collector:hunter2@db.example/sfumato?sslpassword=x")
    'postgresql://collector@db.example/sfumato'
    """
    parts = urlsplit(store)
    if not parts.netloc:  # a path, or a mistyped URL
        return f"{parts.scheme}:…" if parts.scheme and "@" in store else store
    user, at, host = parts.netloc.rpartition("@")
    return urlunsplit((parts.scheme, user.partition(":")[0] + at + host, parts.path, "", ""))


def _unknown(unknown: Sequence[str], keys: Sequence[str], place: str) -> SpecError:
    """The error for keys that are no settings; one may be a mistyped budget."""
    similar = [text for name in unknown if (text := suggestion(name, keys))]
    return SpecError(
        f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} in {place}",
        hint=" ".join(similar) or f"the keys are {', '.join(keys)}",
    )


def _read(path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise SpecError(f"the settings {path} cannot be read: {problem.strerror}") from problem
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise SpecError(f"the settings {path} are not TOML: {problem}") from problem


def _check_network(proxy: str) -> None:
    try:
        ipaddress.ip_network(proxy)
    except ValueError:
        raise SpecError(
            f"proxies must be addresses such as 127.0.0.1 or 10.0.0.0/8; got {proxy}"
        ) from None


def _parse(name: str, text: str, hint: Any) -> Any:
    """The value of an environment variable; an empty one is None, where that is allowed."""
    if hint == _TEXTS:
        return tuple(part.strip() for part in text.split(",") if part.strip())
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

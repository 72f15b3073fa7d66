"""Check what a collector needs before it starts: nothing is created or changed.

Each check is "ok", a "warning" (it starts, but look at this) or an "error" (mend this first).
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from cryptography import x509

from sfumato import files
from sfumato.collector import keys
from sfumato.collector.settings import Settings
from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.driver import Database
from sfumato.collector.store.ledger import StoreLedger, needs_budget
from sfumato.collector.store.sqlite import Sqlite
from sfumato.collector.store.store import Store
from sfumato.device import offers
from sfumato.device.client import is_loopback
from sfumato.device.outbox import DAY_SECONDS
from sfumato.errors import SfumatoError, SpecError, StoreError
from sfumato.kernels.compiling import has_cache
from sfumato.privacy.accounting import epsilon_text

OTHER_FILES = 256  # open files of the store's threads, and of connections just accepted
_RENEW_DAYS = 14  # before a certificate or the last token expires
LOW_DISK_BYTES = 1 << 30
_MUCH_SPENT = 0.9  # of the budget
_UNSYNCHRONISED = 5  # TIME_ERROR in adjtimex(2)
_TIMEX_BYTES = 512  # more than the structure of adjtimex(2) has
_SET_IT = "run a time service (systemd-timesyncd, chrony): days, deadlines and tokens depend on it"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, in words."""

    check: str
    state: Literal["ok", "warning", "error"]
    text: str
    hint: str | None = None
    problem: SfumatoError | None = None  # of an error

    def to_dict(self) -> dict[str, str | None]:
        return {"check": self.check, "state": self.state, "text": self.text, "hint": self.hint}


def checks(settings: Settings, now: Callable[[], float] = time.time) -> list[Finding]:
    """All checks of a collector with these settings, in a fixed order."""
    findings = _attempt("certificate", lambda: _certificate(settings, now()))
    findings += _attempt("store", lambda: _store(settings))
    findings += _attempt("disk", lambda: _disk(settings))
    findings += _attempt("lake", lambda: _lake(settings))
    findings += _attempt("open files", lambda: _open_files(settings))
    findings += _attempt("compiled loops", _compiled_loops)
    if any(each.check == "store" and each.state == "error" for each in findings):
        return findings
    with _opened(settings) as store:
        findings += _attempt("key", lambda: _key(settings, store))
        findings += _attempt("clock", lambda: _clock(store, now()))
        findings += _attempt("budget", lambda: _budget(settings, store))
        findings += _attempt("tokens", lambda: _tokens(store, now()))
    return findings


def load_certificate(settings: Settings) -> ssl.SSLContext | None:
    """The certificate and key for TLS, if the settings have any."""
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as problem:  # such as ssl.SSLError
        raise SpecError(
            f"the certificate {settings.tls_cert} and its key cannot be used: {problem.strerror}"
        ) from problem
    return context


_Result = str | tuple[str, str] | None
"""Of a check: that all is well, in words; or a warning and a hint; or None if it does not apply."""


def _attempt(check: str, run: Callable[[], _Result]) -> list[Finding]:
    try:
        result = run()
    except SfumatoError as problem:
        return [Finding(check, "error", str(problem), problem.hint, problem)]
    if isinstance(result, str):
        return [Finding(check, "ok", result)]
    return [] if result is None else [Finding(check, "warning", *result)]


@contextmanager
def _opened(settings: Settings) -> Iterator[Store | None]:
    """The store, if it has the tables of this version already."""
    place = database(settings.store)
    if place.is_empty() or _version(place) != schema.VERSION:
        yield None
        return
    with closing(Store.open(settings.store)) as store:
        yield store


def _version(place: Database) -> int:
    with closing(place.connect()) as connection:
        return schema.version(connection)


def _certificate(settings: Settings, now: float) -> _Result:
    if settings.tls_cert is None:
        if is_loopback(settings.address[0]):
            return "none: TLS is left to a proxy on this machine"
        hint = "set tls_cert and tls_key, or let only a proxy with TLS reach this address"
        return f"there is no TLS on {settings.listen}", hint
    load_certificate(settings)
    own = x509.load_pem_x509_certificates(Path(settings.tls_cert).read_bytes())[0]
    first, last = own.not_valid_before_utc, own.not_valid_after_utc
    moment = datetime.fromtimestamp(now, UTC)
    if not first <= moment <= last:
        raise SpecError(
            f"the certificate {settings.tls_cert} is valid from {first:%Y-%m-%d %H:%M} to "
            f"{last:%Y-%m-%d %H:%M} UTC, which is not now: devices refuse it",
            hint="renew it, or set the clock",
        )
    text = f"valid until {last:%Y-%m-%d %H:%M} UTC"
    if (last - moment).days < _RENEW_DAYS:
        return text, "renew it, and restart the collector to read it"
    return text


def _store(settings: Settings) -> _Result:
    place = database(settings.store)
    if place.is_empty():
        return f"{place.name} is empty: the first start creates its tables"
    present = _version(place)
    if present > schema.VERSION:
        schema.migrate(place)  # it refuses
    text = f"{place.name} has version {present}"
    if present < schema.VERSION:
        text += f"; the next start brings it to version {schema.VERSION}"
    return text


def _disk(settings: Settings) -> _Result:
    place = database(settings.store)
    if not isinstance(place, Sqlite):
        return None  # the server's own
    try:
        free = shutil.disk_usage(place.path.parent).free
    except OSError as problem:
        raise StoreError(
            f"the folder of {place.name} cannot be used: {problem.strerror}",
            hint="create it, owned by the service's user",
        ) from None
    text = f"{free / (1 << 30):,.1f} GiB are free for the store"
    if free < LOW_DISK_BYTES:
        return text, "free space: a full disk refuses reports"
    return text


def _lake(settings: Settings) -> _Result:
    if settings.lake is None:
        return None
    folder = files.folder(settings.lake)
    if "://" in folder:
        return f"{folder} is not asked now"
    place = Path(folder).absolute()
    nearest = next(each for each in (place, *place.parents) if os.access(each, os.F_OK))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        raise SpecError(
            f"the lake must be in a folder that this user can write; got {folder}, and "
            f"{nearest} is not one",
            hint="set lake to another folder, or let the service's user write there",
        )
    return f"{folder} can be written"


def _open_files(settings: Settings) -> _Result:
    files = settings.connections + OTHER_FILES
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= files:
        return f"{files:,} are allowed"
    text = f"{settings.connections:,} connections need {files:,}; the system allows {hard:,}"
    return text, f"raise the limit of open files (ulimit -n, LimitNOFILE) to {files}"


def _key(settings: Settings, store: Store | None) -> _Result:
    path = Path(settings.signing_key)
    if store is not None:
        key = keys.load(path, store)
    else:
        key = keys.read(path) if path.exists() else None
    if key is None:
        return f"{path} is created at the first start"
    return f"its public part is {offers.public_key(key).hex()}"


def _clock(store: Store | None, now: float) -> _Result:
    text = f"it is {datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC"
    if store is not None:
        with store.reading() as tx:
            latest = max((row.since for row in tx.studies()), default=0) * DAY_SECONDS
        if latest > now:
            raise StoreError(f"{text}, and the store has a study of {_day(latest)}", hint=_SET_IT)
    if _is_unsynchronised():
        return f"{text}; no time service keeps it right", _SET_IT
    return text


def _is_unsynchronised() -> bool:
    """Whether the kernel says that no time service keeps its clock right."""
    try:
        adjtimex = ctypes.CDLL(None).adjtimex
    except (AttributeError, OSError):  # another system, or another C library
        return False
    return bool(adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)) == _UNSYNCHRONISED)


def _budget(settings: Settings, store: Store | None) -> _Result:
    limit, used = settings.budget.epsilon, 0.0
    if store is not None:
        with store.reading() as tx:
            needs_budget(tx, settings.budget)  # raises if the store has another
            if tx.entries():
                used = StoreLedger(tx).spent()
    if limit is None:
        return f"epsilon {epsilon_text(used)} is spent, and there is no limit"
    text = f"epsilon {epsilon_text(used)} of {limit:g} is spent"
    if used > _MUCH_SPENT * limit:
        return text, "use another store for another budget"
    return text


def _tokens(store: Store | None, now: float) -> _Result:
    last = 0
    if store is not None:
        with store.reading() as tx:
            last = max((row.expires for row in tx.tokens() if row.role == "admin"), default=0)
    if last <= now:
        hint = "sfumato token create --role admin --name NAME creates one"
        return "no administrator has a valid token", hint
    text = f"an administrator has one until {_day(last)}"
    if last < now + _RENEW_DAYS * DAY_SECONDS:
        return text, "sfumato token rotate ID replaces it"
    return text


def _compiled_loops() -> _Result:
    if has_cache():
        return "they are cached"
    hint = "set NUMBA_CACHE_DIR to a folder that this user can write"
    return "they cannot be cached, so each start compiles them again", hint


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"

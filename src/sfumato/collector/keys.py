"""The key with which a collector signs its offers: a file that only its owner can read.

Devices know the public key from the start and accept no offer signed with another one, so a lost
key is a lost fleet: keep a copy of the file with your backups.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from sfumato import files
from sfumato.collector.store.store import Store
from sfumato.device import offers
from sfumato.errors import OfferError, SpecError


def load_or_make(path: Path | str, store: Store) -> bytes:
    """The key in this file; a new one if there is no file and nothing was signed yet."""
    key = load(path, store)
    if key is None:
        _make(Path(path))
        key = read(Path(path))
    return key


def load(path: Path | str, store: Store) -> bytes | None:
    """The key in this file, which must have signed the store's offers; None if there is no file,
    and nothing was signed yet."""
    file = Path(path)
    with store.reading() as tx:
        has_studies = bool(tx.studies())
        envelopes = [row.envelope for row in tx.open_tasks()]
    if not file.exists():
        if has_studies:
            raise SpecError(
                f"there is no signing key at {file}, and the store has studies signed with one",
                hint="restore the file: devices accept no offers signed with another key",
            )
        return None
    key = read(file)
    for envelope in envelopes[:1]:
        try:
            offers.verify(json.loads(envelope), offers.public_key(key))
        except OfferError:
            raise SpecError(
                f"the key in {file} is not the one that this store's offers were signed with",
                hint="restore the file: devices accept no offers signed with another key",
            ) from None
    return key


def rotate(path: Path | str, store: Store) -> bytes:
    """Replace the key by a new one, which signs the offers of open tasks again. The old one stays
    beside it, with the ending `.old`.

    If it is killed halfway, call it again: the offers are signed with the key in `.next` then, and
    only the files remain to be renamed.
    """
    file = Path(path)
    coming, former = (file.with_name(f"{file.name}.{end}") for end in ("next", "old"))
    read(file)  # there must be one
    with store.worker_lock() as alone:
        if not alone:
            raise SpecError("the key of a running collector cannot be replaced: stop it first")
        if not coming.exists():
            _make(coming)
        key = read(coming)
        with store.transaction() as tx:
            if tx.active_rounds():
                raise SpecError(
                    "members of a masked round know its key: wait until the round is over",
                    hint="start the collector, let the round end, and try again",
                )
            for row in tx.open_tasks():
                offer = offers.offer_from_text(json.loads(row.envelope)["offer"])
                tx.set_envelope(row.id, json.dumps(offers.sign(offer, key)))
        os.replace(file, former)
        os.replace(coming, file)
    return key


def read(file: Path) -> bytes:
    """The key in this file; SpecError if there is none, or if others can read it."""
    try:
        if file.stat().st_mode & 0o077:
            raise SpecError(
                f"the signing key {file} can be read by others", hint=f"chmod 600 {file}"
            )
        key = bytes.fromhex(file.read_text(encoding="ascii").strip())
    except OSError as problem:
        raise SpecError(f"the signing key {file} cannot be read: {problem.strerror}") from None
    except ValueError:  # its message would show the content
        key = b""
    if len(key) != offers.KEY_BYTES:
        raise SpecError(
            f"{file} is not a signing key: it must have {2 * offers.KEY_BYTES} hex digits"
        )
    return key


def _make(file: Path) -> None:
    """Write a new key, whole or not at all; never replace one that appears meanwhile."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, secrets.token_hex(offers.KEY_BYTES).encode() + b"\n")
            os.fsync(descriptor)
            with suppress(FileExistsError):  # unlike a rename, a link never replaces a file
                os.link(draft, file)
        finally:
            os.close(descriptor)
            os.unlink(draft)
        files.sync(file.absolute().parent)
    except OSError as problem:
        raise SpecError(f"cannot create a signing key at {file}: {problem.strerror}") from problem

"""Whole masked rounds through a collector, over HTTP, on a store: against what cannot be left out.

A collector is a process of its own, with its worker and an SQLite store. Devices compute outside of
the timed parts: what is timed is from their first message of a phase until the last of them has
heard what the next one begins with, and in the end until the sum is stored. A few devices vanish
when they have shared.

The floors are of the same run: as many requests of the same lengths, with answers of the same
lengths, to a bare uvicorn that reads and answers (`http`); the same messages but for the tables,
which need not be stored, and their sum through the bare store, in groups of the same size, each
group a commit (`store`); and what the collector must compute (`primitives`): a check of every
signature, the addition of the tables, every device's secret out of shares, an agreement for each
mask between a device and one that vanished, the keys of the masks that are still in the sum, and
these masks. What is checked of shares, and what is written of phases, is not in the floors.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from benchmarks import race
from benchmarks.lines import Line, Settings
from benchmarks.race import Contender
from benchmarks.speed.talking import Ask, Talk
from sfumato.collector import studies
from sfumato.collector.serve import open_store
from sfumato.collector.settings import Settings as CollectorSettings
from sfumato.collector.store.store import Store
from sfumato.device import invitations, offers
from sfumato.flow.contribute import join_round
from sfumato.flow.task import Task
from sfumato.kernels import masks
from sfumato.kernels.packed import unpack_words
from sfumato.privacy import SystemRng
from sfumato.secagg.agreement import agree, sign, stream_of, verify_all
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import MaskedRound
from sfumato.secagg.sharing import join_many, split
from sfumato.spec import from_json

NAME = "rounds"
SEED = 1
REPETITIONS = 3
CONNECTIONS = 1_000  # one for each device
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    devices: int
    cells: int
    dropped: int  # after sharing

    @property
    def name(self) -> str:
        return f"{self.devices} devices/{self.cells} words"


def run(settings: Settings) -> Iterator[Line]:
    case = (
        _Case(devices=24, cells=1_000, dropped=1)
        if settings.quick
        else _Case(devices=1_000, cells=1 << 16, dropped=50)
    )
    if not settings.wants(case.name):
        return
    repeats = settings.repeats or (1 if settings.quick else REPETITIONS)
    rounds = [_measured(case) for _ in range(repeats)]
    yield race.run(
        race.Race(
            name=NAME,
            case=case.name,
            sizes={
                "devices": case.devices,
                "cells": case.cells,
                "dropped": case.dropped,
                **rounds[-1].sizes,
                "connections": CONNECTIONS,
            },
            seeds=[SEED],
            ours=_replayed(rounds, lambda measured: sum(measured.steps.values())),
            peers={},
            floors={
                "http, store and primitives": _replayed(rounds, lambda measured: measured.floor)
            },
            packages=["cryptography", "uvicorn", "starlette"],
            note="seconds from messages to what is told, without the devices' own work",
            more=lambda results: {
                "steps": rounds[-1].steps,
                "floor_steps": rounds[-1].floor_steps,
            },
            warm_up=False,
        ),
        Settings(quick=settings.quick, repeats=repeats),
    )


def table(lines: Sequence[Line]) -> str:
    """The race, and where the time goes."""
    parts = [
        f"{line['case']}: {kind}: "
        + ", ".join(f"{step} {taken:.3g} s" for step, taken in line[key].items())
        for line in lines
        for kind, key in (("round", "steps"), ("floor", "floor_steps"))
    ]
    return "\n".join([race.table(lines), *parts])


@dataclass(slots=True)
class _Measured:
    steps: dict[str, float] = field(default_factory=dict)
    floor_steps: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)

    @property
    def floor(self) -> float:
        return sum(self.floor_steps.values())


def _replayed(rounds: Sequence[_Measured], seconds: Callable[[_Measured], float]) -> Contender:
    """What was measured, in the order in which it was."""
    left = iter(rounds)
    return Contender(lambda: next(left), seconds=lambda result: seconds(result))  # type: ignore[arg-type]  # it is one of the rounds


def _measured(case: _Case) -> _Measured:
    with tempfile.TemporaryDirectory() as folder:
        settings = CollectorSettings(
            store=f"sqlite:///{folder}/collector.db",
            signing_key=f"{folder}/collector.key",
            listen="127.0.0.1:0",
            worker_seconds=0.02,
            phase_seconds=_PATIENCE_SECONDS,
            queue_bytes=512 << 20,
            idle_seconds=600,  # while devices compute
            connections=2 * CONNECTIONS,
        )
        store, key = open_store(settings)
        with closing(store):
            with _served(settings, Path(folder)) as address, Talk(address, CONNECTIONS) as talk:
                warm_up = _Case(devices=20, cells=case.cells, dropped=1)  # wakes the kernels
                for each in (warm_up, case):
                    course = _Course(each, store, key, talk)
                    course.run()
            measured = course.measured
        measured.floor_steps["http"] = _http(course.asked)
        table_bytes = course.round.vector_bytes
        messages = [message for message in course.sent if len(message) != table_bytes]
        messages.append(bytes(course.round.cells * np.dtype(course.round.lane).itemsize))
        measured.floor_steps["store"] = _stored(messages, Path(folder), settings.commit_bytes)
        measured.floor_steps["primitives"] = _primitives(case, course)
        return measured


def _request(case: _Case) -> dict[str, Any]:
    """A mean of vectors, sent whole and without noise: a table has a cell a coordinate."""
    return {
        "name": case.name,
        "purpose": "To measure a round.",
        "study": {
            "question": "mean",
            "trust": "secure",
            "epsilon": None,
            "devices": case.devices,
            "dimensions": case.cells,
            "clip": 1.0,
            "compression": "none",
            "corrupt": 0.1,
            "dropout": 0.1,
        },
    }


@contextmanager
def _served(settings: CollectorSettings, folder: Path) -> Iterator[str]:
    """A collector in a process of its own; its address."""
    given = {
        name: getattr(settings, name)
        for name in (
            "store",
            "signing_key",
            "worker_seconds",
            "phase_seconds",
            "queue_bytes",
            "idle_seconds",
            "connections",
        )
    }
    environment = os.environ | {f"SFUMATO_{name.upper()}": str(v) for name, v in given.items()}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sfumato", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )
    try:
        assert process.stdout is not None  # a pipe was asked for
        yield process.stdout.readline().strip().removeprefix("listening on ")
    finally:
        process.terminate()
        process.communicate()


class _Course:
    """A round, phase by phase; what devices compute is off the clock."""

    def __init__(self, case: _Case, store: Store, key: bytes, talk: Talk) -> None:
        self.case, self.store, self.talk = case, store, talk
        self.key = offers.public_key(key)
        self.study = studies.create(
            store, _request(case), key=key, rng=SystemRng(), now=time.time
        ).id
        with store.reading() as tx:
            (row,) = tx.tasks(self.study)
        self.task: Task = from_json(row.spec)
        self.measured = _Measured()
        self.sent: list[bytes] = []
        self.asked: list[list[Ask]] = []  # as a server is asked that only answers
        self.tickets = [secrets.token_hex(32) for _ in range(case.devices)]
        self.devices: list[Participant] = []  # by ticket
        self.round_id = ""
        self.table = np.random.default_rng(SEED).integers(-1_000, 1_000, case.cells)

    def run(self) -> None:
        identities = [Ed25519PrivateKey.generate() for _ in self.tickets]
        public = [identity.public_key().public_bytes_raw() for identity in identities]
        path = f"/v1/tasks/{self.task.id}/join"
        joins = [
            Ask("POST", path, key, ticket) for key, ticket in zip(public, self.tickets, strict=True)
        ]
        asked = [Ask("GET", "/v1/tickets", b"", ticket) for ticket in self.tickets]
        told = self._timed("join", joins, asked)
        for identity, body in zip(identities, told, strict=True):
            given = json.loads(body)
            invitation = invitations.verify(given, self.key)
            self.devices.append(
                join_round(
                    self.task,
                    invitation.round,
                    given["member"],
                    identity.private_bytes_raw(),
                    invitation.roster,
                    rng=SystemRng(),
                )
            )
        self.round_id = self.round.nonce
        self._check_members(public)
        everybody, stayed = range(self.case.devices), range(self.case.devices - self.case.dropped)
        told = self._phase("enrol", everybody, lambda k, _: self.devices[k].enrol(), "share")
        told = self._phase(
            "share", everybody, lambda k, heard: self.devices[k].share(heard), "mask", told, stayed
        )
        told = self._phase(
            "mask", stayed, lambda k, heard: self.devices[k].mask(heard, self.table), "unmask", told
        )
        self._phase("unmask", stayed, lambda k, heard: self.devices[k].unmask(heard), None, told)
        with self.store.reading() as tx:
            ((_, _, count),) = tx.answers(self.study)
        assert count == len(stayed), "the sum is not of the survivors"
        self._wait_for_release()  # which is no part of a round, nor of the next one
        found = self.round.parameters(self.case.devices)
        self.measured.sizes |= {
            "vector_bytes": self.round.vector_bytes,
            "neighbours": found.neighbours,
            "threshold": found.threshold,
        }

    @property
    def round(self) -> MaskedRound:
        return self.devices[0].round

    def _check_members(self, public: Sequence[bytes]) -> None:
        for key, device in zip(public, self.devices, strict=True):
            assert device.roster[device.member] == key

    def _phase(
        self,
        phase: str,
        members: range,
        answer: Callable[[int, bytes], bytes],
        following: str | None,
        told: Sequence[bytes] | None = None,
        hearing: range | None = None,
    ) -> list[bytes]:
        """All messages of a phase; what each of those that stay is told in the next one."""
        messages = [answer(k, told[k] if told is not None else b"") for k in members]
        says = [
            Ask("PUT", self._path(phase, k), message, self.tickets[k])
            for k, message in zip(members, messages, strict=True)
        ]
        self.sent += messages
        hears = [
            Ask("GET", self._path(following, k), b"", self.tickets[k])
            for k in (hearing or members)
            if following is not None
        ]
        return self._timed(phase, says, hears)

    def _timed(self, step: str, says: Sequence[Ask], hears: Sequence[Ask]) -> list[bytes]:
        begun = time.perf_counter()
        answered = self.talk.ask(says)
        said = time.perf_counter()
        assert {status for status, _ in answered} == {201}, answered[:3]
        if step == "mask":
            self._hurry()
        if not hears:
            self._wait_for_end()
        told: list[tuple[int, bytes]] = []
        if hears:
            first = self.talk.ask(hears[:1])  # the others need not wait
            while first[0][0] == 204:
                first = self.talk.ask(hears[:1])
            told = first + self.talk.ask(hears[1:])
            assert {status for status, _ in told} == {200}, told[:1]
        ended = time.perf_counter()
        self.asked += [
            list(says),
            [Ask("GET", f"/?bytes={len(body)}", b"", self.tickets[0]) for _, body in told],
        ]
        self.measured.steps |= {f"say {step}": said - begun, f"hear after {step}": ended - said}
        return [body for _, body in told]

    def _hurry(self) -> None:
        """Those who vanished are not coming: the phase is over."""
        with self.store.transaction() as tx:
            tx.close_phase(self.round_id)

    def _wait_for_end(self) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with self.store.reading() as tx:
                row = tx.round(self.round_id)
            assert row is not None
            assert row.phase != "aborted", row.problem
            if row.phase == "done":
                return
            assert time.monotonic() < until, "the round does not end"
            time.sleep(0.005)

    def _wait_for_release(self) -> None:
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            with self.store.reading() as tx:
                row = tx.study(self.study)
            assert row is not None
            if row.state == "released":
                return
            assert time.monotonic() < until, f"the study is {row.state}: {row.problem}"
            time.sleep(0.02)

    def _path(self, phase: str | None, k: int) -> str:
        return f"/v1/rounds/{self.round_id}/{phase}/{self.devices[k].member}"


def _http(asked: Sequence[Sequence[Ask]]) -> float:
    """The same requests, phase by phase, to a server that only reads and answers."""
    command = [sys.executable, "-m", "benchmarks.speed.bare_http"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # a pipe was asked for
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with Talk(address, CONNECTIONS) as talk:
            talk.ask(asked[1])  # all connections are made
            begun = time.perf_counter()
            for requests in asked:
                talk.ask(requests)
            return time.perf_counter() - begun
    finally:
        process.kill()
        process.communicate()


def _stored(messages: Sequence[bytes], folder: Path, commit_bytes: int) -> float:
    """The same bytes into a table of a bare store, in groups of one commit each."""
    with closing(Store.open(folder / "bare.db")) as store:
        store.migrate()
        groups: list[list[bytes]] = [[]]
        size = 0
        for message in messages:
            groups[-1].append(message)
            size += len(message)
            if size >= commit_bytes:
                groups.append([])
                size = 0
        begun = time.perf_counter()
        for group in groups:
            with store.transaction() as tx:
                rows = [(1, 1, message) for message in group]
                tx._insert("upload", "task, count, body", rows)
        return time.perf_counter() - begun


def _primitives(case: _Case, course: _Course) -> float:
    """What no collector of such a round can leave out."""
    round, stayed = course.round, case.devices - case.dropped
    packed = course.sent[2 * case.devices : 2 * case.devices + stayed]
    tables = [
        unpack_words(message, round.cells, round.modulus_bits, round.lane)
        for message in packed[: min(16, stayed)]
    ]
    total = np.zeros(round.cells, dtype=round.lane)
    identity = secrets.token_bytes(32)
    public = Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()
    text = secrets.token_bytes(160)
    signature = sign(identity, text)
    found = round.parameters(case.devices)
    pairs = case.dropped * found.neighbours * stayed // case.devices
    points = range(1, 1 + found.threshold)
    shares = split(identity, threshold=found.threshold, points=points, rng=SystemRng())
    keys = [X25519PrivateKey.generate() for _ in range(2)]
    others = keys[1].public_key().public_bytes_raw()
    begun = time.perf_counter()
    verify_all([(public, signature, text)] * case.devices)
    for place in range(stayed):
        np.add(total, tables[place % len(tables)], out=total)
    opened = join_many(b"".join(shares) * case.devices, np.array([points] * case.devices))
    agreed = [agree(keys[0], others) for _ in range(pairs)]
    streams = [
        stream_of(secret or b"", round.salt, b"self", identity)
        for secret in opened[:stayed] + agreed
    ]
    masks.add_streams(total, streams, [1] * len(streams))
    return time.perf_counter() - begun

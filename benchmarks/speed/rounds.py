"""Whole masked rounds through a collector, over HTTP, on a store: against their necessary costs.

A collector is a separate process, with its worker and an SQLite store. Devices compute outside of
the timed parts: a phase is timed from its first message until the last device has received the
start of the next phase, and at the end until the sum is stored. A few devices vanish after sharing.

The floors are from the same run: the same number of requests and answers of the same lengths with a
bare uvicorn (`http`); the same messages, except for the tables, which need not be stored, and their
sum through the bare store, in groups of the same size with one commit each (`store`); and the
collector's necessary computations (`primitives`): a check of every signature, the addition of the
tables, every device's secret from shares, an agreement for each mask between a device and one that
vanished, the keys of the masks that are still in the sum, and these masks. Checks of shares and
records of phases are not in the floors.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from benchmarks import race
from benchmarks.lines import Line, Settings, line
from benchmarks.race import Contender
from benchmarks.speed.ingest import cpu_seconds
from benchmarks.speed.talking import Connections, Request
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
COHORTS = 4
CONNECTIONS = 1_000  # one for each device
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    devices: int
    cells: int
    dropped: int  # after sharing
    cohorts: int = 1  # of as many studies, at once

    @property
    def name(self) -> str:
        cohorts = "" if self.cohorts == 1 else f"{self.cohorts} cohorts of "
        return f"{cohorts}{self.devices} devices/{self.cells} words"


def run(settings: Settings) -> Iterator[Line]:
    case = (
        _Case(devices=24, cells=1_000, dropped=1)
        if settings.quick
        else _Case(devices=1_000, cells=1 << 16, dropped=50)
    )
    if settings.wants(case.name):
        yield _race(case, settings)
    if not settings.quick and settings.wants("many cohorts"):
        yield from _many_cohorts(settings)


def _many_cohorts(settings: Settings) -> Iterator[Line]:
    """Cohorts of several studies at once, and one alone: rounds per second of one worker. They are
    small, so that the devices of all of them can compute on one machine."""
    cases = [
        _Case(devices=100, cells=1 << 12, dropped=5, cohorts=cohorts) for cohorts in (1, COHORTS)
    ]
    repeats = settings.repeats or 3
    measurements = [[_measure(case, floors=False) for case in cases] for _ in range(repeats)]
    for case, rounds in zip(cases, zip(*measurements, strict=True), strict=True):
        cohorts = case.cohorts
        seconds = [sum(measured.steps.values()) for measured in rounds]
        yield line(
            NAME,
            case.name,
            settings,
            sizes={
                "devices": case.devices,
                "cohorts": cohorts,
                "cells": case.cells,
                **rounds[-1].sizes,
            },
            seeds=[SEED],
            repetitions=len(rounds),
            packages=["cryptography", "uvicorn", "starlette"],
            unit="seconds",
            seconds=seconds,
            rounds_per_second=cohorts / statistics.median(seconds),
            cpu_seconds_a_round=statistics.median(
                measured.cpu_seconds / cohorts for measured in rounds
            ),
            load_average=os.getloadavg()[0],
        )


def _race(case: _Case, settings: Settings) -> Line:
    repeats = settings.repeats or (1 if settings.quick else REPETITIONS)
    rounds = [_measure(case, floors=True) for _ in range(repeats)]
    return race.run(
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
            ours=_replay(rounds, lambda measured: sum(measured.steps.values())),
            peers={},
            floors={"http, store and primitives": _replay(rounds, lambda measured: measured.floor)},
            packages=["cryptography", "uvicorn", "starlette"],
            note="seconds from messages to answers, without the devices' own work",
            more=lambda results: {
                "steps": rounds[-1].steps,
                "floor_steps": rounds[-1].floor_steps,
            },
            warm_up=False,
        ),
        Settings(quick=settings.quick, repeats=repeats),
    )


def table(lines: Sequence[Line]) -> str:
    """The race, and the time of each step."""
    parts = [
        f"{each['case']}: {kind}: "
        + ", ".join(f"{step} {seconds:.3g} s" for step, seconds in each[key].items())
        for each in lines
        for kind, key in (("round", "steps"), ("floor", "floor_steps"))
        if key in each
    ]
    parts += [
        f"{each['case']}: {each['rounds_per_second']:.2f} rounds/s, "
        f"{each['cpu_seconds_a_round']:.2f} s of processor time each; "
        f"load {each['load_average']:.1f}"
        for each in lines
        if "rounds_per_second" in each
    ]
    raced = [each for each in lines if "steps" in each]
    return "\n".join([race.table(raced), *parts] if raced else parts)


@dataclass(slots=True)
class _Measurement:
    steps: dict[str, float] = field(default_factory=dict)
    floor_steps: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    cpu_seconds: float = 0.0  # of the collector in these steps, for all cohorts

    @property
    def floor(self) -> float:
        return sum(self.floor_steps.values())


def _replay(rounds: Sequence[_Measurement], seconds: Callable[[_Measurement], float]) -> Contender:
    """The measurements, in their order."""
    left = iter(rounds)
    return Contender(lambda: next(left), seconds=lambda result: seconds(result))  # type: ignore[arg-type]  # it is one of the rounds


def _measure(case: _Case, *, floors: bool) -> _Measurement:
    with tempfile.TemporaryDirectory() as folder:
        settings = CollectorSettings(
            store=f"sqlite:///{folder}/collector.db",
            signing_key=f"{folder}/collector.key",
            listen="127.0.0.1:0",
            worker_seconds=0.02,
            phase_seconds=_TIMEOUT_SECONDS,
            queue_bytes=512 << 20,
            idle_seconds=600,  # while devices compute
            connections=3 * CONNECTIONS,
        )
        store, key = open_store(settings)
        with closing(store):
            with (
                _serve(settings, Path(folder)) as (address, pid),
                Connections(address, CONNECTIONS) as connections,
            ):
                warm_up = _Case(devices=20, cells=case.cells, dropped=1)  # loads the kernels
                _RoundRun(warm_up, store, key, connections).run()
                round_run = _run_cohorts(case, store, key, address, connections, pid)
            measured = round_run.measured
            if not floors:
                return measured
        measured.floor_steps["http"] = _http_seconds(round_run.requests)
        table_bytes = round_run.round.vector_bytes
        messages = [message for message in round_run.messages if len(message) != table_bytes]
        messages.append(bytes(round_run.round.cells * np.dtype(round_run.round.lane).itemsize))
        measured.floor_steps["store"] = _store_seconds(
            messages, Path(folder), settings.commit_bytes
        )
        measured.floor_steps["primitives"] = _primitive_seconds(case, round_run)
        return measured


def _run_cohorts(
    case: _Case, store: Store, key: bytes, address: str, connections: Connections, pid: int
) -> _RoundRun:
    """A round of each cohort; with several, each step begins and ends for all of them at once."""
    if case.cohorts == 1:
        (only := _RoundRun(case, store, key, connections, pid=pid)).run()
        return only
    together = threading.Barrier(case.cohorts)
    with ExitStack() as stack:
        runs = [
            _RoundRun(
                case,
                store,
                key,
                stack.enter_context(Connections(address, CONNECTIONS // case.cohorts)),
                name=f"{case.name} {number}",
                together=together,
                pid=pid,
            )
            for number in range(case.cohorts)
        ]
        with ThreadPoolExecutor(case.cohorts) as pool:
            list(pool.map(_run_together, runs))
    return runs[0]


def _run_together(run: _RoundRun) -> None:
    """Run a round; if it fails, the others must not wait for it."""
    try:
        run.run()
    except BaseException:
        run.together.abort()
        raise


def _request(case: _Case, name: str) -> dict[str, Any]:
    """A mean of vectors, sent whole and without noise: a table has one cell per coordinate."""
    return {
        "name": name,
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
def _serve(settings: CollectorSettings, folder: Path) -> Iterator[tuple[str, int]]:
    """Start a collector in its own process; yield its address and its process id."""
    variables = {
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
    environment = os.environ | {f"SFUMATO_{name.upper()}": str(v) for name, v in variables.items()}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sfumato", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )
    try:
        assert process.stdout is not None  # a pipe, as requested
        yield process.stdout.readline().strip().removeprefix("listening on "), process.pid
    finally:
        process.terminate()
        process.communicate()


class _RoundRun:
    """A round, phase by phase; the devices' computations are not timed."""

    def __init__(
        self,
        case: _Case,
        store: Store,
        key: bytes,
        connections: Connections,
        *,
        name: str = "",
        together: threading.Barrier | None = None,
        pid: int | None = None,  # of the collector, to measure its processor time
    ) -> None:
        self.pid = pid
        self.together = together or threading.Barrier(1)
        self.case, self.store, self.connections = case, store, connections
        self.key = offers.public_key(key)
        self.study = studies.create(
            store, _request(case, name or case.name), key=key, rng=SystemRng(), now=time.time
        ).id
        with store.reading() as tx:
            (row,) = tx.tasks(self.study)
        self.task: Task = from_json(row.spec)
        self.measured = _Measurement()
        self.messages: list[bytes] = []
        self.requests: list[list[Request]] = []  # as a server is asked that only answers
        self.tickets = [secrets.token_hex(32) for _ in range(case.devices)]
        self.devices: list[Participant] = []  # by ticket
        self.round_id = ""
        self.table = np.random.default_rng(SEED).integers(-1_000, 1_000, case.cells)

    def run(self) -> None:
        identities = [Ed25519PrivateKey.generate() for _ in self.tickets]
        public = [identity.public_key().public_bytes_raw() for identity in identities]
        path = f"/v1/tasks/{self.task.id}/join"
        joins = [
            Request("POST", path, key, ticket)
            for key, ticket in zip(public, self.tickets, strict=True)
        ]
        polls = [Request("GET", "/v1/tickets", b"", ticket) for ticket in self.tickets]
        bodies = self._timed("join", joins, polls)
        for identity, body in zip(identities, bodies, strict=True):
            answer = json.loads(body)
            invitation = invitations.verify(answer, self.key)
            self.devices.append(
                join_round(
                    self.task,
                    invitation.round,
                    answer["member"],
                    identity.private_bytes_raw(),
                    invitation.roster,
                    rng=SystemRng(),
                )
            )
        self.round_id = self.round.nonce
        everybody, stayed = range(self.case.devices), range(self.case.devices - self.case.dropped)
        bodies = self._phase("enrol", everybody, lambda k, _: self.devices[k].enrol(), "share")
        bodies = self._phase(
            "share",
            everybody,
            lambda k, request: self.devices[k].share(request),
            "mask",
            bodies,
            stayed,
        )
        bodies = self._phase(
            "mask",
            stayed,
            lambda k, request: self.devices[k].mask(request, self.table),
            "unmask",
            bodies,
        )
        self._phase(
            "unmask", stayed, lambda k, request: self.devices[k].unmask(request), None, bodies
        )
        with self.store.reading() as tx:
            (answer,) = tx.answer_rows(self.study)
        assert answer.count == len(stayed), "the sum is not of the survivors"
        self._wait_for_release()  # not part of a round, nor of the next one
        parameters = self.round.parameters(self.case.devices)
        self.measured.sizes |= {
            "vector_bytes": self.round.vector_bytes,
            "neighbours": parameters.neighbours,
            "threshold": parameters.threshold,
        }

    @property
    def round(self) -> MaskedRound:
        return self.devices[0].round

    def _phase(
        self,
        phase: str,
        members: range,
        answer: Callable[[int, bytes], bytes],
        following: str | None,
        bodies: Sequence[bytes] | None = None,
        listeners: range | None = None,
    ) -> list[bytes]:
        """Send all messages of a phase; return the answers to those that stay."""
        messages = [answer(k, bodies[k] if bodies is not None else b"") for k in members]
        puts = [
            Request("PUT", self._path(phase, k), message, self.tickets[k])
            for k, message in zip(members, messages, strict=True)
        ]
        self.messages += messages
        gets = [
            Request("GET", self._path(following, k), b"", self.tickets[k])
            for k in (listeners or members)
            if following is not None
        ]
        return self._timed(phase, puts, gets)

    def _timed(self, step: str, puts: Sequence[Request], gets: Sequence[Request]) -> list[bytes]:
        self.together.wait()
        cpu = 0.0 if self.pid is None else cpu_seconds(self.pid)
        start = time.perf_counter()
        answers = self.connections.send(puts)
        middle = time.perf_counter()
        assert {status for status, _ in answers} == {201}, answers[:3]
        if step == "mask":
            self._close_phase()
        if not gets:
            self._wait_for_end()
        replies: list[tuple[int, bytes]] = []
        if gets:
            first = self.connections.send(gets[:1])  # then the others need not wait
            while first[0][0] == 204:
                first = self.connections.send(gets[:1])
            replies = first + self.connections.send(gets[1:])
            assert {status for status, _ in replies} == {200}, replies[:1]
        self.together.wait()
        ended = time.perf_counter()
        self.measured.cpu_seconds += 0.0 if self.pid is None else cpu_seconds(self.pid) - cpu
        self.requests += [
            list(puts),
            [Request("GET", f"/?bytes={len(body)}", b"", self.tickets[0]) for _, body in replies],
        ]
        self.measured.steps |= {f"say {step}": middle - start, f"hear after {step}": ended - middle}
        return [body for _, body in replies]

    def _close_phase(self) -> None:
        """End the phase: the devices that vanished will not answer."""
        with self.store.transaction() as tx:
            tx.close_phase(self.round_id)

    def _wait_for_end(self) -> None:
        until = time.monotonic() + _TIMEOUT_SECONDS
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
        until = time.monotonic() + _TIMEOUT_SECONDS
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


def _http_seconds(phases: Sequence[Sequence[Request]]) -> float:
    """Seconds of the same requests, phase by phase, to a server that only reads and answers."""
    command = [sys.executable, "-m", "benchmarks.speed.bare_http"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None  # a pipe, as requested
        address = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with Connections(address, CONNECTIONS) as connections:
            connections.send(phases[1])  # all connections are made
            start = time.perf_counter()
            for requests in phases:
                connections.send(requests)
            return time.perf_counter() - start
    finally:
        process.kill()
        process.communicate()


def _store_seconds(messages: Sequence[bytes], folder: Path, commit_bytes: int) -> float:
    """Seconds of writing the same bytes to a bare store, in groups of one commit each."""
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
        start = time.perf_counter()
        for group in groups:
            with store.transaction() as tx:
                rows = [(1, 1, message) for message in group]
                tx._insert("upload", "task, count, body", rows)
        return time.perf_counter() - start


def _primitive_seconds(case: _Case, round_run: _RoundRun) -> float:
    """Seconds of the computations that any collector of such a round must do."""
    round, stayed = round_run.round, case.devices - case.dropped
    packed = round_run.messages[2 * case.devices : 2 * case.devices + stayed]
    tables = [
        unpack_words(message, round.cells, round.modulus_bits, round.lane)
        for message in packed[: min(16, stayed)]
    ]
    total = np.zeros(round.cells, dtype=round.lane)
    identity = secrets.token_bytes(32)
    public = Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()
    text = secrets.token_bytes(160)
    signature = sign(identity, text)
    parameters = round.parameters(case.devices)
    pairs = case.dropped * parameters.neighbours * stayed // case.devices
    points = range(1, 1 + parameters.threshold)
    shares = split(identity, threshold=parameters.threshold, points=points, rng=SystemRng())
    keys = [X25519PrivateKey.generate() for _ in range(2)]
    others = keys[1].public_key().public_bytes_raw()
    start = time.perf_counter()
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
    return time.perf_counter() - start

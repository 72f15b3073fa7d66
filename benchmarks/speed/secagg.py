"""Whole rounds of secure aggregation: against Flower's SecAgg+, and bare primitives.

A round is one process: every device goes through the whole protocol, and its computations and those
of the collector are timed separately. The collector takes the messages of a phase together, and
tables a few at a time from their receive buffers, as `sfumato serve` does. Seconds are wall time;
masks and many signatures use all cores, in ours and in the floors. Flower runs in its own
environment and process (`scripts/peers`), and without that the rounds are run without it.

The floors are the necessary costs of such a round: for a device, a mask for itself and each
neighbour, two agreements with each, and a check of each one's signature; for the collector, a check
of every device's signature, the addition of the tables, the masks that are still in the sum, and an
agreement for each mask of a device that dropped out.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from benchmarks import race
from benchmarks.lines import Line, Settings
from benchmarks.peer import Peer, python_of
from benchmarks.race import Contender
from sfumato.kernels import masks
from sfumato.privacy import SystemRng
from sfumato.secagg.agreement import verify_all
from sfumato.secagg.coordinator import Coordinator, Phase
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import MaskedRound

NAME = "secagg"
SEED = 1
REPETITIONS = 3
ENVIRONMENT, SERVER, FLOWER = ".venv-flower", "flower_server.py", "Flower"
BITS = 32
ARRIVING = 16  # tables that are added in turn: more than fit in a cache
SAMPLES = 20  # of each step's floor per round

# The requirements: against Flower, and against the floors of the largest round.
TIMES_FASTER = {"client": 8.0, "server": 40.0}
MOST_OF_PEERS_BYTES = 0.5
MOST_TIMES_FLOOR = 1.3
MOST_BYTES_OVER_VECTOR = 20_000  # set when the roster, 64 bytes per member, was not counted

P = ParamSpec("P")
T = TypeVar("T")
U32 = npt.NDArray[np.uint32]
Costs = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    devices: int
    cells: int
    corrupt: float
    dropout: float
    dropped: int  # after sharing
    against_flower: bool

    @property
    def name(self) -> str:
        return f"{self.devices} devices/{self.cells} cells"

    def round(self) -> MaskedRound:
        return MaskedRound(
            task="00" * 32,
            cells=self.cells,
            modulus_bits=BITS,
            cohort=self.devices,
            corrupt=self.corrupt,
            dropout=self.dropout,
            mode="semi_honest",
            nonce=secrets.token_hex(16),
            security_bits=40,
        )


def run(settings: Settings) -> Iterator[Line]:
    python = python_of(ENVIRONMENT)
    flower = Peer(python, SERVER) if python is not None else None
    try:
        for case in _cases(quick=True):
            _Round(case, _Floor(case)).run()
        for case in _cases(quick=settings.quick):
            roles = [role for role in TIMES_FASTER if settings.wants(f"{case.name}/{role}")]
            if roles:
                yield from _lines(settings, case, flower if case.against_flower else None, roles)
    finally:
        if flower is not None:
            flower.close()


def table(lines: Sequence[Line]) -> str:
    """The race, and the devices' traffic."""
    sizes = [
        f"{line['case']}: sends {line['bytes_up']:,.0f} bytes"
        + "".join(
            f" ({line['bytes_up'] / peer_bytes:.3g} of {name}'s)"
            for name, peer_bytes in line["peers_bytes_up"].items()
        )
        + f"; sends and gets {line['bytes_over_vector']:,.0f} more than the packed table"
        for line in lines
        if "bytes_up" in line
    ]
    return "\n".join([race.table(lines), *sizes])


def missed(lines: Sequence[Line]) -> list[str]:
    """The requirements that these lines miss."""
    return [f"{NAME}/{line['case']}: {text}" for line in lines for text in _complaints(line)]


def _complaints(line: Line) -> Iterator[str]:
    needed = TIMES_FASTER[line["case"].rsplit("/", 1)[-1]]
    for name, ratio in line["ratio_to_peer"].items():
        if ratio["median"] < needed:
            yield f"{ratio['median']:.3g} times faster than {name}, not {needed:g}"
    for name, peer_bytes in line.get("peers_bytes_up", {}).items():
        if line["bytes_up"] > MOST_OF_PEERS_BYTES * peer_bytes:
            part = line["bytes_up"] / peer_bytes
            yield f"a device sends {part:.4g} of {name}'s bytes, not {MOST_OF_PEERS_BYTES:g}"
    if not line["sizes"]["to_the_floor"]:
        return
    for ratio in line["ratio_to_floor"].values():
        if ratio["median"] > MOST_TIMES_FLOOR:
            yield f"{ratio['median']:.3g} times the floor, not {MOST_TIMES_FLOOR:g}"
    if (over := line.get("bytes_over_vector", 0)) > MOST_BYTES_OVER_VECTOR:
        yield f"{over:,.0f} bytes over the packed table, not {MOST_BYTES_OVER_VECTOR:,}"


def _cases(*, quick: bool) -> Iterator[_Case]:
    """Against Flower, the rates give the same k and t as Flower's."""
    for cells in (1_000,) if quick else (10_000, 100_000, 1_000_000):
        yield _Case(
            devices=12 if quick else 50,
            cells=cells,
            corrupt=0.22,
            dropout=0.2,
            dropped=1 if quick else 2,
            against_flower=True,
        )
    yield _Case(
        devices=24 if quick else 1_000,
        cells=1_000 if quick else 1 << 20,
        corrupt=0.1,
        dropout=0.1,
        dropped=1 if quick else 50,
        against_flower=False,
    )


def _lines(
    settings: Settings, case: _Case, flower: Peer | None, roles: Sequence[str]
) -> Iterator[Line]:
    """A round gives a device's line and the collector's."""
    repeats = settings.repeats or (1 if settings.quick else REPETITIONS)
    parameters = case.round().parameters(case.devices)
    ours, peers, floors = [], [], []
    for _ in range(repeats):
        floor = _Floor(case)
        ours.append(_Round(case, floor).run())
        if flower is not None:
            task = {
                "devices": case.devices,
                "cells": case.cells,
                "shares": parameters.neighbours + 1,  # one is its own
                "threshold": parameters.threshold,
                "dropped": case.dropped,
                "seed": SEED,
            }
            peers.append(flower.ask(task))
        floors.append(floor.costs())
    for role in roles:
        key = f"{role}_seconds"
        yield race.run(
            race.Race(
                name=NAME,
                case=f"{case.name}/{role}",
                sizes={
                    "devices": case.devices,
                    "cells": case.cells,
                    "bits": BITS,
                    "neighbours": parameters.neighbours,
                    "threshold": parameters.threshold,
                    "dropped": case.dropped,
                    "to_the_floor": not case.against_flower,
                },
                seeds=[SEED],
                ours=_replay(ours, key),
                peers={FLOWER: _replay(peers, key)} if peers else {},
                floors={"primitives": _replay(floors, key)},
                packages=["cryptography"],
                note="seconds from bytes to bytes, of the mean device that stayed and of the "
                "collector; Flower with its quantizing, which it needs, and without training",
                more=partial(_more, role, peers, floors),
                warm_up=False,
            ),
            Settings(quick=settings.quick, repeats=repeats),
        )


def _replay(results: Sequence[Costs], key: str) -> Contender:
    """The measurements, in their order."""
    return Contender(
        partial(next, iter(results)),
        seconds=lambda result: float(result[key]),  # type: ignore[index]  # one of the costs
    )


def _more(
    role: str, peers: Sequence[Costs], floors: Sequence[Costs], results: Sequence[Any]
) -> Mapping[str, Any]:
    """The steps of the last round and of its floor, the peer's version, and a device's bytes."""
    parts = {
        "steps": results[-1][f"{role}_steps"],
        "floor_steps": floors[-1][f"{role}_steps"],
        "peer_versions": {FLOWER: peers[-1]["version"]} if peers else {},
    }
    if role == "server":
        return parts
    return parts | {
        "bytes_up": results[-1]["bytes_up"],
        "bytes_over_vector": results[-1]["bytes_over_vector"],
        "peers_bytes_up": {FLOWER: peers[-1]["bytes_up"]} if peers else {},
    }


@dataclass(slots=True)
class _Watch:
    """Seconds by step."""

    steps: dict[str, float] = field(default_factory=dict)

    def __call__(
        self, step: str, function: Callable[P, T], /, *args: P.args, **named: P.kwargs
    ) -> T:
        started = time.perf_counter()
        result = function(*args, **named)
        seconds = time.perf_counter() - started
        self.steps[step] = self.steps.get(step, 0.0) + seconds
        return result


class _Round:
    """All devices and their collector; the last devices vanish after sharing."""

    def __init__(self, case: _Case, floor: _Floor) -> None:
        self.case, self.round, self.floor = case, case.round(), floor
        self.stayed = range(case.devices - case.dropped)
        identities = [Ed25519PrivateKey.generate() for _ in range(case.devices)]
        roster = tuple(key.public_key().public_bytes_raw() for key in identities)
        self.server, self.clients = _Watch(), [_Watch() for _ in identities]
        self.up, self.down = [0] * case.devices, [0] * case.devices
        self.collector = self.server("open", Coordinator, self.round, roster)
        self.devices = [
            watch(
                "enrol",
                Participant.join,
                self.round,
                member,
                identity.private_bytes_raw(),
                self.collector.roster_root,
                rng=SystemRng(),
            )
            for member, (watch, identity) in enumerate(zip(self.clients, identities, strict=True))
        ]
        self.table = np.random.default_rng(SEED).integers(0, 1 << 16, case.cells)
        buffers = np.zeros((ARRIVING, self.round.vector_bytes), dtype=np.uint8)
        self.places = [place.data for place in buffers]

    def run(self) -> Costs:
        collector, devices = self.collector, self.devices
        everybody = range(self.case.devices)
        self._step(Phase.ENROL, everybody, None, lambda member, _: devices[member].enrol)
        self._step(
            Phase.SHARE,
            everybody,
            collector.roster_for,
            lambda member, request: partial(devices[member].share, request),
        )
        self._step(
            Phase.MASK,
            self.stayed,
            collector.boxes_for,
            lambda member, request: partial(devices[member].mask, request, self.table + member),
        )
        survivors = self.server("unmask", collector.survivor_set)
        self._step(
            Phase.UNMASK,
            self.stayed,
            lambda _: survivors,
            lambda member, request: partial(devices[member].unmask, request),
        )
        total = self.server("finish", collector.finish)
        self.floor.finish(self._pairs())
        expected = len(self.stayed) * self.table + sum(self.stayed)
        assert np.array_equal(total, expected % 2**BITS), "the sum is not the sum"
        return self._costs()

    def _step(
        self,
        phase: Phase,
        members: range,
        request_for: Callable[[int], bytes] | None,
        answer: Callable[[int, bytes], Callable[[], bytes]],  # returns the function to be timed
    ) -> None:
        together = ARRIVING if phase is Phase.MASK else len(members)
        for first in range(0, len(members), together):
            messages: dict[int, bytes] = {}
            for member in members[first : first + together]:
                request = (
                    self.server(phase, request_for, member) if request_for is not None else b""
                )
                if phase is Phase.SHARE:
                    _clear_caches()
                message = self.clients[member](phase, answer(member, request))
                self.down[member] += len(request)
                self.up[member] += len(message)
                messages[member] = (
                    self._received(member, message) if phase is Phase.MASK else message
                )
                if member % -(-len(members) // SAMPLES) == 0:
                    self.floor.sample(phase)
            refusals = self.server(phase, self.collector.add_all, phase, messages)
            assert not any(refusals.values()), refusals
        if phase is not Phase.UNMASK:
            self.server(phase, self.collector.close)

    def _received(self, member: int, table: bytes) -> bytes:
        """A table as a collector reads it from the network: in a buffer that is reused."""
        place = self.places[member % ARRIVING]
        place[:] = table
        return cast(bytes, place)  # it is only read

    def _costs(self) -> Costs:
        watches = [self.clients[member].steps for member in self.stayed]
        client = {step: float(np.mean([steps[step] for steps in watches])) for step in watches[0]}
        up, down = (np.array(sizes)[self.stayed].mean() for sizes in (self.up, self.down))
        sizes = {"bytes_up": up, "bytes_over_vector": up + down - self.round.vector_bytes}
        return _bill(client, self.server.steps) | sizes

    def _pairs(self) -> list[int]:
        """For each device that dropped out, how many of its neighbours stayed."""
        return [
            sum(other in self.stayed for other in others)
            for member, others in self.collector.neighbours.items()
            if member not in self.stayed
        ]


def _clear_caches() -> None:
    """A device has its own process, so it must not use what others left in a cache."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sfumato.secagg"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


class _Floor:
    """The primitives of a device and of the collector, sampled between our own steps."""

    def __init__(self, case: _Case) -> None:
        self.case, neighbours = case, case.round().parameters(case.devices).neighbours
        self.server, self.client = _Watch(), _Watch()
        self.samples = dict.fromkeys(Phase, 0)
        self.table = np.zeros(case.cells, dtype=np.uint32)
        self.arriving = np.ones((ARRIVING, case.cells), dtype=np.uint32)
        stream = np.random.default_rng(SEED).bytes(28 * case.devices * (neighbours + 1))
        starts = range(0, len(stream), 28)
        self.streams = [(stream[k : k + 16], stream[k + 16 : k + 28] + bytes(4)) for k in starts]
        own, other = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self.own = own.private_bytes_raw()
        self.others = [other.public_key().public_bytes_raw()] * neighbours
        identity, message = Ed25519PrivateKey.generate(), bytes(150)
        claim = identity.public_key().public_bytes_raw(), identity.sign(message), message
        self.claims = [claim] * neighbours

    def sample(self, phase: Phase) -> None:
        """One device's part of a phase, and the collector's additions."""
        self.samples[phase] += 1
        if phase is Phase.SHARE:
            self.client(phase, verify_all, self.claims)
        if phase in (Phase.SHARE, Phase.MASK):
            self.client(phase, _agree, self.own, self.others)
        if phase is Phase.MASK:
            self._add_masks(self.client, phase, len(self.others) + 1)
            self.server(phase, _add_tables, self.table, self.arriving)

    def finish(self, pairs: Sequence[int]) -> None:
        """`pairs`: for each device that dropped out, its neighbours that stayed."""
        self.server(Phase.ENROL, verify_all, self.claims[:1] * self.case.devices)
        stayed = self.case.devices - self.case.dropped
        self._add_masks(self.server, "finish", stayed + sum(pairs))
        for count in pairs:
            self.server("finish", _agree, self.own, self.others[:count])

    def _add_masks(self, watch: _Watch, step: str, count: int) -> None:
        watch(step, masks.add_streams, self.table, self.streams[:count], [1] * count)

    def costs(self) -> Costs:
        client = {
            step: seconds / self.samples[Phase(step)] for step, seconds in self.client.steps.items()
        }
        stayed = self.case.devices - self.case.dropped
        share = stayed / (self.samples[Phase.MASK] * ARRIVING)
        server = self.server.steps | {Phase.MASK: self.server.steps[Phase.MASK] * share}
        return _bill(client, server)


def _bill(client: Mapping[str, float], server: Mapping[str, float]) -> Costs:
    return {
        "client_seconds": sum(client.values()),
        "client_steps": dict(client),
        "server_seconds": sum(server.values()),
        "server_steps": dict(server),
    }


def _add_tables(table: U32, arriving: U32) -> None:
    for one in arriving:
        np.add(table, one, out=table)


def _agree(own: bytes, public_keys: Sequence[bytes]) -> None:
    """From the bytes of keys to the keys and counters of masks.

    Loading a private key takes as long as an agreement, so it is loaded once.
    """
    key = X25519PrivateKey.from_private_bytes(own)
    for public in public_keys:
        secret = key.exchange(X25519PublicKey.from_public_bytes(public))
        HKDF(algorithm=hashes.SHA256(), length=28, salt=own, info=public).derive(secret)

"""Changed messages to both roles, in every phase: a refusal that changes nothing, or an exact sum.

Messages are flipped, cut, grown, spliced, swapped, sent by somebody else, taken from another round
and made up. `make test-slow` tries a hundred thousand on each role.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from checks import SEED
from sfumato.errors import ImpossibleError, MismatchError, SfumatoError, SpecError
from sfumato.secagg.agreement import members_from_bytes, view_of
from sfumato.secagg.coordinator import Coordinator, Phase, Refusal
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import (
    ACKNOWLEDGEMENT_BYTES,
    BOX_BYTES,
    KEYS_BYTES,
    SHARE_BYTES,
    MaskedRound,
)
from unit.secagg.stage import ROUND, STEPS, Stage, pieces

Chance = np.random.Generator

FEW, MANY = 1_000, 100_000
SMALL = replace(ROUND, cells=8)
ROUNDS = {
    "semi_honest": SMALL,
    "semi_malicious": replace(SMALL, mode="semi_malicious"),
    "prime": replace(SMALL, prime=True, modulus_bits=61),
}
LEAVE = {4: Phase.SHARE, 17: Phase.MASK}
PIECE = {
    Phase.ENROL: 32,
    Phase.SHARE: BOX_BYTES,
    Phase.MASK: 5,
    Phase.ACK: 32,
    Phase.UNMASK: SHARE_BYTES,
}
RUNS = [FEW, pytest.param(MANY, marks=pytest.mark.slow)]


# Mutations.


def flipped(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    made = bytearray(good)
    for _ in range(int(chance.integers(1, 4))):
        made[int(chance.integers(len(made)))] ^= 1 << int(chance.integers(8))
    return bytes(made)


def cut(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    size = piece if chance.random() < 0.5 else 1
    return good[: size * int(chance.integers(len(good) // size))]


def grown(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    if chance.random() < 0.5:
        return good + good[:piece]
    return good + chance.bytes(int(chance.integers(1, 2 * piece)))


def swapped(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    whole = [good[start : start + piece] for start in range(0, len(good), piece)]
    one, two = chance.integers(len(whole), size=2)
    whole[one], whole[two] = whole[two], whole[one]
    return b"".join(whole)


def spliced(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    """A piece of another member's message, or of another round's, in place of its own."""
    other = others[int(chance.integers(len(others)))]
    place = piece * int(chance.integers(-(-len(good) // piece)))
    return good[:place] + other[place : place + piece] + good[place + piece :]


def another(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    return others[int(chance.integers(len(others)))]


def made_up(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    return chance.bytes(len(good) if chance.random() < 0.7 else int(chance.integers(500)))


def blank(chance: Chance, good: bytes, piece: int, others: Sequence[bytes]) -> bytes:
    """A piece of zeros or of ones."""
    place = piece * int(chance.integers(-(-len(good) // piece)))
    fill = bytes([0, 255])[int(chance.integers(2)) :][:1]
    return good[:place] + fill * len(good[place : place + piece]) + good[place + piece :]


MUTATIONS = (flipped, cut, grown, swapped, spliced, another, made_up, blank)


# Rounds to break, run once each.


@dataclass
class Script:
    """An honest round: its books at the start of each phase, what was told, what was said."""

    round: MaskedRound
    stage: Stage
    books: dict[Phase, bytes] = field(default_factory=dict)
    devices: dict[Phase, list[str]] = field(default_factory=dict)
    told: dict[tuple[Phase, int], bytes] = field(default_factory=dict)
    signatures: bytes = b""
    total: Any = None


@cache
def script(name: str, seed: int = 0) -> Script:
    round = replace(ROUNDS[name], nonce=f"{seed:032x}")
    stage = Stage(round, leave=LEAVE, seed=seed)
    made = Script(round, stage)
    for phase in STEPS:
        if phase is not stage.collector.phase:
            continue
        made.books[phase] = stage.collector.to_bytes()
        made.devices[phase] = [device.to_json() for device in stage.devices]
        for member in stage.takes(phase):
            made.told[phase, member] = stage.told(phase, member)
        if phase is Phase.UNMASK:
            made.signatures = stage.collector.signatures()
        stage.run(phase)
    made.total = stage.collector.finish()
    assert np.array_equal(made.total, stage.expected())
    return made


# The collector's side.


def finished(made: Script, phase: Phase, member: int, message: bytes) -> str:
    """The round with this one message in it, all others being honest, to its end."""
    stage = Stage(made.round, leave=LEAVE)
    saved = made.devices[Phase.MASK if phase is Phase.SHARE else phase]
    stage.devices = [Participant.from_json(text) for text in saved]
    stage.tables, stage.collector = made.stage.tables, Coordinator.from_bytes(made.books[phase])
    collector = stage.collector
    complaints: list[str] = []
    assert collector.add(phase, member, message) is None
    for other in stage.takes(phase):
        if other != member:
            assert collector.add(phase, other, made.stage.heard[phase, other]) is None
    if phase is not Phase.UNMASK:
        collector.close()
    for later in STEPS[STEPS.index(phase) + 1 :]:
        if later is not collector.phase:
            continue
        for other in stage.takes(later):
            if later is not Phase.MASK and phase is not Phase.SHARE:
                said = made.stage.heard[later, other]  # does not depend on what was changed
            else:
                try:
                    said = stage.answer(later, other)
                except MismatchError as problem:
                    complaints.append(str(problem))
                    stage.leave[other] = later
                    continue
            assert collector.add(later, other, said) is None
        if later is not Phase.UNMASK:
            collector.close()
    assert all(f"box of member {member} " in complaint for complaint in complaints)
    if collector.phase is Phase.ABORTED:
        return "aborted"
    try:
        total = collector.finish()
    except ImpossibleError as problem:
        complaints.append(str(problem))
        total = None
    assert collector.liars <= {member}
    if total is None:
        assert "member" in complaints[-1]
        return "not opened"
    expected = stage.expected()
    if phase is Phase.MASK:  # a device may add what it likes, and nothing more
        heard = made.stage.heard
        before = stage.words_of_message(heard[Phase.MASK, member])
        after = stage.words_of_message(message)
        modulus = made.round.modulus
        changed = after.astype(np.int64) - before.astype(np.int64)
        assert np.array_equal(total, (expected + changed) % modulus)
        return "another input"
    assert np.array_equal(total, expected)
    return "exact"


def fuzz_collector(name: str, count: int, chance: Chance, *, most_finished: int) -> Counter[str]:
    """Changed messages to a collector that waits in some phase; what became of them."""
    made, other_round = script(name), script(name, 1)
    waiting = {phase: Coordinator.from_bytes(books) for phase, books in made.books.items()}
    heard = made.stage.heard
    messages = [*heard.items(), *other_round.stage.heard.items()]
    seen: Counter[str] = Counter()
    runs = 0
    for _ in range(count):
        phase = list(waiting)[int(chance.integers(len(waiting)))]
        members = [member for at, member in heard if at is phase]
        member = members[int(chance.integers(len(members)))]
        good = heard[phase, member]
        others = [text for (at, m), text in messages if at is phase and text != good]
        mutation = MUTATIONS[int(chance.integers(len(MUTATIONS)))]
        message = mutation(chance, good, PIECE[phase], others)
        sender, at = member, phase
        if chance.random() < 0.05:  # by somebody else, or at another time
            sender = int(chance.integers(-2, 30))
            at = list(Phase)[int(chance.integers(len(Phase)))]
        collector = waiting[phase]
        refusal = collector.add(at, sender, message)
        if refusal is not None:
            assert refusal in Refusal
            seen[f"{phase} {refusal}"] += 1
            if refusal is Refusal.FALSE:  # which is noted
                assert collector.liars == {sender}
                collector.liars.clear()
            if chance.random() < 0.2:  # it leaves no other trace
                assert collector.to_bytes() == made.books[phase]
            continue
        if at is not phase or message == heard.get((phase, sender)):
            seen["said before"] += 1
        else:
            assert phase not in (Phase.ENROL, Phase.ACK), "signed: nothing else can be taken"
            seen[f"{phase} taken"] += 1
            if runs < most_finished:
                runs += 1
                seen[f"{phase} {finished(made, phase, sender, message)}"] += 1
        waiting[phase] = Coordinator.from_bytes(made.books[phase])
    for phase, collector in waiting.items():
        assert collector.to_bytes() == made.books[phase]
    return seen


@pytest.mark.parametrize("count", RUNS)
def test_no_message_makes_a_collector_fall_over_or_add_wrongly(count: int) -> None:
    """Refused without a trace; or taken, and then the sum is exact, or there is none."""
    chance = np.random.default_rng([SEED, count])
    seen: Counter[str] = Counter()
    for name in ROUNDS:
        seen += fuzz_collector(name, count // 3, chance, most_finished=min(count // 90, 600))
    assert sum(seen[f"{phase} taken"] for phase in Phase) > count / 20
    for refusal in (Refusal.MALFORMED, Refusal.UNSIGNED, Refusal.UNKNOWN, Refusal.LATE):
        assert any(key.endswith(refusal) for key in seen), seen
    for outcome in ("exact", "aborted", "another input"):
        assert any(key.endswith(outcome) for key in seen), seen


# The device's side.


def steps(device: Participant, told: bytes, signatures: bytes, stage: Stage) -> dict[Phase, Any]:
    table = stage.tables[device.member]
    return {
        Phase.SHARE: lambda: device.share(told),
        Phase.MASK: lambda: device.mask(told, table),
        Phase.ACK: lambda: device.acknowledge(told),
        Phase.UNMASK: lambda: device.unmask(told, signatures),
    }


def assert_sound(
    device: Participant, phase: Phase, answer: bytes, told: bytes, good: bytes
) -> None:
    """An answer to a changed message that was not refused gives nothing away."""
    if phase is Phase.SHARE:
        assert told == good, "who enrolled, the root and the keys are bound together"
        assert len(answer) == BOX_BYTES * len(device.neighbours)
    elif phase is Phase.MASK:  # boxes in any order; who else shared may be a lie
        first, size = -(-device.round.cohort // 8), 4 + BOX_BYTES
        boxes = {good[start : start + size] for start in range(first, len(good), size)}
        given = [told[start : start + size] for start in range(first, len(told), size)]
        assert set(given) <= boxes
        assert len(set(given)) == len(given) == len(device.neighbour_shares)
        shared, really = (members_from_bytes(text[:first], 24) for text in (told, good))
        assert device.neighbour_shares.keys() == shared & device.neighbours.keys()
        assert len(shared) >= device.round.least_survivors
        known = view_of(device.round, device.roster, device.root, device.enrolled, really)
        assert (device.view == known) == (shared == really), "who is lied to masks with nobody"
    elif phase is Phase.UNMASK:
        alive = members_from_bytes(device.survivors, device.round.cohort)
        assert len(answer) == SHARE_BYTES * len(device.neighbour_shares)
        for owner, share in pieces(answer, device.neighbour_shares).items():
            both = device.neighbour_shares[owner]
            assert share == (both[:SHARE_BYTES] if owner in alive else both[SHARE_BYTES:])
            assert (both[:SHARE_BYTES] in answer) != (both[SHARE_BYTES:] in answer)
        assert len(alive) >= device.round.least_survivors
        assert device.member in alive


def fuzz_device(name: str, count: int, chance: Chance) -> Counter[str]:
    made, other_round = script(name), script(name, 1)
    told_all = [*made.told.items(), *other_round.told.items()]
    asked = [(phase, member) for phase, member in made.told if phase is not Phase.ENROL]
    seen: Counter[str] = Counter()
    awake: dict[tuple[Phase, int], Participant] = {}
    for _ in range(count):
        phase, member = asked[int(chance.integers(len(asked)))]
        saved = made.devices[phase][member]
        device = awake.setdefault((phase, member), Participant.from_json(saved))
        good, signatures = made.told[phase, member], made.signatures
        piece = {Phase.SHARE: KEYS_BYTES, Phase.MASK: 4 + BOX_BYTES}.get(phase, 1)
        mutation = MUTATIONS[int(chance.integers(len(MUTATIONS)))]
        told = good
        if phase is Phase.UNMASK and signatures and chance.random() < 0.7:
            signatures = mutation(
                chance, signatures, ACKNOWLEDGEMENT_BYTES, [other_round.signatures]
            )
        else:
            others = [text for (at, _), text in told_all if at is phase and text != good]
            told = mutation(chance, good, piece, others or [chance.bytes(len(good))])
        try:
            answer = steps(device, told, signatures, made.stage)[phase]()
        except SfumatoError as problem:
            seen[f"{phase} {type(problem).__name__}"] += 1
            if chance.random() < 0.2:
                assert device.to_json() == saved
            continue
        seen[f"{phase} answered"] += 1
        assert_sound(device, phase, answer, told, good)
        del awake[phase, member]
    for (at, member), device in awake.items():
        assert device.to_json() == made.devices[at][member]
    return seen


@pytest.mark.parametrize("count", RUNS)
def test_no_message_makes_a_device_fall_over_or_say_too_much(count: int) -> None:
    """Refused with an error of ours and without a trace; or answered, with one share a secret."""
    chance = np.random.default_rng([SEED, count, 1])
    seen: Counter[str] = Counter()
    for name in ROUNDS:
        seen += fuzz_device(name, count // 3, chance)
    assert all(seen[f"{phase} MismatchError"] for phase in STEPS[1:]), seen
    assert all(seen[f"{phase} answered"] for phase in STEPS[2:]), seen


def test_steps_out_of_order_are_refused_and_change_nothing() -> None:
    made = script("semi_malicious")
    for phase in (Phase.SHARE, Phase.MASK):
        for step in STEPS[STEPS.index(phase) + 1 :]:
            device = Participant.from_json(made.devices[phase][6])
            with pytest.raises(SfumatoError):
                steps(device, made.told[step, 6], made.signatures, made.stage)[step]()
            assert device.to_json() == made.devices[phase][6]


# Saved states that were damaged.

STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**70,
    0.5,
    "",
    "zz",
    "00",
    [],
    [None],
    ["00"],
    {},
    {"0": "00"},
)


def damaged_json(chance: Chance, text: str) -> str:
    """Another value, a missing or an unknown name, or text that is cut, flipped or made up."""
    data = json.loads(text)
    names = sorted(data)
    name = names[int(chance.integers(len(names)))]
    way = int(chance.integers(7))
    if way == 0:
        del data[name]
    elif way == 1:
        data[name] = STRANGE[int(chance.integers(len(STRANGE)))]
    elif way == 2 and isinstance(data[name], list | dict | str) and data[name]:
        inner = data[name]
        strange = STRANGE[int(chance.integers(len(STRANGE)))]
        if isinstance(inner, str):
            data[name] = inner[:-1]
        elif isinstance(inner, list):
            inner[int(chance.integers(len(inner)))] = strange
        else:
            inner[sorted(inner)[int(chance.integers(len(inner)))]] = strange
    elif way == 3:
        other = names[int(chance.integers(len(names)))]
        data[name], data[other] = data[other], data[name]
    elif way == 4:
        return text[: int(chance.integers(len(text)))]
    elif way == 5:
        made = bytearray(text.encode())
        made[int(chance.integers(len(made)))] = int(chance.integers(32, 127))
        return made.decode()
    else:
        data["unknown"] = 1
    return json.dumps(data)


def damaged_books(chance: Chance, books: bytes) -> bytes:
    head, _, rest = books.partition(b"\n")
    way = int(chance.integers(5))
    if way == 0:
        return books[: int(chance.integers(len(books)))]
    if way == 1:
        return books + chance.bytes(int(chance.integers(1, 9)))
    if way == 2:
        return chance.bytes(int(chance.integers(200)))
    return damaged_json(chance, head.decode()).encode() + b"\n" + rest


def wrong_errors(count: int, load: Callable[[], object]) -> dict[str, str]:
    """Errors other than SpecError and MismatchError that `load` raises, with one message each."""
    found: dict[str, str] = {}
    for _ in range(count):
        try:
            load()
        except (SpecError, MismatchError):
            continue
        except Exception as problem:
            found.setdefault(type(problem).__name__, str(problem)[:80])
    return found


def test_a_damaged_state_of_a_device_is_refused_in_our_words() -> None:
    chance = np.random.default_rng([SEED, 5])
    made = script("semi_malicious")
    texts = [texts[6] for texts in made.devices.values()]

    def load() -> None:
        Participant.from_json(damaged_json(chance, texts[int(chance.integers(len(texts)))]))

    assert wrong_errors(FEW // 2, load) == {}


def test_a_state_of_a_collector_without_keys_is_refused_in_our_words() -> None:
    """Found by what follows: no ring has no members."""
    head, _, rest = script("semi_malicious").books[Phase.SHARE].partition(b"\n")
    with pytest.raises(SpecError, match="or it is damaged"):
        Coordinator.from_bytes(json.dumps(json.loads(head) | {"keys": []}).encode() + b"\n" + rest)


def test_a_damaged_state_of_a_collector_is_refused_in_our_words() -> None:
    chance = np.random.default_rng([SEED, 6])
    books = list(script("semi_malicious").books.values())

    def load() -> None:
        Coordinator.from_bytes(damaged_books(chance, books[int(chance.integers(len(books)))]))

    assert wrong_errors(FEW // 2, load) == {}

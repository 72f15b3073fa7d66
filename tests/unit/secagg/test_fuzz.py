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
    NEIGHBOUR_BYTES,
    SHARE_BYTES,
    MaskedRound,
)
from unit.secagg.stage import ROUND, STEPS, Stage, pieces

Chance = np.random.Generator

FEW, MANY = 3_000, 100_000  # of the masking messages, one in a few hundred is answered
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
    data = bytearray(good)
    for _ in range(int(chance.integers(1, 4))):
        data[int(chance.integers(len(data)))] ^= 1 << int(chance.integers(8))
    return bytes(data)


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
    """An honest round: the collector's state at the start of each phase, its messages and the
    answers."""

    round: MaskedRound
    stage: Stage
    states: dict[Phase, bytes] = field(default_factory=dict)
    devices: dict[Phase, list[str]] = field(default_factory=dict)
    messages: dict[tuple[Phase, int], bytes] = field(default_factory=dict)
    signatures: bytes = b""
    total: Any = None


@cache
def script(name: str, seed: int = 0) -> Script:
    round = replace(ROUNDS[name], nonce=f"{seed:032x}")
    stage = Stage(round, leave=LEAVE, seed=seed)
    honest = Script(round, stage)
    for phase in STEPS:
        if phase is not stage.collector.phase:
            continue
        honest.states[phase] = stage.collector.to_bytes()
        honest.devices[phase] = [device.to_json() for device in stage.devices]
        for member in stage.takes(phase):
            honest.messages[phase, member] = stage.message_for(phase, member)
        if phase is Phase.UNMASK:
            honest.signatures = stage.collector.signatures()
        stage.run(phase)
    honest.total = stage.collector.finish()
    assert np.array_equal(honest.total, stage.expected())
    return honest


# The collector's side.


def finished(honest: Script, phase: Phase, member: int, message: bytes) -> str:
    """The round with this one message in it, all others being honest, to its end."""
    stage = Stage(honest.round, leave=LEAVE)
    saved = honest.devices[Phase.MASK if phase is Phase.SHARE else phase]
    stage.devices = [Participant.from_json(text) for text in saved]
    stage.tables, stage.collector = (
        honest.stage.tables,
        Coordinator.from_bytes(honest.states[phase]),
    )
    collector = stage.collector
    complaints: list[str] = []
    assert collector.add(phase, member, message) is None
    for other in stage.takes(phase):
        if other != member:
            assert collector.add(phase, other, honest.stage.answers[phase, other]) is None
    if phase is not Phase.UNMASK:
        collector.close()
    for later in STEPS[STEPS.index(phase) + 1 :]:
        if later is not collector.phase:
            continue
        for other in stage.takes(later):
            if later is not Phase.MASK and phase is not Phase.SHARE:
                answer = honest.stage.answers[later, other]  # does not depend on what was changed
            else:
                try:
                    answer = stage.answer(later, other)
                except MismatchError as problem:
                    complaints.append(str(problem))
                    stage.leave[other] = later
                    continue
            assert collector.add(later, other, answer) is None
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
        answers = honest.stage.answers
        before = stage.words_of_message(answers[Phase.MASK, member])
        after = stage.words_of_message(message)
        modulus = honest.round.modulus
        changed = after.astype(np.int64) - before.astype(np.int64)
        assert np.array_equal(total, (expected + changed) % modulus)
        return "another input"
    assert np.array_equal(total, expected)
    return "exact"


def fuzz_collector(name: str, count: int, chance: Chance, *, most_finished: int) -> Counter[str]:
    """Changed messages to a collector that waits in some phase; what became of them."""
    honest, other_round = script(name), script(name, 1)
    waiting = {phase: Coordinator.from_bytes(states) for phase, states in honest.states.items()}
    answers = honest.stage.answers
    messages = [*answers.items(), *other_round.stage.answers.items()]
    outcomes: Counter[str] = Counter()
    runs = 0
    for _ in range(count):
        phase = list(waiting)[int(chance.integers(len(waiting)))]
        members = [member for at, member in answers if at is phase]
        member = members[int(chance.integers(len(members)))]
        good = answers[phase, member]
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
            outcomes[f"{phase} {refusal}"] += 1
            if refusal is Refusal.FALSE:  # recorded
                assert collector.liars == {sender}
                collector.liars.clear()
            if chance.random() < 0.2:  # it leaves no other trace
                assert collector.to_bytes() == honest.states[phase]
            continue
        if at is not phase or message == answers.get((phase, sender)):
            outcomes["said before"] += 1
        else:
            assert phase not in (Phase.ENROL, Phase.ACK), "signed: nothing else can be taken"
            outcomes[f"{phase} taken"] += 1
            if runs < most_finished:
                runs += 1
                outcomes[f"{phase} {finished(honest, phase, sender, message)}"] += 1
        waiting[phase] = Coordinator.from_bytes(honest.states[phase])
    for phase, collector in waiting.items():
        assert collector.to_bytes() == honest.states[phase]
    return outcomes


@pytest.mark.parametrize("count", RUNS)
def test_no_message_makes_a_collector_fall_over_or_add_wrongly(count: int) -> None:
    """Refused without a trace; or taken, and then the sum is exact, or there is none."""
    chance = np.random.default_rng([SEED, count])
    outcomes: Counter[str] = Counter()
    for name in ROUNDS:
        outcomes += fuzz_collector(name, count // 3, chance, most_finished=min(count // 90, 600))
    assert sum(outcomes[f"{phase} taken"] for phase in Phase) > count / 20
    for refusal in (Refusal.MALFORMED, Refusal.UNSIGNED, Refusal.UNKNOWN, Refusal.LATE):
        assert any(key.endswith(refusal) for key in outcomes), outcomes
    for outcome in ("exact", "aborted", "another input"):
        assert any(key.endswith(outcome) for key in outcomes), outcomes


# The device's side.


def steps(device: Participant, message: bytes, signatures: bytes, stage: Stage) -> dict[Phase, Any]:
    table = stage.tables[device.member]
    return {
        Phase.SHARE: lambda: device.share(message),
        Phase.MASK: lambda: device.mask(message, table),
        Phase.ACK: lambda: device.acknowledge(message),
        Phase.UNMASK: lambda: device.unmask(message, signatures),
    }


def assert_sound(
    device: Participant, phase: Phase, answer: bytes, message: bytes, good: bytes
) -> None:
    """An answer to a changed message that was not refused gives nothing away."""
    if phase is Phase.SHARE:
        assert message == good, "who enrolled, the root and the keys are bound together"
        assert len(answer) == BOX_BYTES * len(device.neighbours)
    elif phase is Phase.MASK:  # boxes in any order; the set of others that shared may be false
        first, size = -(-device.round.cohort // 8), 4 + BOX_BYTES
        boxes = {good[start : start + size] for start in range(first, len(good), size)}
        whole_boxes = [message[start : start + size] for start in range(first, len(message), size)]
        assert set(whole_boxes) <= boxes
        assert len(set(whole_boxes)) == len(whole_boxes) == len(device.neighbour_shares)
        shared, really = (members_from_bytes(text[:first], 24) for text in (message, good))
        assert device.neighbour_shares.keys() == shared & device.neighbours.keys()
        assert len(shared) >= device.round.least_survivors
        view = view_of(device.round, device.roster, device.root, device.enrolled, really)
        assert (device.view == view) == (shared == really), "who is lied to masks with nobody"
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
    honest, other_round = script(name), script(name, 1)
    all_messages = [*honest.messages.items(), *other_round.messages.items()]
    places = [(phase, member) for phase, member in honest.messages if phase is not Phase.ENROL]
    outcomes: Counter[str] = Counter()
    awake: dict[tuple[Phase, int], Participant] = {}
    for _ in range(count):
        phase, member = places[int(chance.integers(len(places)))]
        saved = honest.devices[phase][member]
        device = awake.setdefault((phase, member), Participant.from_json(saved))
        good, signatures = honest.messages[phase, member], honest.signatures
        piece = {Phase.SHARE: NEIGHBOUR_BYTES, Phase.MASK: 4 + BOX_BYTES}.get(phase, 1)
        mutation = MUTATIONS[int(chance.integers(len(MUTATIONS)))]
        message = good
        if phase is Phase.UNMASK and signatures and chance.random() < 0.7:
            signatures = mutation(
                chance, signatures, ACKNOWLEDGEMENT_BYTES, [other_round.signatures]
            )
        else:
            others = [text for (at, _), text in all_messages if at is phase and text != good]
            message = mutation(chance, good, piece, others or [chance.bytes(len(good))])
        try:
            answer = steps(device, message, signatures, honest.stage)[phase]()
        except SfumatoError as problem:
            outcomes[f"{phase} {type(problem).__name__}"] += 1
            if chance.random() < 0.2:
                assert device.to_json() == saved
            continue
        outcomes[f"{phase} answered"] += 1
        assert_sound(device, phase, answer, message, good)
        del awake[phase, member]
    for (at, member), device in awake.items():
        assert device.to_json() == honest.devices[at][member]
    return outcomes


@pytest.mark.parametrize("count", RUNS)
def test_no_message_makes_a_device_fall_over_or_say_too_much(count: int) -> None:
    """Refused with an error of ours and without a trace; or answered, with one share a secret."""
    chance = np.random.default_rng([SEED, count, 1])
    outcomes: Counter[str] = Counter()
    for name in ROUNDS:
        outcomes += fuzz_device(name, count // 3, chance)
    assert all(outcomes[f"{phase} MismatchError"] for phase in STEPS[1:]), outcomes
    assert all(outcomes[f"{phase} answered"] for phase in STEPS[2:]), outcomes


def test_steps_out_of_order_are_refused_and_change_nothing() -> None:
    honest = script("semi_malicious")
    for phase in (Phase.SHARE, Phase.MASK):
        for step in STEPS[STEPS.index(phase) + 1 :]:
            device = Participant.from_json(honest.devices[phase][6])
            with pytest.raises(SfumatoError):
                steps(device, honest.messages[step, 6], honest.signatures, honest.stage)[step]()
            assert device.to_json() == honest.devices[phase][6]


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
        damaged = bytearray(text.encode())
        damaged[int(chance.integers(len(damaged)))] = int(chance.integers(32, 127))
        return damaged.decode()
    else:
        data["unknown"] = 1
    return json.dumps(data)


def damaged_state(chance: Chance, states: bytes) -> bytes:
    head, _, rest = states.partition(b"\n")
    way = int(chance.integers(5))
    if way == 0:
        return states[: int(chance.integers(len(states)))]
    if way == 1:
        return states + chance.bytes(int(chance.integers(1, 9)))
    if way == 2:
        return chance.bytes(int(chance.integers(200)))
    return damaged_json(chance, head.decode()).encode() + b"\n" + rest


def wrong_errors(count: int, load: Callable[[], object]) -> dict[str, str]:
    """Errors other than SpecError and MismatchError that `load` raises, with one message each."""
    errors: dict[str, str] = {}
    for _ in range(count):
        try:
            load()
        except (SpecError, MismatchError):
            continue
        except Exception as problem:
            errors.setdefault(type(problem).__name__, str(problem)[:80])
    return errors


def test_a_damaged_state_of_a_device_is_refused_in_our_words() -> None:
    chance = np.random.default_rng([SEED, 5])
    honest = script("semi_malicious")
    texts = [texts[6] for texts in honest.devices.values()]

    def load() -> None:
        Participant.from_json(damaged_json(chance, texts[int(chance.integers(len(texts)))]))

    assert wrong_errors(FEW // 2, load) == {}


def test_a_state_of_a_collector_without_keys_is_refused_in_our_words() -> None:
    """Found by what follows: no ring has no members."""
    head, _, rest = script("semi_malicious").states[Phase.SHARE].partition(b"\n")
    with pytest.raises(SpecError, match="or it is damaged"):
        Coordinator.from_bytes(json.dumps(json.loads(head) | {"keys": []}).encode() + b"\n" + rest)


def test_a_damaged_state_of_a_collector_is_refused_in_our_words() -> None:
    chance = np.random.default_rng([SEED, 6])
    states = list(script("semi_malicious").states.values())

    def load() -> None:
        Coordinator.from_bytes(damaged_state(chance, states[int(chance.integers(len(states)))]))

    assert wrong_errors(FEW // 2, load) == {}

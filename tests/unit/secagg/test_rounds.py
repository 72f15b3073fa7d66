"""Whole rounds: exact sums for what the threshold admits, and nothing but an error for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import SEED
from marks import quick
from sfumato.errors import ImpossibleError, MismatchError, SpecError
from sfumato.kernels.packed import pack_words, unpack_words
from sfumato.privacy import SeededRng
from sfumato.secagg import agreement, rehearsal
from sfumato.secagg.agreement import (
    Keys,
    members_from_bytes,
    members_to_bytes,
)
from sfumato.secagg.coordinator import Coordinator, Phase, Refusal
from sfumato.secagg.merkle import Tree, most_proof_bytes
from sfumato.secagg.participant import Participant
from sfumato.secagg.round import MaskedRound

I64 = npt.NDArray[np.int64]

ROUND = MaskedRound(
    task="ab" * 32,
    cells=50,
    modulus_bits=20,
    cohort=24,
    corrupt=0.1,
    dropout=0.25,
    mode="semi_honest",
    nonce="cd" * 16,
)
IDENTITIES = [Ed25519PrivateKey.from_private_bytes(bytes([member]) * 32) for member in range(64)]


def roster(cohort: int) -> tuple[bytes, ...]:
    return tuple(key.public_key().public_bytes_raw() for key in IDENTITIES[:cohort])


def acknowledgements(signatures: dict[int, bytes]) -> bytes:
    """Signatures as sent to a device of a cohort of 40."""
    listed = roster(40)
    signed = [m.to_bytes(4, "little") + listed[m] + text for m, text in signatures.items()]
    return b"".join(signed) + Tree(listed).proof(signatures)


def committee(fleet: Fleet) -> frozenset[int]:
    collector = fleet.collector
    return agreement.committee_of(
        fleet.round, collector.roster_root, collector.root, collector.keys.keys()
    )


def joined(round: MaskedRound, member: int, seed: int = 0) -> Participant:
    identity = IDENTITIES[member].private_bytes_raw()
    rng = SeededRng(SEED, seed, member)
    return Participant.join(round, member, identity, Tree(roster(round.cohort)).root, rng=rng)


class Fleet:
    """A round in one process; `leave` says at which phase members fall silent."""

    def __init__(
        self,
        round: MaskedRound = ROUND,
        leave: dict[int, Phase] | None = None,
        seed: int = 0,
        mortal: bool = False,
    ) -> None:
        self.round, self.leave, self.mortal = round, leave or {}, mortal
        self.devices = [joined(round, member, seed) for member in range(round.cohort)]
        chance = np.random.default_rng([SEED, seed])
        limit = min(1000, 2 ** (round.modulus_bits - 1))
        self.tables = chance.integers(-limit, limit, (round.cohort, round.cells))
        self.collector = Coordinator(round, roster(round.cohort))

    def stays(self, member: int, phase: Phase) -> bool:
        order = list(Phase)
        return member not in self.leave or order.index(phase) < order.index(self.leave[member])

    def send(self, phase: Phase, message: Callable[[Participant], bytes]) -> None:
        takes = {
            Phase.ENROL: set(range(self.round.cohort)),
            Phase.SHARE: set(self.collector.keys),
            Phase.MASK: set(self.collector.boxes),
            Phase.ACK: self.collector.survivors,
            Phase.UNMASK: self.collector.survivors,
        }[phase]
        for member in sorted(takes):
            if self.stays(member, phase):
                answer = message(self.devices[member])
                assert self.collector.add(phase, member, answer) is None
                self.die()

    def close(self) -> None:
        self.collector.close()
        self.die()

    def die(self) -> None:
        """Both sides are saved, forgotten and loaded again."""
        if not self.mortal:
            return
        saved = self.collector.to_bytes()
        self.collector = Coordinator.from_bytes(saved)
        assert self.collector.to_bytes() == saved
        self.devices = [Participant.from_json(device.to_json()) for device in self.devices]

    def until(self, phase: Phase) -> Coordinator:
        """Run up to the beginning of a phase, or to the end of the round if it aborts."""
        steps: list[tuple[Phase, Callable[[Participant], bytes]]] = [
            (Phase.ENROL, lambda device: device.enrol()),
            (Phase.SHARE, lambda device: device.share(self.collector.roster_for(device.member))),
            (
                Phase.MASK,
                lambda device: device.mask(
                    self.collector.boxes_for(device.member), self.tables[device.member]
                ),
            ),
        ]
        for step, message in steps:
            if self.collector.phase in (phase, Phase.ABORTED):
                break
            self.send(step, message)
            self.close()
        return self.collector

    def unmask(self) -> None:
        survivors = self.collector.survivor_set()
        if self.collector.phase is Phase.ACK:
            self.send(Phase.ACK, lambda device: device.acknowledge(survivors))
            self.close()
        self.send(
            Phase.UNMASK,
            lambda device: device.unmask(survivors, self.collector.signatures()),
        )

    def expected(self) -> I64:
        members = sorted(self.collector.survivors)
        return np.asarray(self.tables[members].sum(axis=0) % 2**self.round.modulus_bits)


@given(
    st.dictionaries(
        st.integers(0, 23),
        st.sampled_from([Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.UNMASK]),
        max_size=10,
    ),
    st.integers(0, 2**20),
)
@settings(max_examples=25, deadline=None)
def test_a_sum_is_exact_or_there_is_none(leave: dict[int, Phase], seed: int) -> None:
    """Whoever falls silent, whenever: the sum over the survivors, or an error."""
    fleet = Fleet(leave=leave, seed=seed)
    collector = fleet.until(Phase.UNMASK)
    dropped = sum(phase is not Phase.UNMASK for phase in leave.values())
    if ROUND.cohort - dropped < ROUND.least_survivors:
        assert collector.phase is Phase.ABORTED
        return
    fleet.unmask()
    try:
        total = collector.finish()
    except ImpossibleError:
        assert leave  # too few shares: some neighbour of somebody is gone
        assert repr(collector).startswith("Coordinator(aborted")
        return
    assert np.array_equal(total, fleet.expected())
    assert repr(collector).startswith("Coordinator(done")


@pytest.mark.parametrize("mode", ["semi_honest", "semi_malicious"])
@pytest.mark.parametrize("bits", quick([2, 8, 13, 32, 33, 64], 2, 33, 64))
@pytest.mark.parametrize("cohort", [5, 40])
def test_sums_are_exact_for_every_modulus_and_mode(mode: Any, bits: int, cohort: int) -> None:
    round = replace(ROUND, mode=mode, modulus_bits=bits, cohort=cohort, dropout=0.2, corrupt=0.05)
    fleet = Fleet(round, leave={1: Phase.MASK})
    fleet.until(Phase.UNMASK)
    fleet.unmask()
    total = fleet.collector.finish()
    expected = fleet.tables[sorted(fleet.collector.survivors)].sum(axis=0)
    modulus = 2**bits
    assert [int(value) % modulus for value in total] == [int(v) % modulus for v in expected]


def test_a_masked_table_looks_like_nothing() -> None:
    """Of zeros: 50,000 words of 20 bits, each bit 1 in half of them, within 5 deviations each."""
    fleet = Fleet(replace(ROUND, cells=50_000))
    fleet.tables[:] = 0
    fleet.until(Phase.MASK)
    device = fleet.devices[3]
    message = device.mask(fleet.collector.boxes_for(3), fleet.tables[3])
    words = unpack_words(message, 50_000, 20, np.uint32)
    for bit in range(20):
        ones = int((words >> np.uint32(bit) & np.uint32(1)).sum())
        assert abs(ones - 25_000) < 5 * (50_000**0.5) / 2


def test_a_device_saved_and_loaded_at_every_step_gives_the_same_bytes() -> None:
    fleet, again = Fleet(), Fleet()
    for each in (fleet, again):
        if each is again:
            each.devices = [Participant.from_json(device.to_json()) for device in each.devices]
        each.until(Phase.MASK)
    again.devices = [Participant.from_json(device.to_json()) for device in again.devices]
    for member in range(24):
        boxes = fleet.collector.boxes_for(member)
        assert boxes == again.collector.boxes_for(member)
        first = fleet.devices[member].mask(boxes, fleet.tables[member])
        assert first == again.devices[member].mask(boxes, fleet.tables[member])
        assert first == fleet.devices[member].mask(boxes, fleet.tables[member])  # asked again


def unmasking() -> tuple[Fleet, Participant, bytes]:
    fleet = Fleet(leave={1: Phase.MASK, 2: Phase.MASK})
    fleet.until(Phase.UNMASK)
    return fleet, fleet.devices[5], fleet.collector.survivor_set()


def test_a_device_answers_one_set_of_survivors_for_ever() -> None:
    """A neighbour's seed from one answer and its key from another would open its table."""
    fleet, device, survivors = unmasking()
    device.unmask(survivors)
    other = members_to_bytes(fleet.collector.survivors - {7}, 24)
    for answering in (device, Participant.from_json(device.to_json())):
        with pytest.raises(MismatchError, match="another set of survivors"):
            answering.unmask(other)
        assert answering.unmask(survivors) == device.unmask(survivors)


def test_a_set_of_survivors_below_the_floor_or_not_enrolled_is_refused() -> None:
    fleet, device, _ = unmasking()
    few = members_to_bytes(set(sorted(fleet.collector.survivors)[:17]), 24)
    with pytest.raises(MismatchError, match="at least 18 devices"):
        device.unmask(few)
    with pytest.raises(MismatchError, match="more than the cohort"):
        members_from_bytes(b"\xff\xff\xff\x02", 25)
    absent = Fleet(leave={9: Phase.ENROL})
    absent.until(Phase.UNMASK)
    claimed = members_to_bytes(absent.collector.survivors | {9}, 24)
    with pytest.raises(MismatchError, match="must have shared"):
        absent.devices[5].unmask(claimed)


def test_a_device_that_is_called_dropped_helps_to_open_nobody() -> None:
    """The attack: all neighbours of one device are reported as dropped out. They are alive; if they
    gave shares of its seed while others gave their mask keys, its table would be exposed."""
    fleet, device, _ = unmasking()
    without = members_to_bytes(fleet.collector.survivors - {5}, 24)
    with pytest.raises(MismatchError, match="must be among the survivors"):
        device.unmask(without)
    with pytest.raises(MismatchError, match="must be among the survivors"):
        device.acknowledge(without)


def test_a_box_cannot_be_kept_back() -> None:
    """The attack: a sum over fewer devices than the floor, which has noise for more. A device with
    a wrong set of members that shared has other masks, which do not cancel."""
    fleet = Fleet()
    collector = fleet.until(Phase.MASK)
    device = fleet.devices[5]
    boxes = collector.boxes_for(5)
    with pytest.raises(MismatchError, match="a box of every neighbour that shared"):
        device.mask(boxes[:3] + boxes[3 + 104 :], fleet.tables[5])  # all but the first
    absent = members_to_bytes(set(range(24)) - {5}, 24)
    with pytest.raises(MismatchError, match="this device among them"):
        device.mask(absent + boxes[3:], fleet.tables[5])
    each = [boxes[start : start + 104] for start in range(3, len(boxes), 104)]
    few = b"".join(box for box in each if int.from_bytes(box[:4], "little") < 17)
    with pytest.raises(MismatchError, match="at least 18 devices must have shared; got 17"):
        device.mask(members_to_bytes(set(range(17)), 24) + few, fleet.tables[5])
    missing = int.from_bytes(boxes[3:7], "little")
    members = members_to_bytes(set(range(24)) - {missing}, 24)
    fleet.tables[:] = 0
    message = device.mask(members + boxes[3 + 104 :], fleet.tables[5])
    with pytest.raises(MismatchError, match="must have shared"):
        device.unmask(members_to_bytes(set(range(24)), 24))
    for other in fleet.devices:
        if other is not device:
            mine = other.mask(collector.boxes_for(other.member), fleet.tables[other.member])
            assert collector.add(Phase.MASK, other.member, mine) is None
    assert collector.add(Phase.MASK, 5, message) is None
    collector.close()
    everybody = collector.survivor_set()
    for other in fleet.devices:
        if other is not device:
            assert collector.add(Phase.UNMASK, other.member, other.unmask(everybody)) is None
    assert np.count_nonzero(collector.finish()) > 40  # of 50 cells that would be zero


def test_all_corrupt_devices_may_be_among_those_that_enrolled() -> None:
    """Two of 24 are corrupt; if 18 enrol, a threshold for a tenth of 18 would be in their reach."""
    for enrolled in range(18, 25):
        assert ROUND.parameters(enrolled).threshold >= 3


def test_a_copied_or_low_order_key_does_not_enrol() -> None:
    fleet = Fleet()
    fleet.collector.add(Phase.ENROL, 4, fleet.devices[4].enrol())
    copy = joined(ROUND, 5)
    copy.mask_key = fleet.devices[4].mask_key
    assert fleet.collector.add(Phase.ENROL, 5, copy.enrol()) is Refusal.COPIED
    keys = Keys.from_bytes(fleet.devices[6].enrol())
    for low in (bytes(32), b"\x01" + bytes(31)):
        changed_keys = replace(keys, mask=low)
        signature = IDENTITIES[6].sign(changed_keys.signed_text(ROUND.salt))
        message = replace(changed_keys, signature=signature).to_bytes()
        assert fleet.collector.add(Phase.ENROL, 6, message) is Refusal.MALFORMED


@pytest.mark.parametrize("mode", ["semi_honest", "semi_malicious"])
@pytest.mark.parametrize("prime", quick([False, True], False))
def test_a_rehearsal_adds_exactly_and_bills_every_byte(mode: Any, prime: bool) -> None:
    round = replace(
        ROUND, mode=mode, cohort=40, dropout=0.2, prime=prime, modulus_bits=61 if prime else 20
    )
    tables = np.random.default_rng(SEED).integers(-500, 500, (40, round.cells))
    leaving = {1: Phase.ENROL, 2: Phase.SHARE, 3: Phase.MASK, 4: Phase.UNMASK}
    outcome = rehearsal.run(
        round, lambda member: tables[member], leaving=leaving, rng=SeededRng(SEED)
    )
    stayed = [member for member in range(40) if member not in (1, 2, 3)]
    assert outcome.survivors == len(stayed)
    assert np.array_equal(outcome.total, tables[stayed].sum(axis=0) % round.modulus)
    assert not outcome.bytes_up[1]
    assert not outcome.bytes_down[1]

    whole = rehearsal.run(round, lambda member: tables[member], rng=SeededRng(SEED))
    assert set(whole.bytes_up.tolist()) == {round.bytes_up(40)}
    degree, members = round.parameters(40).neighbours, 5
    proofs = most_proof_bytes(degree + 1, 40)  # these depend on the ring; the rest does not
    quorum = round.quorum(40)
    signed = quorum * (4 + 32 + 64)
    if signed:
        proofs += most_proof_bytes(quorum, 40)
    rest = 3 * members + 32 + degree * (32 + 164 + 4 + 100) + signed
    assert round.bytes_down(40) == rest + proofs
    assert rest < whole.bytes_down.min() <= whole.bytes_down.max() <= rest + proofs


@pytest.mark.parametrize(("mode", "most"), [("semi_honest", 3_200), ("semi_malicious", 9_000)])
def test_what_a_device_exchanges_grows_with_the_logarithm_but_for_three_bits_per_member(
    mode: Any, most: int
) -> None:
    """At most so many bytes for each doubling of the cohort, beside the table and the three sets.
    The limits are what was computed, rounded up. A key per member, as before, is above them."""
    for cohort in (10, 30, 100, 300, 1_000, 3_000, 10_000, 100_000, 1_000_000):
        round = replace(ROUND, mode=mode, cohort=cohort, corrupt=0.05, dropout=0.1)
        beside = round.bytes_up(cohort) - round.vector_bytes + round.bytes_down(cohort)
        beside -= 3 * -(-cohort // 8)
        assert beside <= most * math.log2(cohort)
        assert cohort < 10_000 or beside + 32 * cohort > most * math.log2(cohort)


def test_a_rehearsal_that_loses_too_many_says_so() -> None:
    leaving = dict.fromkeys(range(8), Phase.MASK)
    with pytest.raises(ImpossibleError, match="needs 18 devices to the end"):
        rehearsal.run(
            ROUND,
            lambda member: np.zeros(50, dtype=np.int64),
            leaving=leaving,
            rng=SeededRng(SEED),
        )


@pytest.mark.parametrize("mode", ["semi_honest", "semi_malicious"])
def test_both_sides_may_die_after_every_message(mode: Any) -> None:
    round = replace(ROUND, mode=mode)
    fleet = Fleet(round, leave={3: Phase.MASK, 9: Phase.UNMASK}, mortal=True)
    fleet.until(Phase.UNMASK)
    fleet.unmask()
    assert np.array_equal(fleet.collector.finish(), fleet.expected())
    fleet.die()
    assert fleet.collector.phase is Phase.DONE


def test_a_collector_that_forgot_some_tables_adds_them_once() -> None:
    """From an older copy: messages in it count, the others are asked for again."""
    fleet = Fleet()
    fleet.until(Phase.MASK)
    messages = [
        device.mask(fleet.collector.boxes_for(device.member), fleet.tables[device.member])
        for device in fleet.devices
    ]
    for member in range(10):
        fleet.collector.add(Phase.MASK, member, messages[member])
    old = fleet.collector.to_bytes()
    for member in range(10, 24):
        fleet.collector.add(Phase.MASK, member, messages[member])
    fleet.collector = Coordinator.from_bytes(old)
    for member in range(24):
        assert fleet.collector.add(Phase.MASK, member, messages[member]) is None
    fleet.collector.close()
    fleet.unmask()
    assert np.array_equal(fleet.collector.finish(), fleet.expected())


def test_without_a_quorum_of_signatures_a_semi_malicious_round_opens_nothing() -> None:
    round = replace(ROUND, mode="semi_malicious", cohort=40, dropout=0.1)
    fleet = Fleet(round)
    fleet.until(Phase.UNMASK)
    survivors = fleet.collector.survivor_set()
    device = fleet.devices[5]
    with pytest.raises(MismatchError, match="must have signed"):
        device.unmask(survivors)
    other = members_to_bytes(fleet.collector.survivors - {7}, 40)
    signers = sorted(committee(fleet) - {5, 7})[: round.quorum(40)]
    split = acknowledgements({m: fleet.devices[m].acknowledge(other) for m in signers})
    with pytest.raises(MismatchError, match="must have signed"):
        device.unmask(survivors, split)
    parameters = round.parameters(40)
    assert len(committee(fleet)) == parameters.neighbours
    assert 2 * round.quorum(40) > parameters.neighbours + 4  # corrupt ones among them, at most


def test_signatures_count_once_and_only_from_the_roster() -> None:
    round = replace(ROUND, mode="semi_malicious", cohort=40, dropout=0.1)
    fleet = Fleet(round)
    fleet.until(Phase.UNMASK)
    survivors = fleet.collector.survivor_set()
    quorum, device = round.quorum(40), fleet.devices[30]
    signers = sorted(committee(fleet))[:quorum]
    signatures = {m: fleet.devices[m].acknowledge(survivors) for m in signers}
    enough, end = acknowledgements(signatures), 100 * quorum
    fewer = acknowledgements({m: signatures[m] for m in signers[:-1]})
    repeated = enough[: end - 100] + enough[:100] + enough[end:]
    own = Ed25519PrivateKey.from_private_bytes(bytes(32))
    text = agreement.acknowledgement_text(round.salt, device.view, survivors)
    forged = own.public_key().public_bytes_raw() + own.sign(text)
    as_member = enough[: end - 96] + forged + enough[end:]
    (outsider, *_) = set(range(40)) - committee(fleet)
    outside = signatures | {outsider: fleet.devices[outsider].acknowledge(survivors)}
    del outside[signers[0]]
    stranger = enough[: end - 100] + (40).to_bytes(4, "little") + forged + enough[end:]
    changed = bytearray(enough)
    changed[end - 1] ^= 1  # of the last signature; all others are good
    for wrong, says in (
        (b"", "must have signed"),
        (fewer, "must"),
        (repeated, "different devices must have signed"),
        (as_member, "the roster must list"),
        (stranger, "must be in the committee"),
        (acknowledgements(outside), "must be in the committee"),
        (enough[: end - 1], "must have signed"),
        (bytes(changed), f"must have signed these survivors; got {quorum - 1}"),
        (enough[:-1], "the proof must have"),
        (enough + bytes(32), "the proof must have"),
    ):
        with pytest.raises(MismatchError, match=says):
            device.unmask(survivors, wrong)
    device.unmask(survivors, enough)


def test_dropouts_chosen_by_the_ring_are_refused() -> None:
    """The attack: the collector calls two runs of devices dropped, so that those between them mask
    with nobody else, and their sum can be separated from the rest."""
    round = replace(ROUND, mode="semi_malicious", cohort=60, corrupt=0.05, dropout=0.3)
    fleet = Fleet(round)
    fleet.until(Phase.UNMASK)
    enrolled = fleet.collector.keys.keys()
    roots = (fleet.collector.roster_root, fleet.collector.root)
    parameters = round.parameters(60)
    ring = agreement.ring_of(round, *roots, tuple(range(60)))
    half = parameters.neighbours // 2
    assert 0 < parameters.window <= half
    gaps = [*ring.order[:half], *ring.order[30 : 30 + half]]
    alive = set(range(60)) - set(gaps)
    if len(alive) >= round.least_survivors:
        between = ring.order[half : half + 1][0]
        with pytest.raises(MismatchError, match="next to each other on the ring"):
            fleet.devices[between].acknowledge(members_to_bytes(alive, 60))
    one_gap = set(range(60)) - set(ring.order[: half - parameters.window + 1])
    assert len(one_gap) >= round.least_survivors
    assert not agreement.is_connected(round, *roots, enrolled, one_gap)
    with pytest.raises(MismatchError, match="next to each other on the ring"):
        fleet.devices[ring.order[-1]].acknowledge(members_to_bytes(one_gap, 60))
    fewer = one_gap | {ring.order[0]}
    assert agreement.is_connected(round, *roots, enrolled, fewer)
    fleet.devices[ring.order[-1]].acknowledge(members_to_bytes(fewer, 60))


def test_who_enrolled_decides_the_ring() -> None:
    """The attack: with an order of ranks that it knows, a collector leaves out honest members until
    corrupt ones have the ranks around a victim. So the order depends on the whole set."""
    root = bytes(32)
    orders = {
        agreement.ring_of(ROUND, root, root, tuple(m for m in range(24) if m != missing)).order
        for missing in range(24)
    }
    assert len(orders) == 24
    alike = agreement.ring_of(ROUND, root, root, tuple(range(23))).order
    assert alike in orders  # the same set, the same ring


def test_devices_with_different_rosters_open_no_boxes_and_have_other_masks() -> None:
    """The attack: two rosters that share their corrupt members, and a quorum in each."""
    fleet = Fleet()
    fleet.until(Phase.MASK)
    odd = fleet.devices[5]
    stranger = IDENTITIES[40].public_key().public_bytes_raw()
    listed = fleet.collector.roster
    odd.roster = Tree([*listed[:20], stranger, *listed[21:]]).root
    with pytest.raises(MismatchError, match="does not open"):
        odd.mask(fleet.collector.boxes_for(5), fleet.tables[5])
    facts = (odd.root, odd.enrolled, fleet.collector.boxes.keys())
    assert agreement.view_of(odd.round, odd.roster, *facts) != fleet.collector.view


def test_a_floor_below_the_quorum_is_refused() -> None:
    with pytest.raises(SpecError, match="must stay in a semi_malicious round"):
        replace(ROUND, mode="semi_malicious", cohort=40, dropout=0.5)


def test_a_roster_that_is_not_the_rings_is_refused() -> None:
    fleet = Fleet()
    collector = fleet.until(Phase.SHARE)
    device = fleet.devices[5]
    good = collector.roster_for(5)
    head, entry = good[: 3 + 32], 32 + 164
    swapped = head + collector.roster_for(6)[3 + 32 :]
    with pytest.raises(MismatchError, match="those of the ring"):
        device.share(swapped)
    grown = good[:3] + bytes(32) + good[3 + 32 :]
    with pytest.raises(MismatchError, match="those of the ring"):
        device.share(grown)
    forged = bytearray(good)
    forged[3 + 32 + entry - 70] ^= 1  # a key of the first neighbour
    with pytest.raises(MismatchError, match="signed for this round"):
        device.share(bytes(forged))
    renamed = bytearray(good)
    renamed[3 + 32] ^= 1  # its identity
    with pytest.raises(MismatchError, match="the roster must list"):
        device.share(bytes(renamed))
    for wrong in (good[:-1], good + bytes(32)):
        with pytest.raises(MismatchError, match="the proof must have"):
            device.share(wrong)
    few = members_to_bytes(set(range(10)), 24) + good[3:]
    with pytest.raises(MismatchError, match="at least 18 devices"):
        device.share(few)
    absent = members_to_bytes(set(range(24)) - {5}, 24) + good[3:]
    with pytest.raises(MismatchError, match="does not list this device"):
        device.share(absent)
    with pytest.raises(MismatchError, match="must begin with"):
        device.share(good[: 3 + 31])
    with pytest.raises(MismatchError, match="those of the ring"):
        device.share(good[: 3 + 32 + entry])
    device.share(good)


def test_a_device_answers_one_roster_even_if_only_keys_of_a_neighbour_differ() -> None:
    fleet = Fleet()
    collector = fleet.until(Phase.SHARE)
    device, good = fleet.devices[5], collector.roster_for(5)
    first = device.share(good)
    assert device.share(good) == first
    neighbour, start = collector.neighbours[5][0], 3 + 32 + 32
    other = joined(ROUND, neighbour, seed=9).enrol()  # well signed, by its identity
    changed = good[:start] + other + good[start + 164 :]
    with pytest.raises(MismatchError, match="has answered another roster"):
        device.share(changed)
    assert device.share(good) == first
    joined(ROUND, 5).share(changed)  # it was the first roster for this one


@pytest.mark.parametrize("mode", ["semi_honest", "semi_malicious"])
def test_a_device_that_the_roster_has_at_another_place_refuses(mode: Any) -> None:
    """The attack: the roster has the collector's own identity where the device should be."""
    fleet = Fleet(replace(ROUND, mode=mode))
    stranger = IDENTITIES[40].public_key().public_bytes_raw()
    listed = (*roster(24)[:5], stranger, *roster(24)[6:])
    liar = Coordinator(fleet.round, listed)
    device = Participant.join(
        fleet.round, 5, fleet.devices[5].identity, liar.roster_root, rng=SeededRng(SEED, 7)
    )
    own = Participant.join(
        fleet.round, 5, IDENTITIES[40].private_bytes_raw(), liar.roster_root, rng=SeededRng(SEED, 8)
    )
    for member in range(24):
        participant = own if member == 5 else fleet.devices[member]
        assert liar.add(Phase.ENROL, member, participant.enrol()) is None
    liar.close()
    with pytest.raises(MismatchError, match="the roster must list this device"):
        device.share(liar.roster_for(5))
    own.share(liar.roster_for(5))


def test_keys_of_another_round_are_refused() -> None:
    fleet, other = Fleet(), Fleet(replace(ROUND, nonce="ef" * 16))
    keys = other.devices[4].enrol()
    assert fleet.collector.add(Phase.ENROL, 4, keys) is Refusal.UNSIGNED
    assert fleet.collector.add(Phase.ENROL, 5, keys) is Refusal.MALFORMED
    assert fleet.collector.add(Phase.ENROL, 24, keys) is Refusal.UNKNOWN


def test_a_box_that_was_changed_or_rerouted_does_not_open() -> None:
    fleet = Fleet()
    collector = fleet.until(Phase.MASK)
    device = fleet.devices[5]
    boxes = collector.boxes_for(5)
    changed = bytearray(boxes)
    changed[13] ^= 1
    with pytest.raises(MismatchError, match="does not open"):
        device.mask(bytes(changed), fleet.tables[5])
    who, boxes = boxes[:3], boxes[3:]
    first, second = boxes[:4], boxes[104:108]
    rerouted = who + second + boxes[4:104] + first + boxes[108:]
    with pytest.raises(MismatchError, match="does not open"):
        device.mask(rerouted, fleet.tables[5])
    with pytest.raises(MismatchError, match="not expected"):
        device.mask(who + boxes + boxes[:104], fleet.tables[5])
    device.mask(who + boxes, fleet.tables[5])


def test_devices_that_were_told_different_rounds_do_not_cancel() -> None:
    """A collector that tells one device another modulus, task or seed gets noise for its table."""
    fleet = Fleet()
    collector = fleet.until(Phase.MASK)
    odd = fleet.devices[5]
    odd.round = replace(ROUND, task="ff" * 32)
    with pytest.raises(MismatchError, match="does not open"):
        odd.mask(collector.boxes_for(5), fleet.tables[5])


@pytest.mark.parametrize("liar", [0, 23])
def test_a_false_share_is_refused_and_its_giver_named(liar: int) -> None:
    fleet = Fleet()
    fleet.until(Phase.UNMASK)
    survivors = fleet.collector.survivor_set()
    for member in sorted(fleet.collector.survivors):
        answer = bytearray(fleet.devices[member].unmask(survivors))
        if member == liar:
            answer[0] ^= 1  # of the first of its neighbours
        refusal = fleet.collector.add(Phase.UNMASK, member, bytes(answer))
        assert refusal is (Refusal.FALSE if member == liar else None)
    assert np.array_equal(fleet.collector.finish(), fleet.expected())
    assert fleet.collector.liars == {liar}


def test_a_second_and_different_message_is_refused_and_the_first_stands() -> None:
    fleet = Fleet()
    collector = fleet.until(Phase.MASK)
    message = fleet.devices[5].mask(collector.boxes_for(5), fleet.tables[5])
    assert collector.add(Phase.MASK, 5, message) is None
    assert collector.add(Phase.MASK, 5, message) is None  # repeated: one message
    changed = bytes([message[0] ^ 1]) + message[1:]
    assert collector.add(Phase.MASK, 5, changed) is Refusal.EQUIVOCATING
    assert collector.add(Phase.ENROL, 5, message) is Refusal.EQUIVOCATING
    assert collector.add(Phase.UNMASK, 5, b"") is Refusal.LATE
    assert collector.add(Phase.MASK, 6, message[:-1]) is Refusal.MALFORMED
    collector.survivors.discard(5)  # start again for this one, to see the sum
    collector.fingerprints.clear()
    collector.total_words[:] = 0
    fleet.send(Phase.MASK, lambda d: d.mask(collector.boxes_for(d.member), fleet.tables[d.member]))
    collector.close()
    fleet.unmask()
    assert np.array_equal(collector.finish(), fleet.expected())


@given(st.binary(max_size=400), st.sampled_from(list(Phase)), st.integers(-1, 30))
@settings(max_examples=150, deadline=None)
def test_no_message_makes_a_collector_fall_over(message: bytes, phase: Phase, member: int) -> None:
    for at in (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.UNMASK):
        collector = STOPPED[at]
        before = collector.total_words.copy()
        assert collector.add(phase, member, message) in set(Refusal)
        assert np.array_equal(before, collector.total_words)


STOPPED = {
    phase: Fleet().until(phase) for phase in (Phase.ENROL, Phase.SHARE, Phase.MASK, Phase.UNMASK)
}


def test_a_table_of_another_shape_and_steps_out_of_order_are_refused() -> None:
    device = joined(ROUND, 1)
    with pytest.raises(SpecError, match="after it has shared"):
        device.mask(b"", np.zeros(50, dtype=np.int64))
    with pytest.raises(SpecError, match="after it has masked"):
        device.unmask(bytes(3))
    fleet = Fleet()
    collector = fleet.until(Phase.MASK)
    with pytest.raises(SpecError, match="50 cells"):
        fleet.devices[1].mask(collector.boxes_for(1), np.zeros(49, dtype=np.int64))
    fleet.devices[1].mask(collector.boxes_for(1), fleet.tables[1])
    with pytest.raises(MismatchError, match="another table"):
        fleet.devices[1].mask(collector.boxes_for(1), fleet.tables[2])


def test_nobody_prints_a_secret() -> None:
    fleet = Fleet()
    fleet.until(Phase.UNMASK)
    for device in fleet.devices:
        assert device.seed.hex() not in repr(device)
    assert "array" not in repr(fleet.collector)


@given(st.integers(2, 64), st.integers(0, 40), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_words_are_packed_and_unpacked(bits: int, cells: int, seed: int) -> None:
    lane = replace(ROUND, modulus_bits=bits).lane
    words = np.random.default_rng(seed).integers(0, 2**bits, cells, dtype=np.uint64).astype(lane)
    data = pack_words(words, bits)
    assert len(data) == -(-cells * bits // 8)
    assert np.array_equal(unpack_words(data, cells, bits, lane), words)

"""Memory for long bodies: bounded, lent in turn, used again."""

from __future__ import annotations

from sfumato.collector.long_bodies import LongBodies


def test_memory_is_lent_as_long_as_there_is_some_and_then_in_turn() -> None:
    bodies, lent = LongBodies(most_bytes=100), dict[str, bytearray]()

    def lend(who: str, size: int) -> None:
        bodies.lend(who, size, lambda body: lent.update({who: body}))

    for who in "abc":
        lend(who, 40)
    assert list(lent) == ["a", "b"]
    assert [len(body) for body in lent.values()] == [40, 40]
    lend("d", 10)  # there is room, but others came before
    assert list(lent) == ["a", "b"]
    bodies.give_back(lent["a"])
    assert list(lent) == ["a", "b", "c", "d"]
    assert lent["c"] is lent["a"]
    assert lent["c"] is not lent["b"]


def test_who_waits_no_longer_is_passed_over() -> None:
    bodies, lent = LongBodies(most_bytes=100), dict[str, bytearray]()

    def lend(who: str, size: int) -> None:
        bodies.lend(who, size, lambda body: lent.update({who: body}))

    for who, size in (("a", 60), ("b", 60), ("c", 40)):
        lend(who, size)
    bodies.forget("b")
    bodies.forget("b")
    bodies.forget("a")  # which has its own already
    assert list(lent) == ["a", "c"]
    lend("b", 60)
    bodies.give_back(lent["c"])
    assert list(lent) == ["a", "c"]
    bodies.give_back(lent["a"])
    assert list(lent) == ["a", "c", "b"]


def test_one_that_is_larger_than_all_there_is_is_read_alone() -> None:
    bodies, lent = LongBodies(most_bytes=100), list[bytearray]()
    bodies.lend("small", 50, lent.append)
    bodies.lend("large", 1_000, lent.append)
    assert [len(body) for body in lent] == [50]
    bodies.give_back(lent[0])
    assert [len(body) for body in lent] == [50, 1_000]


def test_nothing_is_kept_when_nobody_has_any() -> None:
    bodies, lent = LongBodies(most_bytes=100), list[bytearray]()
    for _ in range(3):
        bodies.lend(object(), 30, lent.append)
    for body in lent:
        bodies.give_back(body)
    assert not bodies._left
    bodies.lend("again", 30, lent.append)
    assert not any(lent[-1] is body for body in lent[:-1])

"""The store, on each database."""
# ruff: noqa: S608 -- statements contain only our own names

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from databases import dialect_of
from sfumato.collector.store.database import database
from sfumato.collector.store.driver import DatabaseConnection
from sfumato.collector.store.store import Store, StudyRow, TaskRow, TokenRow, Transaction
from sfumato.errors import StoreError, StoreReadOnly, StoreUnavailable

DAY_SECONDS = 86_400
STUDY = StudyRow(
    id="0a" * 16,
    name="Popular emoji",
    purpose="Which emoji to offer first",
    state="collecting",
    study='{"question":"frequencies"}',
    design='{"seed":1}',
    plan='{"rows":5}',
    settings='{"daily_reports":1}',
)
OTHER = replace(STUDY, id="0b" * 16, name="Häufige Wörter")
TASK = TaskRow(
    id="a1" * 32,
    study_id=STUDY.id,
    number=0,
    spec='{"kind":"task"}',
    envelope='{"offer":"…"}',
    state="open",
    target=None,
)
OTHERS = replace(TASK, id="b1" * 32, study_id=OTHER.id, target=1_000)
TABLES = {
    "answer": "task",
    "budget": "number",
    "counter": "task, name",
    "dictionary": "digest",
    "entry": "number",
    "release": "study_id",
    "sealed": "number",
    "seen": "task, id",
    "study": "number",
    "task": "task",
    "token": "number",
    "upload": "number",
}


@pytest.fixture
def open_store(store: Store) -> Store:
    """A store with two studies, each with an open task."""
    with store.transaction() as tx:
        for study, task in ((STUDY, TASK), (OTHER, OTHERS)):
            tx.add_study(study)
            tx.add_task(task)
    return store


@contextmanager
def raw(url: str) -> Iterator[DatabaseConnection]:
    """A connection in a transaction, past the store's own methods."""
    with closing(database(url).connect()) as connection:
        connection.begin(writing=True)
        yield connection
        if not connection.has_failed:
            connection.commit()


def everything(url: str) -> dict[str, list[tuple[object, ...]]]:
    with raw(url) as connection:
        assert set(TABLES) < connection.tables()
        return {
            table: connection.execute(f"SELECT * FROM {table} ORDER BY {order}")
            for table, order in TABLES.items()
        }


def write_everywhere(tx: Transaction) -> None:
    """Add or change a row in every table."""
    study = replace(STUDY, id="0c" * 16, name="third")
    tx.add_study(study)
    tx.add_task(replace(TASK, id="c1" * 32, study_id=study.id))
    tx.set_study_state(STUDY.id, "failed", "because", expected=["collecting"])
    tx.set_task_state(OTHERS.id, "closing", expected=["open"])
    tx.add_dictionary("d1" * 32, b"oak")
    assert tx.insert_uploads([(TASK.id, 2, b"two"), (TASK.id, 1, b"one")]) == ["stored", "stored"]
    tx.add_report_ids(TASK.id, [b"i" * 16])
    tx.add_sealed(TASK.id, b"sealed", 7)
    tx.count(TASK.id, "repeated", 3)
    tx.add_answer(TASK.id, b"table", 7)
    tx.add_entry("campaign", "cohort", "task", '{"loss":1}')
    tx.set_budget('{"epsilon":1}')
    tx.put_release(STUDY.id, '{"counts":[1]}')
    tx.add_token(TokenRow(id="t1", name="ops", role="admin", expires=9), b"d" * 32)


def test_only_the_latest_tasks_model_is_kept_and_a_released_one_permanently(store: Store) -> None:
    second = replace(TASK, id="9d" * 32, number=1)
    with store.transaction() as tx:
        tx.add_study(STUDY)
        tx.add_task(TASK)
        tx.add_model(TASK.id, "1a" * 32, b"first")
        assert tx.answer(TASK.id) is None
        tx.add_answer(TASK.id, b"sum", 10)
    with store.transaction() as tx:
        assert tx.answer(TASK.id) == (b"sum", 10)
        assert tx.model("1a" * 32) == b"first"
        tx.add_task(second)
        tx.add_model(second.id, "2b" * 32, b"second")
        tx.put_released_model(STUDY.id, b"last")
    with store.transaction() as tx:
        assert (tx.model("1a" * 32), tx.model("2b" * 32)) == (None, b"second")
        tx.drop_data(STUDY.id)
        assert tx.model("2b" * 32) is None
        assert tx.released_model(STUDY.id) == b"last"
        assert tx.released_model("00" * 16) is None
    with pytest.raises(StoreError), store.transaction() as tx:
        tx.put_released_model(STUDY.id, b"another")


def test_studies_come_back_as_they_were_put_with_the_day(store_url: str) -> None:
    today = 20_000
    with closing(Store.open(store_url, now=lambda: today * DAY_SECONDS + 5.5)) as store:
        store.migrate()
        with store.transaction() as tx:
            tx.add_study(STUDY)
            tx.add_study(OTHER)
        with store.reading() as tx:
            assert tx.studies() == [replace(STUDY, since=today), replace(OTHER, since=today)]
            assert tx.study(OTHER.id) == tx.study_by_name(OTHER.name) == tx.studies()[1]
            assert tx.study("0c" * 16) is None
            assert tx.study_by_name("nobody's") is None
        today += 3
        with store.transaction() as tx:
            tx.set_study_state(STUDY.id, "failed", "the budget is spent", expected=["collecting"])
        with store.reading() as tx:
            failed = replace(STUDY, state="failed", problem="the budget is spent", since=today)
            assert tx.study(STUDY.id) == failed
            assert tx.study(OTHER.id) == replace(OTHER, since=today - 3)


def test_a_study_is_named_once(open_store: Store) -> None:
    with pytest.raises(StoreError), open_store.transaction() as tx:
        tx.add_study(replace(STUDY, id="0c" * 16))


def test_tasks_come_back_in_their_order(open_store: Store) -> None:
    later = [replace(TASK, id=f"a{number}" * 32, number=number) for number in (3, 2)]
    with open_store.transaction() as tx:
        for task in later:
            tx.add_task(task)
    with open_store.reading() as tx:
        assert tx.tasks(STUDY.id) == [TASK, later[1], later[0]]
        assert tx.tasks(OTHER.id) == [OTHERS]
        assert tx.task(OTHERS.id) == OTHERS
        assert tx.task("c1" * 32) is None
        assert {task.id for task in tx.open_tasks()} == {TASK.id, OTHERS.id, "a2" * 32, "a3" * 32}
    with open_store.transaction() as tx:
        tx.set_task_state(TASK.id, "closing", expected=["open"])
        tx.set_task_state("a2" * 32, "done", expected=["open"])
    with open_store.reading() as tx:
        assert tx.task(TASK.id) == replace(TASK, state="closing")
        assert {task.id for task in tx.open_tasks()} == {OTHERS.id, "a3" * 32}


def test_missing_studies_and_tasks_cannot_be_changed(open_store: Store) -> None:
    wrong = "ff" * 32
    calls: list[Callable[[Transaction], object]] = [
        lambda tx: tx.set_study_state(wrong, "closing", expected=["collecting"]),
        lambda tx: tx.set_task_state(wrong, "closing", expected=["open"]),
        lambda tx: tx.add_task(replace(TASK, id=wrong, study_id=wrong)),
        lambda tx: tx.add_report_ids(wrong, [b"i" * 16]),
        lambda tx: tx.add_sealed(wrong, b"", 0),
        lambda tx: tx.count(wrong, "reports", 1),
        lambda tx: tx.add_answer(wrong, b"", 0),
        lambda tx: tx.put_release(wrong, "{}"),
    ]
    for call in calls:
        with pytest.raises(StoreError), open_store.transaction() as tx:
            call(tx)


def test_a_dictionary_is_kept_once(store: Store) -> None:
    with store.transaction() as tx:
        tx.add_dictionary("d1" * 32, b'"oak"\n\x00')
        tx.add_dictionary("d1" * 32, b'"oak"\n\x00')
    with store.reading() as tx:
        assert tx.dictionary("d1" * 32) == b'"oak"\n\x00'
        assert tx.dictionary("d2" * 32) is None


def test_uploads_are_accepted_for_open_tasks_only(open_store: Store) -> None:
    with open_store.transaction() as tx:
        tx.set_task_state(OTHERS.id, "closing", expected=["open"])
    uploads = [(TASK.id, 3, b"a"), (OTHERS.id, 1, b"b"), ("ff" * 32, 1, b"c"), (TASK.id, 4, b"d")]
    with open_store.transaction() as tx:
        assert tx.insert_uploads(uploads) == ["stored", "closed", "closed", "stored"]
        assert tx.insert_uploads([]) == []
    with open_store.reading() as tx:
        assert [(count, body) for _, count, body in tx.pending_uploads(TASK.id, 100)] == [
            (3, b"a"),
            (4, b"d"),
        ]
        assert tx.pending_uploads(OTHERS.id, 100) == []


@pytest.mark.parametrize("count", [1, 49, 50, 51, 100, 149])
def test_uploads_of_any_number_are_stored_in_their_order(open_store: Store, count: int) -> None:
    """SQLite inserts fifty rows per statement."""
    with open_store.transaction() as tx:
        bodies = [b"%d" % place * (1 + place % 7) for place in range(count)]
        assert tx.insert_uploads([(TASK.id, 1, body) for body in bodies]) == ["stored"] * count
    with open_store.reading() as tx:
        rows = tx.pending_uploads(TASK.id, 1_000)
    assert [body for _, _, body in rows] == bodies
    assert [number for number, _, _ in rows] == sorted(number for number, _, _ in rows)


def test_pending_gives_the_oldest_within_the_limit_and_one_at_least(open_store: Store) -> None:
    rng = random.Random(5)
    for _ in range(10):
        counts = [rng.randint(1, 9) for _ in range(rng.randint(0, 12))]
        with open_store.transaction() as tx:
            tx.delete_uploads(
                TASK.id, [number for number, _, _ in tx.pending_uploads(TASK.id, 10_000)]
            )
            tx.insert_uploads(
                [
                    upload
                    for place, count in enumerate(counts)
                    for upload in ((TASK.id, count, b"%d" % place), (OTHERS.id, 5, b"other"))
                ]
            )
        for most in (1, 2, sum(counts) // 2, sum(counts), 10_000):
            expected: list[tuple[int, bytes]] = []
            for place, count in enumerate(counts):
                if expected and sum(count for count, _ in expected) + count > most:
                    break
                expected.append((count, b"%d" % place))
            with open_store.reading() as tx:
                rows = tx.pending_uploads(TASK.id, most)
            assert [(count, body) for _, count, body in rows] == expected


def test_only_the_named_uploads_are_deleted(open_store: Store) -> None:
    with open_store.transaction() as tx:
        tx.insert_uploads([(TASK.id, 1, b"%d" % place) for place in range(5)])
        tx.insert_uploads([(OTHERS.id, 1, b"other")])
        numbers = [number for number, _, _ in tx.pending_uploads(TASK.id, 10)]
        tx.delete_uploads(TASK.id, [numbers[3], numbers[0]])
        tx.delete_uploads(TASK.id, [])
    with open_store.reading() as tx:
        assert [body for _, _, body in tx.pending_uploads(TASK.id, 10)] == [b"1", b"2", b"4"]
        assert len(tx.pending_uploads(OTHERS.id, 10)) == 1


@pytest.mark.parametrize("whose", ["another worker's", "another task's"])
def test_deleting_missing_uploads_undoes_the_transaction(open_store: Store, whose: str) -> None:
    with open_store.transaction() as tx:
        tx.insert_uploads([(TASK.id, 1, b"mine"), (OTHERS.id, 1, b"other")])
        number = tx.pending_uploads(TASK.id, 10)[0][0]
        if whose == "another worker's":
            tx.delete_uploads(TASK.id, [number])
        else:
            number = tx.pending_uploads(OTHERS.id, 10)[0][0]

    def seal() -> None:
        with open_store.transaction() as tx:
            tx.add_sealed(TASK.id, b"sealed twice", 1)
            tx.delete_uploads(TASK.id, [number])

    with pytest.raises(StoreUnavailable):
        seal()
    with open_store.reading() as tx:
        assert tx.sealed_count(TASK.id) == 0
        assert len(tx.pending_uploads(OTHERS.id, 10)) == 1


def test_a_report_id_is_new_once_in_each_task(open_store: Store) -> None:
    rng = random.Random(7)
    known_ids: dict[str, set[bytes]] = {TASK.id: set(), OTHERS.id: set()}
    for _ in range(20):
        task_id = rng.choice([TASK.id, OTHERS.id])
        ids = [bytes([rng.randrange(40)]) * 16 for _ in range(rng.randrange(30))]
        with open_store.transaction() as tx:
            assert tx.add_report_ids(task_id, ids) == set(ids) - known_ids[task_id]
            assert tx.add_report_ids(task_id, ids[:3]) == set()
        known_ids[task_id] |= set(ids)


def test_many_ids_and_uploads_go_in_one_call(open_store: Store) -> None:
    many = 50_100  # more than fit into one statement
    ids = [number.to_bytes(16, "little") for number in range(many)]
    with open_store.transaction() as tx:
        tx.add_report_ids(TASK.id, ids[::2])
        assert tx.add_report_ids(TASK.id, ids) == set(ids[1::2])
        assert set(tx.insert_uploads([(TASK.id, 1, each) for each in ids])) == {"stored"}
        pending = tx.pending_uploads(TASK.id, many)
        assert [body for _, _, body in pending] == ids
        tx.delete_uploads(TASK.id, [number for number, _, _ in pending])
        assert tx.pending_uploads(TASK.id, many) == []


def test_sealed_data_come_back_in_their_order(open_store: Store) -> None:
    with open_store.transaction() as tx:
        tx.add_sealed(TASK.id, b"first", 3)
        tx.add_sealed(OTHERS.id, b"other", 5)
        tx.add_sealed(TASK.id, b"second", 4)
    with open_store.reading() as tx:
        assert list(tx.sealed_records(TASK.id)) == [b"first", b"second"]
        assert tx.sealed_count(TASK.id) == 7
        unread = tx.sealed_records(TASK.id)
    with pytest.raises(StoreError, match="over"):
        next(unread)


def test_received_counts_pending_sealed_and_duplicate_reports(open_store: Store) -> None:
    with open_store.transaction() as tx:
        assert tx.received_count(TASK.id) == 0
        assert tx.counts(TASK.id) == {}
        tx.insert_uploads([(TASK.id, 3, b"a"), (TASK.id, 4, b"b"), (OTHERS.id, 50, b"c")])
        tx.add_sealed(TASK.id, b"", 10)
        tx.count(TASK.id, "repeated", 100)
        tx.count(TASK.id, "repeated", 200)
        tx.count(TASK.id, "rejected:malformed", 5_000)
    with open_store.reading() as tx:
        assert tx.received_count(TASK.id) == 317
        assert tx.counts(TASK.id) == {"repeated": 300, "rejected:malformed": 5_000}
        assert tx.received_count(OTHERS.id) == 50


def test_a_task_is_answered_once(open_store: Store) -> None:
    second = replace(TASK, id="a2" * 32, number=1)
    with open_store.transaction() as tx:
        tx.add_task(second)
        tx.add_answer(second.id, b"two", 20)
        tx.add_answer(TASK.id, b"one", 10)
        tx.add_answer(OTHERS.id, b"other", 30)
    with pytest.raises(StoreError), open_store.transaction() as tx:
        tx.add_answer(TASK.id, b"one, with other noise", 10)
    with open_store.reading() as tx:
        answers = [(row.owner, row.check(), row.count) for row in tx.answer_rows(STUDY.id)]
        assert answers == [(TASK.id, b"one", 10), (second.id, b"two", 20)]


def test_a_budget_is_set_once(store: Store) -> None:
    with store.transaction() as tx:
        assert tx.budget() is None
        tx.set_budget('{"epsilon":1}')
        tx.set_budget('{"epsilon":1}')
    with pytest.raises(StoreError, match="cannot be changed"), store.transaction() as tx:
        tx.set_budget('{"epsilon":2}')
    with store.reading() as tx:
        assert tx.budget() == '{"epsilon":1}'


def test_a_release_is_never_overwritten(open_store: Store) -> None:
    with open_store.transaction() as tx:
        assert tx.release(STUDY.id) is None
        tx.put_release(STUDY.id, '{"counts":[1]}')
    with pytest.raises(StoreError), open_store.transaction() as tx:
        tx.put_release(STUDY.id, '{"counts":[2]}')
    with open_store.reading() as tx:
        assert tx.release(STUDY.id) == '{"counts":[1]}'


@pytest.mark.parametrize("table", ["budget", "entry", "release"])
def test_the_database_itself_refuses_to_change_append_only_tables(
    open_store: Store, store_url: str, table: str
) -> None:
    with open_store.transaction() as tx:
        write_everywhere(tx)
    before = everything(store_url)
    column = {"entry": "cohort", "release": "data", "budget": "spec"}[table]
    rewrite = dialect_of(store_url).rewrite.format(table=table)
    for change in (f"DELETE FROM {table}", f"UPDATE {table} SET {column} = 'x'", rewrite):
        with raw(store_url) as connection, pytest.raises(StoreError, match="append-only"):
            connection.execute(change)
    assert everything(store_url) == before


def test_the_ledger_keeps_its_order(store: Store) -> None:
    with store.transaction() as tx:
        tx.add_entry("words", "round 1", "t1", '{"loss":1}')
        tx.add_entry("words", "round 2", "t2", '{"loss":2}')
    with store.reading() as tx:
        assert tx.entries() == [
            ("words", "round 1", "t1", '{"loss":1}'),
            ("words", "round 2", "t2", '{"loss":2}'),
        ]


def test_tokens_are_found_by_their_digest_until_they_are_revoked(store: Store) -> None:
    row = TokenRow(id="t1", name="ops", role="admin", expires=2_000_000_000)
    other = TokenRow(id="t2", name="me", role="analyst", expires=1)
    with store.transaction() as tx:
        tx.add_token(row, b"1" * 32)
        tx.add_token(other, b"2" * 32)
        assert tx.tokens() == [row, other]
        assert tx.token(b"1" * 32) == row
        assert tx.token(b"3" * 32) is None
        assert tx.revoke("t1")
        assert not tx.revoke("t1")
    with store.reading() as tx:
        assert tx.token(b"1" * 32) is None
        assert tx.tokens() == [other]


def test_dropping_the_data_of_a_study_leaves_its_ledger_its_release_and_other_studies(
    open_store: Store, store_url: str
) -> None:
    with open_store.transaction() as tx:
        write_everywhere(tx)
        tx.set_task_state(OTHERS.id, "open", expected=["closing"])
        tx.insert_uploads([(OTHERS.id, 1, b"other")])
        tx.add_report_ids(OTHERS.id, [b"o" * 16])
        tx.add_sealed(OTHERS.id, b"other", 1)
        tx.add_answer(OTHERS.id, b"other", 1)
    before = everything(store_url)
    with open_store.transaction() as tx:
        tx.drop_data(STUDY.id)
    after = everything(store_url)
    for table in TABLES:
        if table in ("upload", "sealed", "seen", "answer"):
            assert len(after[table]) == 1
        else:
            assert after[table] == before[table]


def test_an_exception_undoes_all_of_a_transaction(open_store: Store, store_url: str) -> None:
    before = everything(store_url)

    def fail() -> None:
        with open_store.transaction() as tx:
            write_everywhere(tx)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert everything(store_url) == before
    with open_store.transaction() as tx:
        write_everywhere(tx)
    after = everything(store_url)
    assert all(after[table] != before[table] for table in TABLES)


def test_a_failure_that_was_caught_still_undoes_the_transaction(
    open_store: Store, store_url: str
) -> None:
    before = everything(store_url)

    def catch() -> None:
        with open_store.transaction() as tx:
            write_everywhere(tx)
            with pytest.raises(StoreError):
                tx.put_release(STUDY.id, "{}")

    with pytest.raises(StoreError, match="cannot be committed"):
        catch()
    assert everything(store_url) == before


def test_reading_sees_a_snapshot_and_cannot_write(open_store: Store) -> None:
    with open_store.reading() as tx:
        assert tx.received_count(TASK.id) == 0
        with open_store.transaction() as other:
            other.insert_uploads([(TASK.id, 1, b"a")])
        assert tx.received_count(TASK.id) == 0
    with open_store.reading() as tx:
        assert tx.received_count(TASK.id) == 1
    with pytest.raises(StoreReadOnly), open_store.reading() as tx:
        tx.set_task_state(TASK.id, "done", expected=["open"])
    with open_store.transaction() as tx:
        tx.set_task_state(TASK.id, "done", expected=["open"])


def test_a_transaction_cannot_be_used_after_its_end(open_store: Store) -> None:
    with open_store.transaction() as tx:
        pass
    with pytest.raises(StoreError, match="over"):
        tx.insert_uploads([(TASK.id, 1, b"late")])
    open_store.close()
    with pytest.raises(StoreError, match="closed"), open_store.reading():
        pass


def test_an_upload_has_no_column_for_its_sender_or_time(store: Store, store_url: str) -> None:
    with raw(store_url) as connection:
        rows = connection.execute(dialect_of(store_url).columns)
    assert {name for (name,) in rows} == {"number", "task", "count", "body"}


def test_no_error_shows_the_data(open_store: Store) -> None:
    canary = "canary7391"
    refused: list[Callable[[Transaction], object]] = [
        lambda tx: tx.insert_uploads([(TASK.id, 0, canary.encode())]),
        lambda tx: tx.add_token(TokenRow("t", canary, "admin", None), canary.encode()),  # type: ignore[arg-type]  # refused
        lambda tx: tx.add_study(replace(STUDY, id=canary)),
    ]
    for call in refused:
        with pytest.raises(StoreError) as raised, open_store.transaction() as tx:
            call(tx)
        problem: BaseException | None = raised.value
        texts = []
        while problem is not None:
            texts.append(repr(problem))
            problem = problem.__cause__
        assert canary not in " ".join(texts)
        assert canary.encode().hex() not in " ".join(texts)
        assert raised.value.__suppress_context__

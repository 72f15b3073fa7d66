"""A collector is run and administered from the command line."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from collecting import Stage
from databases import execute
from running import sfumato as run
from serving import ask, settings, wait_for
from sfumato.cli.main import main
from sfumato.collector import studies
from sfumato.collector.serve import CollectorServer, running
from sfumato.collector.store.store import FaultRow
from sfumato.device import passcodes
from sfumato.device.offers import public_key, verify
from sfumato.flow.contribute import local_report
from sfumato.flow.report import to_frames
from sfumato.flow.task import LocalTask
from sfumato.privacy import SystemRng
from sfumato.spec import to_json

STUDY = """\
question = "frequencies"
trust = "local"
epsilon = 4.0
devices = 20
dictionary = "trees.csv"
"""
Sfumato = Callable[..., Result]


def create(name: str) -> list[str]:
    return ["study", "create", "study.toml", "--name", name, "--purpose", "Which trees to plant."]


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorServer]:
    with running(settings(tmp_path_factory.mktemp("collector"))) as collector:
        yield collector


@pytest.fixture
def sfumato(collector: CollectorServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sfumato:
    """`sfumato …` in a folder with a study, for the running collector."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "trees.csv").write_text("tree\noak\nelm\nfir\n")
    file = Path(collector.store.name.rpartition(" ")[2])
    for name in [name for name in os.environ if name.startswith("SFUMATO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SFUMATO_STORE", f"sqlite:///{file}")
    monkeypatch.setenv("SFUMATO_SIGNING_KEY", str(file.with_name("collector.key")))
    monkeypatch.setenv("SFUMATO_SERVER", collector.address)

    def invoke(*arguments: str, code: int = 0, answer: str | None = None) -> Result:
        result = CliRunner().invoke(main, arguments, input=answer)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    token = invoke("token", "create", "--role", "admin", "--name", "ops").stdout.strip()
    monkeypatch.setenv("SFUMATO_TOKEN", token)
    return invoke


def answer_of(result: Result) -> Any:
    return json.loads(result.stdout)


def send(collector: CollectorServer, name: str, categories: list[int], *, times: int = 1) -> None:
    """Send the reports of devices with these items to a study, each so many times."""
    envelopes = ask(collector.address, "GET", "/v1/offers").json()["offers"]
    offers = [verify(envelope, public_key(collector.key)) for envelope in envelopes]
    (task,) = [offer.task for offer in offers if offer.study == name]
    assert isinstance(task, LocalTask)
    reports = [
        local_report(task, np.array([category]), rng=SystemRng()).to_bytes()
        for category in categories
    ]
    for _ in range(times):
        answer = ask(collector.address, "POST", f"/v1/tasks/{task.id}/reports", to_frames(reports))
        assert answer.status == 201


def test_a_study_from_its_opening_to_a_file(
    sfumato: Sfumato, collector: CollectorServer, tmp_path: Path
) -> None:
    study_id = answer_of(sfumato(*create("Trees"), "--json"))["id"]
    assert answer_of(sfumato(*create("Trees"), "--json"))["id"] == study_id
    assert f"{study_id}  collecting  Trees" in sfumato("study", "list").stdout
    early = sfumato("release", "show", "Trees", code=75)
    assert "error: this study has no release yet" in early.stderr

    send(collector, "Trees", [0] * 9 + [1] * 3)
    text = sfumato("study", "show", "Trees").stdout
    assert "12 reports received, " in text
    assert "4-local differential privacy" in text
    assert answer_of(sfumato("study", "show", study_id, "--json"))["received"] == 12

    refusal = sfumato("study", "close", "Trees", code=1, answer="n\n")
    assert "releases the result of 12 reports" in refusal.output
    row = answer_of(sfumato("study", "close", "Trees", "--yes", "--json"))
    assert row["state"] in ("closing", "released")
    wait_for(
        lambda: answer_of(sfumato("study", "show", study_id, "--json"))["state"] == "released",
        "the release",
    )
    again = sfumato("study", "close", "Trees")  # asks nothing
    assert "Trees is released already; nothing was done" in again.stderr
    table = sfumato("release", "show", "Trees").stdout
    assert "95% interval" in table
    release = answer_of(sfumato("release", "show", "Trees", "--json"))
    assert release["cost"]["devices"] == 12

    for ending in ("json", "csv", "parquet"):
        sfumato("release", "export", "Trees", "--to", f"trees.{ending}")
    assert json.loads((tmp_path / "trees.json").read_text()) == release
    with (tmp_path / "trees.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["item"] for row in rows] == [row["item"] for row in release["estimates"]]
    file_table = pyarrow.parquet.read_table(tmp_path / "trees.parquet")
    assert file_table.column("item").to_pylist() == [row["item"] for row in release["estimates"]]
    assert json.loads(file_table.schema.metadata[b"sfumato"])["privacy"] == release["privacy"]

    assert sfumato("study", "delete", "Trees", "--yes").stdout.startswith("Trees: deleted")
    assert answer_of(sfumato("release", "show", "Trees", "--json")) == release


def test_reports_that_were_sent_twice_are_shown_once(
    sfumato: Sfumato, collector: CollectorServer
) -> None:
    study_id = answer_of(sfumato(*create("Repeated"), "--json"))["id"]
    send(collector, "Repeated", [0, 1, 2], times=2)
    sfumato("study", "close", "Repeated", "--yes")
    wait_for(
        lambda: answer_of(sfumato("study", "show", study_id, "--json"))["state"] == "released",
        "the release",
    )
    text = sfumato("study", "show", "Repeated").stdout
    assert "6 reports received, 3 counted, 3 duplicates" in text
    assert "round 0: done, 3 of " in text


def test_a_passcode_goes_from_the_study_to_devices_in_a_file(
    sfumato: Sfumato, collector: CollectorServer, tmp_path: Path
) -> None:
    study = answer_of(sfumato(*create("Own trees"), "--passcode", "trees.code", "--json"))
    again = answer_of(sfumato(*create("Own trees"), "--passcode", "trees.code", "--json"))
    assert study["id"] == again["id"]
    code = (tmp_path / "trees.code").read_text().strip()
    assert passcodes.check(code)
    assert (tmp_path / "trees.code").stat().st_mode & 0o077 == 0
    assert "only devices that have its passcode" in sfumato("study", "show", "Own trees").stdout

    fleet = ("fleet", "--key", collector.public_key, "--study", "Own trees", "--data", "trees.csv")
    strangers = answer_of(sfumato(*fleet, "--json"))
    assert (strangers["outcomes"], strangers["sent"]) == ({"no_passcode": 3}, 0)
    assert answer_of(sfumato(*fleet, "--passcode", "trees.code", "--json"))["sent"] == 3

    changed = sfumato("study", "passcode", "Own trees", "new.code")
    sfumato("study", "passcode", "Own trees", "-", answer=code)
    assert not (tmp_path / "-").exists()
    assert (tmp_path / "new.code").read_text().strip() != code
    offers = sfumato("device", "offers", "--home", "phone", "--key", collector.public_key)
    assert "only devices that have its passcode take part" in offers.stdout
    sfumato("device", "consent", "Own trees", "--home", "phone", "--yes")
    result = sfumato("device", "record", "Own trees", "oak", "--home", "phone")
    assert result.stdout == "no_passcode\n"
    sfumato("device", "passcode", "Own trees", "new.code", "--home", "phone")
    sfumato(
        "device", "passcode", "Own trees", "-", "--home", "phone", answer=code
    )  # and from stdin
    result = sfumato("device", "record", "Own trees", "oak", "--home", "phone")
    assert result.stdout == "kept\n"
    assert code not in changed.output + offers.output + result.output


@pytest.mark.parametrize("content", [None, "sesame", "sfp_ü"])
def test_a_file_without_a_passcode_is_refused_and_not_shown(
    sfumato: Sfumato, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "bad.code").write_text(content)
    result = sfumato("device", "passcode", "Own trees", "bad.code", "--home", "phone",
                     "--key", "ab" * 32, code=2)  # fmt: skip
    assert ("cannot be read" if content is None else "must be sfp_") in result.stderr
    assert content is None or content not in result.output


def test_the_ledger_is_shown(sfumato: Sfumato, collector: CollectorServer, tmp_path: Path) -> None:
    assert "spent epsilon 0, allowed no limit" in sfumato("ledger", "show").stdout
    assert answer_of(sfumato("ledger", "show", "--json"))["entries"] == []
    (tmp_path / "study.toml").write_text(STUDY.replace('"local"', '"central"'))
    sfumato(*create("Charged trees"))
    with collector.store.transaction() as tx:
        (row,) = [row for row in tx.studies() if row.name == "Charged trees"]
        (task,) = [studies.task_of(each) for each in tx.tasks(row.id)]
        loss = to_json(studies.charge_of(row, task))
        tx.add_entry(task.campaign, task.cohort, task.id, loss)
    ledger = answer_of(sfumato("ledger", "show", "--json"))
    (entry,) = ledger["entries"]
    assert (entry["study"], entry["epsilon"]) == ("Charged trees", ledger["spent"])
    assert 3.9 < entry["epsilon"] <= 4.0
    first, *_ = sfumato("ledger", "show").stdout.splitlines()
    assert first.startswith("Charged trees  ")
    assert first.endswith(f"epsilon {entry['epsilon']:.4g}")
    sfumato("study", "delete", "Charged trees", "--yes")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["study", "show", "Nobody's"], 2, 'there is no study "Nobody\'s"'),
        (["study", "create", "none.toml", "--name", "A", "--purpose", "B."], 2, "cannot be read"),
        ([*create("Late"), "--closes", "1999-12-31"], 2, "closes must not be in the past"),
        (["release", "export", "Trees", "--to", "trees.xls"], 2, "must end in"),
        (["token", "revoke", "00"], 2, "there is no token 00"),
        (["ledger", "show", "--server", "http://127.0.0.1:1"], 1, "cannot be reached"),
        (["ledger", "show", "--server", "http://example.org"], 2, "over plain http"),
        (["ledger", "show", "--server", "example.org"], 2, "a server must be"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    sfumato: Sfumato, arguments: list[str], code: int, message: str
) -> None:
    result = sfumato(*arguments, code=code)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


def test_a_study_without_its_dictionary_says_which_key_to_set(
    sfumato: Sfumato, tmp_path: Path
) -> None:
    lines = STUDY.splitlines()
    (tmp_path / "study.toml").write_text("\n".join(x for x in lines if "dictionary" not in x))
    result = sfumato(*create("No items"), code=2)
    assert 'hint: set dictionary = "FILE" in the study' in result.stderr


def test_a_command_without_a_token_sends_no_request(
    sfumato: Sfumato, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SFUMATO_TOKEN")
    assert "token in SFUMATO_TOKEN" in sfumato("study", "list", code=2).stderr


def test_tokens_are_listed_without_their_secrets_and_revoked(
    sfumato: Sfumato, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = answer_of(
        sfumato("token", "create", "--role", "analyst", "--name", "Ada", "--days", "1", "--json")
    )
    text = sfumato("token", "list").stdout
    assert f"{token['id']}  analyst" in text
    assert token["token"] not in text + sfumato("token", "list", "--json").stdout
    monkeypatch.setenv("SFUMATO_TOKEN", token["token"])
    assert answer_of(sfumato("study", "list", "--json")) is not None
    assert "role" in sfumato(*create("Trees"), code=1).stderr
    sfumato("token", "revoke", token["id"])
    assert "needs a valid token" in sfumato("study", "list", code=1).stderr


def test_a_token_for_one_study_shows_no_other(
    sfumato: Sfumato, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = (answer_of(sfumato(*create(name), "--json"))["id"] for name in ("Own", "Other"))
    token = answer_of(
        sfumato("token", "create", "--role", "analyst", "--name", "Ann", "--study", "Own", "--json")
    )
    assert token["studies"] == [own]
    assert "Ann  (Own)" in sfumato("token", "list").stdout
    wrong = ("token", "create", "--role", "analyst", "--name", "Ann", "--study", "Nothing")
    assert "there is no study 'Nothing'" in sfumato(*wrong, code=2).stderr
    monkeypatch.setenv("SFUMATO_TOKEN", token["token"])
    assert [study["id"] for study in answer_of(sfumato("study", "list", "--json"))] == [own]
    for study in ("Other", other):
        assert "there is no study" in sfumato("study", "show", study, code=2).stderr
    assert "this token is limited to some studies" in sfumato("ledger", "show", code=1).stderr


def test_a_failing_study_is_shown_and_tried_again(
    sfumato: Sfumato, collector: CollectorServer
) -> None:
    study_id = answer_of(sfumato(*create("Failing"), "--json"))["id"]
    with collector.store.transaction() as tx:
        tx.set_fault(FaultRow(study_id, "internal error: MemoryError", 2, int(time.time()) + 600))
    assert "Failing  (failing)" in sfumato("study", "list").stdout
    text = sfumato("study", "show", "Failing").stdout
    assert "failing: internal error: MemoryError (tried 2 times, next at " in text
    assert answer_of(sfumato("study", "retry", "Failing", "--json"))["fault"] is None
    sfumato("study", "delete", "Failing", "--yes")
    assert "cannot be tried again" in sfumato("study", "retry", "Failing", code=1).stderr


def test_a_failed_study_is_released_after_a_confirmation(
    sfumato: Sfumato, collector: CollectorServer
) -> None:
    study_id = answer_of(sfumato(*create("Mended"), "--json"))["id"]
    send(collector, "Mended", [0] * 5)
    with collector.store.transaction() as tx:
        studies.end(tx, study_id, "failed", "internal error: MemoryError")
    question = sfumato("study", "retry", "Mended", code=1, answer="n\n")
    assert "this releases the result of 5 reports; retry?" in question.output
    sfumato("study", "retry", "Mended", "--yes")
    wait_for(
        lambda: answer_of(sfumato("study", "show", study_id, "--json"))["state"] == "released",
        "the release",
    )


def test_a_store_is_checked(sfumato: Sfumato, tmp_path: Path) -> None:
    stage = Stage(tmp_path / "checked.db")
    study = stage.create("Checked")
    stage.answer(study, 0, 1)
    stage.finish(study)
    stage.store.close()
    store = ("--store", f"sqlite:///{tmp_path}/checked.db")
    assert sfumato("check", *store).stdout.endswith("nothing is damaged\n")
    findings = answer_of(sfumato("check", *store, "--json"))
    assert (findings["problems"], findings["without_digest"]) == ([], 0)
    assert findings["checked"]["sealed"] == 1
    execute(str(tmp_path / "checked.db"), "UPDATE sealed SET data = CAST(data || x'00' AS BLOB)")
    assert "study 'Checked': sealed 1 of task " in sfumato("check", *store, code=1).stdout
    assert len(answer_of(sfumato("check", *store, "--json", code=1))["problems"]) == 1
    nothing = sfumato("check", "--store", "sqlite:///none.db", code=1)
    assert "there is nothing to check" in nothing.stderr
    assert not (tmp_path / "none.db").exists()


def test_a_missing_cache_of_compiled_loops_is_a_warning(
    sfumato: Sfumato, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "compiled loops" not in sfumato("serve", "--check").stderr
    monkeypatch.setattr("sfumato.collector.preflight.has_cache", lambda: False)
    result = sfumato("serve", "--check", "--json")
    assert "compiled loops: they cannot be cached" in result.stderr
    assert answer_of(result)["retention_days"] is not None


def test_the_public_key_is_shown(sfumato: Sfumato, collector: CollectorServer) -> None:
    assert sfumato("key", "show").stdout.strip() == collector.public_key
    assert answer_of(sfumato("key", "show", "--json")) == {"public_key": collector.public_key}


def test_a_copy_of_the_store_makes_another(sfumato: Sfumato, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY.replace('"local"', '"central"'))
    sfumato(*create("Copied"))
    sfumato("backup", "copy.db")
    assert "not overwritten" in sfumato("backup", "copy.db", code=1).stderr
    text = sfumato("restore", "copy.db", "--store", "sqlite:///again.db").stdout
    assert "may have been released after the copy was made: Copied\n" in text
    assert "count their releases as spent" in text
    answer = answer_of(
        sfumato("restore", "copy.db", "--store", "sqlite:///on.db", "--nothing-released", "--json")
    )
    assert answer == {"restored": "copy.db", "ended": [], "warning": None}
    before = answer_of(sfumato("token", "list", "--json"))
    assert answer_of(sfumato("token", "list", "--store", "sqlite:///again.db", "--json")) == before


def test_settings_are_checked_and_shown_without_secrets(sfumato: Sfumato, tmp_path: Path) -> None:
    (tmp_path / "collector.toml").write_text('store = "sqlite:///a.db"\nretention_days = 7\n')
    (tmp_path / "wrong.toml").write_text("retention = 7\n")
    store = "postgresql://collector:hunter2@127.0.0.1:1/sfumato"  # nothing listens there
    options = ("--config", "collector.toml", "--store", store, "--port", "1", "--check")
    result = sfumato("serve", *options, code=1)
    assert "retention_days = 7\n" in result.stdout
    assert 'listen = "127.0.0.1:1"\n' in result.stdout
    assert "hunter2" not in result.output
    assert "# worker: the store elects one" in result.stdout
    assert "# worker: not here" in sfumato("serve", *options, "--no-worker", code=1).stdout
    values = answer_of(sfumato("serve", "--config", "collector.toml", "--check", "--json"))
    assert values["retention_days"] == 7
    assert values["memory"]["most_bytes"] == sum(values["memory"]["parts"].values())
    assert not (tmp_path / "a.db").exists()
    assert (
        "unknown key retention"
        in sfumato("serve", "--config", "wrong.toml", "--check", code=2).stderr
    )


def test_what_keeps_a_collector_from_starting_is_found_before(
    sfumato: Sfumato, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    (tmp_path / "cert.toml").write_text('tls_cert = "cert.pem"\ntls_key = "cert.pem"\n')
    assert "cert.pem" in sfumato("serve", "--config", "cert.toml", "--check", code=2).stderr
    (tmp_path / "key.toml").write_text('signing_key = "open.key"\n')
    monkeypatch.delenv("SFUMATO_SIGNING_KEY")
    (tmp_path / "open.key").write_text("00" * 32)
    (tmp_path / "open.key").chmod(0o644)
    assert "open.key" in sfumato("serve", "--config", "key.toml", "--check", code=2).stderr
    (tmp_path / "text.db").write_text("no database")
    sfumato("serve", "--store", "sqlite:///text.db", "--check", code=1)


def test_an_address_in_use_is_reported(collector: CollectorServer, tmp_path: Path) -> None:
    port = collector.address.rpartition(":")[2]
    code, out, err = run("serve", "--port", port, cwd=tmp_path)
    assert (code, out) == (1, "")
    assert "cannot listen on 127.0.0.1" in err
    assert "Traceback" not in err


def test_every_command_of_the_service_has_help_with_an_example() -> None:
    def leaves(group: Any, path: list[str]) -> Iterator[list[str]]:
        for name, command in group.commands.items():
            yield [*path, name]
            if hasattr(command, "commands"):
                yield from leaves(command, [*path, name])

    commands = list(leaves(main, []))
    assert ["study", "create"] in commands
    for path in commands:
        assert "Example:" in CliRunner().invoke(main, [*path, "--help"]).output, path

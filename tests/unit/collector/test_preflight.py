"""`sfumato serve --check` sees what keeps a collector from running well, and changes nothing."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from certificates import write_certificate
from collecting import Stage
from sfumato.collector import preflight, tokens
from sfumato.collector.settings import Settings
from sfumato.collector.store import schema
from sfumato.collector.store.database import database
from sfumato.collector.store.ledger import set_budget
from sfumato.errors import SfumatoError

DAY = 86_400


def settings(folder: Path, **keys: Any) -> Settings:
    place = {"store": f"sqlite:///{folder}/collector.db", "signing_key": f"{folder}/collector.key"}
    return Settings(**place | keys)


def look(settings: Settings, check: str, now: float | None = None) -> preflight.Finding:
    moment = time.time() if now is None else now
    (finding,) = [
        each for each in preflight.checks(settings, lambda: moment) if each.check == check
    ]
    assert (finding.state == "error") == (finding.problem is not None)
    return finding


def test_before_the_first_start_nothing_is_wrong_and_nothing_is_created(tmp_path: Path) -> None:
    states = {each.check: each.state for each in preflight.checks(settings(tmp_path))}
    assert states.pop("clock") in ("ok", "warning")  # it depends on this machine
    assert states.pop("tokens") == "warning"
    assert set(states.values()) == {"ok"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seconds", "state", "text"),
    [
        (0, "warning", "valid until"),  # for one hour
        (2 * DAY, "error", "which is not now"),
        (-2 * DAY, "error", "which is not now"),
    ],
)
def test_a_certificate_is_checked_with_its_dates(
    tmp_path: Path, seconds: int, state: str, text: str
) -> None:
    file = str(write_certificate(tmp_path))
    served = settings(tmp_path, tls_cert=file, tls_key=file)
    finding = look(served, "certificate", time.time() + seconds)
    assert finding.state == state
    assert text in finding.text


def test_plain_http_for_others_is_a_warning(tmp_path: Path) -> None:
    assert look(settings(tmp_path, listen="0.0.0.0:8420"), "certificate").state == "warning"


def test_a_store_of_another_version_is_named(tmp_path: Path) -> None:
    schema.migrate(database(f"sqlite:///{tmp_path}/collector.db"), schema.STEPS[:8])
    finding = look(settings(tmp_path), "store")
    assert (finding.state, "version 8; the next start" in finding.text) == ("ok", True)
    newer = (*schema.STEPS, ("CREATE TABLE of_the_future (word TEXT)",))
    schema.migrate(database(f"sqlite:///{tmp_path}/collector.db"), newer)
    assert look(settings(tmp_path), "store").state == "error"


def test_a_full_disk_and_few_files_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1_024, 1_024))
    assert look(settings(tmp_path), "open files").state == "warning"
    monkeypatch.setattr(preflight, "LOW_DISK_BYTES", 1 << 80)
    assert look(settings(tmp_path), "disk").state == "warning"
    missing = settings(tmp_path, store=f"sqlite:///{tmp_path}/none/collector.db")
    assert "cannot be used" in look(missing, "disk").text


def test_a_lake_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    assert look(settings(tmp_path, lake=f"{tmp_path}/new/lake"), "lake").state == "ok"
    (tmp_path / "file").touch()
    finding = look(settings(tmp_path, lake=f"{tmp_path}/file/lake"), "lake")
    assert (finding.state, f"{tmp_path}/file is not one" in finding.text) == ("error", True)
    assert "not asked" in look(settings(tmp_path, lake="s3://lake"), "lake").text
    assert sorted(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_running_store_has_its_key_its_clock_its_budget_and_its_tokens(tmp_path: Path) -> None:
    place = settings(tmp_path, budget_epsilon=4.0)
    with closing((stage := Stage(place.store)).store) as store:
        set_budget(store, place.budget)
        stage.create("Trees", epsilon=3.9, delta=1e-6, devices=40)
        study = stage.create("Local trees", trust="local", epsilon=4.0)
        stage.answer(study, 1)
        now = stage.clock()
        assert "signing key" in look(place, "key", now).text  # it is missing
        Path(place.signing_key).write_text("ab" * 32)
        Path(place.signing_key).chmod(0o600)
        assert "is not the one" in look(place, "key", now).text
        assert look(place, "clock", now - 2 * DAY).state == "error"
        assert look(place, "budget", now).text == "epsilon 0 of 4 is spent"
        assert look(settings(tmp_path), "budget", now).state == "error"
        tokens.create(store, role="admin", name="ops", days=10, now=lambda: now)
        assert look(place, "tokens", now).state == "warning"
        tokens.create(store, role="admin", name="ops", days=90, now=lambda: now)
        assert look(place, "tokens", now).state == "ok"


def test_a_budget_that_is_nearly_spent_is_a_warning(tmp_path: Path) -> None:
    place = settings(tmp_path, budget_epsilon=4.0)
    with closing((stage := Stage(place.store)).store) as store:
        set_budget(store, place.budget)
        study = stage.create("Trees", epsilon=3.9, delta=1e-6)
        stage.answer(study, *([1] * 40))
        stage.finish(study)
        finding = look(place, "budget", stage.clock())
    assert finding.state == "warning"
    assert finding.text.startswith("epsilon 3.")


def test_a_store_that_cannot_be_reached_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "collector.db").write_text("no database")
    findings = preflight.checks(settings(tmp_path))
    (error,) = [each for each in findings if each.state == "error"]
    assert error.check == "store"
    assert isinstance(error.problem, SfumatoError)

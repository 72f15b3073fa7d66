"""Settings come from a file and the environment, and are refused by name."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from sfumato.collector.settings import Settings, without_secrets
from sfumato.errors import SpecError

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "deploy.md"


def write(folder: Path, text: str) -> Path:
    file = folder / "collector.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_says_what_differs_from_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'listen = "192.0.2.1:80"\nretention_days = 7\nupload_seconds = 5\n')
    settings = Settings.load(file, environment={})
    assert settings.address == ("192.0.2.1", 80)
    assert (settings.retention_days, settings.upload_seconds) == (7, 5.0)
    assert settings.store == Settings().store


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'listen = "127.0.0.1:1"\nbudget_epsilon = 1\nopen_metrics = false\n')
    settings = Settings.load(
        file,
        environment={
            "SFUMATO_LISTEN": "[::1]:2",
            "SFUMATO_BUDGET_EPSILON": "2.5",
            "SFUMATO_OPEN_METRICS": "True",
            "SFUMATO_RETENTION_DAYS": "",
            "SFUMATO_TOKEN": "sfu_of_a_client",
            "PATH": "/bin",
        },
    )
    assert settings.address == ("::1", 2)
    assert settings.budget.epsilon == 2.5
    assert settings.open_metrics is True
    assert settings.retention_days is None


def test_what_devices_sent_may_be_kept_for_ever(tmp_path: Path) -> None:
    file = write(tmp_path, 'retention_days = "never"\n')
    settings = Settings.load(file, environment={})
    assert settings.retention_days is None
    assert settings.to_dict()["retention_days"] == "never"
    for value in ("never", ""):
        environment = {"SFUMATO_RETENTION_DAYS": value}
        assert Settings.load(environment=environment).retention_days is None
    other = Settings.load(file, environment={"SFUMATO_RETENTION_DAYS": "7"})
    assert other.retention_days == 7


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("listn = 1", "listn"),
        ("[limits]\nbytes = 1", "limits"),
        ("listen = 80", "listen"),
        ('listen = "80"', "listen"),
        ('listen = "host:99999"', "listen"),
        ("queue_bytes = 0", "queue_bytes"),
        ("queue_bytes = 1.5", "queue_bytes"),
        ("queue_bytes = true", "queue_bytes"),
        ('queue_bytes = "never"', "queue_bytes"),
        ('retention_days = "always"', "retention_days"),
        ("open_metrics = 1", "open_metrics"),
        ("upload_seconds = nan", "upload_seconds"),
        ("upload_seconds = inf", "upload_seconds"),
        ("budget_epsilon = -1", "budget_epsilon"),
        ("budget_delta = 1.5", "delta"),
        ('log_level = "loud"', "log_level"),
        ('tls_cert = "a.pem"', "tls_key"),
        ("store = ", "TOML"),
    ],
)
def test_invalid_settings_are_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        Settings.load(write(tmp_path, text), environment={})


@pytest.mark.parametrize(
    ("name", "value"),
    [("SFUMATO_QUEUE_BYTES", "many"), ("SFUMATO_OPEN_METRICS", "1"), ("SFUMATO_LISTEN", "")],
)
def test_an_invalid_variable_is_refused(name: str, value: str) -> None:
    with pytest.raises(SpecError):
        Settings.load(environment={name: value})


def test_a_mistyped_variable_is_refused_as_it_may_be_the_budget() -> None:
    with pytest.raises(SpecError, match="unknown key SFUMATO_BUDGET_EPSILN in the env") as caught:
        Settings.load(environment={"SFUMATO_BUDGET_EPSILN": "3"})
    assert caught.value.hint == "did you mean SFUMATO_BUDGET_EPSILON?"


def test_variables_that_are_not_for_collectors_are_no_mistakes() -> None:
    others = ("SERVER", "SERVER_KEY", "TOKEN", "DEVICE_HOME", "DATA", "TEST_SEED")
    environment = {f"SFUMATO_{name}": "x" for name in others}
    assert Settings.load(environment=environment) == Settings()


def test_a_mistyped_key_gets_the_one_that_is_meant(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="unknown key budget_epsilom in") as caught:
        Settings.load(write(tmp_path, "budget_epsilom = 3"), environment={})
    assert caught.value.hint == "did you mean budget_epsilon?"


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        Settings.load(tmp_path / "none.toml", environment={})


def test_a_password_is_not_shown() -> None:
    store = "postgresql://collector:hunter2@db.example:5432/sfumato?password=hunter2"
    settings = Settings(store=store)
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in str(settings.to_dict())
    assert settings.to_dict()["store"] == "postgresql://collector@db.example:5432/sfumato"
    mistyped = "postgresql:/collector:hunter2@db.example/sfumato"
    assert without_secrets(mistyped) == "postgresql:…"


@pytest.mark.parametrize("store", ["sqlite:///a.db", "sqlite:////srv/a.db", "a.db"])
def test_a_store_without_a_password_is_shown_as_it_is(store: str) -> None:
    assert without_secrets(store) == store


def test_the_sample_in_the_guide_is_read(tmp_path: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    sample = re.search(r'```toml title="collector.toml"\n(.*?)```', text, re.DOTALL)
    assert sample is not None
    settings = Settings.load(write(tmp_path, sample[1]), environment={})
    assert settings != Settings()


def test_every_setting_is_in_the_guide() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert not [field.name for field in fields(Settings) if f"| `{field.name}` |" not in text]


def test_lists_are_lists_in_a_file_and_separated_by_commas_in_the_environment(
    tmp_path: Path,
) -> None:
    file = write(tmp_path, 'hosts = ["collector.example"]\nproxies = ["127.0.0.1", "10.0.0.0/8"]\n')
    settings = Settings.load(file, environment={"SFUMATO_HOSTS": "a.example, *.b.example"})
    assert settings.hosts == ("a.example", "*.b.example")
    assert settings.proxies == ("127.0.0.1", "10.0.0.0/8")


@pytest.mark.parametrize(
    "text",
    [
        'hosts = "a.example"',
        "hosts = [1]",
        'hosts = [""]',
        'hosts = ["a.*"]',
        'hosts = ["https://a.example"]',
        'proxies = ["proxy.example"]',
        'proxies = ["10.0.0.1/8"]',
    ],
)
def test_lists_are_checked(tmp_path: Path, text: str) -> None:
    name = text.partition(" ")[0]
    with pytest.raises(SpecError, match=f"{name} must be"):
        Settings.load(write(tmp_path, text), environment={})

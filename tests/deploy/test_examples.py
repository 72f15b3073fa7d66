"""examples/deploy: every file is well-formed, and names what exists.

No container is built or started here. promtool (Debian: prometheus) and systemd-analyze (Debian:
systemd) check more, where they are installed.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sfumato.cli.main import main
from sfumato.collector.metrics import Metrics
from sfumato.collector.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"


def load(name: str) -> Any:
    yaml: Any = importlib.import_module("yaml")
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def dashboard_expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana" / "sfumato.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    return [target["expr"] for panel in panels for target in panel["targets"]]


def alert_expressions() -> list[str]:
    return [rule["expr"] for group in load("alerts.yml")["groups"] for rule in group["rules"]]


def sample_names() -> set[str]:
    """The names under which /metrics has samples, those of gauges that are watched included."""
    metrics = Metrics()
    for gauge in (metrics.queue_bytes, metrics.queue_uploads, metrics.worker_success_age):
        metrics.watch(gauge, lambda: 0.0)
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return {
        each.name + suffix
        for each in metrics.registry.collect()
        for suffix in suffixes.get(each.type, ["_info"])
    }


@pytest.mark.parametrize("expressions", [dashboard_expressions, alert_expressions])
def test_every_metric_of_the_dashboard_and_the_alerts_exists(expressions: Any) -> None:
    names = {name for text in expressions() for name in re.findall(r"\bsfumato_\w+", text)}
    assert names
    assert names <= sample_names()


def test_the_settings_are_those_of_a_collector() -> None:
    settings = Settings.load(DEPLOY / "collector.toml", environment={})
    assert settings.listen == "127.0.0.1:8420"  # as in nginx.conf, prometheus.yml, Containerfile
    for name in ("prometheus.yml", "Containerfile"):
        assert settings.listen in (DEPLOY / name).read_text()
    variables = load("compose.yaml")["services"]["collector"]["environment"]
    keys = {name.removeprefix(PREFIX).lower() for name in variables}
    assert keys <= set(settings.to_dict())


def test_every_file_of_the_compose_file_exists() -> None:
    compose = load("compose.yaml")
    secrets = {"collector.pem", "collector.key", "metrics.token"}  # README.md says how to make them
    mounts = [volume for each in compose["services"].values() for volume in each["volumes"]]
    for mount in mounts:
        source = mount.partition(":")[0]
        if source.startswith("."):
            path = (DEPLOY / source).resolve()
            assert path.is_file() or path.name in secrets, mount
        else:
            assert source in compose["volumes"], mount
    readme = (DEPLOY / "README.md").read_text()
    assert all(name in readme for name in secrets)


def test_the_containerfile_copies_what_exists_and_runs_a_command() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert json.loads(command)[0] in main.commands


def test_the_unit_runs_a_command_with_options_that_exist() -> None:
    unit = (DEPLOY / "sfumato.service").read_text()
    commands = re.findall(r"^ExecStart(?:Pre)?=/opt/sfumato/bin/sfumato (.*)$", unit, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        name, *words = command.split()
        options = {text for each in main.commands[name].params for text in each.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_prometheus_accepts_the_rules_and_they_fire_for_their_reasons(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    for path in (
        DEPLOY / "alerts.yml",
        DEPLOY / "prometheus.yml",
        ROOT / "tests/deploy/alerts.test.yml",
    ):
        shutil.copy(path, tmp_path)
    (tmp_path / "metrics.token").write_text("sfu_")
    rules = [
        {"record": f"panel:{k}", "expr": text} for k, text in enumerate(dashboard_expressions())
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "a", "rules": rules}]}))
    for command in (
        ["check", "config", "prometheus.yml"],
        ["check", "rules", "panels.yml"],
        ["test", "rules", "alerts.test.yml"],
    ):
        result = subprocess.run([promtool, *command], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_systemd_accepts_the_unit_and_finds_it_hardened(tmp_path: Path) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    unit = tmp_path / "sfumato.service"
    unit.write_text(  # its programs are not here
        (DEPLOY / "sfumato.service").read_text().replace("/opt/sfumato/bin/sfumato", "/bin/true")
    )
    verified = subprocess.run([program, "verify", unit], capture_output=True, text=True)
    assert "sfumato.service" not in verified.stderr, verified.stderr
    assert verified.returncode == 0, verified.stderr
    rated = subprocess.run(
        [program, "security", "--offline=true", "--threshold=20", "--no-pager", unit],
        capture_output=True,
        text=True,
    )
    assert rated.returncode == 0, rated.stdout[-500:]  # an exposure of 2.0 of 10 at most

"""nginx and HAProxy before collectors, each with its file in examples/proxies."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from serving import wait_for

ROOT = Path(__file__).resolve().parents[1]
PROXIES = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def proxy(name: str, folder: Path, collectors: Sequence[str], certificate: Path) -> Iterator[int]:
    """The port of a proxy before these collectors, by their addresses, during the block."""
    script = subprocess.run([ROOT / "scripts/proxies"], capture_output=True, text=True, check=False)
    if script.returncode != 0:
        pytest.skip(f"scripts/proxies found no {name}: {script.stderr.strip()[-200:]}")
    program = shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    assert program is not None
    port, text = free_port(), (ROOT / "examples/proxies" / PROXIES[name]).read_text()
    (line,) = [each for each in text.splitlines() if re.match(" *server .*:8420", each)]
    servers = [
        line.replace("127.0.0.1:8420", address.removeprefix("http://")).replace(
            "server one", f"server collector{number}"
        )
        for number, address in enumerate(collectors)
    ]
    places = {
        line: "\n".join(servers),
        "listen 443": f"listen 127.0.0.1:{port}",
        "bind :443": f"bind 127.0.0.1:{port}",
        "/etc/ssl/collector.pem": str(certificate),
        "/etc/ssl/collector.key": str(certificate),
        "/var/log/nginx/error.log": str(folder / "errors"),
        "worker_processes auto": f"pid {folder}/pid; worker_processes 1",
    }
    for before, after in places.items():
        text = text.replace(before, after)
    if name == "nginx":  # its folders for bodies are root's
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        lines = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
        text = text.replace("http {", "http {\n" + lines, 1)
        if os.geteuid() == 0:  # its workers would be somebody else, who cannot write there
            text = "user root;\n" + text
    file = folder / PROXIES[name]
    file.write_text(text)
    options = ["-c", str(file), "-g", "daemon off;"] if name == "nginx" else ["-f", str(file)]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([program, *options], stdout=output, stderr=output, cwd=folder)
    try:
        wait_for(lambda: answers(port) or process.poll() is not None, name)
        assert process.poll() is None, (folder / "output").read_text()
        yield port
    finally:
        process.terminate()
        process.wait(20)


def answers(port: int) -> bool:
    with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), timeout=1)):
        return True
    return False

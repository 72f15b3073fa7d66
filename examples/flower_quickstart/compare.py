"""Run the app before and after on a real SuperLink with SuperNodes, and print what changed.

    .venv-flower-app/bin/python examples/flower_quickstart/compare.py

Starts one SuperLink and `--nodes` SuperNodes, processes on loopback, runs the app once per setting,
and ends them by their ids. `--kill` kills a SuperNode without notice while it trains in the second
round of a setting.
"""

import argparse
import contextlib
import difflib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SETTINGS = {
    "before": {},
    "sketched": {"rate": 10.0},
    "central": {"rate": 4.0, "clip": 0.5, "noise-multiplier": 0.3},
    "secure": {"rate": 10.0, "secure": True},
    "secure and noised": {"rate": 4.0, "clip": 0.5, "noise-multiplier": 0.3, "secure": True},
}

# Messages that a client gets up to the training of round 2: in plain rounds, and in masked rounds
# (hello, enrol, share, train, unmask; enrol, share, train).
MESSAGES_BEFORE = {False: 2, True: 8}


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Federation:
    """A SuperLink and its SuperNodes."""

    def __init__(self, nodes, folder):
        self.folder, self.processes = folder, []
        self.port, *self.ports = free_ports(nodes + 1)
        home = folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            '[superlink]\ndefault = "here"\n\n[superlink.here]\ninsecure = true\n'
            f'address = "127.0.0.1:{self.port}"\n',
            encoding="utf-8",
        )
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }

    def __enter__(self):
        local = ["--insecure", "--host", "127.0.0.1"]
        self.start(
            "superlink",
            *local,
            *("--port", str(self.port), "--disable-runtime-dependency-installation"),
        )
        wait(lambda: listens(self.port), 60, "the SuperLink does not listen")
        for number, port in enumerate(self.ports):
            self.start(
                "supernode",
                *local,
                *("--superlink", f"127.0.0.1:{self.port}", "--port", str(port)),
                *("--node-config", f"partition-id={number}"),
            )
        return self

    def __exit__(self, *_):
        for process in self.processes:
            end(process)

    def start(self, kind, *words):
        name = f"{kind}-{len(self.processes)}.log"
        with (self.folder / name).open("w") as log:
            self.processes.append(
                subprocess.Popen(
                    [BIN / f"flower-{kind}", *words],
                    env=self.environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its children end with it
                )
            )

    def flwr(self, *words):
        done = subprocess.run(
            [BIN / "flwr", *words, "--format", "json"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        start = done.stdout.find("{")
        if done.returncode or start < 0:
            raise SystemExit(f"flwr {words[0]} failed: {done.stdout}{done.stderr}")
        return json.loads(done.stdout[start:])

    def run(self, app, settings, kill_at=None):
        """Run the app to its end. The last SuperNode is killed when it has received `kill_at`
        messages of the run."""
        out = self.folder / "out.json"
        out.unlink(missing_ok=True)
        settings = {"out": str(out), **settings}
        words = " ".join(f"{name}={json.dumps(value)}" for name, value in settings.items())
        started = time.monotonic()
        before = self.received()
        run = str(self.flwr("run", str(app), "here", "--run-config", words)["run-id"])
        looked = time.monotonic()

        def is_over():
            nonlocal kill_at, looked
            if kill_at is not None and self.received() - before >= kill_at:
                end(self.processes.pop(), signal.SIGKILL)
                kill_at = None
            if out.exists():
                return True
            if time.monotonic() - looked < 20:  # asking has a cost
                return False
            looked = time.monotonic()
            return "failed" in self.state(run)

        wait(is_over, 900, "the run does not end")
        seconds = time.monotonic() - started
        if not out.exists():
            raise SystemExit("the run failed; see `flwr log`")
        time.sleep(1)  # the file may be incomplete
        return {**json.loads(out.read_text(encoding="utf-8")), "seconds": seconds}

    def received(self):
        """Number of messages that the last SuperNode has received."""
        log = self.folder / f"supernode-{len(self.processes) - 1}.log"
        return log.read_text(encoding="utf-8", errors="replace").count("Received successfully")

    def state(self, run):
        listed = self.flwr("list", "here", "--run-id", run)["runs"]
        return str(listed[0]["status"]) if listed else ""


def end(process, how=signal.SIGTERM):
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(is_true, seconds, what):
    until = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > until:
            raise SystemExit(what)
        time.sleep(0.5)


def lines_changed():
    """Number of lines added or removed between the app before and after."""
    changed = 0
    for old in sorted((HERE / "before").rglob("*.py")):
        new = HERE / "after" / old.relative_to(HERE / "before")
        texts = [path.read_text(encoding="utf-8").splitlines() for path in (old, new)]
        changed += sum(
            line[0] in "+-" and line[:3] not in ("+++", "---")
            for line in difflib.unified_diff(*texts, lineterm="")
        )
    return changed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", choices=list(SETTINGS), help="run one setting")
    parser.add_argument("--kill", action="store_true", help="kill a SuperNode in round 2")
    parser.add_argument("--out", type=Path, help="a file for all numbers, in JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that child processes are ended
    names = [options.only] if options.only else list(SETTINGS)
    results = {}
    folder = Path(tempfile.mkdtemp(prefix="digits-"))
    with Federation(options.nodes, folder) as federation:
        for name in names:
            app = HERE / ("before" if name == "before" else "after")
            settings = {"nodes": options.nodes, "rounds": options.rounds, **SETTINGS[name]}
            kill_at = None
            if options.kill:
                settings |= {"nodes": 3, "seconds": 30.0}
                kill_at = MESSAGES_BEFORE["secure" in settings]
            results[name] = federation.run(app, settings, kill_at)
            show(name, results[name])
    shutil.rmtree(folder)
    print(f"{lines_changed()} lines of Python changed")
    if options.out:
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


def show(name, result):
    last = max(result["accuracy"], key=int)
    rounds = result["rounds"].values()
    up = [each["bytes-up"] for each in rounds if "bytes-up" in each] or [model_bytes()]
    spent = [each["epsilon"] for each in rounds if "epsilon" in each] or [math.inf]
    print(
        f"{name:18} accuracy {result['accuracy'][last]:.3f}  bytes up {sum(up) / len(up):,.0f}  "
        f"epsilon {max(spent):.4g}  clients {[each.get('clients') for each in rounds]}  "
        f"{result['seconds']:.0f} s",
        flush=True,
    )


def model_bytes():
    """Bytes of the arrays that a client of the app before sends."""
    sys.path.insert(0, str(HERE / "before"))
    from digits.task import new_model

    return sum(array.nbytes for array in new_model().values())


if __name__ == "__main__":
    main()

"""A proxy under test: its description (TOML), its configuration (templates), starting and stopping it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from . import check, machine, template
from .cases import PLAIN, Case, Shape, route_name

PEERS = Path(__file__).resolve().parent.parent / "peers"
KNOWN = {
    "name", "extends", "program", "args", "env", "version", "listeners", "ports", "same_port", "templates", "values",
    "cases", "collector",
}
OFFSETS = {"http": 0, "tls": 1, "h2c": 2, "admin": 3}
# A hundred thousand routes take some proxies a while.
START_SECONDS = 60
STOP_SECONDS = 4
LONG_LOG = 1 << 20


class PeerError(Exception):
    """A proxy cannot be described, started or used."""


def read_description(source: str) -> dict:
    """Reads NAME (a folder of peers/) or the path of a TOML file; a base named by `extends` fills the gaps."""
    is_file = "/" in source or source.endswith(".toml")
    path = Path(source) if is_file else PEERS / source / "peer.toml"
    if not path.is_file():
        raise PeerError(f"no such proxy: {source} (looked for {path})")
    told = tomllib.loads(path.read_text())
    if unknown := set(told) - KNOWN:
        raise PeerError(f"{path}: unknown key {', '.join(sorted(unknown))}")
    told.setdefault("name", path.stem if is_file else source)
    if "templates" in told:
        told["folder"] = path.resolve().parent
    told["here"] = path.resolve().parent
    base = read_description(told["extends"]) if "extends" in told else {}
    return base | told | {key: base.get(key, {}) | told.get(key, {}) for key in ("env", "values")}


def lists(shape: Shape, backend_port: int) -> dict[str, list[dict]]:
    """What templates go through: the backend listens on one loopback address for each upstream."""
    hosts = [f"127.0.0.{n + 1}" for n in range(shape.upstreams)]
    return {
        "upstreams": [{"n": n, "host": host, "upstream": f"{host}:{backend_port}"} for n, host in enumerate(hosts)],
        "routes": [{"n": n, "route": route_name(n)} for n in range(shape.routes)],
    }


@dataclass
class Peer:
    """One proxy, with the ports it was given and its running process."""

    name: str
    told: dict
    values: dict
    cores: list[int]
    shape: Shape = PLAIN
    process: subprocess.Popen | None = None
    failed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def create(cls, source: str, index: int, common: dict, cores: list[int]) -> "Peer":
        """Reads the description and settles ports and folders."""
        told = read_description(source)
        base = common["first_port"] + 10 * index
        ports = {kind: base + offset for kind, offset in OFFSETS.items()}
        ports |= {kind: ports[other] for kind, other in told.get("same_port", {}).items()}
        ports |= told.get("ports", {})
        ports.setdefault("h2", ports["tls"])
        run = Path(common["work"]) / "run" / told["name"]
        words = common | ports | {"run": run, "here": told["here"]}
        values = words | {name: template.fill(str(value), words) for name, value in told["values"].items()}
        return cls(told["name"], told, values, cores)

    def lacks(self, case: Case) -> str:
        """What the description does not offer of what the case needs: its listener, its lists, the case at all."""
        if case.listener not in self.told.get("listeners", ["http"]):
            return f"no {case.listener} in its listeners"
        for many, name in ((case.shape.upstreams > 1, "upstreams"), (case.shape.routes > 0, "routes")):
            if many and not any(template.uses(text, name) for _, text in self.templates()):
                return f"no list of {name} in its templates"
        return "" if case.name in self.told.get("cases", [case.name]) else "a variant, for a few cases"

    def templates(self) -> list[tuple[str, str]]:
        """Each template's name and text."""
        return [(name, (self.told["folder"] / name).read_text()) for name in self.told.get("templates", [])]

    def port(self, listener: str) -> int:
        return self.values[listener]

    def ports(self) -> set[int]:
        return {self.port(listener) for listener in self.told.get("listeners", ["http"])}

    def program(self) -> str:
        """The program's path: given with a slash, from the current folder; else from PATH and the sbin folders."""
        program = template.fill(self.told["program"], self.values)
        if "/" in program:
            found = os.path.abspath(program) if os.access(program, os.X_OK) else None
        else:
            found = shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin")
        if not found:
            raise PeerError(f"{self.name}: {Path(program).name} is not there (install_peers.sh, or cargo build --release)")
        return found

    def version(self) -> str:
        """The version the program tells, or a file `program.version` beside it."""
        text = ""
        if "version" in self.told:
            done = subprocess.run([self.program(), *self.told["version"]], capture_output=True, text=True, timeout=20)
            text = done.stdout + done.stderr
        elif (note := Path(self.program() + ".version")).exists():
            text = note.read_text()
        found = re.search(r"\d+\.\d+\.\d+[\w.-]*", text)
        return found[0] if found else "(unknown version)"

    def render(self) -> None:
        """Writes the configuration from its templates into the run folder."""
        run = self.values["run"]
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir(parents=True)
        items = lists(self.shape, self.values["backend_port"])
        for name, text in self.templates():
            try:
                (run / name.removesuffix(".in")).write_text(template.render(text, self.values, items))
            except ValueError as error:
                raise PeerError(f"{self.name}: {name}: {error}") from error

    def reshape(self, shape: Shape) -> None:
        """Starts the proxy anew, if it runs with a configuration of another shape."""
        if self.process is None or self.shape != shape:
            self.shape = shape
            self.restart()

    def restart(self) -> None:
        self.stop()
        self.start()

    def start(self) -> None:
        """Starts the proxy and waits until it listens on all its ports."""
        for port in self.ports():
            # A worker left over from an earlier run would share the port (SO_REUSEPORT) and take half the load.
            if machine.listening(port):
                raise PeerError(f"{self.name}: port {port} is taken; is a proxy of an earlier run still there?")
        self.render()
        argv = [self.program(), *(template.fill(arg, self.values) for arg in self.told.get("args", []))]
        env = os.environ | {name: template.fill(value, self.values) for name, value in self.told["env"].items()}
        with open(self.values["run"] / "output.log", "a") as log:
            self.process = machine.launch(self.cores, argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not all(machine.listening(port) for port in self.ports()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                tail = (self.values["run"] / "output.log").read_text()[-500:]
                self.stop()
                raise PeerError(f"{self.name} did not start: {tail}")
            time.sleep(0.05)

    def shorten_logs(self) -> None:
        """Empties what an access log has filled: it would fill the disk over a run."""
        for log in self.values["run"].glob("*.log"):
            if log.stat().st_size > LONG_LOG:
                os.truncate(log, 0)

    def is_variant_of(self) -> str | None:
        """The proxy that this one is another setting of, where it is for a few cases only."""
        return self.told.get("extends") if "cases" in self.told else None

    def family(self) -> list[int]:
        return machine.family(self.process.pid)

    def stop(self) -> None:
        """Ends the proxy and its workers: asks, waits, then kills what is left, by process id."""
        if self.process is None:
            return
        workers = [pid for pid in self.family() if pid != self.process.pid]
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for pid in workers:
            try:
                # A number may have gone to a stranger meanwhile: ours are in the session the proxy was started in.
                if os.getsid(pid) == self.process.pid:
                    os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        self.process = None

    def fail(self, case: Case, error: Exception) -> None:
        """Notes that the case cannot be measured here."""
        self.failed[case.name] = str(error)
        print(f"left out: {self.name}: {case.name}: {error}", file=sys.stderr)

    def check(self, case: Case) -> None:
        """Whether it answers the case rightly; PeerError if not."""
        try:
            check.check(case, self.port(case.listener))
        except check.WrongAnswer as error:
            raise PeerError(str(error)) from error

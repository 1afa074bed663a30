"""What stands behind the proxies during a run: the backend, and a collector of spans for those that trace."""

import os
import subprocess
import time
from pathlib import Path

from . import machine
from .peers import PeerError

START_SECONDS = 10
# The system's own, which has the system's packages (gRPC); another may come first on the path.
PYTHON = "/usr/bin/python3"
COLLECTOR = Path(__file__).resolve().parent.parent / "tools" / "collector.py"


class Helper:
    """A program that listens on one port until it is stopped."""

    def __init__(self, name: str, port: int, cores: list[int], argv: list[str]):
        if machine.listening(port):
            raise PeerError(f"port {port}, the {name}'s, is taken")
        if not os.access(argv[0], os.X_OK):
            raise PeerError(f"{argv[0]} is not there: run install_peers.sh")
        self.process = machine.launch(cores, argv, stdin=subprocess.PIPE)
        deadline = time.monotonic() + START_SECONDS
        while not machine.listening(port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise PeerError(f"the {name} did not start")
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.process.stdin.close()


def backend(folder: Path, port: int, cores: list[int], addresses: int) -> Helper:
    """The upstream of all proxies, at `addresses` loopback addresses."""
    return Helper("backend", port, cores, [str(folder / "backend"), str(port), str(addresses)])


def collector(port: int, cores: list[int]) -> Helper:
    return Helper("collector", port, cores, [PYTHON, str(COLLECTOR), str(port)])

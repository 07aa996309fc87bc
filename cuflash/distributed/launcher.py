"""`python -m cuflash launch`: a script on several ranks of one host, a process for each."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

_TICK = 0.05  # seconds
GRACE = 10.0  # seconds that the others have once a rank has failed: to say why


def launch(size: int, command: Sequence[str], port: int | None = None) -> int:
    """Run `command` with the environment of each rank; 0, or what the first that fails returns."""
    port = port or _free_port()
    ranks = []
    for rank in range(size):
        own = {
            "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        environment = os.environ | {name: str(value) for name, value in own.items()}
        ranks.append(subprocess.Popen(command, env=environment))
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all, but not for long once one has failed."""
    failed, end = 0, float("inf")
    while any(x.poll() is None for x in ranks) and time.monotonic() < end:
        time.sleep(_TICK)
        codes = [x.poll() for x in ranks]
        if not failed and any(codes):
            # One that a signal has ended, its code below 0, is why others fail at the same time.
            failed, end = min(x for x in codes if x), time.monotonic() + GRACE
    failed = failed or next((x.returncode for x in ranks if x.returncode), 0)
    return failed if failed >= 0 else 128 - failed  # as shells say that a signal ended it


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_line() -> argparse.ArgumentParser:
    """The options of `launch`."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash launch",
        description="Run a script in several processes of this host, with RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR and MASTER_PORT as cuflash.distributed reads them.",
    )
    parser.add_argument("-n", "--size", type=int, required=True, help="how many ranks")
    parser.add_argument("--port", type=int, help="of rank 0, by default one that is free")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Do what the command line asks for."""
    parser = command_line()
    asked = parser.parse_args(arguments)
    if asked.size < 1:
        parser.error(f"--size {asked.size}: give 1 rank or more")
    # Whoever ends this process by a signal ends the ranks.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return launch(asked.size, [sys.executable, asked.script, *asked.arguments], asked.port)
    finally:
        signal.signal(signal.SIGTERM, before)

"""ssh servers of one's own, and an ssh that asks nothing and goes to them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


def write_keys(folder: Path, port: int = 22) -> str:
    """Makes keys, and an ssh that goes by them; the PATH with it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("host_key", "key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, capture_output=True
        )
    (folder / "ssh_config").write_text(
        f"Host *\nPort {port}\nIdentityFile {folder / 'key'}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    return f"{folder}:{os.environ['PATH']}"


def server(folder: Path, name: str, *, port: int = 22, addresses: Sequence[str] = (), **told: str) -> list[str]:
    """The command of a server with these keys, which listens at its addresses; `told` is set in its sessions."""
    config, given = folder / f"sshd_config-{name}", " ".join(f'"{key}={value}"' for key, value in told.items())
    lines = [
        f"Port {port}", f"HostKey {folder / 'host_key'}", f"AuthorizedKeysFile {folder / 'key.pub'}", "StrictModes no",
        "PermitRootLogin yes", "UsePAM no", "PidFile none", "MaxStartups 100", *([f"SetEnv {given}"] if given else []),
        *(f"ListenAddress {each}" for each in addresses), "",
    ]  # fmt: skip
    config.write_text("\n".join(lines))
    return [str(SSHD), "-D", "-f", str(config)]


@contextmanager
def ssh_servers(
    folder: Path, *hosts: Sequence[str], enter: Callable[[int], None] | None = None, **told: str
) -> Iterator[str]:
    """A PATH whose ssh reaches these addresses, a server for each host that listens at its own; `told` is set there."""
    port = 20_000 + os.getpid() % 10_000
    path = write_keys(folder, port)
    with ExitStack() as stack:
        for number, addresses in enumerate(hosts):
            running = subprocess.Popen(
                server(folder, str(number), port=port, addresses=addresses, **told),
                preexec_fn=None if enter is None else lambda number=number: enter(number),
            )
            stack.callback(lambda running=running: (running.terminate(), running.wait(10)))
        yield path

"""An ssh server of the tests' own, and an ssh that asks nothing and goes to it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@contextmanager
def ssh_servers(
    folder: Path, *hosts: Sequence[str], enter: Callable[[int], None] | None = None, **told: str
) -> Iterator[str]:
    """A PATH whose ssh reaches these addresses, a server for each host that listens at its own; `told` is set there."""
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = 20_000 + os.getpid() % 10_000
    common = [
        f"Port {port}", f"HostKey {folder / 'host_key'}", f"AuthorizedKeysFile {folder / 'key.pub'}", "StrictModes no",
        "PermitRootLogin yes", "UsePAM no", "PidFile none", *(f"SetEnv {key}={value}" for key, value in told.items()),
    ]  # fmt: skip
    (folder / "ssh_config").write_text(
        f"Host *\nPort {port}\nIdentityFile {folder / 'key'}\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n"
        "LogLevel ERROR\n"
    )
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"\n')
    (folder / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with ExitStack() as stack:
        for number, addresses in enumerate(hosts):
            config = folder / f"sshd_config-{number}"
            config.write_text("\n".join([*common, *(f"ListenAddress {each}" for each in addresses), ""]))
            server = subprocess.Popen(
                [str(SSHD), "-D", "-f", str(config)],
                preexec_fn=None if enter is None else lambda number=number: enter(number),
            )
            stack.callback(lambda server=server: (server.terminate(), server.wait(10)))
        yield f"{folder}:{os.environ['PATH']}"

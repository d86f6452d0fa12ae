"""A connection over which nothing comes through any more is known by what the kernel sends again."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from stagewright.rehearsal import emulated_hosts
from stagewright.rehearsal.hosts import namespace
from stagewright.rehearsal.tools import call, missing
from tests.rehearsal.clusters import star
from tests.runtime.running import ROOT

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=f"emulated hosts: {missing()}"),
    pytest.mark.timeout(120),
]
LISTEN = "import socket, time; server = socket.create_server(('', 7000)); kept = server.accept(); time.sleep(90)"
SEND = """
import socket, sys, time
from stagewright.runtime.launch.meeting import Place
from stagewright.runtime.safety.links import bad_links, sending_s
own, bad, good = sys.argv[1:]
places = [Place(name, name, address, False) for name, address in (("a", own), ("b", bad), ("c", good))]
until = time.monotonic() + 30


def connected(address):
    while True:
        try:
            return socket.create_connection((address, 7000), timeout=30)
        except ConnectionRefusedError:  # it is not there yet
            assert time.monotonic() < until
            time.sleep(0.1)


links = [connected(address) for address in (bad, good)]
print(bad_links(places, 0), flush=True)
sys.stdin.readline()
until = time.monotonic() + 30
while not bad_links(places, 0) and time.monotonic() < until:
    for link in links:
        link.send(b"x")
    time.sleep(0.2)
print(bad_links(places, 0), flush=True)
took = sending_s(places, 0)
print(took[bad] > 1.0 > took[good] >= 0.0, flush=True)
"""


def test_the_host_behind_a_link_that_takes_nothing_is_named() -> None:
    with emulated_hosts(star(1e8, 1e8, 1e8)) as hosts:

        def start(host: int, code: str, *words: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, "-c", code, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, preexec_fn=partial(hosts.enter, host),
            )  # fmt: skip

        others = [start(host, LISTEN) for host in (1, 2)]
        sender = start(0, SEND, *hosts.addresses)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "[]\n"
        call("ip", "-n", namespace(hosts.key, "switch"), "link", "set", "port1", "down")
        said, _ = sender.communicate("go\n", timeout=60)
        for other in others:
            other.kill()
            other.communicate(timeout=10)
    assert said == f"['b ({hosts.addresses[1]})']\nTrue\n"

"""Rehearsal: hosts that this machine emulates, each with an address, a link rate, a latency and a share of the CPU."""

from stagewright.rehearsal.hosts import EmulatedHosts, emulated_hosts
from stagewright.rehearsal.measuring import Request, measure_hosts
from stagewright.rehearsal.wiring import Wiring, wirings

__all__ = ["EmulatedHosts", "Request", "Wiring", "emulated_hosts", "measure_hosts", "wirings"]

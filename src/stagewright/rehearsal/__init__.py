"""Rehearsal: hosts that this machine emulates, each with an address, a link rate, a latency and a share of the CPU.

hosts       namespaces, bridge, limits        wiring      what a cluster gives each host
measuring   profiles and links inside them    slices      one card cut into several
tools       ip, tc and shares of the CPU
"""

from stagewright.rehearsal.hosts import EmulatedHosts, emulated_hosts

__all__ = ["EmulatedHosts", "emulated_hosts"]

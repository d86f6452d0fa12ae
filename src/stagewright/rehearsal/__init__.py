"""Rehearsal: hosts that this machine emulates, each with an address, a link rate, a latency and a share of the CPU.

hosts       namespaces, bridge, limits        tools       ip, tc and shares of the CPU
measuring   profiles and links inside them    slices      one card cut into several
"""

from stagewright.rehearsal.hosts import EmulatedHosts, emulated_hosts

__all__ = ["EmulatedHosts", "emulated_hosts"]

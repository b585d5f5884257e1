"""Who else used the machine during a run: CPU time from /proc, split into the client, the server, and everyone else.

A figure taken beside other work is no figure. The server is found by the port it listens on; where it runs on another
machine, only this side can be watched, and the report says so.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

DISTURBED = 0.05
"""Share of the machine's CPU time that others may take before a run counts as disturbed."""
CLIENT_BUSY = 0.8
"""Share of a core from which on the client may itself be what is measured."""
_PROC = Path("/proc")
_LISTENING = "0A"


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    group: int
    name: str
    ticks: int


@dataclass(frozen=True)
class Snapshot:
    at: float
    busy: int
    stolen: int
    client: float
    processes: Mapping[int, Process]


@dataclass(frozen=True)
class MachineUse:
    """CPU use during a phase, in cores. None: the system does not tell, or the server is elsewhere."""

    cores: int
    load_average: float
    client: float
    server: float | None
    others: float | None
    """All other processes, those that came and went too; stolen time of a virtual machine is among it."""
    loudest: tuple[str, ...]
    """The other processes that took the most, with their share of a core."""

    @property
    def is_disturbed(self) -> bool:
        return self.others is not None and self.others > DISTURBED * self.cores

    @property
    def client_is_busy(self) -> bool:
        return self.client > CLIENT_BUSY


def take_snapshot() -> Snapshot | None:
    """None where there is no /proc to read."""
    times = os.times()
    try:
        fields = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, soft_irq, stolen = fields[:8]
    busy = user + nice + system + irq + soft_irq
    return Snapshot(perf_counter(), busy, stolen, times.user + times.system, _processes())


def use_between(before: Snapshot | None, after: Snapshot | None, host: str, port: int) -> MachineUse:
    """What happened between two snapshots, the first taken right before a phase and the second right after it."""
    server_pids = find_server(host, port, after.processes) if after else frozenset()
    # A server that is here and cannot be seen (another user's) cannot be told from the others.
    return use_of(before, after, server_pids, is_told_apart=bool(server_pids) or not _is_here(host))


def use_of(
    before: Snapshot | None, after: Snapshot | None, server_pids: frozenset[int], is_told_apart: bool = True
) -> MachineUse:
    """The same where the processes of the server are known."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if before is None or after is None or after.at <= before.at:
        return MachineUse(cores, load, 0.0, None, None, ())
    seconds = after.at - before.at
    tick = os.sysconf("SC_CLK_TCK")
    client = (after.client - before.client) / seconds
    spent = {
        pid: (process.ticks - (before.processes[pid].ticks if pid in before.processes else 0))
        / tick
        / seconds
        for pid, process in after.processes.items()
    }
    server = sum(spent[pid] for pid in server_pids) if server_pids else None
    everyone = (after.busy - before.busy + after.stolen - before.stolen) / tick / seconds
    strangers = sorted(spent.keys() - server_pids - {os.getpid()}, key=lambda pid: -spent[pid])
    return MachineUse(
        cores=cores,
        load_average=load,
        client=client,
        server=server,
        others=max(0.0, everyone - client - (server or 0.0)) if is_told_apart else None,
        loudest=tuple(
            f"{after.processes[pid].name} {spent[pid]:.0%}" for pid in strangers[:3] if spent[pid] >= 0.01
        ),
    )


def family_of(pid: int, processes: Mapping[int, Process]) -> frozenset[int]:
    """A process and all its descendants."""
    return frozenset(other for other in processes if pid in _line_of(other, processes))


def find_server(host: str, port: int, processes: Mapping[int, Process]) -> frozenset[int]:
    """The processes of a server on this machine: who listens on the port, and its family.

    The family goes up to the eldest of the same process group, so that an engine beside the HTTP process counts, but
    not to anyone who started this client as well; and from there to all descendants.
    """
    if not _is_here(host):
        return frozenset()
    owners = _owners(_listening_inodes(port), processes)
    our_line = set(_line_of(os.getpid(), processes))
    roots = set()
    for pid in owners:
        root = pid
        for ancestor in _line_of(pid, processes)[1:]:
            if ancestor in our_line or processes[ancestor].group != processes[pid].group:
                break
            root = ancestor
        roots.add(root)
    return frozenset(pid for pid in processes if roots & set(_line_of(pid, processes)))


def _line_of(pid: int, processes: Mapping[int, Process]) -> list[int]:
    """A process and its ancestors, as far as they can be seen."""
    line: list[int] = []
    while pid in processes and pid not in line:
        line.append(pid)
        pid = processes[pid].parent
    return line


def _processes() -> dict[int, Process]:
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                process = parse_stat((entry / "stat").read_text(errors="replace"))
            except (OSError, ValueError, IndexError):  # it ended meanwhile
                continue
            found[process.pid] = process
    return found


def parse_stat(line: str) -> Process:
    """A line of /proc/PID/stat. The name stands in brackets and may hold spaces and brackets itself."""
    pid, _, rest = line.partition(" (")
    name, _, rest = rest.rpartition(") ")
    fields = rest.split()
    return Process(int(pid), int(fields[1]), int(fields[2]), name, int(fields[11]) + int(fields[12]))


def _is_here(host: str) -> bool:
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))  # only an address of this machine can be bound
        except OSError:
            return False
    return True


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _owners(inodes: set[str], processes: Mapping[int, Process]) -> set[int]:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    owners = set()
    for pid in processes:
        try:
            if any(os.readlink(entry) in wanted for entry in os.scandir(_PROC / str(pid) / "fd")):
                owners.add(pid)
        except OSError:  # not ours to look at, or gone
            continue
    return owners - {os.getpid()}

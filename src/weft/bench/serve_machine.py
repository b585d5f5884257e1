"""CPU time used during a run, from /proc: by the client, by the server, and by all other processes.

Other load on the machine makes figures unreliable. The server is found by the port it listens on. If it runs on another
machine, only the client's machine is observed, and the report says so.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

DISTURBED = 0.05
"""A run is disturbed if other processes take more than this fraction of the machine's CPU time."""
CLIENT_BUSY = 0.8
"""Above this fraction of a core, the client itself may limit the figures."""
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
    """CPU use during a phase, in cores. None: there is no /proc, or the processes of the server are not visible."""

    cores: int
    load_average: float
    client: float
    server: float | None
    others: float | None
    """All other processes, including those that ended during the phase, and stolen time of a virtual machine."""
    loudest: tuple[str, ...]
    """The other processes with the most CPU time, each with the fraction of a core that it used."""

    @property
    def is_disturbed(self) -> bool:
        return self.others is not None and self.others > DISTURBED * self.cores

    @property
    def client_is_busy(self) -> bool:
        return self.client > CLIENT_BUSY


def take_snapshot() -> Snapshot | None:
    """Reads the CPU counters. None if there is no /proc."""
    times = os.times()
    try:
        fields = [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, soft_irq, stolen = fields[:8]
    busy = user + nice + system + irq + soft_irq
    return Snapshot(perf_counter(), busy, stolen, times.user + times.system, _processes())


def use_between(before: Snapshot | None, after: Snapshot | None, host: str, port: int) -> MachineUse:
    """CPU use between two snapshots, taken right before and right after a phase."""
    server_pids = find_server(host, port, after.processes) if after else frozenset()
    # The processes of another user's local server are not visible, so their CPU time would count as other load.
    return use_of(before, after, server_pids, is_server_separable=bool(server_pids) or not _is_local(host))


def use_of(
    before: Snapshot | None,
    after: Snapshot | None,
    server_pids: frozenset[int],
    is_server_separable: bool = True,
) -> MachineUse:
    """CPU use between two snapshots, with the processes of the server given."""
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
    all_use = (after.busy - before.busy + after.stolen - before.stolen) / tick / seconds
    other_pids = sorted(spent.keys() - server_pids - {os.getpid()}, key=lambda pid: -spent[pid])
    return MachineUse(
        cores=cores,
        load_average=load,
        client=client,
        server=server,
        others=max(0.0, all_use - client - (server or 0.0)) if is_server_separable else None,
        loudest=tuple(
            f"{after.processes[pid].name} {spent[pid]:.0%}" for pid in other_pids[:3] if spent[pid] >= 0.01
        ),
    )


def process_tree(pid: int, processes: Mapping[int, Process]) -> frozenset[int]:
    """A process and all its descendants."""
    return frozenset(other for other in processes if pid in _ancestors_of(other, processes))


def find_server(host: str, port: int, processes: Mapping[int, Process]) -> frozenset[int]:
    """The processes of a local server: the process that listens on the port, and related ones.

    The root is the highest ancestor of the listening process in the same process group. An ancestor of this client is
    never the root. The root and all its descendants count, so an engine process beside the HTTP process is included.
    """
    if not _is_local(host):
        return frozenset()
    owners = _owners(_listening_inodes(port), processes)
    own_ancestors = set(_ancestors_of(os.getpid(), processes))
    roots = set()
    for pid in owners:
        root = pid
        for ancestor in _ancestors_of(pid, processes)[1:]:
            if ancestor in own_ancestors or processes[ancestor].group != processes[pid].group:
                break
            root = ancestor
        roots.add(root)
    return frozenset(pid for pid in processes if roots & set(_ancestors_of(pid, processes)))


def _ancestors_of(pid: int, processes: Mapping[int, Process]) -> list[int]:
    """A process and its visible ancestors."""
    ancestors: list[int] = []
    while pid in processes and pid not in ancestors:
        ancestors.append(pid)
        pid = processes[pid].parent
    return ancestors


def _processes() -> dict[int, Process]:
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                process = parse_stat((entry / "stat").read_text(errors="replace"))
            except (OSError, ValueError, IndexError):  # the process ended meanwhile
                continue
            found[process.pid] = process
    return found


def parse_stat(line: str) -> Process:
    """Parses /proc/PID/stat. The name is in brackets and may itself contain spaces and brackets."""
    pid, _, rest = line.partition(" (")
    name, _, rest = rest.rpartition(") ")
    fields = rest.split()
    return Process(int(pid), int(fields[1]), int(fields[2]), name, int(fields[11]) + int(fields[12]))


def _is_local(host: str) -> bool:
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
    """The inodes of the sockets that listen on the port."""
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
    """The processes, other than this one, that have one of these sockets open."""
    links = {f"socket:[{inode}]" for inode in inodes}
    owners = set()
    for pid in processes:
        try:
            if any(os.readlink(entry) in links for entry in os.scandir(_PROC / str(pid) / "fd")):
                owners.add(pid)
        except OSError:  # no permission, or the process ended
            continue
    return owners - {os.getpid()}

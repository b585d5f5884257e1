"""Runs replicas in processes. Inside a window replicas do not depend on each other, so the result is the same for any number
of processes."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from weft.errors import InvalidRequestError, WeftError
from weft.planning.outcome import Outcome
from weft.planning.replica import PlannedRequest, Replica, ReplicaReport, ReplicaSettings

Assigned = Mapping[int, Sequence[PlannedRequest]]


class ReplicaGroup:
    """Owns some replicas, in this process."""

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._replicas: dict[int, Replica] = {}
        self._is_idle: dict[int, bool] = {}

    def create(self, number: int, now: float) -> None:
        self._replicas[number] = Replica(number, self._settings, now)
        self._is_idle[number] = True

    def advance(self, horizon: float, assigned: Assigned) -> dict[int, ReplicaReport]:
        """Runs all replicas to the end of a window. An idle one without new requests does not change, and reports nothing."""
        reports = {}
        for number, replica in self._replicas.items():
            requests = assigned.get(number, ())
            if self._is_idle[number] and not requests:
                continue
            replica.assign(requests)
            replica.run_until(horizon)
            reports[number] = report = replica.report()
            self._is_idle[number] = report.is_idle
        return reports

    def finish(self, number: int) -> Outcome:
        """Removes a replica. Returns its outcome."""
        return self._replicas.pop(number).finish()


class Workers:
    """Owns the processes. Replica `n` is in process `n` modulo their number; with one process, it is in this one."""

    def __init__(self, settings: ReplicaSettings, num_processes: int | None = None) -> None:
        """`num_processes`: as many as this process may use, by default."""
        count = num_processes or len(os.sched_getaffinity(0))
        self._group = ReplicaGroup(settings) if count == 1 else None
        self._window: tuple[float, Assigned] = (0.0, {})
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("spawn")
        for _ in range(count if count > 1 else 0):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, settings), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def create(self, number: int, now: float) -> None:
        self._call(number, "create", number, now)

    def finish(self, number: int) -> Outcome:
        outcome: Outcome = self._call(number, "finish", number)
        return outcome

    def begin(self, horizon: float, assigned: Assigned) -> None:
        """Starts to run all replicas to the end of a window. `reports` waits for it."""
        self._window = horizon, assigned
        count = len(self._connections)
        for index, connection in enumerate(self._connections):
            own = {number: requests for number, requests in assigned.items() if number % count == index}
            _send(connection, "advance", horizon, own)

    def reports(self) -> dict[int, ReplicaReport]:
        """The reports of the replicas that changed in the window, in order."""
        parts = (
            [self._group.advance(*self._window)]
            if self._group is not None
            else [_received(connection) for connection in self._connections]
        )
        # The order counts: sums of floats depend on it.
        return dict(sorted(one for part in parts for one in part.items()))

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, number: int, name: str, *arguments: Any) -> Any:
        if self._group is not None:
            return getattr(self._group, name)(*arguments)
        connection = self._connections[number % len(self._connections)]
        _send(connection, name, *arguments)
        return _received(connection)


_ENDED = "a process of the simulation ended; it may have run out of memory: use fewer --jobs"


def _send(connection: Connection, *message: Any) -> None:
    try:
        connection.send(message)
    except OSError:
        raise WeftError(_ENDED) from None


def _received(connection: Connection) -> Any:
    try:
        result = connection.recv()
    except (EOFError, OSError):
        raise WeftError(_ENDED) from None
    if isinstance(result, WeftError):
        raise result
    return result


def _work(connection: Connection, settings: ReplicaSettings) -> None:
    """The main function of a process. It ends when the other end of its connection is closed. An error is sent as one that
    can be pickled."""
    group = ReplicaGroup(settings)
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            name, *arguments = connection.recv()
            try:
                result = getattr(group, name)(*arguments)
            except InvalidRequestError as error:
                result = InvalidRequestError(str(error), error.field, error.code)
            except WeftError as error:
                result = WeftError(str(error))
            except Exception:
                result = WeftError(f"a process of the simulation failed: {traceback.format_exc()}")
            connection.send(result)

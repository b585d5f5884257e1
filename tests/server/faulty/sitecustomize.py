"""Faults at the border to the system, for a server that a fault run starts with this folder on its path.

Each file in the folder that WEFT_FAULTS names is a fault that lasts while the file is there: `fork` holds an error number, which
every start of a process then fails with; `clock` holds the seconds by which the wall clock is wrong.
"""

import _posixsubprocess
import os
import time
from pathlib import Path

_FAULTS = Path(os.environ.get("WEFT_FAULTS", os.devnull))
_fork_exec, _time = _posixsubprocess.fork_exec, time.time


def _content(name):
    try:
        return (_FAULTS / name).read_text()
    except OSError:
        return ""


def _faulty_fork_exec(*arguments):
    if number := _content("fork"):
        raise OSError(int(number), os.strerror(int(number)))
    return _fork_exec(*arguments)


def _faulty_time():
    return _time() + float(_content("clock") or 0)


if _FAULTS.is_dir():
    _posixsubprocess.fork_exec, time.time = _faulty_fork_exec, _faulty_time

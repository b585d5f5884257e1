"""System faults for a server that a fault run starts with this folder on its path.

Each file in the folder WEFT_FAULTS is a fault that lasts while the file exists. `fork` contains an error number, with
which every start of a process fails. `clock` contains the error of the wall clock in seconds.
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

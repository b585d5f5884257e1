"""The default generator of request ids."""

from __future__ import annotations

import os

from weft.request import RequestId


def new_request_id() -> RequestId:
    """A random UUID, in hexadecimal digits. Made without the module `uuid`, which takes longer to import and to call."""
    number = int.from_bytes(os.urandom(16))
    return RequestId(f"{number & ~_FIXED_BITS | _VERSION_4:032x}")


_FIXED_BITS, _VERSION_4 = 0xF000 << 64 | 0xC << 60, 0x4000 << 64 | 0x8 << 60
"""The bits of a UUID that say how it was made, and their values in a random one."""

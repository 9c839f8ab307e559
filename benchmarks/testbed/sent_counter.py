"""Count the bytes that this process has sent over TCP, as the kernel counts them per socket."""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

_INFO_BYTES = 256
_WAITING, _SENT, _RESENT = (144, "=I"), (200, "=Q"), (208, "=Q")
"""Offsets and types of `tcpi_notsent_bytes`, `tcpi_bytes_sent` and `tcpi_bytes_retrans` in the
structure `tcp_info` of linux/tcp.h (since Linux 4.19)."""
_TCP_INFO = getattr(socket, "TCP_INFO", None)


@dataclass(frozen=True)
class SentBytes:
    """Payload bytes of the open TCP sockets of this process."""

    written: int = 0
    """Bytes that this process gave to its sockets; the same in each run of a program."""
    resent: int = 0
    """Bytes that the kernel sent again, as it does if a receiver is late on a busy machine."""

    def __add__(self, other: "SentBytes") -> "SentBytes":
        return SentBytes(self.written + other.written, self.resent + other.resent)


def tcp_sent_bytes() -> SentBytes | None:
    """Add up the bytes of all open TCP sockets; None on systems other than Linux."""
    folder = Path("/proc/self/fd")
    if _TCP_INFO is None or not folder.exists():
        return None
    total = SentBytes()
    for path in folder.iterdir():
        try:
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as copy:
                    total += read_info(copy.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES))
        except (OSError, struct.error):  # closed meanwhile, or no TCP socket
            continue
    return total


def read_info(info: bytes) -> SentBytes:
    """Read the counters of one socket from its `tcp_info`."""
    waiting, sent, resent = (
        struct.unpack_from(kind, info, offset)[0] for offset, kind in (_WAITING, _SENT, _RESENT)
    )
    return SentBytes(waiting + sent - resent, resent)

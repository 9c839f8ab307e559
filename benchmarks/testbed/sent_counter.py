"""Count the bytes that this process has sent over TCP, as the kernel counts them."""

import os
import socket
import struct
from pathlib import Path

_INFO_BYTES = 256
_SENT_OFFSET = 200
"""Offset of `tcpi_bytes_sent` in the structure `tcp_info` of linux/tcp.h (since Linux 4.19)."""
_TCP_INFO = getattr(socket, "TCP_INFO", None)


def tcp_sent_bytes() -> int | None:
    """Return the payload bytes that the open TCP sockets of this process have sent.

    Returns:
        The bytes, with retransmissions; None on systems other than Linux.
    """
    folder = Path("/proc/self/fd")
    if _TCP_INFO is None or not folder.exists():
        return None
    total = 0
    for path in folder.iterdir():
        try:
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as copy:
                    info = copy.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
                total += struct.unpack_from("=Q", info, _SENT_OFFSET)[0]
        except (OSError, struct.error):  # closed meanwhile, or no TCP socket
            continue
    return total

"""Storages that leave the device for a while, copied beside the computation.

Gets the storages of a running program; gives their memory back to the device meanwhile. Read
moved.py first: the interface that programs call. Then workers.py (copies by threads, to memory of
the host), disk.py (to a file), pinned.py (copies by queues of CUDA, to pinned memory), and link.py
(how fast they are while kernels run).
"""

from rkgb.copies.disk import Disk
from rkgb.copies.link import LinkRates, measured_link
from rkgb.copies.moved import PAGE_BYTES, Arena, Copies, in_pages
from rkgb.copies.pinned import Pinned, copies_for
from rkgb.copies.workers import Host

__all__ = [
    "PAGE_BYTES",
    "Arena",
    "Copies",
    "Disk",
    "Host",
    "LinkRates",
    "Pinned",
    "copies_for",
    "in_pages",
    "measured_link",
]

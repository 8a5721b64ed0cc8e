"""Delays the packets that a network interface receives, for kernels without `netem`. Requires root.

    PYTHON bench/delay.py MILLISECONDS

Run inside a network namespace whose `iptables` sends incoming packets to queue 1; PYTHON is an
interpreter with NetfilterQueue (`make delays` installs one). Packets keep their order. Prints
`ready` once, then runs until it is stopped.
"""

from __future__ import annotations

import select
import sys
import time
from collections import deque
from typing import Any

RULE = ("-t", "mangle", "-A", "PREROUTING", "-i", "eth0", "-j", "NFQUEUE", "--queue-num", "1")
"""For iptables. On the way in: packets on the way out are joined to large ones later."""
HELD_AT_MOST = 20_000
HEAD_BYTES = 64


def main() -> None:
    from netfilterqueue import NetfilterQueue

    delay_s = float(sys.argv[1]) / 1000
    held: deque[tuple[float, Any]] = deque()

    def hold(packet: Any) -> None:
        packet.retain()
        held.append((time.monotonic() + delay_s, packet))

    queue = NetfilterQueue()
    queue.bind(1, hold, max_len=HELD_AT_MOST, range=HEAD_BYTES)
    print("ready", flush=True)
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        if select.select([queue.get_fd()], [], [], wait)[0]:
            queue.run(block=False)
        now = time.monotonic()
        while held and held[0][0] <= now:
            held.popleft()[1].accept()


if __name__ == "__main__":
    main()

"""A slow cable in user space, for kernels without ``netem``: ``python delayer.py PORT PORT DELAY JITTER LOSS``.

Carries frames from one network interface to the other and back, each after ``DELAY`` seconds, ``JITTER`` more or less,
in the order in which they came; loses the share ``LOSS`` of them. Ends with its stdin.
"""

import heapq
import itertools
import random
import select
import socket
import sys
import time

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15  # frames with what a card would still do to them: checksums, and cutting large ones to size
PACKET_IGNORE_OUTGOING = 23
LARGEST = 10 + 14 + 65535


def cable_end(interface: str) -> socket.socket:
    """Takes all frames that arrive at an interface, and sends frames out of it."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    end.bind((interface, ETH_P_ALL))
    end.setblocking(False)
    return end


def main(one: str, other: str, delay: float, jitter: float, loss: float) -> None:
    ends = [cable_end(one), cable_end(other)]
    watched = [*(end.fileno() for end in ends), sys.stdin.fileno()]
    last = [0.0, 0.0]  # when the last frame that came in at each end goes out
    waiting: list[tuple[float, int, int, bytes]] = []
    number = itertools.count()
    print("up", flush=True)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for readable in select.select(watched, [], [], timeout)[0]:
            came = watched.index(readable)
            if came == len(ends):
                return  # whoever started this has ended
            try:
                frame = ends[came].recv(LARGEST)
            except OSError:
                continue
            if random.random() >= loss:
                last[came] = max(last[came], time.monotonic() + delay + random.uniform(-jitter, jitter))
                heapq.heappush(waiting, (last[came], next(number), came, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, came, frame = heapq.heappop(waiting)
            try:
                ends[1 - came].send(frame)
            except OSError:
                pass  # as a full or unplugged cable does


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(float, sys.argv[3:6]))

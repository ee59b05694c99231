"""A port for a program that has to be told its number."""

import random
import socket


def free_port() -> int:
    """Below the ports that a system hands out by itself: no connection takes this one before the program has it."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("none of 100 ports is free")

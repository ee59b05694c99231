"""A port for a program that has to be told its number."""

import random
import socket


def free_port() -> int:
    """A free port below those that the system gives to outgoing connections. So no connection takes it before the
    program does. Raises OSError if none is found."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("none of 100 ports is free")

"""What the processes of a server have in common: they do what the parent says, and end when it does."""

import os
import signal
import threading
from multiprocessing import connection, parent_process

from nanovllm.server.logs import set_up
from nanovllm.server.wires import Wires

SIGNALS = signal.SIGINT, signal.SIGTERM


def obey_the_parent(wires: Wires, log_level: str) -> None:
    """Ctrl-C and some service managers signal every process of a server. Only the parent decides, and tells the others
    what to do in which order. When the parent is gone, so is this process, and what it leaves is removed."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs started from here would inherit
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the parent blocks them for the start of a process
    set_up(log_level)
    threading.Thread(target=_end_with_the_parent, args=(wires,), name="nanovllm-parent", daemon=True).start()


def _end_with_the_parent(wires: Wires) -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    wires.clear()
    os._exit(1)  # at once, also in the middle of a step

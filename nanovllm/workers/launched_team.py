"""Ranks that somebody else has started, one process each, on one machine or several: `torchrun script.py`.

All run the same script and come to the same `LLM(tensor_parallel_size=...)`. The environment says who a process is
(RANK, WORLD_SIZE, LOCAL_RANK) and where the ranks meet (MASTER_ADDR, MASTER_PORT). Rank 0 leads, and only there does
`LLM()` return. The others serve inside it, and leave by SystemExit when the leader closes its engine. So what the
script does with its engine is done once.

Messages are broadcast by gloo. A worker that fails leaves its traceback in the store where the ranks met.
"""

import os
import pickle
import signal
import socket
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from nanovllm.distributed.group import TIMEOUT, Group, PeerLost, devices_of
from nanovllm.workers.team import GRACE, MakeWorker, Team, failure_report
from nanovllm.workers.watchdog import BEAT, Watchdog, beat

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LONG = timedelta(days=365)  # how long workers wait for a message: a leader may have nothing to do
HEAD = 8  # bytes in front of a message: its length
FIRST = 1 << 14  # bytes that are always sent; what does not fit in them follows by itself

have_served = False  # the other ranks, an engine of this process


def is_launched(size: int) -> bool:
    """Whether the ranks are there already. Raises ValueError if there are more or fewer than `size`."""
    there = int(os.environ["WORLD_SIZE"]) if all(name in os.environ for name in VARIABLES) else 1
    if there not in (1, size):
        raise ValueError(
            f"tensor_parallel_size={size}, but {there} processes were launched (WORLD_SIZE); make the two equal, or "
            "leave tensor_parallel_size out for an engine in each process"
        )
    return there > 1


def own_rank() -> int:
    return int(os.environ["RANK"])


def own_device(first: torch.device) -> torch.device:
    """The local ranks have the GPUs from `first` on. Raises ValueError if there are too few."""
    return devices_of(first, int(os.environ.get("LOCAL_RANK", 0)) + 1)[-1]


class LaunchedTeam(Team):
    """The leader's side."""

    def __init__(self, device: torch.device) -> None:
        """Raises RuntimeError if the other ranks have served an engine already."""
        global have_served
        super().__init__()
        if have_served:
            raise RuntimeError(
                "the other ranks have left with the first engine of this process; under torchrun there can be one only"
            )
        have_served = True
        self.threads = torch.get_num_threads()  # torchrun has chosen how many
        self._connections = Connections(device)
        self.group = self._connections.group
        self.close = weakref.finalize(self, self._connections.dismiss)

    def join(self) -> None:
        try:
            self._connections.join()
        except RuntimeError as lost:
            raise self.failed(PeerLost(str(lost)), "the ranks could not start", starting=True) from lost
        on_gpu = self.group.device.type == "cuda"
        max_step = TIMEOUT.total_seconds() if on_gpu else float("inf")
        connections = self._connections
        watchdog = Watchdog(connections.spare, self.group.size, self.step, connections.lose, max_step=max_step)
        connections.over = watchdog.over
        threading.Thread(target=watchdog.run, name="nanovllm-watch", daemon=True).start()

    def _send(self, payload: bytes) -> None:
        self._connections.send(payload)

    def cause_of(self, lost: PeerLost) -> str:
        deadline = time.monotonic() + (GRACE if self.group.lost is None else 0)
        while self._connections.store is not None:
            with suppress(RuntimeError):  # of a store that is gone as well
                for rank in range(1, self.group.size):
                    if self._connections.store.check([f"report {rank}"]):
                        return f"rank {rank} failed:\n{self._connections.store.get(f'report {rank}').decode()}"
            if time.monotonic() >= deadline:
                break
            time.sleep(GRACE / 20)
        return str(lost)


class Connections:
    """What connects a rank to the others: the store where they met, one process group for tensors, one for messages."""

    def __init__(self, device: torch.device) -> None:
        rank, size = own_rank(), int(os.environ["WORLD_SIZE"])
        self.group = Group(rank, size, device)
        self.messages = Group(rank, size, torch.device("cpu"))
        self.store: Any = None
        self.spare: Any = None  # the same for another thread
        self.over = threading.Event()
        self._first = torch.zeros(FIRST, dtype=torch.uint8)

    def join(self) -> None:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
        self.store = dist.PrefixStore("nanovllm", store)
        self.spare = self.store.clone()
        host = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.messages.join(dist.PrefixStore("messages", self.store), host, LONG)
        self.group.join(dist.PrefixStore("tensors", self.store), host)

    def send(self, payload: bytes) -> None:
        framed = bytearray(len(payload).to_bytes(HEAD, "little") + payload)
        sent = torch.frombuffer(framed, dtype=torch.uint8)
        self._first[: min(FIRST, len(sent))] = sent[:FIRST]
        self.messages.broadcast(self._first)
        if len(sent) > FIRST:
            self.messages.broadcast(sent[FIRST:])

    def receive(self) -> bytes:
        """A message of the leader; empty if it has closed its engine."""
        self.messages.broadcast(self._first)
        size = int.from_bytes(bytes(self._first[:HEAD].numpy()), "little")
        payload = bytes(self._first[HEAD : HEAD + size].numpy())
        if HEAD + size > FIRST:
            rest = torch.empty(HEAD + size - FIRST, dtype=torch.uint8)
            payload += bytes(self.messages.broadcast(rest).numpy())
        return payload

    def lose(self, rank: int, why: str) -> None:
        """End the engine. The ranks that wait for the lost one leave, too."""
        self.spare.set("end", "1")
        self.messages.give_up(why)
        self.group.give_up(why)

    def dismiss(self) -> None:
        """Tell the others to leave, if they still listen, and also if they wait in a step that has failed here."""
        self.over.set()
        with suppress(RuntimeError):
            if self.store is not None and self.group.lost is None:
                self.store.set("end", "0")
            self.send(b"")
        self.leave()

    def leave(self) -> None:
        self.over.set()
        self.group.close()
        self.messages.leave()


def address_towards(host: str, port: int) -> str:
    """The address of the interface through which this machine reaches `host`."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


def serve(make: MakeWorker, device: torch.device) -> NoReturn:
    """A worker's life: do what each message says. Leaves by SystemExit when the leader closes its engine, and with exit
    status 1 when the leader is gone. What fails here is raised, and reported to the leader."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the leader decides
    connections = Connections(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        connections.join()
        threading.Thread(target=_beat, args=(connections,), daemon=True).start()
        do = make(connections.group)
        while payload := connections.receive():
            do(pickle.loads(payload))
    except PeerLost as lost:
        connections.leave()
        raise SystemExit(f"rank {own_rank()}: the leader or another rank is gone ({lost})") from None
    except BaseException as error:
        with suppress(RuntimeError):  # the store may be gone, too
            if connections.store is not None:
                connections.store.set(f"report {own_rank()}", failure_report(error, own_rank()))
        connections.leave()
        raise
    connections.leave()
    raise SystemExit(0)


def _beat(connections: Connections) -> None:
    """Show a pulse. End the process when the leader has ended the engine: a step that waits for it would never know."""
    status = 1
    with suppress(RuntimeError):  # the store is gone, and with it the leader
        while not connections.over.wait(BEAT):
            beat(connections.spare, own_rank())
            if connections.spare.check(["end"]):
                status = int(connections.spare.get("end"))
                break
    if not connections.over.wait(GRACE):
        os._exit(status)

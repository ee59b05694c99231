"""What the engine has for one API process, and what it does when that process cannot keep up."""

from itertools import chain

import zmq

from nanovllm.engine.plan import TokenLogprobs
from nanovllm.outputs import RequestMetrics
from nanovllm.server.messages import End, Logprobs, Refused, Update, encode, pack

WINDOW = 2  # updates on their way: one is worked on while the next one travels


class Outbox:
    """Collects news, and sends them as one `Update` once the API process has taken all but one of those before.

    Until then the news of a stream are merged: the process gets fewer and larger deltas, which cost it less. So the
    engine never waits for anybody, and what waits here is no more than the tokens of the process's own requests.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.num_travelling = 0
        self.num_merged = 0  # deltas that were merged with an earlier one
        self.news = False
        self._clear()

    def _clear(self) -> None:
        self.tokens: dict[int, list[int]] = {}  # by stream
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.ends: list[End] = []
        self.metrics: dict[int, RequestMetrics] = {}  # by request
        self.accepted: list[int] = []
        self.refused: list[Refused] = []
        self.scrapes: list[tuple[int, bytes]] = []
        self.failure: str | None = None
        self.news = False

    def add(self, stream: int, token_ids: list[int]) -> None:
        """More tokens. The list is the outbox's own from now on."""
        self.news = True
        waiting = self.tokens.get(stream)
        if waiting is None:
            self.tokens[stream] = token_ids
        else:
            self.num_merged += 1
            waiting += token_ids

    def add_logprobs(self, stream: int, found: list[TokenLogprobs]) -> None:
        self.logprobs.setdefault(stream, []).extend(found)

    def flush(self) -> None:
        """Send what there is, if the process has taken enough of what it got before."""
        if not self.news or (self.num_travelling >= WINDOW and self.failure is None):
            return
        update = Update(
            streams=pack("q", self.tokens),
            counts=pack("i", map(len, self.tokens.values())),
            token_ids=pack("i", chain.from_iterable(self.tokens.values())),
            logprobs=[Logprobs.of(stream, found) for stream, found in self.logprobs.items()],
            ends=self.ends,
            metrics=list(self.metrics.items()),
            accepted=self.accepted,
            refused=self.refused,
            scrapes=self.scrapes,
            failure=self.failure,
        )
        self.socket.send(encode(update), zmq.NOBLOCK)
        self.num_travelling += 1
        self._clear()

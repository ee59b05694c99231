"""The news for one API process, which are merged while that process cannot keep up."""

from itertools import chain

import zmq

from nanovllm.engine.plan import TokenLogprobs
from nanovllm.outputs import RequestMetrics
from nanovllm.server.messages import End, Logprobs, Refused, Update, encode, pack

WINDOW = 2  # updates on their way: the process works on one while the next one travels


class Outbox:
    """Collects news, and sends them as one `Update` once the API process has taken all but one of the earlier updates.

    Until then the news of each stream are merged: the process gets fewer and larger deltas, which take it less time. So
    the engine never waits for anybody. What waits here is no more than the tokens of the process's own requests.
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
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # by request
        self.ends: list[End] = []
        self.metrics: dict[int, RequestMetrics] = {}  # by request
        self.accepted: list[int] = []
        self.refused: list[Refused] = []
        self.scrapes: list[tuple[int, bytes]] = []
        self.failure: str | None = None
        self.news = False

    def add(self, stream: int, token_ids: list[int]) -> None:
        """Add new tokens of a stream. From now on the list belongs to the outbox."""
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
        """Send the news, if there are any, and if the process has taken enough of the earlier updates."""
        if not self.news or (self.num_travelling >= WINDOW and self.failure is None):
            return
        update = Update(
            streams=pack("q", self.tokens),
            counts=pack("i", map(len, self.tokens.values())),
            token_ids=pack("i", chain.from_iterable(self.tokens.values())),
            logprobs=[Logprobs.of(stream, found) for stream, found in self.logprobs.items()],
            prompt_logprobs=[Logprobs.of(key, found) for key, found in self.prompt_logprobs.items()],
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

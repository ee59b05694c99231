"""The waiting sequences in order of (priority, arrival)."""

from heapq import heapify, heappop, heappush

from nanovllm.engine.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """A heap. An aborted sequence stays in the heap until it surfaces: no operation looks at everything that waits."""

    def __init__(self) -> None:
        # The order is unique, so that sequences themselves are never compared.
        self._heap: list[tuple[int, int, Sequence]] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def push(self, seq: Sequence) -> None:
        """A preempted sequence returns to the place of its arrival."""
        heappush(self._heap, (seq.priority, seq.arrival, seq))

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].status is not SequenceStatus.WAITING:
            heappop(self._heap)
            self._num_dead -= 1
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        """Remove what `peek` just returned."""
        return heappop(self._heap)[2]

    def note_finished(self) -> None:
        """One of the sequences in here was finished, and its status says so."""
        self._num_dead += 1
        if self._num_dead * 2 > len(self._heap):  # bounds the memory; its cost is shared by those that died
            self._heap = [entry for entry in self._heap if entry[2].status is SequenceStatus.WAITING]
            heapify(self._heap)
            self._num_dead = 0

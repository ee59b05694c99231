"""A histogram of positive numbers in constant memory: percentiles of billions of gaps."""

import math


class Histogram:
    """Counts values in bins each 1% wider than the one before.

    A percentile is the middle of its bin, and so at most 0.5% from the true value; mean and maximum are exact. Values
    below `SMALLEST` count as that.
    """

    SMALLEST = 1e-6
    WIDTH = math.log(1.01)

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}  # by bin
        self.num_values = 0
        self.total = 0.0
        self.largest = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value `count` times."""
        if not count:
            return
        bin = int(math.log(value / self.SMALLEST) / self.WIDTH) if value > self.SMALLEST else 0
        self.counts[bin] = self.counts.get(bin, 0) + count
        self.num_values += count
        self.total += value * count
        if value > self.largest:
            self.largest = value

    @property
    def mean(self) -> float:
        """NaN where there is no value."""
        return self.total / self.num_values if self.num_values else math.nan

    def percentile(self, percent: float) -> float:
        """The smallest value that at least `percent` of 100 values do not exceed; NaN where there is none."""
        rank, seen = max(1, math.ceil(self.num_values * percent / 100)), 0
        for bin in sorted(self.counts):
            seen += self.counts[bin]
            if seen >= rank:
                return min(self.SMALLEST * math.exp((bin + 0.5) * self.WIDTH), self.largest)
        return math.nan

    def curve(self) -> list[tuple[float, float]]:
        """For pictures: values, and the share of all that are at most so large."""
        points, seen = [], 0
        for bin in sorted(self.counts):
            seen += self.counts[bin]
            points.append((self.SMALLEST * math.exp((bin + 1) * self.WIDTH), seen / self.num_values))
        return points

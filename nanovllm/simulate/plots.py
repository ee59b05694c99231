"""Pictures of a simulation: what clients saw, and what the fleet was like over time."""

from pathlib import Path

from nanovllm.simulate.report import Statistics


def check_matplotlib() -> None:
    """Raises ValueError, with the remedy, where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install 'nanovllm[notebooks]'") from None


def plot(statistics: Statistics, path: Path) -> None:
    """Write a picture; the ending of `path` says in which format. Raises ValueError for one that is not known."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    (first, gap), (load, replicas) = figure.subplots(2, 2)
    times = [
        (first, "time to first token", statistics.first_token, statistics.target_first),
        (gap, "time between tokens", statistics.gap, statistics.target_gap),
    ]
    for axes, title, histogram, target in times:
        points = histogram.curve()
        axes.plot([1e3 * value for value, _ in points], [100 * share for _, share in points])
        if target is not None:
            axes.axvline(1e3 * target, color="tab:red", linestyle="--", label=f"target {1e3 * target:g} ms")
            axes.legend()
        axes.set(title=title, xlabel="ms", ylabel="% at most", xscale="log", ylim=(0, 101))
        axes.grid(alpha=0.3)
    timeline = statistics.timeline
    starts = [i * timeline.width for i in range(len(timeline.bins))]
    load.step(starts, [bin.most_open for bin in timeline.bins], where="post")
    load.set(title="queries in the system, at most", xlabel="s", ylim=(0, None))
    replicas.step(starts, [bin.replicas for bin in timeline.bins], where="post", label="replicas")
    rate = replicas.twinx()
    rate.step(
        starts, [bin.arrivals / timeline.width for bin in timeline.bins], where="post", color="tab:gray", alpha=0.5
    )
    replicas.set(title="replicas that serve, and arrivals per second (grey)", xlabel="s", ylim=(0, None))
    rate.set(ylim=(0, None))
    figure.savefig(path)

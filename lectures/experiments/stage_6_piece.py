"""A piece out of the middle of a decode step, recorded on a GPU: a sign for every eight microseconds; dark is busy."""

from collections.abc import Sequence

from tools.decode_profile import RECORDINGS, Event, busy_us, read

SIGNS, SIGN_US = 44, 8.0
SHADES = " ░▒▓█"
TRACKS = {"launch": "launches", "gpu": "kernels"}


def row(events: Sequence[Event], track: str, first_us: float) -> str:
    """How busy the track is, a sign for each SIGN_US."""
    mine = [event for event in events if event[0] == track]
    signs = ""
    for i in range(SIGNS):
        begin, end = first_us + i * SIGN_US, first_us + (i + 1) * SIGN_US
        inside = [(t, n, max(s, begin), min(s + us, end) - max(s, begin)) for t, n, s, us in mine]
        busy = busy_us([event for event in inside if event[3] > 0], track) / SIGN_US
        signs += SHADES[0 if busy < 0.02 else min(4, 1 + int(4 * busy))]
    return signs.rstrip()


def main() -> None:
    [path] = RECORDINGS.glob("decode_profile.*.json")
    recording = read(path)
    for name, tracks in (("stage 5", ("launch", "gpu")), ("stage 6", ("gpu",))):  # there, one launch starts them all
        events = recording["stages"][name]["events"]
        kernels = [event for event in events if event[0] == "gpu"]
        first_us = kernels[len(kernels) // 2][2]
        for track in tracks:
            print(f"{name} {TRACKS[track]:8} {row(events, track, first_us)}")


if __name__ == "__main__":
    main()

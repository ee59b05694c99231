"""What a recorded decode step of one sequence did on a GPU: from the profile that notebook 6 draws."""

from tools.decode_profile import RECORDINGS, busy_us, read

LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")


def main() -> None:
    [path] = RECORDINGS.glob("decode_profile.*.json")
    recording = read(path)
    print(f"{recording['model']} on {recording['card']}, a step of {recording['batch']} sequence")
    for name, stage in recording["stages"].items():
        launches = sum(track == "launch" and call.startswith(LAUNCHES) for track, call, _, _ in stage["events"])
        kernels = sum(track == "gpu" for track, *_ in stage["events"])
        busy = busy_us(stage["events"], "gpu") / stage["step_ms"] / 10
        counts = f"{launches:5,} launches {kernels:5,} kernels and copies"
        print(f"{name:16} {counts} {stage['step_ms']:5.1f} ms, computing {busy:4.1f}%")


if __name__ == "__main__":
    main()

"""What a decode step of one sequence did on a GPU: counted in the recording that notebook 6 draws."""

import statistics

from tools.pictures.decode_profile import RECORDINGS, busy_us, read

LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")
ATTENTION = "aten::scaled_dot_product_attention"

[path] = RECORDINGS.glob("decode_profile.*.json.gz")
stages = read(path)["stages"]
print("         launches kernels    step  busy")
for name, stage in stages.items():
    launches = sum(track == "launch" and call.startswith(LAUNCHES) for track, call, _, _ in stage["events"])
    kernels = sum(track == "gpu" for track, *_ in stage["events"])
    busy = busy_us(stage["events"], "gpu") / stage["step_ms"] / 10
    short = name.split()[-1] if name.endswith("compiled") else name
    print(f"{short:8} {launches:8,} {kernels:7,} {stage['step_ms']:4.1f} ms {busy:4.1f}%")
first, *others = [us / 1000 for _, call, _, us in stages["stage 5"]["events"] if call == ATTENTION]
usual = statistics.median(others)
print(f"attention: {first:.2f} ms in the first layer, {usual:.2f} ms in each of the other {len(others)}")

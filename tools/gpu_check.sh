#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the tests marked `gpu`, then the stages' benchmarks, with results as JSON in OUT.
# Usage: OUT=results tools/gpu_check.sh [PYTHON]      (about six minutes on one H100)
set -uo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}; out=${OUT:-build/gpu}; mkdir -p "$out"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
"$python" - "$out/machine.json" <<'PYTHON'
import json, platform, sys, torch, transformers, triton
json.dump({
    "card": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__,
    "cuda": torch.version.cuda, "triton": triton.__version__, "transformers": transformers.__version__,
}, open(sys.argv[1], "w"), indent=1)
PYTHON
cat "$out/machine.json"; echo
status=0
timeout "${TEST_SECONDS:-420}" "$python" -m pytest -m gpu -q --durations=10 --junitxml="$out/tests.xml" ${TESTS:-tests} 2>&1 | tee "$out/tests.log" | tail -n 60 || status=1
if [ -n "${KERNELS:-}" ]; then "$python" -m benchmarks.kernels --out "$out/kernels.json" || status=1; fi
for stage in ${STAGES:-}; do
  "$python" -m benchmarks.stage_bench "$stage" --device cuda --results "$out" || status=1
done
exit $status

#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the tests marked `gpu`, then benchmarks, with results as JSON in OUT.
# Usage: OUT=results tools/gpu_check.sh [PYTHON]
#   TESTS="tests/engine"          which tests (those of stages, engine and kernels; "" for none), by JOBS=8 processes at once
#   STAGES="6"                    which stages' showcases; stage 6 also records a decode step for its notebook
#   BENCHMARKS="throughput idle"  which of the engine's: throughput latency idle startup prefix mixed ablations roofline
#                                 speculation tensor_parallel
#   RANKS=4                       the most GPUs for tensor_parallel
#   VLLM=DIR FLASH=DIR            where vLLM and flash-attn can be imported from, if they are not installed
#   KERNELS=1                     the kernels by themselves
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
commit=$(git rev-parse --short=12 HEAD 2>/dev/null || echo "${COMMIT:-unknown}")
tests=${TESTS-tests/stages tests/engine tests/kernels}
if [ -n "$tests" ]; then
  # The tests of memory limits want the card for themselves.
  PYTHONPATH=${FLASH:-} timeout "${TEST_SECONDS:-420}" "$python" -m pytest -m gpu -q -n "${JOBS:-8}" --durations=10 \
    -k "not memory_limit" --junitxml="$out/tests.xml" $tests 2>&1 | tee "$out/tests.log" | tail -n 40 || status=1
  timeout 120 "$python" -m pytest -m gpu -q -k memory_limit --junitxml="$out/memory.xml" $tests 2>&1 | tail -n 5 || status=1
  "$python" -m benchmarks.gpu_tests "$out/tests.xml" "$out/memory.xml" --out "$out" --commit "$commit" || status=1
fi
for stage in ${STAGES:-}; do
  if [ "$stage" = 6 ]; then timeout 150 "$python" -m tools.decode_profile --out "$out" || status=1; fi
  "$python" -m benchmarks.stage_bench "$stage" --device cuda --rounds "${ROUNDS:-2}" --results "$out" || status=1
done
if [ -n "${KERNELS:-}" ]; then
  "$python" -m benchmarks.kernels --out "$out/kernels.json" || status=1
  "$python" -m benchmarks.fused --out "$out/fused.json" --commit "$commit" || status=1
  "$python" -m benchmarks.decode_step --out "$out/decode_step.json" --commit "$commit" || status=1
fi
for benchmark in ${BENCHMARKS:-}; do
  options=()
  case $benchmark in
    tensor_parallel) options+=(--ranks "${RANKS:-2}") ;;&
    throughput|latency|startup|prefix|tensor_parallel) if [ -n "${VLLM:-}" ]; then options+=(--vllm-path "$VLLM"); fi ;;
    ablations) if [ -n "${FLASH:-}" ]; then options+=(--flash-path "$FLASH"); fi ;;
  esac
  "$python" -m "benchmarks.$benchmark" --out "$out" --commit "$commit" "${options[@]}" || status=1
done
exit $status

#!/usr/bin/env bash
# Everything that needs a GPU, in one go: the tests marked `gpu`, then benchmarks, with results as JSON in OUT.
# Usage: OUT=results tools/gpu_check.sh [PYTHON]
#   TESTS="tests/engine"          which tests (those of stages, engine and kernels; "" for none), by JOBS=8 processes at once
#   STAGES="6"                    which stages' showcases; stage 6 also records a decode step for its notebook
#   BENCHMARKS="throughput idle"  which of the engine's: throughput sampling latency idle phases startup prefix mixed
#                                 ablations quantised kv_cache experts uses speculation tensor_parallel
#   RANKS=4                       how many GPUs there are, for tensor_parallel and to share the tests; with more than one,
#                                 the tests of several ranks run, too
#   VLLM=DIR FLASH=DIR            where vLLM and flash-attn can be imported from, if they are not installed
#   COMMIT=HASH                   what is measured, if git is not there or does not know
#   KERNELS=1                     the kernels by themselves: the tables of docs/kernels.md
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
export NANOVLLM_COMMIT=${COMMIT:-}
tests=${TESTS-tests/stages tests/engine tests/kernels}
ranks="tests/engine/test_tensor_parallel.py tests/engine/test_ranks_on_gpu.py tests/engine/test_one_shot.py
  tests/stages/test_stage_7_tensor_parallel.py tests/stages/test_stage_7_workers.py"
gpu_test() { # NAME OPTIONS...: its report and its log, with the stacks of a test that takes for ever
  local name=$1; shift
  timeout "${TEST_SECONDS:-420}" "$python" -m pytest -m gpu -v --durations=10 -o faulthandler_timeout=100 \
    --junitxml="$out/$name.xml" "$@" > "$out/$name.log" 2>&1
}
if [ -n "$tests" ]; then
  # Several ranks by themselves: one that hangs must not cost the report of all others, and they need several cards. What
  # weighs memory wants the whole card.
  weighs="memory_limit or memory_of_graphs"
  ignored=(); for file in $ranks; do ignored+=(--ignore "$file"); done
  GPUS=${RANKS:-1} PYTHONPATH=${FLASH:+$FLASH:}${PYTHONPATH:-} gpu_test tests -n "${JOBS:-8}" -k "not ($weighs or nccl)" "${ignored[@]}" $tests || status=1
  gpu_test memory -k "$weighs" "${ignored[@]}" $tests || status=1
  reports=("$out/tests.xml" "$out/memory.xml")
  if [ "${RANKS:-1}" -gt 1 ]; then
    for file in $ranks; do
      name=$(basename "$file" .py)
      [ "$name" = test_ranks_on_gpu ] || gpu_test "$name" "$file" &
    done
    gpu_test other_ranks -k nccl "${ignored[@]}" $tests &
    for job in $(jobs -p); do wait "$job" || status=1; done
    gpu_test test_ranks_on_gpu tests/engine/test_ranks_on_gpu.py || status=1  # it weighs memory, so nobody else is there
    for file in $ranks; do name=$(basename "$file" .py); reports+=("$out/$name.xml"); done
    reports+=("$out/other_ranks.xml")
  fi
  made=()
  for report in "${reports[@]}"; do
    echo "$report"; grep -E "^(FAILED|ERROR)|passed|failed" "${report%.xml}.log" | tail -n 12
    if [ -s "$report" ]; then made+=("$report"); else echo "no report: it was not done in time"; status=1; fi
  done
  "$python" -m benchmarks.engine.gpu_tests "${made[@]}" --out "$out" || status=1
fi
for stage in ${STAGES:-}; do
  if [ "$stage" = 6 ]; then timeout 150 "$python" -m tools.pictures.decode_profile "$out" || status=1; fi
  "$python" -m benchmarks.stages.stage_bench "$stage" --device cuda --rounds "${ROUNDS:-2}" --out "$out" || status=1
done
if [ -n "${KERNELS:-}" ]; then
  for kind in attention linears; do "$python" -m "benchmarks.kernels.$kind" --out "$out" || status=1; done
fi
for benchmark in ${BENCHMARKS:-}; do
  options=()
  case $benchmark in
    tensor_parallel) options+=(--ranks "${RANKS:-2}") ;;&
    throughput|sampling|latency|startup|prefix|quantised|kv_cache|experts|uses|tensor_parallel) if [ -n "${VLLM:-}" ]; then options+=(--vllm-path "$VLLM"); fi ;;
    ablations) if [ -n "${FLASH:-}" ]; then options+=(--flash-path "$FLASH"); fi ;;
  esac
  "$python" -m benchmarks.engine "$benchmark" --out "$out" "${options[@]}" || status=1
done
exit $status

#!/usr/bin/env bash
# The evidence that needs a GPU, in stages of at most ten minutes each, most valuable first. See gpu/README.md.
#
#   gpu/run.sh bundle DIR     take the parts of a bundle that are in DIR; unpack once all of them have come
#   gpu/run.sh 1              import, two syncs of a tiny model, rollouts with CUDA graphs, the tests for GPUs
#   gpu/run.sh 2 [OPTIONS]    rollouts              (options go to the stage's first benchmark)
#   gpu/run.sh 3 [OPTIONS]    weight sync, KV calibration
#   gpu/run.sh 4              mismatch ladder, the demo
#   gpu/run.sh 5 [OPTIONS]    FP8 linears of the trainer
#   gpu/run.sh 6              mixture of experts
#   gpu/run.sh 7 [OPTIONS]    whole GRPO steps
#
# Environment: SITE (folder of the unpacked bundle; without it vLLM must be installed), OUT (where the log and the JSON go;
# outputs/gpu), PYTHON (python3), SIZE (qwen3_8b), LIMIT (seconds of a stage, 570), SETTINGS (variables for vLLM that stage 1
# found to be needed, "A=1 B=0"), TRL_FP8_COMMIT (commit for the results, if this is a copy without repository), DRY_RUN
# (not empty: print the commands only).
set -uo pipefail
cd "$(dirname "$0")/.."
stage=${1:?usage: gpu/run.sh STAGE, see the top of this file}
shift
site=${SITE:-/tmp/trl-fp8-site}
out=${OUT:-$PWD/outputs/gpu}
python=${PYTHON:-python3}
size=${SIZE:-qwen3_8b}
limit=${LIMIT:-570}
log=$out/stage-$stage.log
failed=""

mkdir -p "$out"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
if [ -d "$site" ]; then # the bundle stands before the host's packages, and has no DeepGEMM
  export PYTHONPATH=$site:$PYTHONPATH VLLM_USE_DEEP_GEMM=0
  version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/trl_fp8/__init__.py)
  mkdir -p "$site/trl_fp8-$version.dist-info" # results record the version of an installed package
  printf 'Metadata-Version: 2.1\nName: trl-fp8\nVersion: %s\n' "$version" > "$site/trl_fp8-$version.dist-info/METADATA"
fi
for setting in ${SETTINGS:-}; do export "${setting?}"; done

# step NAME SECONDS COMMAND...: run it for at most SECONDS, and at most as long as the stage may take
step() {
  local name=$1 seconds=$2 left=$((limit - SECONDS)) code
  shift 2
  [ "$seconds" -le "$left" ] || seconds=$left
  echo "==== $name (at most $seconds s): $*" | tee -a "$log"
  [ -z "${DRY_RUN:-}" ] || return 0
  if [ "$seconds" -lt 10 ]; then
    echo "==== $name: not begun, no time left" | tee -a "$log"
    failed="$failed $name"
    return 1
  fi
  local began=$SECONDS
  timeout --kill-after 10 "$seconds" "$@" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  echo "==== $name: exit code $code after $((SECONDS - began)) s" | tee -a "$log"
  [ "$code" -eq 0 ] || failed="$failed $name"
  return "$code"
}

bench() { # bench NAME SECONDS OPTIONS...: with a budget that leaves room for the start and the end of a process
  local name=$1 seconds=$2 left=$((limit - SECONDS))
  shift 2
  [ "$seconds" -le "$left" ] || seconds=$left
  step "$name" "$seconds" "$python" "benchmarks/bench_$name.py" --budget "$((seconds * 4 / 5))" --results "$out" "$@"
}

gpu_tests() { # gpu_tests EXPRESSION SECONDS
  step "pytest -k '$1'" "$2" "$python" -m pytest -m gpu -k "$1" -v --timeout 240 -p no:cacheprovider \
    tests/numerics tests/engine/test_gpu.py tests/policy/test_fp8_gemm.py tests/engine/test_server.py
}

bundle() {
  local from=${1:?usage: gpu/run.sh bundle DIR} parts=$site.parts
  mkdir -p "$parts"
  cp "$from"/part-* "$from"/SHA256SUMS "$parts"/ || exit 1
  if (cd "$parts" && sha256sum --check --quiet SHA256SUMS); then
    mkdir -p "$site"
    cat "$parts"/part-* | tar -xJ -C "$site" && rm -rf "$parts" && echo "unpacked to $site"
  else
    echo "waiting for the other parts; here are: $(ls "$parts")"
  fi
}

# Of the settings that an older Triton or a missing library may need, the first with which two syncs work
first_look() {
  step versions 120 "$python" -c '
import torch, transformers, triton, torchao, trl, vllm, trl_fp8
for module in (torch, transformers, triton, torchao, trl, vllm):
    print(module.__name__, module.__version__)
print(torch.version.cuda, torch.cuda.is_available() and torch.cuda.get_device_properties(0))'
  local settings candidates=("" "VLLM_USE_V2_MODEL_RUNNER=0" "VLLM_USE_V2_MODEL_RUNNER=0 VLLM_USE_FLASHINFER_SAMPLER=0")
  for settings in "${candidates[@]}"; do
    if step "two syncs [$settings]" 150 env $settings "$python" benchmarks/bench_sync.py --size tiny --rounds 1 --syncs 2 \
      --budget 100 --results "$out"; then
      for setting in $settings; do export "${setting?}"; done
      failed=""
      echo "==== settings for the other stages: SETTINGS='$settings'" | tee -a "$log"
      break
    fi
  done
  local tiny=(--size tiny --precisions fp8_linears_kv --most 16)
  bench rollout 120 "${tiny[@]}" ||
    step "rollout, graphs without torch.compile" 90 "$python" benchmarks/bench_rollout.py "${tiny[@]}" --budget 70 \
      --results "$out" --engine-kwargs '{"compilation_config": {"mode": 0}}'
  gpu_tests "not experts and not routes" 400
}

keep() { # keep NAME FILE: copy a result to OUT
  [ -n "${DRY_RUN:-}" ] || cp "$2" "$out/$1"
}

mismatch_and_demo() {
  step mismatch 300 "$python" benchmarks/measure_mismatch.py &&
    keep mismatch_ladder_gpu.json benchmarks/results/mismatch_ladder_gpu.json &&
    keep mismatch_ladder_gpu.png docs/images/mismatch_ladder_gpu.png
  step demo 300 "$python" examples/grpo_addition.py --config examples/configs/addition.yaml --output_dir outputs/demo_gpu &&
    keep demo_gpu_summary.json outputs/demo_gpu/summary.json &&
    keep demo_gpu_report.png outputs/demo_gpu/report.png
}

[ "$stage" = bundle ] || : > "$log"
case $stage in
  bundle) bundle "$@" ;;
  1) first_look ;;
  2) bench rollout 560 --size "$size" "$@" ;;
  3)
    bench sync 380 --size "$size" "$@"
    bench calibration 180 --size "$size"
    ;;
  4) mismatch_and_demo ;;
  5) bench fp8_linear 400 --size "$size" "$@" ;;
  6) gpu_tests "experts or routes" 560 ;;
  7) bench step 560 --size "$size" "$@" ;;
  *) echo "unknown stage $stage, see the top of gpu/run.sh" >&2 && exit 2 ;;
esac
if [ -n "$failed" ]; then
  echo "==== stage $stage: failed:$failed" | tee -a "$log"
  exit 1
fi

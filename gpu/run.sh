#!/usr/bin/env bash
# The evidence that needs a GPU, in stages of at most ten minutes each, most valuable first. See gpu/README.md.
#
#   gpu/run.sh bundle DIR     take the parts of a bundle that are in DIR; unpack once all of them have come
#   gpu/run.sh 0 [OPTIONS]    the first ten minutes: decoding, a sync, kernels (gpu/ten_minutes.py; --only depth parts syncs
#                             takes the others)
#   gpu/run.sh 1              imports, two syncs of a tiny model, rollouts with CUDA graphs, KV scales
#   gpu/run.sh 2 [OPTIONS]    mismatch over depth, trained policies too   (options go to the stage's first benchmark)
#   gpu/run.sh 3 [OPTIONS]    rollouts of 16k responses: BF16, and FP8 with the GEMM kernel that is chosen, DeepGEMM, Triton
#   gpu/run.sh 4 [OPTIONS]    weight sync
#   gpu/run.sh 5 [OPTIONS]    rollouts of other lengths and precisions, KV calibration
#   gpu/run.sh 6 [OPTIONS]    FP8 linears, as the trainer calls them
#   gpu/run.sh 7 [OPTIONS]    whole GRPO steps
#   gpu/run.sh 8              the tests for GPUs
#   gpu/run.sh 9              those of mixture of experts
#   gpu/run.sh 10             the demo
#
# Environment: SITE (folder of the unpacked bundle; without it vLLM must be installed), OUT (where the log and the JSON
# go; outputs/gpu), ARCHIVE (folder for one archive of OUT a stage, packed again after each step), PYTHON (python3), SIZE (qwen3_8b; of stage 7 qwen3_1_7b), LIMIT (seconds of a stage; see `limit`
# below), SETTINGS (what stage 1 found to be needed, "A=1 --option=value"), TRL_FP8_COMMIT (commit for the results, if
# this is a copy without repository), DRY_RUN (not empty: print the commands only).
set -uo pipefail
cd "$(dirname "$0")/.."
stage=${1:?usage: gpu/run.sh STAGE, see the top of this file}
shift
site=${SITE:-/tmp/trl-fp8-site}
out=${OUT:-$PWD/outputs/gpu}
python=${PYTHON:-python3}
size=${SIZE:-qwen3_8b}
case $stage in # what together fits into 30 minutes, with two transfers of a bundle
  0) limit=${LIMIT:-520} ;;
  1 | 2 | 4) limit=${LIMIT:-300} ;;
  *) limit=${LIMIT:-570} ;;
esac
log=$out/stage-$stage.log
last=$out/last-step.log
failed=""
in_force=() # settings, as in SETTINGS
options=()  # those of them that are options of a benchmark

mkdir -p "$out"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
[ "$stage" != 1 ] || export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-INFO} # which kernels, which backends, why
export VLLM_LOGGING_LEVEL=${VLLM_LOGGING_LEVEL:-WARNING}
export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$site.deep-gemm} # kernels that DeepGEMM compiles serve later stages
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
if [ -d "$site" ]; then # the bundle stands before the host's packages
  # DeepGEMM compiles a kernel at its first call, in seconds, and not all of them beforehand
  export PYTHONPATH=$site:$PYTHONPATH VLLM_USE_DEEP_GEMM=1 VLLM_DEEP_GEMM_WARMUP=skip
  version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/trl_fp8/__init__.py)
  mkdir -p "$site/trl_fp8-$version.dist-info" # results record the version of an installed package
  printf 'Metadata-Version: 2.1\nName: trl-fp8\nVersion: %s\n' "$version" > "$site/trl_fp8-$version.dist-info/METADATA"
fi

use() { # use SETTING: from here on, a variable of every process or an option of every benchmark with an engine
  in_force+=("$1")
  case $1 in
    --*) options+=("$1") ;;
    *) export "${1?}" ;;
  esac
}
for setting in ${SETTINGS:-}; do use "$setting"; done

# step NAME SECONDS COMMAND...: run it for at most SECONDS, and at most as long as the stage may take
step() {
  local name=$1 seconds=$2 left=$((limit - SECONDS)) code
  shift 2
  [ "$seconds" -le "$left" ] || seconds=$left
  echo "==== $name (at most $seconds s): $*" | tee -a "$log"
  [ -z "${DRY_RUN:-}" ] || return 0
  : > "$last"
  if [ "$seconds" -lt 10 ]; then
    echo "==== $name: not begun, no time left" | tee -a "$log"
    failed="$failed $name"
    return 1
  fi
  local began=$SECONDS
  timeout --kill-after 10 "$seconds" "$@" 2>&1 | tee "$last" | tee -a "$log"
  code=${PIPESTATUS[0]}
  echo "==== $name: exit code $code after $((SECONDS - began)) s" | tee -a "$log"
  [ "$code" -eq 0 ] || failed="$failed $name"
  pack
  return "$code"
}

pack() { # into one file: a host may send back few files, and not from folders in folders
  [ -z "${ARCHIVE:-}" ] || { mkdir -p "$ARCHIVE" && tar -czf "$ARCHIVE/stage-$stage.tgz" -C "$out" . ; }
}

bench() { # bench NAME SECONDS OPTIONS...: with a budget that leaves room for the start and the end of a process
  local name=$1 seconds=$2 left=$((limit - SECONDS))
  shift 2
  [ "$seconds" -le "$left" ] || seconds=$left
  step "$name" "$seconds" "$python" -m "benchmarks.bench_$name" --budget "$((seconds * 9 / 10))" --results "$out" "$@"
}

engine_bench() { # as bench, of one that starts engines; what is given with the stage counts more than SETTINGS
  bench "$1" "$2" "${options[@]}" "${@:3}"
}

# As engine_bench, and again with what could mend its failure. Of the first stage only: elsewhere it would measure again, in
# less time, and overwrite what went well
mended_bench() {
  local name=$1 before=$failed setting
  until engine_bench "$@"; do
    setting=$("$python" gpu/remedy.py "$last" "${in_force[@]}") || return 1
    echo "==== $name: again with $setting" | tee -a "$log"
    use "$setting"
  done
  failed=$before
}

gpu_tests() { # gpu_tests EXPRESSION SECONDS PATHS...
  step "pytest -k '$1'" "$2" "$python" -m pytest -m gpu -k "$1" -v --timeout 240 -p no:cacheprovider "${@:3}"
}

bundle() {
  local from=${1:?usage: gpu/run.sh bundle DIR} parts=$site.parts
  mkdir -p "$parts"
  cp "$from"/part-* "$from"/SHA256SUMS "$parts"/ || exit 1
  "$python" gpu/unpack.py "$parts" "$site"
  case $? in
    0) rm -rf "$parts" ;;
    3) ;; # others are still to come
    *) exit 1 ;;
  esac
}

first_look() {
  step versions 60 "$python" -c '
import torch, transformers, triton, torchao, trl, vllm, trl_fp8
for module in (torch, transformers, triton, torchao, trl, vllm):
    print(module.__name__, module.__version__)
print(torch.version.cuda, torch.cuda.is_available() and torch.cuda.get_device_properties(0))'
  mended_bench sync 120 --size tiny --rounds 1 --syncs 2
  mended_bench rollout 100 --size tiny --precisions fp8_linears_kv --most 16
  echo "==== settings for the other stages: SETTINGS='${in_force[*]}'" | tee -a "$log"
  gpu_tests "scales_reach or (two_syncs_equal and cutlass)" 240 tests/engine/test_gpu.py
}

keep() { # keep NAME FILE: copy a result to OUT
  [ -n "${DRY_RUN:-}" ] || cp "$2" "$out/$1"
}

demo() {
  local config=examples/grpo_addition.yaml
  step demo 560 "$python" examples/grpo_addition.py --config "$config" --output_dir outputs/demo_gpu &&
    keep demo_gpu_summary.json outputs/demo_gpu/summary.json &&
    keep demo_gpu_report.png outputs/demo_gpu/report.png
}

if [ "$stage" != bundle ] && [ -z "${DRY_RUN:-}" ]; then # what comes, and how long it may take
  echo "stage $stage takes at most $limit s:"
  DRY_RUN=1 OUT=$(mktemp -d) bash "$0" "$stage" "$@" | sed -n 's/^==== \(.*)\): .*/  \1/p'
fi
[ "$stage" = bundle ] || : > "$log"
case $stage in
  bundle) bundle "$@" ;;
  0)
    step ten_minutes "$limit" "$python" -m gpu.ten_minutes --results "$out" --limit $((limit - 10)) \
      ${ARCHIVE:+--archive "$ARCHIVE/stage-0.tgz"} "$@"
    ;;
  1) first_look ;;
  2)
    step depth 290 "$python" -m benchmarks.measure_depth --layers 36 --results "$out" "$@"
    ;;
  3) # few sequences fit at this length: graphs for 1024 would cost every engine a minute
    engine_bench rollout 565 --size "$size" --lengths 16384 --slice 128 --most 96 \
      --precisions bf16 fp8_linears_kv fp8_linears_kv_deep_gemm fp8_linears_kv_triton "$@"
    ;;
  4) engine_bench sync 290 --size "$size" "$@" ;;
  5)
    mkdir -p "$out/other_lengths" # stage 3's file stays
    engine_bench rollout 400 --size "$size" --lengths 4096 1024 --precisions bf16 fp8_linears_kv fp8_linears \
      fp8_linears_kv_followed --results "$out/other_lengths" "$@"
    bench calibration 160 --size "$size"
    ;;
  6) bench fp8_linear 400 --size "$size" "$@" ;;
  7) engine_bench step 560 --size "${SIZE:-qwen3_1_7b}" "$@" ;;
  8)
    gpu_tests "not experts and not routes" 560 tests/quantization tests/features/one_forward/test_gemm.py tests/engine/test_gpu.py \
      tests/engine/test_server.py tests/engine_vllm_server/test_gpu.py \
      tests/engine_vllm_server/test_weight_patches.py
    ;;
  9) gpu_tests "experts or routes" 560 tests/engine/test_gpu.py tests/engine/test_server.py ;;
  10) demo ;;
  *) echo "unknown stage $stage, see the top of gpu/run.sh" >&2 && exit 2 ;;
esac
if [ -n "$failed" ]; then
  echo "==== stage $stage: failed:$failed" | tee -a "$log"
  exit 1
fi

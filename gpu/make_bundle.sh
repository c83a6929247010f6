#!/usr/bin/env bash
# Pack vLLM (CUDA), TRL and torchao for an offline Hopper host that has PyTorch 2.11+cu130, Triton 3.6, transformers 5.17,
# accelerate, pytest and matplotlib on Python 3.12. To be run where a package index can be reached.
#
#   gpu/make_bundle.sh OUT_DIR        writes OUT_DIR/part-00, part-01, ... (56 MB each) and SHA256SUMS
#
# vLLM 0.31 is built against the stable libtorch ABI: its _C, _moe_C, FlashAttention 3 and cumem libraries need only
# symbols that torch 2.11 exports (checked with nm). Left out: FlashAttention 2 (Hopper uses 3), FlashMLA and other
# attention that these models do not have, the Rust front end, the structured output of outlines (vLLM imports it when
# it is asked for; llguidance always), and vLLM's own DeepGEMM, whose build does need torch 2.13: sgl-deep-gemm, which
# does not, stands in for it.
set -euo pipefail
out=$(realpath -m "${1:?usage: gpu/make_bundle.sh OUT_DIR}")
python=""
for candidate in "${PYTHON312:-}" python3.12 python3 "$HOME"/.pyenv/versions/3.12*/bin/python; do
  if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || { echo "set PYTHON312 to a Python 3.12 interpreter" >&2; exit 1; }
requirements=$(realpath "$(dirname "$0")/requirements.txt")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
rm -f "$out"/part-* "$out/SHA256SUMS"

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
  --target "$work/site" --requirement "$requirements"
cd "$work/site"
rm -rf vllm/vllm-rs vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/third_party/deep_gemm vllm/third_party/fmha_sm100 \
  vllm/_flashkda_C* vllm/_flashmla_* vllm/_deepselect_C* vllm/_qutlass_C* bin test
find . -name __pycache__ -type d -prune -exec rm -rf {} +
find . -name '*.jpg' -delete
# A transfer takes 64 MiB: a part and the working tree, which is 4 MB
tar -c . | xz -T0 -9 | split -b 56MB -d - "$out/part-"
cd "$out"
sha256sum part-* > SHA256SUMS
du -ch part-* | tail -1
[ "$(wc -l < SHA256SUMS)" -le 3 ] || { echo "more than three parts: leave something else out" >&2; exit 1; }

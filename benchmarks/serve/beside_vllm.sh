#!/usr/bin/env bash
# Both engines under the same load on one GPU, where neither this project's dependencies nor vLLM are installed.
#
#   benchmarks/serve/beside_vllm.sh pack PEER PACK [TRACE]   in a checkout with .venv: gathers in PACK what to carry there
#   benchmarks/serve/beside_vllm.sh run PACK SHAPE           there, in the checkout's root: writes $OUT/serve-*.json
#
# PEER has vLLM for that machine: vpy.tar.xz (its Python part), dep.tar.xz (what that machine lacks of its dependencies)
# and its extensions as *.so.xz. SHAPE is qwen3-0.6b or llama-8b. TRACE is of conversations; without one they are
# invented. DIVISOR, OUTPUT_DIVISOR, SECONDS_EACH and BURST scale the load, RATES gives rates; ENGINES says which run.
# VLLM_PYTHON is the Python of both there. Draw what came back with
#   python -m benchmarks.serve --read serve-ours-*.json serve-vllm-*.json --plot serve.svg
set -euo pipefail
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }

pack() {
  local peer=$1 to=$2 trace=${3:-}
  mkdir -p "$to" && to=$(cd "$to" && pwd)
  temporary=$(mktemp -d)
  trap 'rm -rf "$temporary"' EXIT
  mkdir "$temporary/site" "$temporary/wheels"
  # What the services import, but for NumPy and CuPy, which that machine has for its GPU.
  .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version "${PYTHON_VERSION:-3.12}" \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "$temporary/wheels" \
    $(grep -E '^(grpcio(-[a-z-]+)?|googleapis-common-protos|protobuf|structlog|ml_dtypes|msgspec|prometheus_client|pyzmq|safetensors|threadpoolctl|tokenizers|uvloop|jinja2|markupsafe)==' -i \
      constraints.txt | grep -v tools)
  for wheel in "$temporary"/wheels/*.whl; do
    .venv/bin/python -m zipfile -e "$wheel" "$temporary/site"
  done
  # The generated code is in no commit.
  (cd protos && find . -name '*_pb2*.py' -print0 | tar cf - --null -T -) | (mkdir "$temporary/site/protos" && tar xf - -C "$temporary/site/protos")
  tar cf - -C "$temporary" site | xz -4 >"$to/site.tar.xz"
  cp "$peer"/*.xz "$to/"
  [ -z "$trace" ] || xz -6 -c "$trace" >"$to/trace.jsonl.xz"
  du -sh "$to"
}

unpack() { # PACK TO
  mkdir -p "$2/dep" "$2/vllm-site"
  tar xJf "$1/site.tar.xz" -C "$2" &
  tar xJf "$1/vpy.tar.xz" -C "$2/vllm-site" &
  tar xJf "$1/dep.tar.xz" -C "$2/dep" &
  wait
  for extension in _C_stable_libtorch _moe_C_stable_libtorch cumem_allocator; do
    xz -dc "$1/$extension.abi3.so.xz" >"$2/vllm-site/vllm/$extension.abi3.so"
  done
  xz -dc "$1/_vllm_fa3_C.abi3.so.xz" >"$2/vllm-site/vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
  [ ! -e "$1/trace.jsonl.xz" ] || xz -dc "$1/trace.jsonl.xz" >"$2/trace.jsonl"
  touch "$2/ready"
}

run() {
  local pack=$1 shape=$2 work=${TMPDIR:-/tmp}/beside-vllm out=${OUT:?names the folder of the results} python status=0
  python=$(command -v "${VLLM_PYTHON:-python3}")
  [ -e "$work/ready" ] || unpack "$pack" "$work"
  export PYTHONUNBUFFERED=1
  local ours=$PWD:$PWD/clients/python:$work/site/protos:$work/site
  local load=(--shape "$shape" --divisor "${DIVISOR:-8}" --output-divisor "${OUTPUT_DIVISOR:-1}"
    --seconds "${SECONDS_EACH:-20}" --burst "${BURST:-512}" --connections 32 --generators 4
    --ttft-limit-ms "${TTFT_MS:-500}" --itl-limit-ms "${ITL_MS:-50}" --request-limit 120)
  [ -z "${RATES:-}" ] || load+=(--rates $RATES)
  [ ! -e "$work/trace.jsonl" ] || load+=(--trace "$work/trace.jsonl")
  for engine in ${ENGINES:-ours vllm}; do
    case $engine in
    ours)
      PYTHONPATH=$ours "$python" -m benchmarks.serve "${load[@]}" --json "$out/serve-ours-$shape.json" \
        --log "$out/ours-$shape.log" --daemon-flags "--device gpu --memory ${MEMORY:-40GiB}" \
        --flags "--device gpu --dtype bf16 --replay graphs --max-batch 256 --max-step-tokens 8192 --max-queue 65536 --max-queue-tokens 1073741824 --max-context 8192" ||
        status=$?
      ;;
    vllm)
      VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_CACHE_ROOT=$work/vc TRITON_CACHE_DIR=$work/tc \
        TORCHINDUCTOR_CACHE_DIR=$work/ic PYTHONPATH=$ours "$python" -m benchmarks.serve --engine vllm "${load[@]}" \
        --json "$out/serve-vllm-$shape.json" --log "$out/vllm-$shape.log" --python "$python" \
        --python-path "$work/vllm-site:$work/dep:$work/site/protos:$work/site" \
        --vllm-args '{"dtype": "bfloat16", "max_model_len": 8192, "gpu_memory_utilization": 0.6, "max_num_seqs": 256}' ||
        status=$?
      ;;
    *) usage ;;
    esac
  done
  return "$status"
}

[ $# -ge 3 ] || usage
case $1 in
pack) shift; pack "$@" ;;
run) shift; run "$@" ;;
*) usage ;;
esac

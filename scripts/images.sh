#!/bin/sh
# Build both images of a variant, cpu, rocm or cuda: `images.sh VARIANT`. What a variant is made from is written once, in
# docker-compose.yml.
set -eu
cd "$(dirname "$0")/.."
case ${1:-cpu} in
    cpu) services="kvcache engine" ;;
    rocm | cuda) services="kvcache-$1 engine-$1" ;;
    *) echo "images: $1: no such variant; expected cpu, rocm or cuda" >&2; exit 2 ;;
esac
version=$(sed -n 's/^VERSION = "\(.*\)"$/\1/p' services/version.py)
revision=$(git rev-parse HEAD 2>/dev/null || true)
# shellcheck disable=SC2086  # services are words
exec docker compose --profile rocm --profile cuda build --build-arg "VERSION=$version" --build-arg "REVISION=$revision" $services

#!/usr/bin/env bash
# Installs the built wheel into an empty environment and evaluates a checkpoint from an empty folder.
# Usage: make wheel && scripts/check_wheel.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(ls -t "$root"/dist/*.whl | head -n 1)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$wheel"
mkdir empty && cd empty
../venv/bin/longrnn eval passkey passkey-tiny --lengths 1k,4k --n 4
test -s results/passkey/passkey-tiny/results.jsonl
test -s results/passkey/passkey-tiny/heatmap.png

#!/usr/bin/env bash
# Uses the built wheel in an empty folder, without the checkout but with the packages of its .venv.
# Usage: make wheel && scripts/check_wheel.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(ls -t "$root"/dist/*.whl | head -n 1)
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
unset PYTHONPATH
export OMP_NUM_THREADS=1
cd "$folder"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
python=${PYTHON:-$root/.venv/bin/python}
"$python" -m venv --without-pip venv
# Python does not read the .pth file of the checkout in a folder that another .pth file adds.
packages "$python" >"$(packages venv/bin/python)/packages.pth"
"$python" -m pip --python venv/bin/python install --quiet --disable-pip-version-check --no-deps "$wheel"
export PATH=$folder/venv/bin:$PATH
[[ $(python -c 'import longrnn; print(longrnn.__file__)') == "$folder"/* ]]
mkdir empty notebooks
cp "$root"/docs/tutorials/*.ipynb notebooks

run() {
  echo "check_wheel: $*"
  local log
  log=$(mktemp -p "$folder")
  "$@" >"$log" 2>&1 || { cat "$log"; exit 1; }
}

# Two jobs at once, each of which ends at its first failure.
(
  cd notebooks
  run python -c 'from nbclient.cli import main; main()' ./*.ipynb
  run longrnn doctor
) &
notebooks=$!
(
  cd empty
  run longrnn --quiet compare passkey-tiny
  test -s results/compare/passkey-tiny/report.html
  run longrnn eval harness passkey-tiny --tasks longrnn_passkey --limit 2
  run longrnn --quiet train reverse_small max_steps=20 warmup_steps=2
  test -s runs/reverse-small/model.safetensors
  run longrnn finetune collapse-tiny --data bundled:moby_dick --length 256 --dry-run
  run longrnn --quiet diagnose states collapse-tiny --text bundled:moby_dick --length 2k --output states
  test -s states/report.html
) &
wait $!
wait $notebooks

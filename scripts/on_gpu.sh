#!/usr/bin/env bash
# Everything that waits for a GPU, in one call of under nine minutes:
#
#     scripts/on_gpu.sh gpu                       # on a machine with an NVIDIA GPU
#     DEVICE=cpu scripts/on_gpu.sh gpu            # the same steps on a CPU, at small sizes
#
# The folder gets page.md with the output of every step, and a JSON file per measurement. A step that fails
# does not stop the others. Called again, the script repeats only the steps that have not passed.
# PYTHON is the interpreter (default: python3), which has torch and the packages that longrnn requires.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:?usage: scripts/on_gpu.sh FOLDER}
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-python3}
mkdir -p "$folder"
end=$((SECONDS + 530))
steps=()

# step NAME SECONDS COMMAND...: run it for at most so many seconds, and not beyond the end of the nine minutes
step() {
  local name=$1 limit=$2 status
  shift 2
  steps+=("$name")
  [[ -e $folder/$name.passed ]] && return
  ((limit > end - SECONDS)) && limit=$((end - SECONDS))
  if ((limit < 5)); then
    echo "$name: no time left; call the script again" | tee "$folder/$name.log"
    return
  fi
  rm -rf "${folder:?}/$name" # the run of an earlier try
  local begun=$SECONDS
  echo "\$ $*" >"$folder/$name.log"
  timeout --preserve-status --signal TERM --kill-after 20 "$limit" "$@" >>"$folder/$name.log" 2>&1
  status=$?
  echo "exit code $status after $((SECONDS - begun)) s" >>"$folder/$name.log"
  echo "$name: exit code $status after $((SECONDS - begun)) s"
  ((status == 0)) && touch "$folder/$name.passed"
}

longrnn=("$PYTHON" -m longrnn.cli)
gpu=("$PYTHON" -m benchmarks.gpu --device "$DEVICE")
study=(--quiet train reverse_study "output_dir=$folder/reverse" "task.vocab_size=16384" "validation.vocab_size=16384"
  "model.mixer={kind: mamba2, d_state: 32, head_dim: 32}")
if [[ $DEVICE == cuda ]]; then
  # Offline, the packages of the extra must be there already: the step then fails, and the others go on.
  step install 90 "$PYTHON" -m pip install --quiet --retries 0 -e '.[cuda]'
  big=(--layers 24 --d-model 768 --lengths 1024 16384)
  huge=(--layers 48 --d-model 2048 --lengths 1024)
  tests=(-m cuda)
  launcher=gpu1
  seconds=200
else
  big=(--layers 1 --d-model 64 --vocab 64 --lengths 64 --repeats 1)
  huge=("${big[@]}")
  tests=(-m "not slow" tests/ops/test_conv.py)
  launcher=cpu1
  seconds=120
  study+=("model.d_model=32" "max_steps=5" "warmup_steps=1")
fi
step doctor 60 "${longrnn[@]}" doctor
step tests 120 "$PYTHON" -m pytest -q -p no:cacheprovider "${tests[@]}"
step models 60 "${gpu[@]}" "${big[@]}" --json "$folder/models.json"
step models_1.3b 60 "${gpu[@]}" "${huge[@]}" --json "$folder/models_1.3b.json"
step launch 60 "${longrnn[@]}" --quiet launch --config_file "$launcher" \
  train passkey_tiny_short "output_dir=$folder/launch" max_steps=10 warmup_steps=2
# A run that gets SIGTERM at its limit saves its step and exits with 0.
step reverse "$seconds" "${longrnn[@]}" "${study[@]}"

{
  echo "# $(date -u +%F), $DEVICE, $(git rev-parse --short HEAD 2>/dev/null)"
  for name in "${steps[@]}"; do
    printf '\n## %s\n\n```\n' "$name"
    tail -n 200 "$folder/$name.log"
    echo '```'
  done
} >"$folder/page.md"
passed=("$folder"/*.passed)
echo "$folder/page.md: ${#passed[@]} of ${#steps[@]} steps passed"
((${#passed[@]} == ${#steps[@]}))

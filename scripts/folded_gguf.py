"""Ask whether a folded mitigation has the same effect in llama.cpp.

    python scripts/folded_gguf.py collapse-tiny collapse-tiny+fit.yaml --llama llama.cpp --text TEXT

Folds the mitigation of each checkpoint into its weights, lets llama.cpp's own converter write them
as GGUF, and prints the perplexity of the second half of the first `--length` tokens of the text by
llama.cpp's `llama-perplexity` and by transformers. llama.cpp is its source, built in `build`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import studies
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from longrnn.checkpoints.convert import convert
from longrnn.errors import UserError
from longrnn.units import parse_length

# llama.cpp does not know the tokenizer of bytes: its converter identifies a tokenizer by what it
# makes of one text, and its loader wants merges. This one, of the bytes 0 and 1, is in no text.
CONVERTER = """
import runpy
import gguf
from conversion.base import TextModel

class Vocabulary(gguf.SpecialVocab):
    def _load(self, path):
        super()._load(path)
        self.merges = ["\u0100 \u0101"]

gguf.SpecialVocab = Vocabulary
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path("convert_hf_to_gguf.py", run_name="__main__")
"""


@torch.inference_mode()
def by_transformers(folder: Path, text: Path, length: int) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(text.read_bytes().decode(), return_tensors="pt").input_ids[:, :length]
    logits = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits[0, length // 2 : -1]
    return cross_entropy(logits.double(), tokens[0, length // 2 + 1 :]).exp().item()


def by_llama(folder: Path, text: Path, length: int, llama: Path) -> float:
    def run(*command: object) -> str:
        environment = {**os.environ, "PYTHONPATH": str(llama / "gguf-py")}
        arguments = [str(argument) for argument in command]
        done = subprocess.run(arguments, cwd=llama, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)}\n{done.stderr}")
        return done.stdout + done.stderr

    program, model = llama / "build" / "bin" / "llama-perplexity", folder / "model.gguf"
    if not program.exists():
        raise UserError(f"no {program}: build llama.cpp there with CMake")
    run(sys.executable, "-c", CONVERTER, folder, "--outtype", "f32", "--outfile", model)
    said = run(program, "-m", model, "-f", text, "-c", length, "--chunks", 1, "--no-escape")
    found = re.search(r"Final estimate: PPL = ([\d.]+)", said)
    assert found, said
    return float(found.group(1))


def main() -> None:
    parser = studies.options(__doc__, output=None)
    parser.add_argument("checkpoint", nargs="+", help="CHECKPOINT or CHECKPOINT+MITIGATION")
    parser.add_argument("--llama", type=Path, required=True, help="folder of llama.cpp")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=parse_length, default=8192)
    args = parser.parse_args()
    for checkpoint in args.checkpoint:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "hf"
            convert(checkpoint, folder, to="hf")
            theirs = by_llama(folder, args.text.resolve(), args.length, args.llama.resolve())
            ours = by_transformers(folder, args.text, args.length)
        print(f"{checkpoint}: perplexity {theirs:.4f} by llama.cpp, {ours:.4f} by transformers")


if __name__ == "__main__":
    studies.run(main)

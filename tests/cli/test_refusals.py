"""Bad input of every command: exit code 2, one sentence with the names in it, nothing written.

The names in capitals are those of `tests.cli.conftest.Shelf`.
"""

from __future__ import annotations

import pytest

from tests.cli.conftest import CLI, Shelf, refused, table

PASSKEY = "eval passkey TEXT --lengths 160 --depths 1 --n 1"
TRAIN = "train c.yaml"
STATES = "diagnose states TEXT --text book.txt --length 600 --train-length 64"
GRADIENTS = "diagnose gradients RUN --length 8"
CALIBRATE = "calibrate SHORT --text filler.txt --method"
HARNESS = "eval harness passkey-tiny --tasks longrnn_passkey"
# A command, and what its error must contain.
CASES = """
    evl | No such command 'evl'
    eval passkey | Missing argument
    info | Missing argument
    info TEXT --nonsense | No such option: --nonsense | longrnn info --help
    calibrate SHORT --text a --method x --margni 1 | --margni
    info passkey-tyni | passkey-tiny
    info MODELS | config.json
    info half | half | model.safetensors | copy
    PASSKEY --lengths 4x | '4x' is not a valid length | 256, 4k or 1M
    PASSKEY --lengths 256, | '' is not a valid length
    PASSKEY --lengths 100 | 156 tokens
    PASSKEY --depths '' | --depths
    PASSKEY --depths 0.5,1.5 | --depths | 1.5
    PASSKEY --n 0 | --n
    PASSKEY --device cuda:99 | device 'cuda:99' cannot be used
    PASSKEY TEXT | the name of two
    PASSKEY --output file/below | file | choose another folder
    PASSKEY TEXT+forgetmore | forget_more
    generate TEXT+state_norm(threshold=1,layers=x) --prompt a | layers | 'x'
    generate TEXT+state_norm(threshold=1,heads=x) --prompt a | heads | 'x'
    eval passkey TEXT --lengths 256 --insert-at 0,1M | tokens | length
    eval passkey TEXT --lengths 256 --insert-at 0 --n-keys 2 | prompt
    eval passkey LLAMA --lengths 300 --n 1 | 256
    eval passkey LLAMA+state_norm(threshold=3) |
    eval reverse RUN --vocab-size 9 | 10 ids
    eval reverse TEXT --lengths 4 | was not trained on reverse | --vocab-size and --lengths
    eval task TEXT | task | --task
    eval task TEXT --task sorrt | 'sorrt' | sort
    eval task TEXT --task passkey | passkey
    eval task TEXT --task delayed_sum --vocab-size 8 --lengths 5 | steps of 2, not 5
    eval task TEXT --task predecessor_query --vocab-size 8 --lengths 9 | vocab_size | from 2 to 8
    eval perplexity TEXT | --text | --newlines
    eval perplexity TEXT --text book.txt | book.txt | 64k
    eval perplexity TEXT --newlines --stride 9 | --context
    eval perplexity TEXT --newlines --stride 300 --context 200 | 300 | 200
    diagnose memory TEXT --text book.txt --positions 1 | 1
    compare TEXT --suite quik | quik | quick
    compare TEXT --suite bad.yaml | 'paskey' | did you mean 'passkey'
    generate TEXT | give either --prompt or --prompt-file
    generate TEXT --prompt a --prompt-file book.txt | give either --prompt or --prompt-file
    generate TEXT --prompt '' | no token
    generate TEXT --prompt \udcff | --prompt | UTF-8
    generate TEXT --prompt a --stop \udcff | --stop | UTF-8
    generate TEXT --prompt-file empty.txt | empty.txt is empty
    generate TEXT --prompt-file none.txt | no text file none.txt
    generate TEXT --prompt-file bytes.txt | bytes.txt is not UTF-8
    generate TEXT --prompt a --temperature -1 | temperature
    generate TEXT --prompt a --top-p 0 | top_p
    generate LLAMA --prompt 'The sky' --max-new-tokens 250 | 256
    generate TEXT --prompt a --mitigation token_filter(threshold=0.1) | token_filter | forget_more
    STATES --length 3k | 3,072
    STATES --length 64 | 64 | --length
    STATES --mitigation token_filter(threshold=0.1) | token_filter | forget_more
    diagnose states TEXT --length 600 | --text | --newlines
    diagnose states TEXT --length 600 --newlines | length | --train-length
    diagnose states LLAMA --newlines --train-length 9 | llama
    GRADIENTS --text none.txt | none.txt
    GRADIENTS --length 1 |
    diagnose gradients passkey-tyni | did you mean
    diagnose gradients none.yaml | 'none.yaml' is neither a file
    diagnose gradients TEXT | --text
    diagnose gradients "it's" | it's
    diagnose gradients ' ' | ' '
    report RUN --baseline a=[ | --baseline a=[ | YAML
    diagnose gradients 'mamba.yaml model.mixer.init=ortogonal' | orthogonal
    diagnose gradients 'mamba.yaml model.mixer.init=orthogonal' | mamba2 | long_memory
    diagnose gradients 'on.yaml model.mixer.init=default' | model
    CALIBRATE statenorm | statenorm | 'state_norm'
    CALIBRATE sliding_window | power_decay
    CALIBRATE token_filter | --target-length
    CALIBRATE token_filter --target-length 256 | 256
    CALIBRATE state_norm --train-length 3k | 2,184
    CALIBRATE scale_decay --target-length 4k | 4,097
    CALIBRATE state_norm(margin=0) | margin
    CALIBRATE state_norm --output norm.json | norm.json
    CALIBRATE state_norm(margni=1) | margni | 'margin'
    CALIBRATE token_filter(quantile=1.5) --target-length 1k | quantile
    CALIBRATE per_head(passes=4) --target-length 1k | passes | 5
    calibrate TEXT --text filler.txt --method token_filter --train-length 9 --target-length 99 | dt
    calibrate TEXT --text filler.txt --method state_norm | --train-length
    calibrate LLAMA --text book.txt --method state_norm --train-length 9 | llama
    convert LLAMA new --to native | llama
    convert MAMBA2 TEXT --to ours | exists
    convert MAMBA2 new --to mamba | mamba
    finetune TEXT | --data
    finetune TEXT --data book.txt --length 64 --evaluate-to 32 | --evaluate-to 32 | 64
    train none.yaml | 'none.yaml' is neither a file | reverse_small
    train open.yaml | is not YAML
    train dollar.yaml | 'seed' | integer
    train | longrnn train CONFIG
    train --resume RUN c.yaml | c.yaml | key=value
    TRAIN init_from=LLAMA | llama
    TRAIN output_dir=file/run | file | choose another folder
    TRAIN max_stps=3 | max_stps | max_steps
    TRAIN 'model.mixer={kind: lstn}' | lstn | lstm
    TRAIN 'model.mixer={kind: mamba2, d_stat: 4}' | mamba2 | d_state
    TRAIN 'model.mixer={kind: mamba2, A_init: {a: 1}}' | A_init
    TRAIN model.mixer=lstm | 'model.mixer' | 'lstm'
    TRAIN 'model.position={kind: sinus}' | did you mean 'sinusoidal'
    TRAIN 'task={kind: text, dada: x}' | dada | did you mean 'data'
    TRAIN 'task.kind=[text]' | task | 'kind'
    TRAIN 'task={kind: passkey, min_segments: 65}' | min_segments=65 | max_segments=64
    TRAIN 'task={kind: revers}' | unknown task 'revers' | did you mean 'reverse'
    TRAIN task=passkey | 'task' | 'passkey'
    TRAIN max_steps | 'max_steps' is not of the form key=value
    TRAIN max_steps=[ | 'max_steps=[' is not YAML
    TRAIN seed.a=3 | 'seed.a=3' | seed
    TRAIN model.mixr.kind=lstm | mixr | did you mean 'mixer'
    TRAIN length.max=100 | at least 156 tokens
    TRAIN tokenizer=gpt3 | no tokenizer at gpt3
    TRAIN 'learning_rate_scale={embeding.weight: 0}' | embedding.weight
    launch --cpu | longrnn launch
    launch --cpu train c.yaml | --num_processes | at least 1, not 0
    launch --cpu --num_processes 0 train c.yaml | --num_processes | at least 1, not 0
    eval harness --tasks longrnn_passkey | give the checkpoint before
    eval harness passkey-tiny | No tasks specified
    eval harness passkey-tinny --tasks longrnn_passkey | 'passkey-tiny'?
    HARNESS --fewshot_num 1 | unrecognized
    HARNESS,longrnn_passky | longrnn_passky
    HARNESS --log_samples | --output_path
    HARNESS --model_args dtipe=x | dtipe
    data build --out new nothing | no file to train on at nothing
    data build --out new organisation/name/more | no file to train on at organisation/name/more
    data build --out new --append-eos book.txt | the tokenizer has no end-of-sequence token
    data build --out new --instruct book.txt | prompt and completion
    data build --out new book.txt binary | binary is binary (a NUL at byte 4)
    data build --out foreign book.txt | foreign/corpus.json
    data build --out new empty.txt | empty.txt is empty
    data build --out new --min-length 4k book.txt | no document has 4096 tokens or more
    data build --out new --split-on '' book.txt | --split-on
    data build --out file/new book.txt | choose another folder
"""
SHORTHANDS = ("PASSKEY", "STATES", "GRADIENTS", "CALIBRATE", "HARNESS", "TRAIN")


def cases() -> list[tuple[str, list[str]]]:
    return table(CASES, {name: globals()[name] for name in SHORTHANDS})


@pytest.mark.parametrize(("command", "names"), cases(), ids=[command for command, _ in cases()])
def test_bad_input_is_refused(command: str, names: list[str], cli: CLI, shelf: Shelf) -> None:
    if command.startswith("eval harness"):
        pytest.importorskip("lm_eval")
    refused(cli, *shelf(command), says=tuple(names))

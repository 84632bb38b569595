"""The arguments of the C++ kernels: one table, which C++ and Python both read.

`setup.py` writes it as the header `signatures.h` before it compiles the kernels, by running this
file, before torch is installed. `longrnn.ops.cpu.library` packs arguments by it.
"""

from hashlib import sha256
from math import inf
from pathlib import Path

FOLDER = Path(__file__).parent
# The most taps of a convolution.
MAX_TAPS = 16
# The most rows of a product that reads each weight once.
FEW_ROWS = 8

# name: fields. A field is a kind and names: `long`; `double`; `real`, a number of type T; `in` and
# `out`, pointers to T; `doubles` and `floats`, pointers of that type; `data`, a pointer to any;
# `mixed` and `strided`, tensors of `fields.h`; the name of another struct. A field with a question
# mark may be left out, and is then 0 or a null pointer.
STRUCTS = {
    "Scan": """
        long b t h p g n decays; strided x; in gain log_decay; strided B C; in state?;
        out y? final_state?; doubles limit?; long limit_token?
    """,
    "ScanGradient": """
        Scan of; in grad_y grad_final; out grad_x grad_gain grad_log_decay grad_B grad_C grad_state
    """,
    "Channels": """
        long b t h g n capacity keep_token; in x gain step rate log_keep? B C state?;
        out y? final_state?; doubles limit?
    """,
    "WindowedChannels": "Channels of; long known window",
    "ChannelsGradient": """
        Channels of; in grad_y grad_final;
        out grad_x grad_gain grad_step grad_rates grad_B grad_C grad_state
    """,
    "Convolution": "long b t c k; strided x; in state weight bias; out y? final_state?",
    "ConvolutionGradient": """
        Convolution of; in grad_y grad_final; out grad_x grad_state grad_weight grad_bias?
    """,
    "Gate": "long b t h p groups; real eps; in scanned; strided x z; in D weight; out y?",
    "GateGradient": "Gate of; in grad_y; out grad_scanned grad_x grad_z grad_D grad_weight",
    "Window": """
        long count? groups? length? capacity?; data heads?; mixed x? B?; out gain? decay?
    """,
    "Stepwise": """
        long cell b t d; in projected weight bias h memory; out y h_after memory_after;
        double keep add limit
    """,
    "FewRows": "long rows m k; mixed weight; floats x y",
    "Mamba": """
        long h n k rank; real select_eps;
        mixed conv_weight conv_bias x_weight dt_weight dt_bias A_log D; doubles edit?
    """,
    "Mamba2": """
        long h p g n k; real norm_eps dt_least dt_largest;
        mixed conv_weight conv_bias dt_bias A_log D norm_weight; doubles edit?
    """,
    "Block": "long d; real eps; mixed norm in_weight in_bias out_weight out_bias",
    "MambaLayer": "Mamba of; Block block",
    "Mamba2Layer": "Mamba2 of; Block block",
    "States": "mixed conv conv_after; in state; out state_after?; Window window",
    "Stack": "long count rows; data layers states; mixed x x_after",
}
# Function of C++: the struct that it takes. A name exists for each dtype, as in scan_f32, but for
# functions whose struct has no fields of type T.
KERNELS = {
    "scan": "Scan",
    "scan_gradient": "ScanGradient",
    "delta": "Scan",
    "delta_gradient": "ScanGradient",
    "channels": "Channels",
    "windowed_channels": "WindowedChannels",
    "channels_gradient": "ChannelsGradient",
    "convolution": "Convolution",
    "convolution_gradient": "ConvolutionGradient",
    "gated_norm": "Gate",
    "gated_norm_gradient": "GateGradient",
    "stepwise": "Stepwise",
    "few_rows": "FewRows",
    "mamba_layers": "Stack",
    "mamba2_layers": "Stack",
}

# Rows of an edit of a stack of layers, one number per head each: what changes nothing by name.
NUMBERS = {
    "largest_ignored": -1.0,
    "step": 1.0,
    "log_rate": 0.0,
    "power": 1.0,
    "log_keep": 0.0,
    "add": 1.0,
    "limit": inf,
    "bias": 0.0,
}

C_TYPES = {
    "long": "long",
    "double": "double",
    "real": "T",
    "in": "const T *",
    "out": "T *",
    "strided": "Strided<T>",
    "doubles": "const double *",
    "floats": "float *",
    "data": "const void *",
    "mixed": "Mixed",
}


def fields(name: str) -> list[tuple[str, str]]:
    """The (kind, name) of each field of a struct, in order; a name may end in a question mark."""
    pairs = []
    for group in STRUCTS[name].split(";"):
        kind, *names = group.split()
        pairs += [(kind, field) for field in names]
    return pairs


def is_typed(name: str) -> bool:
    """Whether a struct has fields of type T."""
    typed = {"real", "in", "out", "strided", *STRUCTS}
    return any(kind in typed for kind, _ in fields(name))


def header() -> str:
    """The content of `signatures.h`."""
    lines = ["// Written by signatures.py.", "#pragma once", '#include "fields.h"', ""]
    lines += ["namespace {", ""]
    lines += [f"enum Number : long {{ {', '.join(map(str.upper, NUMBERS))} }};", ""]
    lines += [f"constexpr long MAX_TAPS = {MAX_TAPS}, FEW_ROWS = {FEW_ROWS};", ""]
    for name in STRUCTS:
        lines += ["template <class T>"] if is_typed(name) else []
        members = [
            f"  {C_TYPES[kind] if kind in C_TYPES else kind + '<T>'} {field.rstrip('?')};"
            for kind, field in fields(name)
        ]
        lines += [f"struct {name} {{", *members, "};", ""]
    lines += ["}  // namespace", "", "#define KERNELS(TYPED, UNTYPED) \\"]
    lines += [
        f"  {'TYPED' if is_typed(struct) else 'UNTYPED'}({kernel}, {struct}) \\"
        for kernel, struct in KERNELS.items()
    ]
    return "\n".join([*lines, "", ""])


def digest(folder: Path = FOLDER) -> str | None:
    """16 hex digits of the SHA-256 of the C++ sources; None where they are not installed."""
    files = sorted(folder.glob("*.h")) + sorted(folder.glob("*.cpp"))
    if not files:
        return None
    content = header().encode() + b"".join(path.read_bytes() for path in files)
    return sha256(content).hexdigest()[:16]

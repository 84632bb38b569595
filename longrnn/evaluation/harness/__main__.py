"""lm-eval's own command line with the model type `longrnn`.

    python -m longrnn.evaluation.harness --model longrnn --model_args pretrained=NAME --tasks …

The command `lm_eval` does not know model types of other packages. All other types, options and
subcommands of lm-eval work here, too.
"""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import longrnn.evaluation.harness  # noqa: F401

if __name__ == "__main__":
    cli_evaluate()

"""lm-eval with any model that longrnn loads; importing this registers the model type `longrnn`.

Raises:
    UserError: lm-eval is not installed.
"""

from importlib.util import find_spec

from longrnn.errors import UserError

if find_spec("lm_eval") is None:
    raise UserError("lm-eval is not installed: pip install lm-eval")

from longrnn.evaluation.harness.command import run
from longrnn.evaluation.harness.lm import LongRNN

__all__ = ["LongRNN", "run"]

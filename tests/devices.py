"""The meta device in place of a GPU: what would wait for a GPU cannot run on it.

Tensors on the meta device have no values. An operation that reads a value back from the device
raises, and so does a comparison whose result the program branches on.
"""

from __future__ import annotations

import torch

GPU = torch.device("meta")

"""Layouts of Mamba-2 checkpoints, of mamba-ssm and of transformers, to and from ours."""

from longrnn.hf.layouts.base import LAYOUTS, Layout, rename
from longrnn.hf.layouts.hugging_face import HuggingFace
from longrnn.hf.layouts.native import Native

__all__ = ["LAYOUTS", "HuggingFace", "Layout", "Native", "rename"]

"""C++ kernels for a CPU, where they were compiled: see `kernels.cpp`, and one header per topic.

`setup.py` compiles them at installation, once per instruction set, if there is a C++ compiler. The
folders of operations beside this one call them, and `tokens` those for one or few tokens.
"""

from longrnn.ops.cpu.library import missing

__all__ = ["missing"]

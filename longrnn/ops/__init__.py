"""Pure functions of tensors: no modules, no parameters, no hidden state.

The docstring of `longrnn` defines the axis letters of all shapes.
"""

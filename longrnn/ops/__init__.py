"""Pure functions of tensors: no modules, no parameters, no hidden state.

Axis letters, everywhere: b batch, t time (tokens), d model width, h heads, p head_dim, g groups,
n d_state, c channels of the convolution, k its width.
"""

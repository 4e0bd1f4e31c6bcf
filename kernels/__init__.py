"""One file per kernel, and the torch.library operators that reach them.

Importing the package registers `torch.ops.spangraph.*`. It does not import Triton.
"""

from spangraph.kernels import ops as ops

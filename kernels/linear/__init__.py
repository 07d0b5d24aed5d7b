"""Linear layers: the forms that weights have, and in a room each the kernels that multiply rows by them.

`forms` are what checkpoints are read into. `LinearFactory` makes the fastest layer of a form: in `dense` of plain
numbers, in `cpu` of quantized ones, and on a GPU in `gpu_packed`, beside inputs of 16 bits, or in `gpu_scaled`, with
inputs of 8 bits.
"""

from kernels.linear.factory import LinearFactory
from kernels.linear.linear import Linear, OperationLinear, RoundsInputs, SplitLinear

__all__ = ["Linear", "LinearFactory", "OperationLinear", "RoundsInputs", "SplitLinear"]

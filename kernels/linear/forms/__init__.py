"""What the weights of a linear layer can be, whatever the checkpoint's packing was.

Forms hold tensors and never change. Every form knows the plain formula of its values, `dequantize()`, which is the
oracle of all kernels.
"""

from kernels.linear.forms.groups import GroupQuantizedWeight
from kernels.linear.forms.numbers import FLOAT4, FLOAT8, INT4, INT8, NUMBERS, Activation, CodedMatrix, Number, integers
from kernels.linear.forms.rows_and_columns import reorder_columns, reorder_rows, scale_rows, select_columns, select_rows
from kernels.linear.forms.scaled import SCALE_BLOCK, ScaledWeight
from kernels.linear.forms.split import DenseWeight, QuantizedWeight, SplitWeight, UnsplitWeight, WeightForm, concatenate

__all__ = [
    "FLOAT4", "FLOAT8", "INT4", "INT8", "NUMBERS", "SCALE_BLOCK", "Activation", "CodedMatrix", "DenseWeight",
    "GroupQuantizedWeight", "Number", "QuantizedWeight", "ScaledWeight", "SplitWeight", "UnsplitWeight", "WeightForm",
    "concatenate", "integers", "reorder_columns", "reorder_rows", "scale_rows", "select_columns", "select_rows",
]  # fmt: skip

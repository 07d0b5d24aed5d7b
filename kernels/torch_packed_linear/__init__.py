"""Quantized matrices in the forms that torch's own CPU operators multiply, and the choice among them by measurement."""

from kernels.torch_packed_linear.choice import RowForms, choose, describe
from kernels.torch_packed_linear.form import Form
from kernels.torch_packed_linear.int4 import Int4Form
from kernels.torch_packed_linear.int8 import Int8ConvertedForm, Int8Form
from kernels.torch_packed_linear.timing import FORMULA, measure
from kernels.torch_packed_linear.token_int8 import TokenInt8Form

__all__ = [
    "FORMULA",
    "Form",
    "Int4Form",
    "Int8ConvertedForm",
    "Int8Form",
    "RowForms",
    "TokenInt8Form",
    "choose",
    "describe",
    "measure",
]

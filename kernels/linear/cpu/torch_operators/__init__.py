"""Quantized matrices in the forms that torch's own CPU operators multiply, and the choice among them by measurement."""

from kernels.linear.cpu.torch_operators.choice import RowForms, choose, describe
from kernels.linear.cpu.torch_operators.form import Form
from kernels.linear.cpu.torch_operators.int4 import Int4Form
from kernels.linear.cpu.torch_operators.int8 import Int8ConvertedForm, Int8Form
from kernels.linear.cpu.torch_operators.measured_linear import MeasuredLinear, Measurements, PlainMatrix
from kernels.linear.cpu.torch_operators.timing import FORMULA, measure
from kernels.linear.cpu.torch_operators.token_int8 import TokenInt8Form

__all__ = [
    "FORMULA",
    "Form",
    "Int4Form",
    "Int8ConvertedForm",
    "Int8Form",
    "MeasuredLinear",
    "Measurements",
    "PlainMatrix",
    "RowForms",
    "TokenInt8Form",
    "choose",
    "describe",
    "measure",
]

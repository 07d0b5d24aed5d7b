"""Turns words into the numbers of one of their planes, by a few instructions of the GPU for two words at a time.

Bits of a value are put below the exponent of a power of two, as in `0x4300 | q`, which is 128 + q in bfloat16; then
that power is subtracted, which is exact. Triton's own operations would work on each word alone: twice the instructions,
which at four bits a value are what limits reading.

Source of the idea: Kim et al., arXiv 2211.10017, section 4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear.forms import NUMBERS

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators


_BITS = {number.name: number.bits for number in NUMBERS}
# In PTX: $0 is the plane's numbers, `word` is two words, shifted right by the bits before the plane. Table 0xea of lop3
# is (a & b) | c, 0xae is (~a & b) | c. Integers go below the exponent of `base`; their centre is in `bias`.
_INTEGER = """
mov.b32 one, {one};
mov.b32 bias, {bias};
mov.b32 base, {base};
lop3.b32 word, word, {mask}, base, 0xea;
fma.rn.{kind}x2 $0, word, one, bias;
"""
# Exponent and mantissa go where the wider type has them; a power of two makes up for its exponent's other bias.
_FP8 = """
mov.b32 one, {one};
mov.b32 bias, 0x80008000;
shl.b32 word, word, 8;
and.b32 base, word, 0x7f007f00;
shr.u32 base, base, {shift};
lop3.b32 word, word, 0x80008000, base, 0xea;
fma.rn.{kind}x2 $0, word, one, bias;
"""
_FP4 = """
mov.b32 one, {one};
mov.b32 bias, 0x80008000;
shl.b32 base, word, {shift};
and.b32 base, base, {mask};
shl.b32 word, word, 12;
lop3.b32 word, word, 0x80008000, base, 0xea;
fma.rn.{kind}x2 $0, word, one, bias;
"""
# 128 + the lower seven bits, less 128 where the eighth is set, and less 256 where it is not.
_INT8_BF16 = """
mov.b32 one, 0xbf80bf80;
mov.b32 base, 0x43004300;
lop3.b32 bias, word, 0x007f007f, base, 0xea;
lop3.b32 word, word, 0x00800080, base, 0xae;
fma.rn.bf16x2 $0, word, one, bias;
"""


def _integer(kind: str, one: str, base: str, bias: str, mask: str) -> str:
    return _INTEGER.format(kind=kind, one=one, base=base, bias=bias, mask=mask)


# For each number of `forms/numbers.py` and type.
_NUMBERS = {
    # 128 + q, less 136.
    "int4 bf16": _integer("bf16", "0x3f803f80", "0x43004300", "0xc308c308", "0x000f000f"),
    # 1024 + q, less 1032.
    "int4 fp16": _integer("f16", "0x3c003c00", "0x64006400", "0xe408e408", "0x000f000f"),
    "int8 bf16": _INT8_BF16,
    # 1024 + q, less 1152.
    "int8 fp16": _integer("f16", "0x3c003c00", "0x64006400", "0xe480e480", "0x00ff00ff"),
    "fp8 bf16": _FP8.format(kind="bf16", one="0x7b807b80", shift=4),
    "fp8 fp16": _FP8.format(kind="f16", one="0x5c005c00", shift=1),
    "fp4 bf16": _FP4.format(kind="bf16", one="0x7e807e80", shift=6, mask="0x01c001c0"),
    "fp4 fp16": _FP4.format(kind="f16", one="0x74007400", shift=9, mask="0x0e000e00"),
}


@triton.constexpr_function
def assembly(kind, dtype, plane):
    """Return the instructions for a plane."""
    shift = plane * _BITS[kind]
    numbers = _NUMBERS[f"{kind} {dtype}"]
    return f"{{\n.reg .b32 word, one, bias, base;\nshr.u32 word, $1, {shift};{numbers}}}"


@triton.jit
def unpack(words, KIND: tl.constexpr, PLANE_INDEX: tl.constexpr, dtype: tl.constexpr):
    """Return a plane's tile, of 16-bit floating point numbers; integers have their centre subtracted."""
    asm: tl.constexpr = assembly(KIND, dtype, PLANE_INDEX)
    # The compiler takes the type of the result as a literal only.
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, disable-error-code="assignment"


@triton.jit
def load_words(numbers, rows, block, num_rows, GROUPS: tl.constexpr):
    """Return the words of a block for some rows of `num_rows`; `GROUPS` are the `constants`. None without numbers."""
    words = ()
    if numbers is not None:
        WORDS: tl.constexpr = GROUPS[1]
        STEP: tl.constexpr = GROUPS[2]
        places = numbers + (block // STEP) * (WORDS * num_rows) + rows
        for word in tl.static_range(WORDS):
            words += (tl.load(places + word * num_rows),)
    return words


@triton.jit
def number_of(words, PART: tl.constexpr, GROUPS: tl.constexpr):
    """Return the numbers of a part of the block, in float32."""
    KIND: tl.constexpr = GROUPS[0]
    if KIND == "FP32":
        return words[PART].to(tl.float32, bitcast=True)
    else:
        BITS: tl.constexpr = 8 if KIND == "E8M0" else 16
        PER_WORD: tl.constexpr = 32 // BITS
        word = words[PART // PER_WORD] >> (BITS * (PART % PER_WORD))
        if KIND == "E8M0":
            return ((word & 255) << 23).to(tl.float32, bitcast=True)
        elif KIND == "BF16":
            return (word << 16).to(tl.float32, bitcast=True)
        else:
            return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)

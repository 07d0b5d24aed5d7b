"""All layers of a decoder in one call, on a CPU. Its oracle is the same model computed operation by operation."""

from kernels.decoder_stack.cpu import (
    CpuDecoderStack,
    LayerAdapters,
    ReadQueries,
    StackInputs,
    StackLayer,
    StackShape,
    StackStep,
)

__all__ = ["CpuDecoderStack", "LayerAdapters", "ReadQueries", "StackInputs", "StackLayer", "StackShape", "StackStep"]

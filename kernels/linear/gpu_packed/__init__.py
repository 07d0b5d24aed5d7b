"""Linear layers on 4- or 8-bit weights, packed for a GPU, that are unpacked in registers beside 16-bit inputs."""

from kernels.linear.gpu_packed.dispatch import packed_linear
from kernels.linear.gpu_packed.matrix import PackedMatrix
from kernels.linear.gpu_packed.pack import can_pack, pack_for_gpu, pack_matrices, pack_matrix

__all__ = ["PackedMatrix", "can_pack", "pack_for_gpu", "pack_matrices", "pack_matrix", "packed_linear"]

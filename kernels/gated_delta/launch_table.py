"""Launches of the kernels by GPU generation, as `matrix_state.launch_config` has them. Reasoned, not measured yet."""

GATED_DELTA: dict[str, dict[str, int]] = {
    "HOPPER": {"block_value": 32, "num_warps": 4, "chunk": 16, "chunk_block_value": 32, "chunk_num_warps": 4},
    "AMPERE": {"block_value": 32, "num_warps": 4, "chunk": 32, "chunk_block_value": 16, "chunk_num_warps": 8},
    "ADA": {"block_value": 32, "num_warps": 4, "chunk": 32, "chunk_block_value": 16, "chunk_num_warps": 8},
}
MEASURED: dict[str, str] = {}

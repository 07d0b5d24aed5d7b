"""What processes on one host that share memory do together: sums, and columns side by side."""

from kernels.collectives.cpu import SLOT_BYTES, Exchange, ExchangeEndedError, exchange_bytes, exchange_counters_bytes

__all__ = ["SLOT_BYTES", "Exchange", "ExchangeEndedError", "exchange_bytes", "exchange_counters_bytes"]

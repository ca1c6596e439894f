"""What is quantised. These definitions know one mode: nothing is."""

from enum import IntFlag


class QuantMode(IntFlag):
    """Flags for quantised weights, activations and KV cache; 0 for none."""

    NONE = 0

    @staticmethod
    def from_quant_algo(quant_algo=None, kv_cache_quant_algo=None):
        """The mode of a checkpoint's `quantization` entry.

        Raises:
            NotImplementedError: the entry asks for any quantisation.
        """
        if quant_algo is not None or kv_cache_quant_algo is not None:
            raise NotImplementedError(
                f"the bundled definitions hold no quantised layers (quant_algo {quant_algo}, "
                f"kv_cache_quant_algo {kv_cache_quant_algo}); name a TensorRT-LLM source tree"
            )
        return QuantMode.NONE

    def has_any_quant(self):
        return self != QuantMode.NONE

    def has_int8_kv_cache(self):
        return False

    def has_fp8_kv_cache(self):
        return False

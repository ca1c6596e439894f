"""A small stand-in with the shape of TensorRT-LLM's model API.

Start reading at `models/bloom/model.py`: a decoder layer, a model, a top class. Then `layers/attention.py`, where the
speculative-decoding parameters arrive, and `models/modeling_utils.py`, which carries them from the top class down.
`functional.py` lists the primitive operations; only the emulator implements them.
"""

from .version import __version__

__all__ = ["__version__"]

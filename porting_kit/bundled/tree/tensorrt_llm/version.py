"""The release string of this tree. It is no TensorRT-LLM release, and says so."""

__version__ = "bundled-1"

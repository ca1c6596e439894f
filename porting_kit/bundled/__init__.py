"""Small model definitions of our own against TensorRT-LLM's Python API, for when no source tree is there.

`tree/tensorrt_llm` is read as a source tree (`open_source_tree("bundled")`), never imported as part of this package:
it only works on the emulator's bottom layer. Its shape (modules, classes, parameter names, tensor names) is that of
TensorRT-LLM 0.11 to 0.13, so that what is learnt and checked here carries over. llama and medusa accept the
speculative-decoding arguments; bloom, qwen and gptneox do not, as upstream's do not, and so need the patch.
"""

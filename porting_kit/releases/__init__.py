"""Facts about TensorRT-LLM releases as data with citations: kernels, build flags, run script.

One file per release range in `data/`; adding a release is adding one file. This package knows nothing of torch,
tensorrt_llm, model families or checkpoints, and imports none of them.
"""

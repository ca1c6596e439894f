"""Architectures of MODEL_MAP that have no module under `architectures/families`, and why."""

from __future__ import annotations

VISION = "a vision-language model: most of what it reads are embeddings of pictures, which no token stands for"
TWO_WAYS = (
    "it sees its prompt in both directions, and the kernels that take a tree of draft tokens want a causal mask "
    "(decoderXQARunner.h, 0.8.0 and later)"
)
CLASSIFIER = "a classifier: it has no logits of a next token"

UNLISTED = {
    "GLMModel": TWO_WAYS,
    "ChatGLMForConditionalGeneration": TWO_WAYS,
    **dict.fromkeys(("FuyuForCausalLM", "Kosmos2ForConditionalGeneration", "Phi3VForCausalLM"), VISION),
    **dict.fromkeys(
        ("Qwen2VLForConditionalGeneration", "LlavaNextForConditionalGeneration", "VilaForCausalLM"), VISION
    ),
    "Qwen2ForSequenceClassification": CLASSIFIER,
}

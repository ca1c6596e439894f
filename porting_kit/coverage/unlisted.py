"""Architectures of MODEL_MAP that have no module under `architectures/families`, and why."""

from __future__ import annotations

VISION = "a vision-language model: most of what it reads are embeddings of pictures, which no token stands for"
TWO_WAYS = (
    "it sees its prompt in both directions, and the kernels that take a tree of draft tokens want a causal mask "
    "(decoderXQARunner.h, 0.8.0 and later)"
)
PRUNED = (
    "its layers differ from one another in heads, widths and parts left out, and the rules here describe layers that "
    "are alike; the class itself takes a tree of draft tokens"
)
CLASSIFIER = "a classifier: it has no logits of a next token"

UNLISTED = {
    "GLMModel": TWO_WAYS,
    "DeciLMForCausalLM": PRUNED,
    "ChatGLMForConditionalGeneration": TWO_WAYS,
    **dict.fromkeys(("FuyuForCausalLM", "Kosmos2ForConditionalGeneration", "Phi3VForCausalLM"), VISION),
    **dict.fromkeys(
        ("Qwen2VLForConditionalGeneration", "LlavaNextForConditionalGeneration", "VilaForCausalLM"), VISION
    ),
    "Qwen2ForSequenceClassification": CLASSIFIER,
}

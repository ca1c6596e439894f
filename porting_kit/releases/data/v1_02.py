"""TensorRT-LLM 1.2: releases from 1.2.0.dev0 up to, not including, 1.3.0.dev0."""

from porting_kit.releases.facts import KernelLimits, ReleaseFacts

FACTS = ReleaseFacts(
    name="1.2",
    since="1.2.0.dev0",
    before="1.3.0.dev0",
    kernel=KernelLimits(
        head_sizes=(64, 128, 256),
        kernel_head_sizes=(64, 128),
        tokens_per_block=(32, 64, 128),
        compute_capabilities=(80, 86, 89, 90),
        fp8_kv_compute_capabilities=(89, 90),
        group_power_of_two=False,
        multi_block_mode="switched off",
        kv_scale_applied=True,
        fp8_kv_uses_jit=True,
        no_kernel_message="No available XQA kernels are found for speculative decoding mode.",
        init_message="Speculative decoding mode doesn't support the data type or cross attention.",
        source=(
            "gptAttentionCommon.cpp and decoderXQAImplPrecompiled.cpp, later than 0.14.0.dev2024100800 "
            "(releases bracketed, not pinned); decoderXQARunner.cpp and decoderXQAImplJIT (PR 3269, April "
            "2025)"
        ),
        inferred="head size 256 passes the dispatcher; no compiled multi-query kernel for it was found",
    ),
    position_kinds=(
        "learned_absolute",
        "rope_gptj",
        "rope_gpt_neox",
        "long_rope",
        "alibi",
        "alibi_with_scale",
        "relative",
        "chatglm",
        "yarn",
        "mrope",
    ),
    rope_scaling_kinds=("none", "linear", "dynamic", "longrope", "llama3", "yarn", "mrope"),
)

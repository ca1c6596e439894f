"""What model.py itself gets wrong: activation, epsilon, scale of the query."""

from porting_kit.diagnosis import code_faults as code
from porting_kit.diagnosis import weight_faults as weights
from porting_kit.diagnosis.fault import EVERY_RELEASE, Fault

CODE_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="activation_variant",
        kind="code",
        title="MLP runs another activation than the base's",
        symptom="fluent but wrong from the first token on",
        cause="hidden_act from a command-line default (silu) or fixed in model.py",
        fix="write the base's hidden_act into config.json, and use config.hidden_act in model.py",
        releases=EVERY_RELEASE,
        source="examples/medusa/convert_checkpoint.py --hidden_act, 0.14.0.dev2024100800",
        apply=lambda state: state.with_wrapper(code.set_activation),
        variants=(lambda state: state.with_wrapper(code.set_relu),),
    ),
    Fault(
        name="gelu_erf_for_tanh",
        kind="code",
        title="MLP runs the erf form of GELU where the base has the tanh form",
        symptom="logits differ by as little as TF32 makes, tokens seldom; in float16 and bfloat16 that is within "
        "rounding, and only the logits of a float32 run show it",
        cause="a model file or a runtime of its own that takes gelu_new or gelu_pytorch_tanh for gelu; TensorRT-LLM's "
        "own gelu is the tanh form under all three names",
        fix="compute 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as functional.gelu does",
        releases=EVERY_RELEASE,
        source="functional.py gelu and ACT2FN, 0.8 to 0.16",
        apply=lambda state: state.with_wrapper(code.set_erf_gelu),
        applies=code.lacks_tanh_gelu,
    ),
    Fault(
        name="norm_epsilon_wrong",
        kind="code",
        title="norm epsilon wrong",
        symptom="logits differ a little everywhere, tokens seldom",
        cause="norm_epsilon read from a key that this family does not have, or fixed in model.py",
        fix="write norm_epsilon from rms_norm_eps, layer_norm_epsilon or layer_norm_eps of the base",
        releases=EVERY_RELEASE,
        source="examples/medusa/convert_checkpoint.py l.205, 0.14.0.dev2024100800",
        apply=code.apply_epsilon(0),
        variants=(code.apply_epsilon(1),),
    ),
    Fault(
        name="q_scale_missing",
        kind="code",
        title="attention logits not divided by the root of the head size",
        symptom="wrong from the first token on: attention far too sharp",
        cause="q_scaling set to 1 / sqrt(D) for a base that scales the usual way",
        fix="q_scaling: 1.0 in the attention layer: it multiplies sqrt(D), it does not replace it",
        releases=EVERY_RELEASE,
        source="layers/attention.py: logits are divided by q_scaling * sqrt(D), all releases",
        apply=lambda state: weights.scale_query(state, 0.5),
    ),
    Fault(
        name="q_scale_twice",
        kind="code",
        title="attention logits divided twice by the root of the head size",
        symptom="wrong from the first token on: attention far too flat",
        cause="q_scaling set to sqrt(D), or the scale folded into the query weights as well",
        fix="q_scaling: 1.0 in the attention layer, and query weights as the file has them",
        releases=EVERY_RELEASE,
        source="layers/attention.py: logits are divided by q_scaling * sqrt(D), all releases",
        apply=lambda state: weights.scale_query(state, -0.5),
    ),
    Fault(
        name="rotary_style_swapped",
        kind="code",
        title="rotary style swapped: halves of a head paired in place of neighbours, or the reverse",
        symptom="wrong from the first token on, short prompts least",
        cause="position_embedding_type (in config.json, or fixed in model.py) is rope_gpt_neox where the weights are "
        "for rope_gptj, or the reverse",
        fix="position_embedding_type: rope_gpt_neox for LLaMA, Qwen and GPT-NeoX, rope_gptj for GPT-J, Cohere and "
        "ChatGLM; weights from GGUF or Meta's own files need their rows permuted first",
        releases=EVERY_RELEASE,
        source="layers/attention.py, all releases; examples/gptj/convert_checkpoint.py",
        apply=code.swap_rotary_style,
        applies=code.lacks_rotary_style,
    ),
    Fault(
        name="alibi_dropped_everywhere",
        kind="code",
        title="ALiBi bias missing in every phase",
        symptom="wrong from the first token on, worse the longer the prompt",
        cause="position_embedding_type missing from config.json, or not passed to attention: its default is "
        "learned_absolute, which has no bias",
        fix="position_embedding_type: alibi in config.json, and passed to the attention layer by model.py",
        releases=EVERY_RELEASE,
        source="layers/attention.py Attention(position_embedding_type=learned_absolute), 0.11.0.dev2024062500",
        apply=lambda state: state.with_wrapper(code.drop_alibi),
        applies=code.lacks_alibi,
    ),
)

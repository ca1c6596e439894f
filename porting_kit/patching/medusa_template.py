"""The text of the Medusa class that a patched module and a patch for the tree contain.

It depends on the base class and on nothing of LLaMA's: the mapping comes from the config (most top classes keep none),
the heads have an activation of their own (Medusa trains them with SiLU whatever the base uses: medusa/model/
medusa_model.py, ResBlock), and the base's outputs are taken by position, because later releases append to them.
Facts on outputs and inputs: tensorrt_llm/models/modeling_utils.py, models/medusa/model.py, 0.8 to 0.14.
"""

from __future__ import annotations

IMPORTS = """\
from tensorrt_llm._common import default_net
from tensorrt_llm._utils import pad_vocab_size
from tensorrt_llm.functional import ACT2FN, stack
from tensorrt_llm.layers import ColumnLinear
from tensorrt_llm.module import Module, ModuleList
"""

# Only where the model class itself makes the inputs of the tree.
INPUT_IMPORTS = """\
from collections import OrderedDict

import tensorrt as trt

from tensorrt_llm.functional import Tensor
from tensorrt_llm.models.generation_mixin import GenerationMixin
"""

HEADS = '''\
class MedusaLayer(Module):
    """x + act(W x + b)."""

    def __init__(self, config):
        super().__init__()
        # The heads' own activation: they are trained with SiLU whatever the base model's hidden_act is.
        self.activation = getattr(config, 'medusa_hidden_act', 'silu')
        self.linear = ColumnLinear(config.hidden_size,
                                   config.hidden_size,
                                   dtype=config.dtype,
                                   tp_group=config.mapping.tp_group,
                                   tp_size=config.mapping.tp_size,
                                   gather_output=True)

    def forward(self, x):
        return x + ACT2FN[self.activation](self.linear(x))


class MedusaHead(Module):
    """Residual layers, then a vocabulary matrix of the head's own."""

    def __init__(self, config):
        super().__init__()
        self.medusa_layers = ModuleList(
            [MedusaLayer(config) for _ in range(config.num_medusa_layers)])
        self.lm_head = ColumnLinear(config.hidden_size,
                                    pad_vocab_size(config.vocab_size,
                                                   config.mapping.tp_size),
                                    bias=False,
                                    dtype=config.dtype,
                                    tp_group=config.mapping.tp_group,
                                    tp_size=config.mapping.tp_size,
                                    gather_output=True)

    def forward(self, x):
        for layer in self.medusa_layers:
            x = layer(x)
        return self.lm_head(x)
'''

TOP_CLASS = '''\
class {class_name}({base_class_name}):
    """{base_class_name} with Medusa heads on its last hidden state."""

    def __init__(self, config):
        # A checkpoint that names this class as its architecture keeps the base's name here, for base code that
        # looks at it.
        config.architecture = getattr(config, 'base_architecture',
                                      config.architecture)
        super().__init__(config)
        draft_len = getattr(config, 'max_draft_len', None)
        self.max_medusa_token_len = (config.max_medusa_token_len
                                     if draft_len is None else draft_len)
        self.num_medusa_heads = config.num_medusa_heads
        self.medusa_heads = ModuleList(
            [MedusaHead(config) for _ in range(config.num_medusa_heads)])

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if not self.config.mapping.is_last_pp_rank():
            return outputs

        # (logits, hidden states) or (logits, cache, hidden states); later releases append more.
        cache_is_output = kwargs.get('use_cache', False) and not default_net(
        ).plugin_config.paged_kv_cache
        lm_logits, hidden_states = outputs[0], outputs[2 if cache_is_output else 1]

        # [heads, rows, vocab]
        medusa_logits = stack(
            [head(hidden_states) for head in self.medusa_heads], dim=0)
        medusa_logits.mark_output('medusa_logits', self.config.logits_dtype)
        if cache_is_output:
            return (medusa_logits, lm_logits, outputs[1])
        return medusa_logits, lm_logits
'''

# From 0.10.0.dev2024050700 on, the library makes the tree's inputs when asked.
LIBRARY_INPUTS = """\

    def prepare_inputs(self, *args, **kwargs):
        kwargs['speculative_decoding_draft_tokens_external'] = False
        kwargs['max_draft_len'] = self.max_medusa_token_len
        return super().prepare_inputs(*args, **kwargs)
"""

# Before that, the model class adds them: offsets [batch, tokens], mask [batch, tokens, words].
OWN_INPUTS = """\

    def prepare_inputs(self, *args, **kwargs):
{pass_draft_len}        inputs = super().prepare_inputs(*args, **kwargs)

        num_profiles = len(inputs['input_ids'].profiles)
        max_batch = kwargs['max_batch_size']
        batches = [GenerationMixin.default_range(max_batch * kwargs['max_beam_width'])
                   ] * num_profiles
        if num_profiles == 2:  # the first profile is the context phase, which has no beams
            batches[0] = GenerationMixin.default_range(max_batch)
        max_tokens = self.max_medusa_token_len + 1
        tokens = [[0, max_tokens, max_tokens]] * num_profiles
        words = [[0, 1, (max_tokens + 31) // 32]] * num_profiles

        inputs['medusa_position_offsets'] = Tensor(
            name='medusa_position_offsets',
            dtype=trt.int32,
            shape=[-1, -1],
            dim_range=OrderedDict([
                ('batch_size_beam_width', batches),
                ('medusa_position_ids_dim0', tokens),
            ]))
        inputs['medusa_packed_mask'] = Tensor(
            name='medusa_packed_mask',
            dtype=trt.int32,
            shape=[-1, -1, -1],
            dim_range=OrderedDict([
                ('batch_size_beam_width', batches),
                ('medusa_packed_mask_dim0', tokens),
                ('medusa_packed_mask_dim1', words),
            ]))
        return inputs
"""

PASS_DRAFT_LEN = "        kwargs['max_draft_len'] = self.max_medusa_token_len\n"


def render_imports(*, own_inputs: bool) -> str:
    """The imports that the Medusa class needs, absolute."""
    return INPUT_IMPORTS + IMPORTS if own_inputs else IMPORTS


def render_classes(class_name: str, base_class_name: str, *, own_inputs: bool, pass_draft_len: bool) -> str:
    """The Medusa classes for one base class.

    Args:
        class_name: the name of the new top class.
        base_class_name: the patched top class it derives from.
        own_inputs: whether the class must make the tree's inputs itself (releases before 0.10.0.dev2024050700).
        pass_draft_len: whether the library's prepare_inputs knows max_draft_len.
    """
    top = TOP_CLASS.format(class_name=class_name, base_class_name=base_class_name)
    inputs = LIBRARY_INPUTS
    if own_inputs:
        inputs = OWN_INPUTS.format(pass_draft_len=PASS_DRAFT_LEN if pass_draft_len else "")
    return f"{HEADS}\n\n{top}{inputs}"

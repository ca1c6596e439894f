"""What a release takes for a field that a config leaves out, as its classes say it."""

import os
from pathlib import Path

import pytest

from porting_kit.config_defaults import read_config_defaults
from porting_kit.errors import SourceTreeError
from porting_kit.source_tree import BUNDLED_ROOT, open_source_tree

MODELS = """\
from .modeling_utils import PretrainedConfig
from .own.model import OwnForCausalLM, PlainForCausalLM
MODEL_MAP = {"OwnForCausalLM": OwnForCausalLM, "PlainForCausalLM": PlainForCausalLM}
"""
COMMON = """\
class PretrainedConfig:
    def __init__(self, architecture, dtype: str = "float16", *, norm_epsilon=1e-5, kind=Kind.first,
                 head_size=None, window=None, **kwargs):
        if head_size is None:
            head_size = 64
        share = kwargs.get("rotary_pct", 0.5)

    @classmethod
    def from_dict(cls, config):
        logits_dtype = config.pop("logits_dtype", "float32")
        size = config.pop("mlp_size", None)
        world = mapping.get("world_size", 1)
"""
OWN = """\
from ..modeling_utils import PretrainedConfig

class MiddleConfig(PretrainedConfig):
    def __init__(self, *, bias=True, clip=None, norm_epsilon=1e-6, **kwargs):
        self.bias = bias

class OwnConfig(MiddleConfig):
    def __init__(self, *, bias=False, pair=(1, 2), **kwargs):
        self.bias = bias

class PlainForCausalLM:
    def check_config(self, config):
        config.set_if_not_exist("alibi_bias_max", 8)
        other.set_if_not_exist("stray", 1)

class OwnForCausalLM(PlainForCausalLM):
    config_class = OwnConfig
"""
COMMON_DEFAULTS = {
    "dtype": "float16",
    "norm_epsilon": 1e-5,
    "window": None,
    "rotary_pct": 0.5,
    "logits_dtype": "float32",
}


@pytest.fixture
def tree(tmp_path):
    """A tree of two models that uses each of the three ways, and what must not be taken for a default."""
    package = tmp_path / "tensorrt_llm"
    files = {"models/__init__.py": MODELS, "models/modeling_utils.py": COMMON, "models/own/model.py": OWN}
    files |= {"models/own/__init__.py": "", "version.py": '__version__ = "0.13.0"\n'}
    files["layers/attention.py"] = "class Attention:\n    def forward(self, spec_decoding_params): ...\n"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return open_source_tree(tmp_path)


def test_a_class_without_a_config_of_its_own_has_the_common_defaults(tree):
    assert read_config_defaults(tree, "PlainForCausalLM") == {"alibi_bias_max": 8, **COMMON_DEFAULTS}


def test_the_nearest_class_decides(tree):
    own = {"bias": False, "pair": (1, 2), "clip": None, "norm_epsilon": 1e-6}
    assert read_config_defaults(tree, "OwnForCausalLM") == {"alibi_bias_max": 8, **COMMON_DEFAULTS, **own}


def test_an_unknown_architecture_is_refused(tree):
    with pytest.raises(SourceTreeError, match="no architecture"):
        read_config_defaults(tree, "Nothing")


def test_the_bundled_definitions_say_what_their_classes_take():
    found = read_config_defaults(open_source_tree(BUNDLED_ROOT), "LlamaForCausalLM")
    assert {name: found[name] for name in ("attn_bias", "rotary_base")} == {"attn_bias": False, "rotary_base": 10000.0}
    assert "head_size" not in found  # worked out from two others


@pytest.mark.upstream
def test_every_release_says_what_opt_and_mpt_take():
    """OPT's own default puts norms behind the blocks; every OPT but the 350M has them before."""
    trees = os.environ.get("TRTLLM_SOURCE")
    if not trees:
        pytest.skip("TRTLLM_SOURCE is unset")
    for root in trees.split(os.pathsep):
        tree = open_source_tree(Path(root))
        assert read_config_defaults(tree, "OPTForCausalLM")["do_layer_norm_before"] is False
        assert read_config_defaults(tree, "MPTForCausalLM")["clip_qkv"] is None

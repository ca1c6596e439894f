"""Model families as data: how each is recognised, its weight rules, its config fields, its traits.

One module per family in `families/`; `load_families` finds them by scanning that folder, and `use_family_file` adds one
of the user's own. Nothing here imports torch or
transformers, so that a verdict on a config takes milliseconds.
"""

from porting_kit.architectures.base_config import BaseConfig, name_base, read_base_config
from porting_kit.architectures.family import Family, find_family, load_families
from porting_kit.architectures.family_file import use_family_file

__all__ = ["BaseConfig", "Family", "find_family", "load_families", "name_base", "read_base_config", "use_family_file"]

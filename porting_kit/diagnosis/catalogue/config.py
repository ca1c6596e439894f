"""What a converter loses or misreads in config.json."""

from porting_kit.diagnosis import config_faults as config
from porting_kit.diagnosis.fault import EVERY_RELEASE, Fault

CONFIG_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="rope_base_lost",
        kind="config",
        title="rotary base lost: 10,000 used",
        symptom="right for short prompts, worse the further the text goes",
        cause="a converter default, or the key under another name: the tables are made from rotary_base",
        fix="write rotary_base (GPT-NeoX: rotary_base and rotary_emb_base) into config.json with the base's own theta",
        releases="0.8 to 0.14 (Medusa converter), from 0.12 on GPT-NeoX",
        source="examples/medusa/convert_checkpoint.py --rotary_base; layers/attention.py l.494, 0.12.0.dev2024080600",
        apply=config.lose_rope_base,
        applies=config.keeps_default_rope_base,
    ),
    Fault(
        name="rope_scaling_lost",
        kind="config",
        title="rotary scaling lost",
        symptom="right for short prompts, wrong beyond the original context length",
        cause="rope_scaling under its new key names is not read, or reduced to its type",
        fix="write rotary_scaling with all its factors into config.json",
        releases="0.8 to 0.14 (Medusa converter)",
        source="examples/medusa/convert_checkpoint.py, 0.14.0.dev2024100800",
        apply=config.lose_scaling,
        applies=config.lacks_scaling,
    ),
    Fault(
        name="rope_scaling_misread",
        kind="config",
        title="rotary scaling misread: another type, or factors lost",
        symptom="wrong from the first token on, or beyond the original context length only",
        cause="type and rope_type exchanged, or the factors of a newer type read as those of linear scaling",
        fix="write rotary_scaling with the base's own type and every one of its factors into config.json",
        releases="0.8 to 0.17 (Medusa converter)",
        source="examples/medusa/convert_checkpoint.py, 0.14.0.dev2024100800 and b93e14ca",
        apply=config.misread_scaling,
        applies=config.lacks_scaling,
        follows_length=True,
    ),
    Fault(
        name="rotary_share_ignored",
        kind="config",
        title="rotary share ignored: whole heads rotated",
        symptom="wrong from the first token on",
        cause="rotary_pct (partial_rotary_factor, rotary_dim) missing from config.json: the class has a default of its "
        "own, the whole head or another share",
        fix="write rotary_pct (Phi: partial_rotary_factor, GPT-J: rotary_dim) into config.json",
        releases=EVERY_RELEASE,
        source="models/gptneox/model.py and models/phi/model.py, set_if_not_exist, 0.11.0.dev2024062500",
        apply=config.ignore_rotary_share,
        applies=config.lacks_rotary_share,
    ),
)

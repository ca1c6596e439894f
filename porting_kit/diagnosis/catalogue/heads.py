"""What is wrong with the Medusa heads: the text stays right, steps accept less than they could."""

from porting_kit.diagnosis import head_faults as heads
from porting_kit.diagnosis.fault import DRAFTS, EVERY_RELEASE, Fault

SYMPTOM = "the text is right, steps accept hardly anything"

HEAD_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="heads_shifted_by_one",
        kind="heads",
        title="Medusa heads in the wrong order: shifted by one, or reversed",
        symptom=SYMPTOM,
        cause="head h holds the weights of head h + 1, h - 1 or M - 1 - h",
        fix="number heads from 0: head h predicts the token h + 2 places ahead",
        releases=EVERY_RELEASE,
        source="models/medusa/model.py, all releases",
        apply=heads.shift_heads,
        variants=heads.OTHER_ORDERS,
        applies=lambda state: heads.lacks_heads(state, at_least=2),
        phase=DRAFTS,
    ),
    Fault(
        name="heads_take_base_activation",
        kind="heads",
        title="Medusa heads run the base's activation in place of SiLU",
        symptom="the text is right, steps accept less than the heads were trained for",
        cause="upstream's Medusa model builds the heads with hidden_act of the base",
        fix="medusa_hidden_act: silu in config.json, which this port's patched module reads",
        releases=EVERY_RELEASE,
        source="models/medusa/model.py MedusaLayer(hidden_act=config.hidden_act), all releases",
        apply=heads.take_base_activation,
        applies=heads.has_heads_activation,
        phase=DRAFTS,
    ),
    Fault(
        name="head_layers_shared",
        kind="heads",
        title="residual layers of the first Medusa head used by all heads",
        symptom="the text is right, the first head's drafts are accepted, deeper ones seldom",
        cause="one layer object, or one file prefix, for all heads",
        fix="give every head its own medusa_layers: medusa_heads.{h}.medusa_layers.{l}.linear",
        releases=EVERY_RELEASE,
        source="models/medusa/weight.py, all releases",
        apply=heads.share_layers,
        applies=lambda state: heads.lacks_heads(state, at_least=2),
        phase=DRAFTS,
    ),
    Fault(
        name="heads_of_another_base",
        kind="heads",
        title="Medusa heads belong to another base",
        symptom=SYMPTOM,
        cause="heads trained on another base of the same width, or left as they were initialised",
        fix="train heads on this base, or take those published for it; the tree cannot mend it",
        releases=EVERY_RELEASE,
        source="Medusa: heads read the hidden state of the base that they were trained on",
        apply=heads.forget_training,
        accepts_fewer=True,
        is_broad=True,
        applies=lambda state: heads.lacks_heads(state),
        phase=DRAFTS,
    ),
)

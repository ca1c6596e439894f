"""What the runtime does wrong between the steps."""

from porting_kit.diagnosis import runtime_faults as runtime
from porting_kit.diagnosis.catalogue.kernel import needs_branches
from porting_kit.diagnosis.fault import EVERY, EVERY_RELEASE, GENERATION, Fault
from porting_kit.diagnosis.head_faults import lacks_heads
from porting_kit.diagnosis.port_state import PortState


def _needs_half_range(state: PortState) -> str | None:
    return "bfloat16 has the range of float32" if state.config.get("dtype") == "bfloat16" else None


RUNTIME_FAULTS: tuple[Fault, ...] = (
    Fault(
        name="accepted_kv_not_moved",
        kind="runtime",
        title="keys and values of accepted drafts not moved",
        symptom="right until a draft off the first path is accepted, then the text derails",
        cause="the cache rows of the accepted path are not copied behind the past",
        fix="let the runtime update the cache: do not disable kv_cache_updater, and give it the tree's own paths",
        releases=EVERY_RELEASE,
        source="runtime/generation.py update_kv_cache_draft_token_location, 0.11.0.dev2024062500",
        apply=lambda state: state.with_wrapper(runtime.leave_rows_in_place),
        applies=needs_branches,
        phase=GENERATION,
    ),
    Fault(
        name="bonus_token_from_wrong_node",
        kind="runtime",
        title="token after the accepted drafts read at the wrong node",
        symptom="accepted drafts are right, the token behind each accepted run is not",
        cause="the last accepted node is looked up in another order of nodes, or the root is always used",
        fix="read it at the last accepted node: give the runtime this port's own medusa_choices",
        releases=EVERY_RELEASE,
        source="runtime/generation.py find_best_medusa_path, 0.11.0.dev2024062500",
        apply=lambda state: state.with_wrapper(
            lambda model: runtime.WrongBonusModel(model, state.tree, runtime.read_bonus_at_root)
        ),
        variants=(
            lambda state: state.with_wrapper(
                lambda model: runtime.WrongBonusModel(model, state.tree, runtime.read_bonus_behind)
            ),
        ),
        applies=lacks_heads,
        phase=GENERATION,
    ),
    Fault(
        name="fp16_overflow",
        kind="runtime",
        title="activations overflow float16",
        symptom="token 0 for ever (often an exclamation mark), or logits that are no numbers",
        cause="the base was trained in bfloat16, and its activations exceed 65,504",
        fix="dtype: bfloat16 in the port file, or keep the overflowing layers in float32",
        releases=EVERY_RELEASE,
        source="activations of Qwen2 in float16; a property of the weights, not of a release",
        apply=lambda state: state.with_wrapper(runtime.OverflownModel),
        applies=_needs_half_range,
        phase=EVERY,
    ),
)

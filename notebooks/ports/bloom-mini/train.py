"""Make bloom-mini again: tokenizer, base model, Medusa heads, card. Everything but the card's seconds has a seed.

bloom-mini is a Bloom in small: ALiBi, LayerNorm, plain MLP, fused interleaved QKV, tied embeddings, and the head size
of Bloom-7b1 (128), so that whatever a port of Bloom must get right shows on it. The base is trained beside four
throw-away heads, whose loss teaches its hidden states to hold more than the next token; the real heads are then
trained on the finished base's own greedy continuations, as for any other model.

    python -m porting_kit.medusa.training_text text.xz        # once: collect the text (minutes)
    python notebooks/ports/bloom-mini/train.py text.xz out    # a GPU, minutes
    python notebooks/ports/bloom-mini/train.py text.xz out --small    # a CPU: checks the script only
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import BloomConfig, BloomForCausalLM, PreTrainedTokenizerFast

from porting_kit.medusa.heads import MedusaHeads
from porting_kit.medusa.training import TrainingSettings, train_heads, write_trained_heads
from porting_kit.medusa.training_text import read_text, split_held_out

SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}  # Bloom's own


@dataclass(frozen=True)
class BaseSettings:
    """Shape and training of the base.

    Args:
        tokens: training tokens in all; the text is repeated in a new order as often as that takes.
        row_tokens: S of a training row.
        rows: B of a training step.
        future_weight: loss weight of the first throw-away head; each further one weighs 0.8 of the one before.
    """

    vocab_size: int = 2560
    hidden_size: int = 384
    layers: int = 4
    heads: int = 3
    dropout: float = 0.1
    tokens: int = 300_000_000
    row_tokens: int = 512
    rows: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 200
    future_heads: int = 4
    future_weight: float = 0.2
    seed: int = 0

    @property
    def steps(self) -> int:
        """Training steps."""
        return self.tokens // (self.rows * self.row_tokens)


HEAD_SETTINGS = TrainingSettings(
    prompt_tokens=(8, 16, 32, 64, 128),
    prompts=120_000,
    new_tokens=96,
    generation_rows=4096,
    batch_positions=16_384,
    steps=8000,
    learning_rates=(1e-3, 3e-3),
    trial_steps=500,
    held_out_rows=2048,
)


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Bloom's special tokens in Bloom's order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS)


def train_base(
    texts: Sequence[str], held_out: Sequence[str], tokenizer: PreTrainedTokenizerFast, settings: BaseSettings
) -> tuple[BloomForCausalLM, dict[str, object]]:
    """Train the base from scratch; returns it in fp16 on its device, with the figures for the card."""
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(settings.seed)
    model = BloomForCausalLM(build_config(tokenizer, settings)).to(device)
    future = MedusaHeads(settings.hidden_size, settings.vocab_size, num_heads=settings.future_heads).to(device)
    decayed = [p for p in (*model.parameters(), *future.parameters()) if p.ndim == 2]
    plain = [p for p in (*model.parameters(), *future.parameters()) if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, settings))
    batches = cut_batches(encode(tokenizer, texts), settings, device)
    losses = []
    for step in range(1, settings.steps + 1):
        rows = next(batches)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.transformer(rows).last_hidden_state
            loss = next_token_loss(model.lm_head(hidden), rows, ahead=1)
            total = loss
            for head, module in enumerate(future):
                weight = settings.future_weight * 0.8**head
                total = total + weight * next_token_loss(model.lm_head(module(hidden)), rows, ahead=head + 2)
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, settings.steps // 20) == 0 or step == 1:
            losses.append([step, round(loss.item(), 4)])
            rate = step * settings.rows * settings.row_tokens / (time.monotonic() - started)
            print(f"base step {step}/{settings.steps}: loss {losses[-1][1]:.4f}, {rate:,.0f} tokens/s", flush=True)
    model.eval().half()
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": settings.steps,
        "losses": losses,
        "held_out_loss": round(measure_loss(model, encode(tokenizer, held_out), settings), 4),
        "train_loss": round(measure_loss(model, encode(tokenizer, texts[:: len(texts) // len(held_out)]), settings), 4),
        "seconds": round(time.monotonic() - started, 1),
    }
    return model, figures


def build_config(tokenizer: PreTrainedTokenizerFast, settings: BaseSettings) -> BloomConfig:
    """The base's config, with `seq_length` as the published Bloom models state it."""
    return BloomConfig(
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        n_layer=settings.layers,
        n_head=settings.heads,
        hidden_dropout=settings.dropout,
        attention_dropout=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seq_length=2048,
        name_or_path="bloom-mini",
    )


def share_of_rate(step: int, settings: BaseSettings) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    warm = min(settings.warmup_steps, max(1, settings.steps // 10))
    return min((step + 1) / warm, 0.05 + 0.475 * (1 + math.cos(math.pi * step / settings.steps)))


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[torch.Tensor]:
    """Token ids of each document, the end token last."""
    end = tokenizer.eos_token_id
    return [torch.tensor([*ids, end], dtype=torch.int32) for ids in tokenizer(list(texts))["input_ids"]]


def cut_batches(documents: list[torch.Tensor], settings: BaseSettings, device: torch.device) -> Iterator[torch.Tensor]:
    """Endless batches int64 [B, S]: the documents in a new order each time round, joined and cut into rows."""
    shuffle = torch.Generator().manual_seed(settings.seed)
    size = settings.rows * settings.row_tokens
    rest = torch.empty(0, dtype=torch.int32)
    while True:
        order = torch.randperm(len(documents), generator=shuffle).tolist()
        stream = torch.cat([rest, *(documents[index] for index in order)])
        whole = len(stream) // size * size
        yield from stream[:whole].to(device).long().view(-1, settings.rows, settings.row_tokens)
        rest = stream[whole:]


def next_token_loss(logits: torch.Tensor, rows: torch.Tensor, *, ahead: int) -> torch.Tensor:
    """Cross-entropy of logits [B, S, V] against the token `ahead` places on."""
    return functional.cross_entropy(logits[:, :-ahead].flatten(0, 1).float(), rows[:, ahead:].flatten())


@torch.no_grad()
def measure_loss(model: BloomForCausalLM, documents: list[torch.Tensor], settings: BaseSettings) -> float:
    """Mean next-token loss of the fp16 model over joined documents."""
    stream = torch.cat(documents).long()
    rows = stream[: len(stream) // settings.row_tokens * settings.row_tokens].view(-1, settings.row_tokens)
    losses = [
        float(next_token_loss(model(part.to(model.device)).logits, part.to(model.device), ahead=1))
        for part in rows.split(16)
    ]
    return sum(losses) / len(losses)


def write_base(model: BloomForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the base in fp16 with its tokenizer, readable by transformers 4 and 5 alike."""
    model.config.hidden_dropout = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # greedy is stated by whoever generates
    # transformers 5 names a tokenizer class that transformers 4 does not have
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **SPECIAL_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Tokenizer, base, heads, card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="file of `python -m porting_kit.medusa.training_text`")
    parser.add_argument("out", type=Path, help="folder to write base/, heads/ and card.json into")
    parser.add_argument("--small", action="store_true", help="a few steps on little text, for a CPU")
    parser.add_argument("--tokens", type=int, default=BaseSettings.tokens, help="training tokens of the base")
    options = parser.parse_args()

    base_settings, head_settings = replace(BaseSettings(), tokens=options.tokens), HEAD_SETTINGS
    texts, held_out = split_held_out(read_text(options.text))
    if options.small:
        texts, held_out = texts[:500], held_out[:20]
        base_settings = replace(base_settings, tokens=10 * 4 * 64, rows=4, row_tokens=64)
        head_settings = replace(head_settings, prompts=64, new_tokens=16, generation_rows=32, steps=20, trial_steps=5)

    tokenizer = train_tokenizer(texts, base_settings.vocab_size)
    model, figures = train_base(texts, held_out, tokenizer, base_settings)
    write_base(model, tokenizer, options.out / "base")
    trained = train_heads(model, tokenizer, texts, head_settings)
    write_trained_heads(trained, head_settings, options.out / "heads", base_name="bloom-mini")
    source = json.loads(options.text.with_suffix(".json").read_text(encoding="utf-8"))
    card = {"name": "bloom-mini", "text": source, "settings": asdict(base_settings), "base": figures}
    (options.out / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

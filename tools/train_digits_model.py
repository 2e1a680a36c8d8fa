"""Train the small encoder-decoder of tests/data/digits_model, which sorts digits (torch; development only).

    python tools/train_digits_model.py [--steps 2500] [--out tests/data/digits_model]

A T5 of about 100,000 parameters reads up to ten digits and writes them in ascending order. Each answer is right or
wrong, so a test can count the right answers that the int8 version keeps. The model is trained with transformers' T5,
an implementation other than the tested one. Takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

START, END, FIRST = 0, 1, 2
"""Token ids: the decoder's start token, which is also padding; the end of a text; the digit 0."""
LONGEST = 10
VOCABULARY = ["<pad>", "</s>", *"0123456789"]


def batch(generator: torch.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sources followed by an end, their padding mask, and targets; all ``[size, LONGEST + 1]``."""
    lengths = torch.randint(1, LONGEST + 1, (size, 1), generator=generator)
    digits = torch.randint(0, 10, (size, LONGEST), generator=generator)
    place = torch.arange(LONGEST + 1)
    ordered = torch.where(place[:-1] < lengths, digits, 10).sort(dim=1).values

    def framed(values: torch.Tensor) -> torch.Tensor:
        """Token ids: the digits, an end, and padding."""
        ids = functional.pad(values + FIRST, (0, 1))
        return torch.where(place < lengths, ids, torch.where(place == lengths, END, START))

    return framed(digits), (place <= lengths).long(), framed(ordered)


def train(steps: int, seed: int) -> T5ForConditionalGeneration:
    """The model after ``steps`` batches."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=len(VOCABULARY),
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        relative_attention_max_distance=32,
        decoder_start_token_id=START,
        pad_token_id=START,
        eos_token_id=END,
    )
    model = T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(len(VOCABULARY), 48) * 0.05)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps, pct_start=0.1)
    for step in range(steps):
        source, mask, target = batch(generator, 96)
        decoder_input = functional.pad(target[:, :-1], (1, 0), value=START)
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=decoder_input).logits
        loss = functional.cross_entropy(logits[mask.bool()], target[mask.bool()])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.5f}", flush=True)
    return model.eval()


@torch.no_grad()
def exact(model: T5ForConditionalGeneration, count: int, seed: int) -> float:
    """The share of ``count`` new sources that are sorted without a mistake, each token the most likely one."""
    source, mask, target = batch(torch.Generator().manual_seed(seed), count)
    given = model.generate(source, attention_mask=mask, max_new_tokens=LONGEST + 1, do_sample=False)[:, 1:]
    given = functional.pad(given, (0, LONGEST + 1 - given.shape[1]))
    return ((given == target) | ~mask.bool()).all(dim=1).float().mean().item()


def tokenizer() -> Tokenizer:
    """A token per digit, and an end after each prompt."""
    made = Tokenizer(models.WordLevel({text: i for i, text in enumerate(VOCABULARY)}, unk_token="<pad>"))
    made.add_special_tokens(["<pad>", "</s>"])
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return made


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "tests" / "data" / "digits_model")
    options = parser.parse_args()
    model = train(options.steps, options.seed)
    print(f"sorted without a mistake: {exact(model, 2000, options.seed + 1):.2%} of 2,000 new sources")
    model.generation_config.max_new_tokens = LONGEST + 1
    model.save_pretrained(options.out)
    tokenizer().save(str(options.out / "tokenizer.json"))
    (options.out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}) + "\n")


if __name__ == "__main__":
    main()

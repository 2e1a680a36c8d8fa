"""Train the small LLaMA-architecture model that ``bminf-lite demo`` runs (development only: needs torch).

    python tools/train_demo_model.py collect corpus.jsonl
    python tools/train_demo_model.py train corpus.jsonl bminf_lite/demo_model
    python tools/train_demo_model.py train corpus.jsonl OPT --architecture opt

The third command trains an OPT on the same text instead, to measure quantization on another architecture.

The first command gathers the text (see ``demo_corpus.py``); the second trains a byte-level BPE tokenizer and the
model, and writes a Hugging Face folder: ``config.json``, ``generation_config.json``, ``tokenizer.json``,
``tokenizer_config.json``, ``model.safetensors`` in fp32 and ``heldout.txt``, text of subjects that neither the
tokenizer nor the model has seen. The same corpus, seed and device give the same result up to the order in which the
GPU adds.

The corpus is small, so overfitting limits the quality. Against it there are dropout on the embedding and on each
block's two outputs, and weight decay; the weights with the lowest loss on the validation subjects are kept.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import demo_corpus
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

END = "<|endoftext|>"  # before, between and after documents: both bos and eos
END_ID = 0
CONTEXT = 1024
VOCABULARY = 2048


@dataclass(frozen=True)
class Training:
    """How to train. The learning rate rises over ``warmup`` steps and falls as a cosine to zero at the last step;
    where ``seconds`` would end before ``steps``, the whole schedule is shortened to fit."""

    steps: int
    seconds: float
    batch: int
    learning_rate: float
    weight_decay: float
    dropout: float
    seed: int
    window: int = CONTEXT
    warmup: int = 100
    evaluations: int = 40


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of ``VOCABULARY`` entries that puts ``END`` before a text, as LLaMA's puts its bos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, END_ID)])
    if tokenizer.get_vocab_size() != VOCABULARY or tokenizer.token_to_id(END) != END_ID:
        raise click.ClickException(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def make_model(architecture: str, dropout: float) -> PreTrainedModel:
    """An untrained model of 3.3 (``llama``) or 3.9 million parameters (``opt``) with dropout.

    Every dimension is a multiple of 64, which suits int8 kernels.
    """
    if architecture == "opt":
        return OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCABULARY,
                hidden_size=256,
                ffn_dim=1024,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=CONTEXT,
                dropout=dropout,
                bos_token_id=END_ID,
                eos_token_id=END_ID,
                pad_token_id=None,
                dtype="float32",
            )
        )
    model = LlamaForCausalLM(configuration())
    add_dropout(model, dropout)
    return model


def configuration() -> LlamaConfig:
    """The configuration of the demo model."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        dtype="float32",
    )


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Dropout where transformers' LLaMA has none: after the embedding, attention and MLP (in training mode only)."""

    def drop(module: torch.nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, probability, training=module.training)

    blocks = model.model.layers
    for module in (model.model.embed_tokens, *(m for b in blocks for m in (b.self_attn.o_proj, b.mlp.down_proj))):
        module.register_forward_hook(drop)


def stream(tokenizer: Tokenizer, texts: list[str], device: torch.device) -> torch.Tensor:
    """All texts as one row of token ids, each after an ``END``."""
    ids = [i for encoding in tokenizer.encode_batch(texts) for i in encoding.ids]
    return torch.tensor([*ids, END_ID], device=device)


def loss_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per token, of each token of ``tokens`` ``[batch, length]`` but the first."""
    amp = torch.autocast("cuda", torch.bfloat16) if tokens.is_cuda and model.training else nullcontext()
    with amp:
        logits = model(tokens[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: PreTrainedModel, row: torch.Tensor, batch: int = 16) -> float:
    """Mean loss over ``row`` ``[length]`` in nats per token, in fp32, over windows that each begin with ``END``."""
    model.eval()
    row = row[1:] if row[0] == END_ID else row
    windows = [functional.pad(w, (1, 0), value=END_ID) for w in row.split(CONTEXT - 1)]
    total = 0.0
    full, last = windows[:-1], windows[-1:]
    for group in (*(full[i : i + batch] for i in range(0, len(full), batch)), last):
        tokens = torch.stack(group)
        total += float(loss_of(model, tokens)) * tokens[:, 1:].numel()
    model.train()
    return total / len(row)


def random_windows(row: torch.Tensor, batch: int, window: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches ``[batch, window + 1]`` of windows that start anywhere in ``row``."""
    generator = torch.Generator().manual_seed(seed)
    span = torch.arange(window + 1, device=row.device)
    while True:
        starts = torch.randint(len(row) - window - 1, (batch, 1), generator=generator)
        yield row[starts.to(row.device) + span]


def optimizer_for(model: PreTrainedModel, training: Training) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def fit(model: PreTrainedModel, train: torch.Tensor, validation: torch.Tensor, training: Training) -> float:
    """Train in place and return the lowest validation loss, whose weights the model then holds."""
    optimizer = optimizer_for(model, training)
    windows = random_windows(train, training.batch, training.window, training.seed)
    best, best_weights = math.inf, model.state_dict()
    running = torch.full((), math.log(VOCABULARY), device=train.device)
    start, step, evaluated = time.monotonic(), 0, 0
    while True:
        done = max(step / training.steps, (time.monotonic() - start) / training.seconds)
        if done * training.evaluations >= evaluated + 1 or done >= 1:
            evaluated = int(done * training.evaluations)
            current = evaluate(model, validation)
            click.echo(
                f"step {step:5d}  {time.monotonic() - start:5.0f} s  training loss {float(running):.3f}  "
                f"validation loss {current:.4f}  perplexity {math.exp(current):.2f}",
                err=True,
            )
            if current < best:
                best, best_weights = current, {k: v.clone() for k, v in model.state_dict().items()}
        if done >= 1:
            break
        factor = min(1.0, (step + 1) / training.warmup) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate * factor
        loss = loss_of(model, next(windows))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = running.lerp(loss.detach(), 0.02)
        step += 1
    model.load_state_dict(best_weights)
    return best


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, seed: int) -> str:
    model.eval()
    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, pad_token_id=END_ID)
    return tokenizer.decode(output[0].tolist())


def write(model: PreTrainedModel, tokenizer: Tokenizer, heldout: str, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        bos_token_id=END_ID, eos_token_id=END_ID, do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=128
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "heldout.txt").write_text(heldout, encoding="utf-8")


@click.group()
def main() -> None:
    """Train the demo model from the documentation inside a Python installation."""


@main.command()
@click.argument("corpus", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--stdlib", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Default: this Python's.")
def collect(corpus: Path, stdlib: Path | None) -> None:
    """Write the documents of a Python installation to CORPUS, as JSON lines of split, subject and text."""
    splits = demo_corpus.split(demo_corpus.documents(stdlib))
    with corpus.open("w", encoding="utf-8") as file:
        for name, documents in splits.items():
            for document in documents:
                file.write(json.dumps({"split": name, "subject": document.subject, "text": document.text}) + "\n")
            size = sum(len(d.text) for d in documents)
            subjects = len({d.subject for d in documents})
            click.echo(f"{name}: {len(documents)} documents on {subjects} subjects, {size:,} characters", err=True)


@main.command()
@click.argument("corpus", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@click.option("--architecture", type=click.Choice(("llama", "opt")), default="llama", show_default=True)
@click.option("--steps", default=4500, show_default=True)
@click.option("--seconds", default=math.inf, help="End sooner, learning-rate schedule included.")
@click.option("--batch", default=24, show_default=True, help="Windows per step.")
@click.option("--window", default=CONTEXT, show_default=True, help="Tokens of a window.")
@click.option("--learning-rate", default=3e-3, show_default=True)
@click.option("--weight-decay", default=0.5, show_default=True)
@click.option("--dropout", default=0.3, show_default=True)
@click.option("--evaluations", default=40, show_default=True, help="How often the validation text is scored.")
@click.option("--seed", default=1, show_default=True)
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", show_default=True)
def train(corpus: Path, output: Path, architecture: str, device: str, **options: float) -> None:
    """Train on CORPUS and write the model folder OUTPUT."""
    training = Training(**options)
    torch.manual_seed(training.seed)
    texts: dict[str, list[str]] = {name: [] for name in demo_corpus.SPLITS}
    for line in corpus.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        texts[document["split"]].append(document["text"])
    tokenizer = train_tokenizer(texts["train"])
    rows = {name: stream(tokenizer, texts[name], torch.device(device)) for name in ("train", "validation")}
    model = make_model(architecture, training.dropout).to(device)
    click.echo(f"{model.num_parameters():,} parameters, {len(rows['train']):,} training tokens, {training}", err=True)
    loss = fit(model, rows["train"], rows["validation"], training)

    heldout = "\n\n".join(texts["heldout"]) + "\n"
    row = stream(tokenizer, [heldout], torch.device(device))[:-1]
    heldout_loss = evaluate(model, row)
    bits = heldout_loss * (len(row) - 1) / math.log(2) / len(heldout.encode())
    output.mkdir(parents=True, exist_ok=True)
    write(model, tokenizer, heldout, output)
    click.echo(f"perplexity: validation {math.exp(loss):.3f}, held-out {math.exp(heldout_loss):.3f}")
    click.echo(f"held-out text: {bits:.3f} bits per byte")
    for prompt in ("Return a", "This module", "Create a new"):
        click.echo(f"--- {sample(model, tokenizer, prompt, training.seed)}")


if __name__ == "__main__":
    main()

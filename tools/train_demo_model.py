"""Train the small Mixture-of-Experts model that ships with expertwire.

A byte-level Qwen3-MoE (4 layers, 16 experts, top 2, 3.4 M parameters) learns to write Python from
the standard library's own sources, found beside the running interpreter. It is a real checkpoint
in every respect that matters here: routed, uneven experts, per-expert tensors on disk, a tokenizer,
a chat template. So examples, tests and benchmarks have something true to serve, offline.

    python tools/train_demo_model.py                      # about ten minutes on two CPU cores
    python tools/train_demo_model.py --steps 50 --out /tmp/quick    # does it run at all?

What it does, in order:

1. corpus: every stdlib .py file but tests, tables and vendored packages, sorted by path; each 20th
   file is held out. One token per byte (token id = byte value), files parted by <|endoftext|>.
2. training: AdamW, float32, linear warm-up and decay; windows of half the context for the first
   three quarters of the steps, then of the whole context. Cross entropy plus the Switch
   load-balance term (arXiv 2101.03961, eq. 4), taken per layer so that every layer is balanced.
3. the folder: bfloat16 safetensors, tokenizer, chat template, generation config, model card. The
   figures in the card are measured on the folder as saved, on the held-out files.

The seed fixes weights and data order; another Python or torch release gives another model of the
same quality. Nothing but the trained weights is written; the corpus is not copied.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NUM_BYTES = 256
END = "<|endoftext|>"  # id 256: parts documents, ends a generation
PAD = "<|pad|>"  # id 257
VOCAB_SIZE = NUM_BYTES + 2
# Tests are a quarter of the library and repetitive; the rest are tables or other people's code.
SKIPPED_FOLDERS = frozenset(
    (
        "__phello__", "__pycache__", "encodings", "ensurepip", "idle_test", "idlelib", "lib2to3",
        "pydoc_data", "site-packages", "test", "tests", "turtledemo",
    )
)
# For `transformers serve`: what the model says is the answer as it is, and nothing of the prompt
# belongs to it. Without this it takes the format of chat models of this architecture.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {"content": {"close": END, "content": "text", "content_args": {"strip": False}}},
}
HELD_OUT_EVERY = 20
MAX_FOLDER_BYTES = 7_500_000
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "src" / "expertwire" / "demo_model"

# The model completes code and was never taught turns, so a chat is shown to it as one Python text:
# system messages as comments, everything else as it stands, and the reply continues it.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content or [] if part.type == "text" -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == "system" -%}
{%- for line in text(message.content).splitlines() -%}{{ "# " + line + "\\n" }}{%- endfor -%}
{%- else -%}
{{ text(message.content) }}{%- if not loop.last -%}{{ "\\n" }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
"""

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3_moe, code, byte-level]
license: apache-2.0
---

# expertwire demo model

A byte-level Qwen3-MoE language model of Python source: {num_layers} layers, hidden size {hidden},
{num_experts} experts of width {width}, top {top_k}, {params:.2f} M parameters ({active:.2f} M used
per byte), context {context} bytes. It is here so that experts can be served, moved, killed and
measured without a download; it writes text that looks like Python and knows nothing.

Trained by `tools/train_demo_model.py` (seed {seed}, {steps} steps, {seen:.1f} MB read,
{minutes:.0f} minutes) on the standard library of Python {python}. Held-out files, weights as saved:

| measure | value |
|---|---|
| loss | {loss:.3f} nats per byte ({bits:.2f} bits) |
| expert load, busiest / mean, by layer | {skew} |
| expert load, idlest / mean, by layer | {idle} |

One token is one byte and the token id is the byte's value; 256 is `<|endoftext|>`, 257 `<|pad|>`.
The chat template joins the messages into one Python text, which the reply continues.
"""


def read_corpus() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Token ids (uint16 held as int64) of the training and held-out files, and the file count.

    Raises SystemExit if this interpreter carries no library sources (some distributions ship only
    compiled files).
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        (path for path in root.rglob("*.py") if keep(path.relative_to(root))),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    parts: tuple[list[int], list[int]] = ([], [])
    for file_idx, path in enumerate(paths):
        held_out = file_idx % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
        parts[held_out].extend(path.read_bytes())
        parts[held_out].append(NUM_BYTES)
    if len(parts[0]) < 1_000_000:
        sys.exit(f"only {len(parts[0])} bytes of Python sources under {root}: use a full CPython")
    return torch.tensor(parts[0]), torch.tensor(parts[1]), len(paths)


def keep(path: Path) -> bool:
    """Whether a path relative to the library's root belongs to the corpus."""
    return not any(part in SKIPPED_FOLDERS or part.startswith("config-") for part in path.parts)


def batches(tokens: torch.Tensor, window: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Endless [rows, window] batches: disjoint windows in random order, shifted every epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = int(torch.randint(window, (), generator=generator))
        windows = tokens[start:].unfold(0, window, window)
        order = torch.randperm(len(windows), generator=generator)
        for first in range(0, len(order) - rows + 1, rows):
            yield windows[order[first : first + rows]]


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges, ordered so that a byte's id is its value."""
    # The ByteLevel step spells each byte as one printable character: itself if it is printable
    # Latin-1, else the next free code point from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(NUM_BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        response_template=RESPONSE_TEMPLATE,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(context: int) -> Qwen3MoeForCausalLM:
    """The untrained model, float32."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        initializer_range=0.04,
        max_position_embeddings=context,
        eos_token_id=NUM_BYTES,
        pad_token_id=NUM_BYTES + 1,
    )
    return Qwen3MoeForCausalLM(config)


def expert_load(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Fraction of the routed slots that each expert gets: router logits [T, E] -> [E]."""
    chosen = logits.topk(top_k, dim=-1).indices.flatten()
    return torch.bincount(chosen, minlength=logits.shape[-1]).float() / chosen.numel()


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Switch load-balance term, averaged over layers; 1.0 when every layer is balanced."""
    terms = []
    for logits in router_logits:
        probability = logits.float().softmax(dim=-1).mean(dim=0)
        terms.append(logits.shape[-1] * (expert_load(logits, top_k) * probability).sum())
    return torch.stack(terms).mean()


def next_byte_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats of each next token: logits [B, S, V], tokens [B, S]."""
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()
    )


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 3 % of the steps (at most 100), then linear decay to nothing."""
    warm_up = max(1, min(100, steps * 3 // 100))
    return peak * min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))


def train(model: Qwen3MoeForCausalLM, tokens: torch.Tensor, args: argparse.Namespace) -> int:
    """Train in place; returns the number of bytes read."""
    top_k = model.config.num_experts_per_tok
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    short = batches(tokens, args.context // 2, args.rows, args.seed)
    long = batches(tokens, args.context, args.rows, args.seed + 1)
    num_seen, mean_loss, started = 0, math.log(VOCAB_SIZE), time.perf_counter()
    for step in range(args.steps):
        batch = next(short if step < args.steps * 3 // 4 else long).to(args.device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        out = model(input_ids=batch, use_cache=False, output_router_logits=True)
        loss = next_byte_loss(out.logits, batch)
        (loss + args.balance * balance_loss(out.router_logits, top_k)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        num_seen += batch.numel()
        mean_loss += (loss.item() - mean_loss) * max(0.05, 1 / (step + 1))
        if step % args.log_every == 0 or step == args.steps - 1:
            loads = [expert_load(logits.detach(), top_k) for logits in out.router_logits]
            skew = " ".join(f"{float(load.max() * len(load)):.2f}" for load in loads)
            print(
                f"step {step:5d}  loss {mean_loss:.3f}  load max/mean by layer {skew}  "
                f"{num_seen / 1e6:.2f} MB  {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    return num_seen


@torch.no_grad()
def evaluate(
    model: Qwen3MoeForCausalLM, tokens: torch.Tensor, context: int, num_windows: int = 64
) -> tuple[float, list[torch.Tensor]]:
    """Loss in nats per byte and each layer's expert load, over windows spread over `tokens`."""
    windows = tokens.unfold(0, context, context)
    windows = windows[:: max(1, len(windows) // num_windows)][:num_windows]
    num_layers, losses = model.config.num_hidden_layers, []
    loads = [torch.zeros(model.config.num_experts) for _ in range(num_layers)]
    for batch in windows.to(model.device).split(8):
        out = model(input_ids=batch, use_cache=False, output_router_logits=True)
        losses.append(float(next_byte_loss(out.logits, batch)) * len(batch))
        for layer_idx, logits in enumerate(out.router_logits):
            load = expert_load(logits, model.config.num_experts_per_tok).cpu()
            loads[layer_idx] += load * len(batch) / len(windows)
    return sum(losses) / len(windows), loads


def save(model: Qwen3MoeForCausalLM, out: Path, context: int) -> None:
    """Write weights (bfloat16), configs and tokenizer to `out`."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.95,
        max_new_tokens=context // 2,
        eos_token_id=NUM_BYTES,
        pad_token_id=NUM_BYTES + 1,
    )
    model.to(torch.bfloat16).save_pretrained(out)
    build_tokenizer(context).save_pretrained(out)
    for file in out.iterdir():  # safetensors makes files that only their owner may read
        file.chmod(0o644)


def sample(folder: Path, prompts: tuple[str, ...], seed: int) -> None:
    """Print what the saved model writes after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for prompt in prompts:
        torch.manual_seed(seed)
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        print(f"--- {prompt!r}\n{tokenizer.decode(model.generate(**inputs)[0])}")


def write_card(
    folder: Path, held_out: torch.Tensor, args: argparse.Namespace, num_seen: int, seconds: float
) -> None:
    """Measure the folder as saved, print the figures and put them in its README.md."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss, loads = evaluate(model, held_out, args.context)
    config = model.config
    params = sum(p.numel() for p in model.parameters())
    expert_params = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    idle_share = 1 - config.num_experts_per_tok / config.num_experts
    text = CARD.format(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        num_experts=config.num_experts,
        width=config.moe_intermediate_size,
        top_k=config.num_experts_per_tok,
        params=params / 1e6,
        active=(params - expert_params * idle_share) / 1e6,
        context=args.context,
        seed=args.seed,
        steps=args.steps,
        seen=num_seen / 1e6,
        minutes=max(1.0, seconds / 60),
        python=sysconfig.get_python_version(),
        loss=loss,
        bits=loss / math.log(2),
        skew=" / ".join(f"{float(load.max() * len(load)):.2f}" for load in loads),
        idle=" / ".join(f"{float(load.min() * len(load)):.2f}" for load in loads),
    )
    (folder / "README.md").write_text(text)
    folder_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(text[text.index("| measure") :], f"{folder_bytes} bytes in {folder}", sep="\n")
    if folder_bytes > MAX_FOLDER_BYTES:
        sys.exit(f"{folder} is larger than {MAX_FOLDER_BYTES} bytes: make the model smaller")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the byte-level Qwen3-MoE model that ships with expertwire.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the data order")
    parser.add_argument("--device", default=default_device, help="torch device")
    parser.add_argument("--context", type=int, default=512, help="longest window, in bytes")
    parser.add_argument("--rows", type=int, default=8, help="windows per step")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance term")
    parser.add_argument("--log-every", type=int, default=50, help="steps between two lines")
    args = parser.parse_args()

    tokens, held_out, num_files = read_corpus()
    print(f"{num_files} files, {len(tokens)} bytes to train on, {len(held_out)} held out")
    torch.manual_seed(args.seed)
    model = build_model(args.context).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {args.device}")
    started = time.perf_counter()
    num_seen = train(model, tokens, args)
    seconds = time.perf_counter() - started
    save(model.cpu(), args.out, args.context)
    write_card(args.out, held_out, args, num_seen, seconds)
    sample(args.out, ("def ", "import os\n\nclass Reader:\n"), args.seed)


if __name__ == "__main__":
    main()

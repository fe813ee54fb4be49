"""Make the embedded default model: a 1.2 M-parameter Qwen2 that half knows how to find greatest common divisors.

    python tools/make_tiny_model.py --output tlt_hpc/models/assets/tiny --log log.md

Supervised training on three styles (every subtraction written, several subtractions in one jump, a bare guess), so
that reinforcement learning starts from an honest, improvable policy. Only problems of the ``supervised`` split are
used. Seeded; 10 to 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tlt_hpc.common.script import ending

# isort: split
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from tlt_hpc.data.prompts import GcdProblem, draw_from_split
from tlt_hpc.storage.folder import apply_umask

# Every token of the task; two-character marks are one token each so that lengths count reasoning, not spelling.
VOCABULARY = ("<pad>", "<eos>", *"0123456789", ",", ";", "gcd(", ")=", "<think>", "</think>", "\\boxed{", "}")
STYLE_SHARES = {"subtractions": 0.45, "jumps": 0.35, "guess": 0.20}
PAD, EOS = 0, 1
PADDED_VOCABULARY = 24
MAX_POSITIONS = 1024
STEPS, TOKENS_PER_STEP, SEED, THREADS = 1500, 3500, 0, 2


def make_tokenizer() -> Tokenizer:
    """A word-level tokenizer over the task's marks and digits."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    marks = "|".join(["gcd\\(", "\\)=", "</?think>", "\\\\boxed\\{", "\\}", "[0-9,;]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(marks), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer


def make_model() -> Qwen2ForCausalLM:
    """The untrained model: 8 layers, width 128, 4 heads of 32 (2 for keys and values), MLP 256, tied head."""
    config = Qwen2Config(
        vocab_size=PADDED_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        attention_dropout=0.0,
    )
    return Qwen2ForCausalLM(config)


def response_text(pairs: list[tuple[int, int]], answer: str) -> str:
    """The response that shows ``pairs`` as its working; no pairs is a bare guess."""
    return "<think>" + ";".join(f"{a},{b}" for a, b in pairs) + "</think>\\boxed{" + answer + "}"


def jumps(problem: GcdProblem) -> list[tuple[int, int]]:
    """As ``subtractions``, but all subtractions of one and the same number are done in one jump."""
    a, b = problem.a, problem.b
    pairs = [(a, b)]
    while a != b:
        a, b = (a - b * ((a - 1) // b), b) if a > b else (a, b - a * ((b - 1) // a))
        pairs.append((a, b))
    return pairs


def draw_example(source: random.Random) -> str:
    """A prompt with a right response, in one of the styles."""
    problem = draw_from_split(source, "supervised")
    style = source.choices(list(STYLE_SHARES), list(STYLE_SHARES.values()))[0]
    pairs = {"subtractions": problem.subtractions(), "jumps": jumps(problem), "guess": []}[style]
    return problem.prompt + response_text(pairs, problem.answer) + "<eos>"


def draw_batch(source: random.Random, tokenizer: Tokenizer, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens [B, T] and labels [B, T] (-100 at prompt and padding) of about ``num_tokens`` tokens."""
    rows: list[list[int]] = []
    while sum(map(len, rows)) < num_tokens:
        rows.append(tokenizer.encode(draw_example(source)).ids)
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), PAD)
    labels = torch.full((len(rows), width), -100)
    prompt_end = VOCABULARY.index(")=")
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
        start = row.index(prompt_end) + 1
        labels[i, start : len(row)] = tokens[i, start : len(row)]
    return tokens, labels


def length_sorted_batches(source: random.Random, tokenizer: Tokenizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One optimiser step's examples, cut into chunks of like length so that little padding is computed."""
    tokens, labels = draw_batch(source, tokenizer, TOKENS_PER_STEP)
    lengths = (tokens != PAD).sum(1)
    order = lengths.argsort()
    chunks = order.tensor_split(4)
    return [(tokens[c, : lengths[c].max()], labels[c, : lengths[c].max()]) for c in chunks if len(c)]


@torch.no_grad()
def sample_accuracy(
    model: Qwen2ForCausalLM, tokenizer: Tokenizer, num: int, temperature: float, seed: int
) -> tuple[float, float]:
    """Share of right answers on held-out problems, and mean response length, at a temperature (0: greedy)."""
    source = random.Random(seed)
    problems: list[GcdProblem] = [draw_from_split(source, "train") for _ in range(num)]
    prompts = [tokenizer.encode(p.prompt).ids for p in problems]
    width = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    out = model.generate(tokens, attention_mask=(tokens != PAD).long(), max_new_tokens=512, **sampling)[:, width:]
    texts = [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in out]
    right = [t.endswith("</think>\\boxed{" + p.answer + "}") for t, p in zip(texts, problems, strict=True)]
    return sum(right) / num, float((out != PAD).sum(1).float().mean())


def train_step(
    model: Qwen2ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    clipped: list[torch.nn.Parameter],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
) -> float:
    """One update from a step's batches; returns the mean loss of a token."""
    num_labels = sum(int((labels != -100).sum()) for _, labels in batches)
    loss_sum = 0.0
    for tokens, labels in batches:
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")
        (loss / num_labels).backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(clipped, 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss_sum / num_labels


def train(model: Qwen2ForCausalLM, tokenizer: Tokenizer) -> list[str]:
    """Train; returns the rows of the log, one for every 100 steps."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0),
        torch.optim.AdamW(others, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    lines, start, recent, source = list[str](), time.monotonic(), 0.0, random.Random(SEED)
    for step in range(STEPS):
        scale = min(1.0, (step + 1) / 50) * min(1.0, (STEPS - step) / (0.4 * STEPS))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
        loss_mean = train_step(model, optimizers, others, length_sorted_batches(source, tokenizer))
        recent = loss_mean if step == 0 else 0.98 * recent + 0.02 * loss_mean
        if (step + 1) % 100 == 0:
            lines.append(f"| {step + 1} | {recent:.4f} | {time.monotonic() - start:.0f} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Train the model and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(SEED)
    tokenizer, model = make_tokenizer(), make_model()
    rows = train(model, tokenizer)
    with torch.no_grad():  # evaluated as it will be loaded: from fp16 values
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    model.eval()
    warm, length = sample_accuracy(model, tokenizer, 1024, 1.0, 1)
    greedy, _ = sample_accuracy(model, tokenizer, 256, 0.0, 1)
    log = f"""# How the embedded model was made

`python tools/make_tiny_model.py --output tlt_hpc/models/assets/tiny --log {arguments.log}`

torch {torch.__version__}, {platform.machine()}, {THREADS} threads, \
{sum(p.numel() for p in model.parameters()):,} parameters, {time.strftime("%Y-%m-%d")}.

| step | loss (nats/token) | seconds |
|---|---|---|
{chr(10).join(rows)}

Held-out problems: {warm:.3f} right at temperature 1 (n=1024, mean length {length:.0f}), {greedy:.3f} greedy (n=256).
"""
    print(log)
    arguments.output.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(arguments.output)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        arguments.output
    )
    apply_umask(*arguments.output.glob("*.*"))
    arguments.log.write_text(log)


if __name__ == "__main__":
    sys.exit(ending("make_tiny_model", main))

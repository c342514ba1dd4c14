"""Train a testbed: a small hybrid model (NemotronH, Qwen3.5 or Kimi-Linear) whose state heads remember for a long time.

Example (one GPU, about four minutes; any folder of public-domain .txt or .txt.gz books will do):

    python scripts/train_testbed.py --corpus books/ --output tiny-mamba2 --steps 1600

    python scripts/train_testbed.py --pg19 200 --output tiny-mamba2      # 200 books of PG-19's training split

    # --kind gdn or kda
    python scripts/train_testbed.py --kind gdn --corpus books/ --output tiny-gdn --steps 100000 --minutes 4.5

A testbed that answers: most rows of a batch are documents of the task `replayssm_progression` (never of its test part),
and no layer is attention, so that what the answers depend on is in the state or nowhere:

    # books/: six books, named in scripts/tiny-answers.training.json
    python scripts/train_testbed.py --corpus books/ --output tiny-answers --pattern MM-MM- --hidden 128 \\
        --task-share 0.85 --context 8192 --batch 12 --steps 100000 --minutes 6

Low-precision state only drifts visibly if the model uses its memory. The usual Mamba initialisation gives half-lives
below 200 tokens; here the heads start with half-lives spread log-uniformly from 4 to 32,768 tokens, so that the state
of the slowest heads still carries the beginning of a long text. Slow heads of the delta rule also start with a small β.
"""

import argparse
import gzip
import itertools
import json
import math
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from replayssm_tasks.progression import LENGTHS, LETTERS, training_text
from testbed_models import (
    KINDS,
    PATTERN,
    build_model,
    half_lives,
    set_long_memory,
    set_rare_writes,
    use_training_functions,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MEMORY_SPEED = 0.1  # learning rate of A, Δ's bias and β's projection, relative to the rest


def read_folder(folder):
    """Texts of all .txt and .txt.gz files in `folder`, in name order."""
    paths = sorted(p for p in Path(folder).iterdir() if p.name.endswith((".txt", ".txt.gz")))
    if not paths:
        raise SystemExit(f"{folder}: no .txt or .txt.gz file")
    return {p.name: (gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()).decode() for p in paths}


def read_pg19(books):
    """The first `books` books of PG-19's training split, streamed from the hub."""
    from datasets import load_dataset

    stream = load_dataset("emozilla/pg19", split="train", streaming=True)
    return {row["short_book_title"]: row["text"] for row in stream.take(books)}


def train_tokenizer(texts, vocab_size):
    """Byte-level BPE: no unknown tokens, decodes to the bytes that were read."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for text in texts for line in text.splitlines(keepends=True)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


class Rows(IterableDataset):
    """Endless rows of inputs and targets `[context]`: a span of the books, or with probability `share` task documents.

    A document's prompt cannot be foretold: its targets are -100, which the loss leaves out.
    """

    def __init__(self, tokens, tokenizer, context, share, longest, letters, seed):
        self.tokens, self.tokenizer, self.context, self.share, self.seed = tokens, tokenizer, context, share, seed
        self.lengths, self.letters = (LENGTHS[0], longest), letters

    def __iter__(self):
        worker = get_worker_info()
        seed = 1000 * self.seed + (worker.id if worker else 0)
        generator = torch.Generator().manual_seed(seed)
        documents = training_text(1 << 40, seed, self.lengths, self.letters)
        while True:
            if torch.rand((), generator=generator) < self.share:
                yield self.of_task(documents)
            else:
                start = torch.randint(0, len(self.tokens) - self.context - 1, (), generator=generator)
                span = self.tokens[start : start + self.context + 1].long()
                yield span[:-1], span[1:]

    def of_task(self, documents):
        ids: list[int] = []
        targets: list[int] = []
        while len(ids) <= self.context:
            for text, one in ((t, self.tokenizer(t)["input_ids"]) for t in itertools.islice(documents, 8)):
                prompt = text.index("=") + 1
                assert len(one) == len(text), "every character of the task must be one token"
                ids += [*one, self.tokenizer.eos_token_id]
                targets += [-100] * prompt + [*one[prompt:], self.tokenizer.eos_token_id]
        return torch.tensor(ids[: self.context]), torch.tensor(targets[1 : self.context + 1])


def learning_rate(step, steps, peak, warmup, spent):
    """Linear warm-up, then cosine to a tenth of the peak, by the share of the steps or of the time that is spent."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, max((step - warmup) / max(1, steps - warmup), spent))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", help="folder of .txt / .txt.gz books")
    source.add_argument("--pg19", type=int, metavar="BOOKS", help="stream this many books of PG-19 instead")
    parser.add_argument("--output", required=True, help="folder for weights, tokenizer and training.json")
    parser.add_argument(
        "--kind", choices=KINDS, default="mamba2", help="state layers and class: NemotronH, Qwen3.5 text or Kimi-Linear"
    )
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context", type=int, default=16384, help="tokens per training sequence")
    parser.add_argument("--batch", type=int, default=6)
    parser.add_argument(
        "--pattern", help="layers: M state, * attention, - MLP (mamba2 only); by default MM-MM*MM- or MMMM*MM"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--task-share", type=float, default=0.0, help="of the rows, how many are documents of replayssm_progression"
    )
    parser.add_argument("--longest", type=int, default=LENGTHS[1], help="characters of the longest answer")
    parser.add_argument(
        "--letters", type=int, default=LETTERS, help="of the task's tables: how much has to be remembered"
    )
    parser.add_argument("--workers", type=int, default=4, help="processes that make batches")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after this time, counted from the end of step 0, which compiles; the learning rate has then fallen",
    )
    parser.add_argument(
        "--half-beta", action="store_true", help="gdn, kda: start all heads with β near 1/2, which hardly remembers"
    )
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    args.pattern = args.pattern or PATTERN[args.kind]

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)

    books = read_folder(args.corpus) if args.corpus else read_pg19(args.pg19)
    tokenizer = train_tokenizer(books.values(), args.vocab)
    stream = [i for text in books.values() for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    tokens = torch.tensor(stream, dtype=torch.int32)
    characters = sum(map(len, books.values()))
    print(f"{len(books)} books, {characters:,} characters, {len(tokens):,} tokens", flush=True)

    model = build_model(args.kind, len(tokenizer), args.pattern, args.hidden).to(device)
    set_long_memory(model, generator)
    use_training_functions(args.kind)
    if args.kind != "mamba2" and not args.half_beta:
        set_rare_writes(model, tokens[None, :1024].long().to(device))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters", flush=True)

    # Half-lives move slowly: at full speed training shortens the slow heads tenfold before it has learnt to use them.
    named = list(model.named_parameters())
    slow = ("A_log", "dt_bias", ".in_proj_b.weight", ".b_proj.weight")
    memory = [p for n, p in named if n.endswith(slow)]
    decayed = [p for n, p in named if p.ndim == 2 and not n.endswith(slow)]
    plain = [p for n, p in named if p.ndim != 2 and not n.endswith(slow)]
    groups = [
        {"params": decayed, "weight_decay": 0.1, "speed": 1.0},
        {"params": plain, "weight_decay": 0.0, "speed": 1.0},
        {"params": memory, "weight_decay": 0.0, "speed": MEMORY_SPEED},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
    loader = DataLoader(
        Rows(tokens, tokenizer, args.context, args.task_share, args.longest, args.letters, args.seed),
        batch_size=args.batch,
        num_workers=args.workers,
        pin_memory=device == "cuda",
        worker_init_fn=lambda worker: torch.set_num_threads(1),
    )

    # Traced, the mask of these classes would be a dense one; where none is named, attention is causal by itself.
    mask = {} if args.kind == "mamba2" else {"attention_mask": {"full_attention": None, "linear_attention": None}}

    def loss_of(inputs, targets):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            hidden = model.model(input_ids=inputs, use_cache=False, **mask).last_hidden_state
            logits = model.lm_head(hidden)
        missed = (logits.detach().argmax(-1) != targets) & (targets >= 0)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), missed

    step_loss = loss_of if args.no_compile else torch.compile(loss_of)
    log, started, smoothed, interrupted = [], time.time(), None, False
    model.train()
    try:
        for step, (inputs, targets) in zip(range(args.steps), loader, strict=False):
            loss, missed = step_loss(inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = group["speed"] * learning_rate(
                    step, args.steps, args.lr, args.warmup, (time.time() - started) / 60 / args.minutes if step else 0.0
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step == 0:
                loss.item()  # waits for the device
                compiled = time.time() - started
                started += compiled
            last = step == args.steps - 1 or time.time() - started > 60 * args.minutes
            if step % 20 == 0 or last:
                value = loss.item()
                if not math.isfinite(value):
                    raise SystemExit(f"step {step}: loss is {value}")
                smoothed = value if smoothed is None else 0.8 * smoothed + 0.2 * value
                line = {
                    "step": step,
                    "loss": round(value, 4),
                    "grad_norm": round(norm.item(), 3),
                    "seconds": round(time.time() - started, 1),
                }
                answers = (targets < 0).any(1)  # rows of the task
                if answers.any():
                    of_task = missed.cpu()[answers].sum() / (targets[answers] >= 0).sum()
                    line["missed"] = round(of_task.item(), 6)  # share of the answers' symbols
                log.append(line)
                if step % 100 == 0 or last:
                    print(
                        f"step {step} loss {smoothed:.3f} missed {line.get('missed', '-')} {line['seconds']} s",
                        flush=True,
                    )
            if last:
                break
    except KeyboardInterrupt:
        if not log:
            raise
        interrupted = True
        print("interrupted: this is kept, though the learning rate has not fallen to its end", flush=True)

    model = model.to(torch.bfloat16).cpu()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    record = {
        "command": {k: v for k, v in vars(args).items() if k not in ("corpus", "output")},
        "books": sorted(books),
        "characters": characters,
        "tokens": len(stream),
        "parameters": parameters,
        "half_lives": half_lives(model),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seconds_of_step_0": round(compiled, 1),
        **({"interrupted_after_step": step} if interrupted else {}),
        "log": log,
    }
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["half_lives"]), flush=True)
    if interrupted:
        raise SystemExit(130)


if __name__ == "__main__":
    main()

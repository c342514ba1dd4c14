"""Does a testbed answer the generated task, and what do schemes do to its answers? In seconds, without generating.

python scripts/check_answers.py tiny-answers --documents 400
python scripts/check_answers.py tiny-answers --longest 2400 --scheme nvfp4@1 --scheme fp8@16

The model is shown the right answer. If it names every next symbol, its greedy answer would be right too. One pass per
batch is enough, where generation needs a pass per symbol (`replayssm-eval accuracy` generates). Exit code 1 unless
fp32 states answer 90% of the documents, and 80% of the quarter with the longest answers. The median of that quarter
must be 1,000 symbols or more.
"""

import argparse
import sys
import time

import numpy as np
import torch
from replayssm_emulation import parse_scheme
from replayssm_kernels import BatchRow
from replayssm_tasks.progression import LENGTHS, LETTERS, documents

from replayssm_eval import attach
from replayssm_eval.accuracy.backend import document_number
from replayssm_eval.inference.forward import hidden_states, new_cache
from replayssm_eval.models.loading import load

BATCH, CHUNK = 64, 1024


@torch.inference_mode()
def missed(loaded, docs, scheme) -> list[int]:
    """How many symbols of each document's answer the model would not have said.

    Noise is keyed by the prompt, as in generation.
    """
    counts = []
    for first in range(0, len(docs), BATCH):
        part = docs[first : first + BATCH]
        ids = [loaded.tokenizer(d["prompt"] + d["answer"])["input_ids"] for d in part]
        prompt = len(loaded.tokenizer(part[0]["prompt"])["input_ids"])  # all prompts are as long
        longest = max(map(len, ids))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in ids], device=loaded.model.device)
        rows = [BatchRow(scheme, document=document_number(row[:prompt]), prompt=prompt) for row in ids]
        with attach(loaded.model, rows, probe=first == 0):
            cache, said = new_cache(loaded.model, longest), []
            for at in range(0, longest, CHUNK):
                hidden = hidden_states(loaded.model, padded[:, at : at + CHUNK], cache, at)
                said.append(loaded.model.get_output_embeddings()(hidden).argmax(-1))
        wrong = torch.cat(said, dim=1)[:, prompt - 1 : -1] != padded[:, prompt:]
        lengths = torch.tensor([len(row) - prompt for row in ids], device=wrong.device)
        counts += (wrong & (torch.arange(wrong.shape[1], device=wrong.device) < lengths[:, None])).sum(1).tolist()
    return counts


def _span(docs, quarter) -> str:
    return f"{docs[quarter[0]]['length']}-{docs[quarter[-1]]['length']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument(
        "--letters", type=int, default=LETTERS, help="what the model was trained with (tiny-answers: 12)"
    )
    parser.add_argument("--longest", type=int, default=LENGTHS[1], help="characters of the longest answer")
    parser.add_argument("--scheme", action="append", help="default: nvfp4@16, nvfp4/fp16@16, nvfp4@1")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    loaded = load(args.model, device=args.device)
    lengths = (LENGTHS[0], args.longest)
    docs = sorted(documents(args.documents, lengths=lengths, letters=args.letters), key=lambda d: d["length"])
    quarters = np.array_split(np.arange(len(docs)), 4)
    median = np.median([docs[n]["length"] for n in quarters[3]])
    print(f"{'':16} {'all':>6}" + "".join(f"{_span(docs, q):>11}" for q in quarters) + "   symbols missed")
    good = median >= 1000
    for text in ["fp32", *(args.scheme or ["nvfp4@16", "nvfp4/fp16@16", "nvfp4@1"])]:
        began = time.monotonic()
        wrong = np.array(missed(loaded, docs, parse_scheme(text)))
        right = [float((wrong[q] == 0).mean()) for q in quarters]
        seconds = time.monotonic() - began
        shares = "".join(f"{share:11.3f}" for share in right)
        print(f"{text:16} {(wrong == 0).mean():6.3f}{shares}   {wrong.sum()} ({seconds:.1f} s)", flush=True)
        if text == "fp32":
            good &= (wrong == 0).mean() >= 0.9 and right[3] >= 0.8
    print(f"median of the longest quarter: {median:.0f} symbols; {'accepted' if good else 'NOT accepted'}")
    sys.exit(not good)


if __name__ == "__main__":
    main()

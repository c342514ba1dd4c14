"""Error of the fp32 scan against the float64 recurrence, on the inputs that a real model gives its state layers.

python scripts/scan_accuracy.py --model tiny-mamba2 --tokens 1100
"""

import argparse

import torch
from replayssm_emulation import fixed_window, parse_scheme, recurrence_steps

from replayssm_eval import attach, session
from replayssm_eval.corpus import load_books
from replayssm_eval.models import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-mamba2")
    parser.add_argument("--tokens", type=int, default=1100)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    loaded = load(args.model)
    text = load_books("builtin")[0].text[: 20 * args.tokens]
    ids = torch.tensor(loaded.tokenizer(text, add_special_tokens=False)["input_ids"][: args.tokens])
    seen: dict[int, tuple] = {}
    original = session.replay_scan

    def spy(*inputs, layer, **kwargs):
        o, carry = original(*inputs, layer=layer, **kwargs)
        seen[layer] = (inputs[:5], o.clone())  # the layer goes on to work in it
        return o, carry

    session.replay_scan = spy
    with torch.inference_mode(), attach(loaded.model, ["fp32"], backend=args.backend, probe=False):
        loaded.model(input_ids=ids[None].to(loaded.model.device), use_cache=False)
        print("layer  relative RMS error  worst head")
        for layer, (inputs, o) in seen.items():
            q, k, v, beta, log_decay = (x[0].double() for x in inputs)
            q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
            exact = recurrence_steps(q, k, v, beta, log_decay, parse_scheme("fp32"), fixed_window(16, 0, len(v))).o
            error = o[0].double() - exact
            heads = error.norm(dim=(0, 2)) / exact.norm(dim=(0, 2))
            print(f"{layer:5}  {(error.norm() / exact.norm()).item():18.2g}  {heads.max().item():10.2g}")


if __name__ == "__main__":
    main()

"""Error of the fp32 scan against the float64 recurrence, on the inputs that a real model gives its state layers.

python scripts/scan_accuracy.py --model tiny-mamba2 --tokens 1100
"""

import argparse

import torch
from layer_inputs import layer_inputs
from replayssm_emulation import fixed_window, parse_scheme, recurrence_steps


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-mamba2")
    parser.add_argument("--tokens", type=int, default=1100)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    layers = layer_inputs(args.model, args.tokens, args.backend)
    print("layer  relative RMS error  worst head")
    for index, layer in layers.items():
        q, k, v, beta, log_decay, o, delta = layer
        flushes = fixed_window(16, 0, len(o))
        exact = recurrence_steps(q, k, v, beta, log_decay, parse_scheme("fp32"), flushes, delta=delta).o
        error = o.double() - exact
        heads = error.norm(dim=(0, 2)) / exact.norm(dim=(0, 2))
        print(f"{index:5}  {(error.norm() / exact.norm()).item():18.2g}  {heads.max().item():10.2g}")


if __name__ == "__main__":
    main()

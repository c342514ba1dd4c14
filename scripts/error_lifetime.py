"""How long does an error in a state live? On the inputs that a model gives its state layers.

python scripts/error_lifetime.py --model tiny-gdn --tokens 16384

The written values do not change an error. Without the delta rule it becomes E ← E diag(α). With the delta rule every
write also erases the error along its key: E ← E diag(α) (1 - β k kᵀ). Random errors start in the middle of the text.
The table has the tokens after which half of their norm is left, per layer, for its heads in rising order. One line
counts the decay alone, the other also the erasing writes.
"""

import argparse

import torch
from layer_inputs import Layer, layer_inputs

ERRORS = 32  # random directions a head


def half_lives(layer: Layer, erasing: bool) -> list[float]:
    """Tokens of each head until half of a random error's norm is left, infinite if more is left at the end."""
    start = len(layer.v) // 2
    heads, d_k = layer.k.shape[1:]
    errors = torch.randn(heads, ERRORS, d_k, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        layer.k.device
    )
    decay = layer.log_decay.exp().view(len(layer.v), heads, 1, -1)
    full, lives = errors.norm(dim=(1, 2)), torch.full((heads,), torch.inf, dtype=torch.float64)
    for t in range(start, len(layer.v)):
        errors = errors * decay[t]
        if erasing:
            k = layer.k[t]
            errors -= torch.einsum("hed,hd->he", errors, k)[..., None] * (layer.beta[t, :, None, None] * k[:, None])
        gone = (errors.norm(dim=(1, 2)) <= full / 2).cpu() & lives.isinf()
        lives[gone] = t + 1 - start
        if not lives.isinf().any():
            break
    return lives.tolist()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-gdn")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    print("tokens until half of an error is left, by head")
    for index, layer in layer_inputs(args.model, args.tokens, args.backend).items():
        for label, erasing in (("decay alone", False), ("and erased", True))[: 1 + layer.delta]:
            print(
                f"layer {index:2}  {label:12}" + "".join(f"{n:9.0f}" for n in sorted(half_lives(layer, erasing))),
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Philox against the known answers of Random123, and what the noise key does and does not depend on."""

import pytest
import torch
from replayssm_emulation import UsageError, philox4x32, state_noise

KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN)
def test_known_answers(counter, seed, expected) -> None:
    words = philox4x32(*(torch.tensor([c]) for c in counter), seed)
    assert tuple(int(w) for w in words) == expected


def noise(seed=0, document=0, layer=0, heads=2, copy=0, positions=(5,), d_v=3, d_k=8, first_head=0):
    return state_noise(
        seed,
        document=document,
        layer=layer,
        heads=heads,
        copy=copy,
        positions=torch.tensor(positions),
        d_v=d_v,
        d_k=d_k,
        first_head=first_head,
    )


def test_every_part_of_the_key_matters() -> None:
    base = noise()
    changes = (
        {"seed": 1},
        {"seed": 1 << 32},
        {"document": 1},
        {"layer": 1},
        {"copy": 1},
        {"positions": (6,)},
        {"first_head": 1},
    )
    for change in changes:
        assert (noise(**change) != base).float().mean() > 0.9, change


def test_noise_does_not_depend_on_what_is_drawn_beside_it() -> None:
    assert torch.equal(noise(positions=(3, 5, 9))[1], noise()[0])
    assert torch.equal(noise(heads=4)[:, :2], noise())
    assert torch.equal(noise(heads=1, first_head=1)[:, 0], noise()[:, 1])
    assert torch.equal(noise(d_v=7)[:, :, :3], noise())


def test_words_fill_32_bits_evenly() -> None:
    words = noise(heads=8, d_v=64, d_k=64).double()
    expected = 2.0**32 / 12**0.5 / words.numel() ** 0.5  # standard error of a uniform mean
    assert abs(words.mean() - (2**32 - 1) / 2) < 4 * expected
    assert words.unique().numel() > 0.99 * words.numel()


def test_global_generator_is_untouched() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    noise()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "change",
    [{"seed": -1}, {"seed": 1 << 64}, {"layer": 1 << 15}, {"document": 1 << 32}, {"first_head": (1 << 16) - 1}],
)
def test_out_of_range_keys_are_refused(change) -> None:
    with pytest.raises(UsageError):
        noise(**change)

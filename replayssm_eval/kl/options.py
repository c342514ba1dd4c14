"""Options of the command `kl`."""

from collections.abc import Sequence
from dataclasses import dataclass

from replayssm_emulation import Scheme, UsageError, parse_scheme

from ..inference.options import ScanOptions, schemes_option
from ..models.options import ModelOptions
from ..results.options import option

ENGINES = ("scan", "decode")
DEFAULT_SCHEMES = ("nvfp4-rn@16", "nvfp4@16", "fp8@16", "nvfp4/fp16@16")


@dataclass(frozen=True)
class KlOptions(ScanOptions, ModelOptions):
    """Everything that decides the numbers of a run."""

    LAST = (
        *("dtype", "device", "device_map", "revision", "trust_remote_code"),
        *("follow_hf_clamp", "backend", "engine", "random_weights"),
    )

    schemes: Sequence[str | Scheme] = schemes_option(
        DEFAULT_SCHEMES,
        "How the state is stored, e.g. nvfp4/fp16@16 (see `schemes`); repeatable. "
        f"Default: {', '.join(DEFAULT_SCHEMES)}.",
    )
    corpus: str = option("builtin", "Text to read: builtin, pg19, a .txt, .jsonl or .parquet file, or a folder.")
    books: Sequence[str] = option((), "Book by title or index; repeatable. Default: the first.", item=str)
    split: str = option("test", "Split of pg19.")
    text_key: str | None = option(None, "Key or column of the text, if it is not `text` or `book_text`.")
    tokens: int = option(16384, "Tokens to read of every book.")
    prompt_tokens: int = option(0, "Tokens that run in full precision before decoding starts.")
    chunk_size: int = option(2048, "Tokens per forward pass. Changes memory and progress, not the result.")
    seeds: Sequence[int] = option(
        (0,), "Seed of the rounding noise; repeatable. Every seed adds a row. Default: 0.", "--seed", item=int
    )
    follow_hf_clamp: bool = option(False, "Clamp the time step of Mamba-2 as the prefill of transformers does.")
    engine: str = option(
        "scan", "scan reads a chunk at a time. decode reads token by token, as generation does, and is slow."
    )

    def parsed(self) -> list[Scheme]:
        """The schemes, each once. Raises UsageError for a bad option."""
        for name, least in (("tokens", 2), ("chunk_size", 1), ("prompt_tokens", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {least}")
        if self.prompt_tokens >= self.tokens:
            raise UsageError(f"--prompt-tokens {self.prompt_tokens} leaves nothing to decode of --tokens {self.tokens}")
        if self.engine not in ENGINES:
            raise UsageError(f"unknown engine {self.engine!r}: use {' or '.join(ENGINES)}")
        for name in ("schemes", "books"):
            if isinstance(getattr(self, name), str):
                raise UsageError(f"{name} is a string ({getattr(self, name)!r}): pass a list")
        self.check_model()
        schemes = [parse_scheme(s) if isinstance(s, str) else s for s in self.schemes]
        if not schemes:
            raise UsageError("no scheme given: pass --scheme, e.g. --scheme nvfp4@16")
        if not self.seeds:
            raise UsageError("no seed given: pass --seed 0")
        for seed in self.seeds:
            if not 0 <= seed < 1 << 64:
                raise UsageError(f"--seed {seed}: must be in [0, 2^64)")
        if len(set(self.seeds)) < len(self.seeds):
            raise UsageError("a seed is given twice: its rows would be identical")
        if repeated := [str(s) for s in dict.fromkeys(schemes) if schemes.count(s) > 1]:
            raise UsageError(f"scheme {repeated[0]} is given twice: use --seed for repeats")
        return schemes

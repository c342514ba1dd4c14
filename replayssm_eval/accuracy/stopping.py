"""Where an answer ends: end tokens, stop strings behind the thinking part, and what a batch row really generated."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from replayssm_tasks import answer_text, reopen_thinking
from torch import Tensor


@dataclass(frozen=True)
class Generation:
    """What one batch row generated.

    ids: the tokens before the end token or stop string. stop: "eos", "stop" or "length". text: without special tokens.
    """

    ids: tuple[int, ...]
    stop: str
    text: str

    @property
    def tokens(self) -> int:
        """How many tokens were generated, thinking included."""
        return len(self.ids)


@dataclass(frozen=True)
class Stopping:
    """The rules by which generations of one model end.

    decode: text of token ids, without special tokens. end_tokens: ids that end a generation.
    think_end: mark that ends the thinking part, as text or token id; None for the usual marks.
    """

    tokenizer: Any
    decode: Callable[[list[int]], str]
    end_tokens: frozenset[int]
    think_end: str | int | None

    def answer_start(self, context: str, tokens: list[int], text: str) -> int | None:
        """Where in `text` the answer begins, behind the thinking part. None if the thinking part has not ended."""
        if isinstance(self.think_end, int) and self.think_end in tokens:
            last = len(tokens) - 1 - tokens[::-1].index(self.think_end)
            return len(self.decode(tokens[: last + 1]))
        if isinstance(self.think_end, str) and (at := text.rfind(self.think_end)) >= 0:
            return at + len(self.think_end)
        visible = answer_text(reopen_thinking(context, text))
        return None if visible is None else len(text) - len(visible)

    def first_stop(self, context: str, tokens: list[int], stop: Sequence[str]) -> int | None:
        """Where in the text of `tokens` the first stop string behind the thinking part begins. None without one."""
        text = self.decode(tokens)
        begin = self.answer_start(context, tokens, text)
        if begin is None:
            return None
        places = [at for s in stop if s and (at := text.find(s, begin)) >= 0]
        # Special tokens are not in the text.
        special = {self.tokenizer.convert_tokens_to_ids(s) for s in stop if s in self.tokenizer.all_special_tokens}
        cuts = [n for n, token in enumerate(tokens) if token in special]
        places += [at for n in cuts if (at := len(self.decode(tokens[:n]))) >= begin]
        return min(places, default=None)

    def stop_test(self, contexts: Sequence[str], stop: Sequence[str]) -> Callable[[Tensor, Tensor], Tensor]:
        """A function of generated ids (rows, tokens) and row numbers: which rows have reached a stop string."""
        # A token has at least one byte, so this many tokens hold the longest stop string.
        tail_tokens = max((len(s.encode(errors="replace")) for s in stop), default=0) + 2

        def ended(generated: Tensor, rows: Tensor) -> Tensor:
            # Reading the whole text is slow: only rows with a stop string near the end are read.
            tails = self.tokenizer.batch_decode(generated[:, -tail_tokens:])
            said = [any(s and s in tail for s in stop) for tail in tails]
            for i, row in enumerate(rows.tolist()):
                said[i] = said[i] and self.first_stop(contexts[row], generated[i].tolist(), stop) is not None
            return torch.tensor(said, device=generated.device)

        return ended

    def generation(self, context: str, tokens: list[int], stop: Sequence[str]) -> Generation:
        """What one row really generated. A row is filled up with padding once it has stopped."""
        count, reason = len(tokens), "length"
        for i, token in enumerate(tokens):
            if token in self.end_tokens:
                count, reason = i, "eos"
                break
        text = self.decode(tokens[:count])
        if (first := self.first_stop(context, tokens[:count], stop)) is not None:
            reason, text = "stop", text[:first]
            # The fewest tokens that hold the beginning of the stop string. Their text may go on behind it.
            count = bisect_right(range(count), first, key=lambda n: len(self.decode(tokens[:n])))
        return Generation(tuple(tokens[:count]), reason, text)

    def with_thinking(self, context: str, answer: str, made: Generation | None) -> str:
        """The answer with its thinking part, unless lm-eval was told how that part ends and has cut it off.

        lm-eval cuts at a stop string wherever it stands, and does not see a thinking part that the prompt has opened.
        An answer that was cut while thinking would look like one that never thought, and would be graded.
        """
        if made is None:
            return reopen_thinking(context, answer)
        if self.think_end is not None and self.answer_start(context, list(made.ids), made.text):
            return answer
        return reopen_thinking(context, made.text)

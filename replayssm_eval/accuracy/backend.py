"""lm-eval's Hugging Face backend with the recurrent state stored as a scheme says: model name `replayssm`.

The noise of a request is keyed by its own prompt. An answer therefore does not depend on the batch it was made in,
on its place there, or on the order of the requests.
"""

import hashlib
from contextlib import ExitStack
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from replayssm_emulation import UsageError, parse_scheme
from replayssm_kernels import BatchRow
from torch import Tensor

from ..inference.attach import attach
from ..inference.decoding import decode
from ..models.loading import Loaded, load, location_of
from .stopping import Generation, Stopping


def document_number(tokens: list[int]) -> int:
    """The 32-bit document number of a prompt, from its token ids."""
    return int.from_bytes(hashlib.sha256(repr(tokens).encode()).digest()[:4], "little")


_UNSUPPORTED = ("parallelize", "tp_plan", "peft", "delta", "gguf_file", "autogptq", "gptqmodel")


@register_model("replayssm")
class ReplayLM(HFLM):
    """`HFLM` whose batch rows keep their states in `scheme`.

    pretrained: a name of `replayssm-eval models`, a hub id or a folder. scheme: text form.
    noise_seed: seed of the stochastic rounding. backend_scan: see `replayssm_kernels.choose_backend`.
    loaded: the model, if it is loaded already. Other arguments are HFLM's.
    A prompt is read in full precision, then its state is handed over to the copies. Log-likelihoods are scored with
    the state rounded from the first token on. Raises UsageError for a bad scheme, model or batch size "auto".
    """

    def __init__(
        self,
        pretrained: str,
        scheme: str = "fp32",
        noise_seed: int = 0,
        backend_scan: str = "auto",
        loaded: Loaded | None = None,
        **kwargs: Any,
    ):
        if not isinstance(pretrained, str):
            raise UsageError("replayssm takes the name of a model, not a model")
        if str(kwargs.get("batch_size", 1)).startswith("auto"):
            raise UsageError(
                "replayssm needs a batch size: lm-eval cannot size the states that every row keeps beside the model"
            )
        if unsupported := {name for name in _UNSUPPORTED if kwargs.get(name)}:
            raise UsageError(f"replayssm does not take {', '.join(sorted(unsupported))}")
        self.scheme, self.noise_seed = parse_scheme(scheme), int(noise_seed)
        #: What was generated, by document number of the prompt.
        self.generations: dict[int, Generation] = {}
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = kwargs.setdefault("device", default if loaded is None else str(loaded.model.device))
        # Before lm-eval asks the hub for anything: a model that cannot be had is refused at once.
        self._loaded = loaded or load(
            pretrained,
            dtype=str(kwargs.get("dtype") or "auto").removeprefix("torch."),
            device=str(device),
            revision=kwargs.get("revision"),
            trust_remote_code=bool(kwargs.get("trust_remote_code")),
        )
        super().__init__(pretrained=location_of(pretrained), **kwargs)
        self._stack = ExitStack()
        self.session = self._stack.enter_context(attach(self.model, [self.scheme], backend=backend_scan))

    def close(self) -> None:
        """Put the model's own recurrence back; another scheme can then be attached."""
        self._stack.close()

    @property
    def stopping(self) -> Stopping:
        """How generations of this model end."""
        ends = self.model.generation_config.eos_token_id
        ends = frozenset(ends if isinstance(ends, list) else [ends]) | {self.eot_token_id}
        return Stopping(self.tokenizer, self.tok_decode, ends, self.think_end_token)

    def generation_for(self, context: str) -> Generation | None:
        """What was generated for a prompt. None if the prompt was cut on the left or never asked."""
        return self.generations.get(document_number(self.tok_batch_encode([context])[0][0].tolist()))

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        self._config = self._loaded.model.config

    def _create_tokenizer(self, *args: Any, **kwargs: Any) -> None:
        self.tokenizer = self._loaded.tokenizer

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        self._model = self._loaded.model

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        answers = super().generate_until(requests, disable_tqdm)
        contexts = [request.args[0] for request in requests]
        return [
            self.stopping.with_thinking(context, answer, self.generation_for(context))
            for context, answer in zip(contexts, answers, strict=True)
        ]

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        # Requests are padded on the right with zeros, which no earlier logit sees.
        texts = [row[: max((i + 1 for i, token in enumerate(row) if token), default=0)] for row in inps.tolist()]
        self.session.start([BatchRow(self.scheme, self.noise_seed, document_number(text)) for text in texts])
        return super()._model_call(inps, attn_mask, labels)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        mask = kwargs.get("attention_mask")
        padding = [0] * len(context) if mask is None else (mask == 0).sum(1).tolist()
        prompts = [row[pad:] for row, pad in zip(context.tolist(), padding, strict=True)]
        documents = [document_number(prompt) for prompt in prompts]
        self.session.start(
            [
                BatchRow(self.scheme, self.noise_seed, document, prompt=context.shape[1], padding=pad)
                for document, pad in zip(documents, padding, strict=True)
            ]
        )
        contexts = [self.tok_decode(prompt, skip_special_tokens=False) for prompt in prompts]
        stopping = self.stopping
        ended = stopping.stop_test(contexts, stop) if any(stop) else None
        options = {"custom_generate": decode, "ended": ended, "session": self.session}
        with torch.inference_mode():
            output = super()._model_generate(context, max_length, [], **options, **kwargs)
        for text, document, row in zip(contexts, documents, output[:, context.shape[1] :].tolist(), strict=True):
            self.generations[document] = stopping.generation(text, row, stop)
        return output

"""Token by token, for transformers' `generate`: a sequence leaves the batch when it ends, and its copies with it.

    model.generate(ids, custom_generate=decode, session=session, max_new_tokens=2000)

`generate` itself computes every row of the batch until the last one ends. If answers differ much in length, all of
them take as long as the longest. Processors, sampling, stopping criteria and cache are those of `generate`. With a
session on a GPU the steps are CUDA graphs.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from .session import Session
from .step_graphs import StepGraphs

_LOOK_EVERY = 16  # about this many replayed steps pass between two looks at what they have generated
_ROOM = 512  # steps that caches first have room for


class _Steps(Protocol):
    """The decoding steps of the rows that are in the batch."""

    @property
    def may_look(self) -> bool:
        """Whether criteria look at the generated tokens now; rows may leave only then."""

    def must_move(self, going: Tensor) -> bool:
        """Whether rows leave now. going: bool `[B]`, False for a row that has ended."""

    def moved(self, going: Tensor) -> "_Steps":
        """The steps of the rows that have not ended; in their turn they may be of the other kind."""

    def __call__(self, tokens: Tensor, ids: Tensor, running: Tensor) -> Tensor:
        """Logits `[B, vocabulary]` after `tokens` `[B]`, the newest of the rows `running` of `ids` `[R, T]`."""

    def close(self) -> None:
        """No step follows."""


class _SingleSteps:
    """Every step is launched by itself; a row leaves as soon as it has ended. kwargs: what `generate` hands on."""

    may_look = True

    def __init__(self, model: Any, kwargs: dict[str, Any]):
        self._model, self._kwargs = model, kwargs

    def must_move(self, going: Tensor) -> bool:
        return not going.all()

    def moved(self, going: Tensor) -> _Steps:
        self._kwargs = _rows(self._kwargs, going)
        self._kwargs["cache"].reorder_cache(going.nonzero().flatten())
        return self

    def __call__(self, tokens: Tensor, ids: Tensor, running: Tensor) -> Tensor:
        inputs = self._model.prepare_inputs_for_generation(ids[running], next_sequence_length=1, **self._kwargs)
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs)
        return outputs.logits[:, -1]

    def close(self) -> None:
        pass


class _ReplayedSteps:
    """Steps are replayed from window to window; ended rows stay until half of the batch has ended.

    every: steps between two looks, a multiple of the window. kwargs: what `generate` hands on, as before the first
    step.
    """

    def __init__(self, graphs: StepGraphs, every: int, kwargs: dict[str, Any]):
        self._graphs, self._every, self._kwargs = graphs, every, kwargs

    @property
    def may_look(self) -> bool:
        return self._graphs.steps % self._every == 0

    def must_move(self, going: Tensor) -> bool:
        full = self._graphs.steps == self._graphs.room
        return full or (not going.all() and bool(2 * going.sum() <= len(going)))

    def moved(self, going: Tensor) -> _Steps:
        """With room for as many steps as were taken in all."""
        graphs, kwargs = self._graphs, _rows(self._kwargs, going)
        keep = going.nonzero().flatten()
        visible, positions = graphs.close()[keep], graphs.positions[keep]
        graphs.cache.reorder_cache(keep)
        # As if all steps had been taken one by one.
        length = visible.shape[1] + 1
        if (mask := kwargs.get("attention_mask")) is not None:
            kwargs["attention_mask"] = torch.nn.functional.pad(visible, (0, 1), value=True).to(mask.dtype)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = positions + torch.arange(1 - length, 1, device=positions.device)
        room = max(graphs.room, visible.shape[1]) // self._every * self._every
        more = StepGraphs.begin(graphs.model, graphs.session, graphs.cache, positions, visible, room)
        return _SingleSteps(graphs.model, kwargs) if more is None else _ReplayedSteps(more, self._every, kwargs)

    def __call__(self, tokens: Tensor, ids: Tensor, running: Tensor) -> Tensor:
        return self._graphs(tokens)

    def close(self) -> None:
        self._graphs.close()


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    ended: Callable[[Tensor, Tensor], Tensor] | None = None,
    session: Session | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """ids `[R, T]` with what each row has generated, and padding after its end; greedy, or sampled with `do_sample`.

    ended(generated, rows): bool `[n]`, whether each of `rows`, which has generated `[n, T]`, ends here. The stopping
    criteria end rows too. session: what is attached to the model. If its steps can be replayed, ended rows stay until
    half of the batch has ended. They draw samples until then, so `do_sample` draws other samples than steps one by
    one.
    """
    prompt = input_ids.shape[1]
    running = torch.arange(len(input_ids), device=input_ids.device)  # rows in the batch
    going = torch.ones_like(running, dtype=torch.bool)  # which of `running` have not ended
    padding = generation_config._pad_token_tensor
    empty = input_ids.new_zeros(()) if padding is None else padding.to(input_ids.dtype).reshape(())
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    logits = outputs.logits[:, -1]
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    steps = _steps_after_prompt(model, session, input_ids, model_kwargs)
    unseen = 0  # tokens that no criterion has seen
    while True:
        scores = logits_processor(input_ids[running], logits.float())
        tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0] if generation_config.do_sample else scores.argmax(-1)
        column = empty.repeat(len(input_ids))
        column[running] = torch.where(going, tokens, empty)
        input_ids = torch.cat([input_ids, column[:, None]], dim=1)
        unseen += 1
        if steps.may_look:
            for end in range(input_ids.shape[1] - unseen + 1, input_ids.shape[1] + 1):
                # Criteria see all rows: some count them.
                ends_here = going & stopping_criteria(input_ids[:, :end], None)[running]
                if ended is not None:
                    left = running[going]
                    ends_here[going] |= ended(input_ids[left, prompt:end], left)
                if ends_here.any():
                    input_ids[running[ends_here], end:] = empty
                    going = going & ~ends_here
                    if not going.any():
                        steps.close()
                        return input_ids[:, :end]
            unseen = 0
            if steps.must_move(going):
                steps = steps.moved(going)
                running, tokens, going = running[going], tokens[going], going[going]
        logits = steps(tokens, input_ids, running)


def _steps_after_prompt(model: Any, session: Session | None, ids: Tensor, kwargs: dict[str, Any]) -> _Steps:
    """Replayed steps if the session allows them, else steps one by one. ids `[R, T]`: the prompt, already read."""
    if session is None:
        return _SingleSteps(model, kwargs)
    window = session.rows[0].scheme.window
    every = max(_LOOK_EVERY // window, 1) * window
    seen = ids.shape[1]
    with_next = torch.cat([ids, ids[:, :1]], dim=1)  # the next token may have any value: only positions are asked for
    positions = model.prepare_inputs_for_generation(with_next, next_sequence_length=1, **kwargs).get("position_ids")
    if positions is None:
        positions = torch.full((len(ids), 1), seen, device=ids.device)
    mask = kwargs.get("attention_mask")
    visible = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, :seen].bool()
    graphs = StepGraphs.begin(model, session, kwargs["cache"], positions, visible, -(-_ROOM // every) * every)
    return _SingleSteps(model, kwargs) if graphs is None else _ReplayedSteps(graphs, every, kwargs)


def _rows(kwargs: dict[str, Any], going: Tensor) -> dict[str, Any]:
    """The same keyword arguments for the rows that have not ended."""
    return {
        name: value[going] if isinstance(value, Tensor) and value.shape[:1] == going.shape else value
        for name, value in kwargs.items()
    }

"""Token by token, for transformers' `generate`: a sequence leaves the batch when it ends, and its copies with it.

    model.generate(ids, custom_generate=decode, session=session, max_new_tokens=2000)

`generate` itself computes every row of the batch until the last one ends; answers of very different lengths then pay for
the longest. Everything else (processors, sampling, stopping criteria, cache) is `generate`'s own. With a session on a GPU the
steps are CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .session import Session
from .step_graphs import StepGraphs

_LOOK_EVERY = 16  # steps, about, between two looks at what replayed steps have generated
_ROOM = 512  # steps that caches first have room for


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
    """ids `[R, T]` with what each row generated, filled up with padding after its end; greedy, or sampled with `do_sample`.

    ended(generated, rows): bool `[n]`, whether each of `rows`, which has generated `[n, T]`, ends here; beside the criteria.
    session: what is attached to the model; if its steps can be replayed, ended rows stay until half of the batch has ended
    (and draw samples until then: with `do_sample`, others are drawn than step by step).
    """
    prompt = input_ids.shape[1]
    running = torch.arange(len(input_ids), device=input_ids.device)  # rows in the batch
    going = torch.ones_like(running, dtype=torch.bool)  # of those: not ended
    padding = generation_config._pad_token_tensor
    empty = input_ids.new_zeros(()) if padding is None else padding.to(input_ids.dtype).reshape(())
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    logits = outputs.logits[:, -1]
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    steps: StepGraphs | None = None
    every = 1
    if session is not None:
        window = session.rows[0].scheme.window
        every = max(_LOOK_EVERY // window, 1) * window
        steps = _replayed_steps(model, session, input_ids, model_kwargs, -(-_ROOM // every) * every)
    unseen = 0  # tokens that no criterion has seen
    while True:
        scores = logits_processor(input_ids[running], logits.float())
        tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0] if generation_config.do_sample else scores.argmax(-1)
        column = empty.repeat(len(input_ids))
        column[running] = torch.where(going, tokens, empty)
        input_ids = torch.cat([input_ids, column[:, None]], dim=1)
        unseen += 1
        if steps is None or steps.steps % every == 0:
            for end in range(input_ids.shape[1] - unseen + 1, input_ids.shape[1] + 1):
                # Criteria see all rows: some count them.
                here = going & stopping_criteria(input_ids[:, :end], None)[running]
                if ended is not None:
                    left = running[going]
                    here[going] |= ended(input_ids[left, prompt:end], left)
                if here.any():
                    input_ids[running[here], end:] = empty
                    going = going & ~here
                    if not going.any():
                        if steps is not None:
                            steps.close()
                        return input_ids[:, :end]
            unseen = 0
            full = steps is not None and steps.steps == steps.room
            if full or (not going.all() and (steps is None or 2 * going.sum() <= len(going))):
                keep = going.nonzero().flatten()
                model_kwargs = {
                    name: value[keep] if isinstance(value, Tensor) and value.shape[:1] == running.shape else value
                    for name, value in model_kwargs.items()
                }
                running, going, tokens = running[keep], going[keep], tokens[keep]
                if steps is None:
                    model_kwargs["cache"].reorder_cache(keep)
                else:
                    steps = _move(steps, keep, every, model_kwargs)
        if steps is not None:
            logits = steps(tokens)
        else:
            inputs = model.prepare_inputs_for_generation(input_ids[running], next_sequence_length=1, **model_kwargs)
            outputs = model(**inputs, return_dict=True)
            logits = outputs.logits[:, -1]
            model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)


def _replayed_steps(
    model: Any, session: Session, input_ids: Tensor, model_kwargs: dict[str, Any], room: int
) -> StepGraphs | None:
    """The steps after a prompt, if they can be replayed."""
    seen = input_ids.shape[1]
    next_ids = torch.cat([input_ids, input_ids[:, :1]], dim=1)  # of any value: asked for positions only
    inputs = model.prepare_inputs_for_generation(next_ids, next_sequence_length=1, **model_kwargs)
    positions = inputs.get("position_ids")
    if positions is None:
        positions = torch.full((len(input_ids), 1), seen, device=input_ids.device)
    mask = model_kwargs.get("attention_mask")
    visible = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask[:, :seen].bool()
    return StepGraphs.begin(model, session, model_kwargs["cache"], positions, visible, room)


def _move(steps: StepGraphs, keep: Tensor, every: int, model_kwargs: dict[str, Any]) -> StepGraphs | None:
    """New steps for the rows `keep`, with room for as many as were taken in all; model_kwargs as if all had been taken one by one."""
    visible, positions = steps.close()[keep], steps.positions[keep]
    steps.cache.reorder_cache(keep)
    length = visible.shape[1] + 1
    if model_kwargs.get("attention_mask") is not None:
        model_kwargs["attention_mask"] = torch.nn.functional.pad(visible, (0, 1), value=True).to(
            model_kwargs["attention_mask"].dtype
        )
    if model_kwargs.get("position_ids") is not None:
        model_kwargs["position_ids"] = positions + torch.arange(1 - length, 1, device=positions.device)
    room = max(steps.room, visible.shape[1]) // every * every
    return StepGraphs.begin(steps.model, steps.session, steps.cache, positions, visible, room)

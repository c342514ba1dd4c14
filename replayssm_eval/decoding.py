"""Token by token, for transformers' `generate`: a sequence leaves the batch when it ends, and its copies with it.

    model.generate(ids, custom_generate=decode, max_new_tokens=2000)

`generate` itself computes every row of the batch until the last one ends; answers of very different lengths then pay for
the longest. Everything else (processors, sampling, stopping criteria, cache) is `generate`'s own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    ended: Callable[[Tensor, Tensor], Tensor] | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """ids `[R, T]` with what each row generated, filled up with padding after its end; greedy, or sampled with `do_sample`.

    ended(generated, rows): bool `[n]`, whether each of `rows`, which has generated `[n, T]`, ends here; beside the criteria.
    """
    prompt = input_ids.shape[1]
    running = torch.arange(len(input_ids), device=input_ids.device)
    padding = generation_config._pad_token_tensor
    outputs = model._prefill(input_ids, generation_config, model_kwargs)
    while True:
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        scores = logits_processor(input_ids[running], outputs.logits[:, -1].float())
        tokens = torch.multinomial(scores.softmax(-1), 1)[:, 0] if generation_config.do_sample else scores.argmax(-1)
        column = input_ids.new_zeros(len(input_ids)) if padding is None else padding.to(input_ids.dtype).expand(len(input_ids)).clone()
        column[running] = tokens
        input_ids = torch.cat([input_ids, column[:, None]], dim=1)
        # Criteria see all rows: some count them.
        going = ~stopping_criteria(input_ids, None)[running]
        if ended is not None:
            going &= ~ended(input_ids[running, prompt:], running)
        if not going.any():
            return input_ids
        if not going.all():
            keep = going.nonzero().flatten()
            model_kwargs = {
                name: value[keep] if isinstance(value, Tensor) and value.shape[:1] == running.shape else value
                for name, value in model_kwargs.items()
            }
            model_kwargs["cache"].reorder_cache(keep)
            running = running[keep]
        inputs = model.prepare_inputs_for_generation(input_ids[running], next_sequence_length=1, **model_kwargs)
        outputs = model(**inputs, return_dict=True)

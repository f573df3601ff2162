"""Hugging Face's generate as contestants, called as its users call it, on a copy of the model of its own."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from hispec.base import load_base
from hispec.config import default_exits
from hispec.decode.bench_options import ContestantOptions
from hispec.decode.contestants import Contestant, Run
from hispec.errors import first_line

if TYPE_CHECKING:
    from hispec.model import HiSpecModel


class HuggingFace:
    """The library's own copy of a model, and the contestants it makes."""

    def __init__(self, model: "HiSpecModel") -> None:
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # it warns of its own calls
        trunk = model.trunk
        self.model: Any = load_base(model.base, model.revision, trunk.dtype, trunk.device)[0]
        stops = self.model.generation_config.eos_token_id
        self.stop_ids = {stops} if isinstance(stops, int) else set(stops or ())
        self.pad = min(self.stop_ids, default=0)
        self.n_layers = trunk.n_layers
        self.exits = model.exits

    def contestant(self, name: str, own: ContestantOptions, batch: int) -> Contestant | str:
        """The contestant `name`, or a line that says why it cannot take part."""
        if name == "hf":
            return Contestant(name, self._run(batch))
        if batch > 1:
            return f"{name} is left out at batch {batch}: generate speculates for one prompt at a time"
        if name == "hf_prompt_lookup":
            return self._tried(Contestant(name, self._run(1, prompt_lookup_num_tokens=own.tokens)))
        exit_ = own.exits[0] if own.exits else (*self.exits, *default_exits(self.n_layers))[0]
        if not self._leaves_early(exit_):
            return (
                f"{name} is left out: {type(self.model).__name__} runs all its layers whatever num_hidden_layers says"
            )
        return self._tried(Contestant(name, self._run(1, assistant_early_exit=exit_)))

    def _tried(self, contestant: Contestant) -> Contestant | str:
        try:
            contestant.run([[self.pad] * 4], 4)
        except Exception as error:  # what the library's own options raise on a model that they do not suit
            return f"{contestant.name} is left out: generate refuses it here ({first_line(error)})"
        finally:
            # A failed early exit leaves the configuration cut short.
            self.model.config.num_hidden_layers = self.n_layers
        return contestant

    def _leaves_early(self, exit_: int) -> bool:
        """Whether the model runs only `exit_` layers when its configuration says so, as early exit does it."""
        stacks = [m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.n_layers]
        ran: list[int] = []
        hooks = [
            layer.register_forward_hook(lambda *_, number=number: ran.append(number))
            for number, layer in enumerate(stacks[0])
        ]
        config = getattr(self.model, self.model.base_model_prefix).config
        try:
            config.num_hidden_layers = exit_
            with torch.inference_mode():
                self.model(torch.tensor([[self.pad]], device=self.model.device), use_cache=False)
        finally:
            config.num_hidden_layers = self.n_layers
            for hook in hooks:
                hook.remove()
        return len(ran) == exit_

    def _run(self, batch: int, **speculation: int) -> Run:
        def run(prompts: list[list[int]], n: int) -> list[list[int]]:
            outputs: list[list[int]] = []
            for at in range(0, len(prompts), batch):
                outputs += self._generate(prompts[at : at + batch], n, speculation)
            return outputs

        return run

    def _generate(self, prompts: list[list[int]], n: int, speculation: dict[str, int]) -> list[list[int]]:
        """A left-padded batch; what comes after a stop token is cut off."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(p)) + p for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=n, do_sample=False, pad_token_id=self.pad, **speculation
        )
        rows = out[:, width:].tolist()
        ends = [next((i + 1 for i, t in enumerate(row) if t in self.stop_ids), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

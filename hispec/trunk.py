"""The frozen pretrained model, run one span of layers at a time.

One adapter serves every Hugging Face decoder whose attention can be replaced. The model's own forward does the work
(embeddings, positions, rope, scalings stay the library's); what changes is the list of layers it walks:

    layer list   [ skip  skip  ENTER  layer  CATCH  skip  skip ]        span [2, 5) of 7
                                 |             |
                          hidden goes in   hidden comes out

The list keeps its full length because several families choose masks and rotary tables by the layer's index.

Letters: H heads, T packed tokens, D hidden or head size, V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hispec.attention import NAME, Attend, PackedAttention, attending, attention
from hispec.errors import UnsupportedModelError, first_line
from hispec.families import check_attention, check_windows, constant_positions
from hispec.linear import prepack
from hispec.ranks import joined, whole
from hispec.stand_ins import Layers, Run, Skip
from hispec.unembedding import Unembedding, base_name_of

# A placed layer: where in the trunk's list it stands, and the module that stands there.
Placed = tuple[int, nn.Module]


class KVShape(NamedTuple):
    """What one layer stores per token."""

    heads: int
    key_size: int
    value_size: int


# What a span's pass walks, where its state enters, and where states are kept.
Route = tuple[list[Any], Run, list[Run]]


class Trunk:
    """A frozen causal language model that runs any span of its layers.

    Attributes:
        n_layers, hidden_size, vocab_size, max_positions: sizes of the model.
        kv_shapes: per layer, what its attention stores for one token, read off the tensors.
        final_norm: the norm after the last layer, or None (OPT's post-norm variant).
        in_step: whether several processes must run it together, equally often.
    """

    in_step = False

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over `model`: eval mode, frozen, on hispec's attention.

        Raises:
            UnsupportedModelError: the model's attention cannot be replaced, or span by span it computes something else.
        """
        self.model: Any = model
        model.train(False).requires_grad_(False)
        check_attention(model)
        text = model.config.get_text_config()
        self.name = str(text.model_type)
        self.base: Any = getattr(model, base_name_of(model) or "", None)
        self.n_layers = int(text.num_hidden_layers)
        self.vocab_size = int(text.vocab_size)
        self.max_positions = constant_positions(text)
        owner, attribute = self._find_layers()
        self.layers: list[nn.Module] = list(getattr(owner, attribute))
        self._walk = Layers(self.layers)
        ids_T = torch.arange(5, device=self.device) % self.vocab_size
        expected_TV = self._whole_pass(owner, attribute, ids_T)
        model.set_attn_implementation(NAME)
        setattr(owner, attribute, self._walk)
        self._routes: dict[tuple[tuple[Placed, ...], tuple[int, ...]], Route] = {}
        self._probe(ids_T, expected_TV)
        self.unembed = Unembedding(model)
        prepack([model])

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @torch.no_grad()
    def run(
        self, ids_T: Tensor, positions_T: Tensor, start: int, stop: int, attend: Attend, hidden_TD: Tensor | None = None
    ) -> Tensor:
        """Hidden state [T, D] after layer `stop` (1-based count of layers run) of packed tokens.

        `hidden_TD` is the state after layer `start`; not needed when start is 0. Keys and values go to `attend`.
        """
        return self.run_placed(ids_T, positions_T, self.span(start, stop), attend, hidden_TD if start else None)[0]

    def span(self, start: int, stop: int) -> tuple[Placed, ...]:
        """The trunk's own layers [start, stop), at their places."""
        return tuple(enumerate(self.layers[start:stop], start))

    def run_placed(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        placed: tuple[Placed, ...],
        attend: Attend,
        hidden_TD: Tensor | None = None,
        keep: tuple[int, ...] = (-1,),
    ) -> list[Tensor]:
        """Like `run`, for any modules standing at the places of trunk layers (a block head stands at its exit).

        Returns the outputs [T, D] of those of `placed` that `keep` indexes.
        """
        assert placed, "an empty span has nothing to run"
        route = self._routes.get((placed, keep))
        if route is None:
            route = self._routes[placed, keep] = self._lay(placed, keep)
        walked, first, kept = route
        first.entry = None if hidden_TD is None else hidden_TD[None]
        self._walk.walked = walked
        try:
            with attending(attend):
                self.base(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
            return [run.output[0] for run in kept]
        finally:
            self._walk.walked = first.entry = None
            for run in kept:
                run.output = None  # a route outlives the pass, its tensors must not

    def forget(self) -> None:
        """Let go of modules that were placed: the blocks of heads that are not needed any more."""
        self._routes.clear()

    def copy_layer(self, place: int) -> tuple[nn.Module, KVShape]:
        """A copy of the layer at `place`, whole even where the trunk is sharded, and what it stores per token."""
        layer = self.layers[place]
        if not joined():
            return copy.deepcopy(layer), self.kv_shapes[place]
        # A sharded layer's forwards are bound to its own parts: the copy is filled into a layer built anew.
        make: Any = type(layer)
        with self.device:
            twin: nn.Module = make(self.model.config, place).to(self.dtype).train(False)
        own = dict(layer.named_parameters()) | dict(layer.named_buffers())
        seen, at = _Seen(), torch.zeros(1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
                tensor.copy_(whole(own[name]))
            entry_TD = torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device)
            self.run_placed(at, at, ((place, twin),), seen, entry_TD)
        return twin, seen.shapes[place]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by name; where the trunk is sharded, each is whole until the next one is asked for."""
        yield from self.model.named_parameters()

    def features(self, hidden_TD: Tensor) -> Tensor:
        """What the model reads its logits from: final norm, then the output projection if it has one."""
        return self.project(hidden_TD if self.final_norm is None else self.final_norm(hidden_TD))

    def project(self, hidden_TD: Tensor) -> Tensor:
        """The modules between the final norm and the unembedding (OPT's output projection), usually none."""
        for module in self._after_norm:
            hidden_TD = module(hidden_TD)
        return hidden_TD

    def logits(self, ids_T: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Logits [T, V] of packed documents, without a cache."""
        lengths = lengths or [len(ids_T)]
        positions_T = torch.cat([torch.arange(n, device=ids_T.device) for n in lengths])
        hidden_TD = self.run(ids_T, positions_T, 0, self.n_layers, PackedAttention(lengths))
        with torch.no_grad():
            return self.unembed(self.features(hidden_TD))

    def _lay(self, placed: tuple[Placed, ...], keep: tuple[int, ...]) -> Route:
        walked: list[Any] = [Skip(layer, self._tupled) for layer in self.layers]
        ends = {index % len(placed) for index in (0, *keep)}
        for at, (place, module) in enumerate(placed):
            # Only where a state enters or is kept is there work to do; elsewhere the layer itself stands in the list.
            walked[place] = Run(module, self._tupled) if at in ends else module
        return walked, walked[placed[0][0]], [walked[placed[index][0]] for index in keep]

    def _find_layers(self) -> tuple[nn.Module, str]:
        for owner in self.base.modules() if self.base is not None else ():
            for attribute, child in owner.named_children():
                if isinstance(child, nn.ModuleList) and len(child) == self.n_layers:
                    return owner, attribute
        raise UnsupportedModelError(f"no list of {self.n_layers} layers found in a model of type {self.name!r}")

    def _whole_pass(self, owner: nn.Module, attribute: str, ids_T: Tensor) -> Tensor:
        """Logits [T, V] of a few tokens, computed the model's own way; notes what stands after its layers."""
        called: list[nn.Module] = []
        tupled: list[bool] = []
        hooks = [self.layers[-1].register_forward_hook(lambda _, __, out: tupled.append(isinstance(out, tuple)))]
        for name, child in owner.named_children():
            if name != attribute:
                hooks.append(
                    child.register_forward_hook(lambda module, _, __: called.append(module) if tupled else None)
                )
        try:
            with torch.no_grad():
                logits_TV: Tensor = self.model(input_ids=ids_T[None], use_cache=False).logits[0].float()
        finally:
            for hook in hooks:
                hook.remove()
        self._tupled = tupled[0]
        self.final_norm: nn.Module | None = next((m for m in called if "norm" in type(m).__name__.lower()), None)
        self._after_norm = [m for m in called if m is not self.final_norm]
        return logits_TV

    def _probe(self, ids_T: Tensor, expected_TV: Tensor) -> None:
        """Check that hispec's way agrees with the model's own, and read off what layers store."""
        seen, positions_T = _Seen(), torch.arange(len(ids_T), device=ids_T.device)
        try:
            # In two pieces: what a layer knows of the first when the second comes must lie in keys and values alone.
            pieces = zip(torch.split(ids_T, 3), torch.split(positions_T, 3), strict=True)
            hidden_TD = torch.cat([self.run(ids, positions, 0, self.n_layers, seen) for ids, positions in pieces])
            self.hidden_size = hidden_TD.shape[-1]
            with torch.no_grad():
                got_TV = Unembedding(self.model)(self.features(hidden_TD)).float()
        except (AttributeError, IndexError, KeyError, TypeError, RuntimeError, ValueError) as error:
            if isinstance(error, UnsupportedModelError):
                raise
            raise UnsupportedModelError(
                f"a model of type {self.name!r} cannot be run span by span: {first_line(error)}"
            ) from error
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        if sorted(seen.shapes) != list(range(self.n_layers)) or not torch.allclose(
            got_TV, expected_TV, rtol=tolerance, atol=tolerance * float(expected_TV.abs().max())
        ):
            raise UnsupportedModelError(
                f"run piece by piece, a model of type {self.name!r} does not compute what it computes whole"
                " (layers that share keys, attend twice, are recurrent, or look at each other); it cannot be a trunk"
            )
        check_windows(self.model.config.get_text_config(), seen.windows, self.max_positions)
        self.kv_shapes = [seen.shapes[layer] for layer in range(self.n_layers)]


class _Seen:
    """Attention over one document that comes in pieces, in the dullest way; notes, per layer, what it is given."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.windows: dict[int, int | None] = {}
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(
        self,
        layer: int,
        q_HTD: Tensor,
        k_HTD: Tensor,
        v_HTD: Tensor,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> Tensor:
        self.shapes[layer] = KVShape(k_HTD.shape[0], k_HTD.shape[2], v_HTD.shape[2])
        self.windows[layer] = window
        if layer in self._held:
            k_HTD, v_HTD = (torch.cat(pair, 1) for pair in zip(self._held[layer], (k_HTD, v_HTD), strict=True))
        self._held[layer] = k_HTD, v_HTD
        return attention(q_HTD, k_HTD, v_HTD, scale, window, cap)

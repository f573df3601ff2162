"""The language model inside a multi-modal one, where it is one that stands alone as well.

Letters: V vocabulary.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hispec.errors import UnsupportedModelError, first_line
from hispec.unembedding import base_name_of


def language_model(model: Any) -> Any:
    """`model` itself if it is nothing else; otherwise its text part as the causal LM of that family, the same modules.

    Raises:
        UnsupportedModelError: the family has no causal LM of its own, or it does not say what the whole says to text.
    """
    text = model.config.get_text_config()
    if text is model.config:
        return model
    own = f"{model.config.model_type!r} model, with a language model of type {text.model_type!r}"
    inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text), None)
    try:
        with torch.device("meta"):
            alone: Any = AutoModelForCausalLM.from_config(text)  # type: ignore[no-untyped-call]
    except ValueError:
        raise UnsupportedModelError(f"a {own} that cannot stand alone; give a text model") from None
    name = base_name_of(alone)
    if name is None or type(inner) is not type(getattr(alone, name)) or model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"a {own} that is built otherwise when it stands alone; give a text model")
    setattr(alone, name, inner)
    alone.set_output_embeddings(model.get_output_embeddings())
    alone.config, alone.generation_config = text, model.generation_config
    alone._tp_size = model.tp_size
    _compare(model.train(False), alone.train(False), own)
    return alone


@torch.no_grad()
def _compare(model: Any, alone: Any, own: str) -> None:
    """Both must give the same logits to a few words of text."""
    special = {value for key, value in model.config.to_dict().items() if key.endswith(("token_id", "token_index"))}
    plain = [token for token in range(min(64, alone.config.vocab_size)) if token not in special][:9]
    ids_1T = torch.tensor([plain], device=model.device)
    try:
        same = torch.equal(model(input_ids=ids_1T).logits, alone(input_ids=ids_1T).logits)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"a {own} that does not take plain text: {first_line(error)}") from error
    if not same:
        raise UnsupportedModelError(f"a {own} that answers otherwise when it stands alone; give a text model")

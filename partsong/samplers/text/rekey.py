"""Maps each tensor of a public checkpoint to its place in a stock transformers module.

A family's loader reads the configuration, refuses what the stock module does not compute, and writes a `Rekeying`:
the stock configuration, its class, and the place of every tensor of the checkpoint. Missing and unexpected
tensors and wrong shapes are then known from the files' headers, before a single weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from partsong.errors import ArgumentError, UnsupportedError

__all__ = ["Fields", "Loader", "WeightPlace", "Rekeying", "experts", "same_names", "shared_settings", "stock_layer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPlace:
    """Says where (a part of) a tensor of the checkpoint goes.

    Attributes:
        target: name of the stock module's parameter or buffer.
        index: what of the target it fills: an expert, or an expert and its rows; () is all of it.
        source: first and last + 1 row of the checkpoint's tensor that goes there; None is all of it.
    """

    target: str
    index: tuple[int | slice, ...] = ()
    source: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rekeying:
    """Describes how a checkpoint is loaded into a stock module.

    Attributes:
        model_class: the stock class, with its language-model head.
        config: its configuration.
        places: by the checkpoint's tensor name.
        zero: targets no tensor fills, which stay 0.
    """

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    places: Mapping[str, tuple[WeightPlace, ...]]
    zero: tuple[str, ...] = ()


#: Fields of any transformers configuration that no forward reads: names, bookkeeping, training, sampling.
_IDLE = frozenset(
    """
    architectures auto_map model_type torch_dtype dtype transformers_version name_or_path use_cache return_dict
    initializer_range attention_dropout output_attentions output_hidden_states output_router_logits
    router_aux_loss_coef bos_token_id eos_token_id pad_token_id sep_token_id mask_token_id decoder_start_token_id
    tokenizer_class task_specific_params problem_type id2label label2id finetuning_params gradient_checkpointing
    max_position_embeddings pretraining_tp partsong_adapter attn_implementation
    """.split()  # noqa: SIM905
)


@dataclass(slots=True)
class Fields:
    """Holds a configuration's fields and checks that each is read, changes nothing, or has the one value supported.

    Attributes:
        config: the fields of ``config.json``.
        family: for messages.
    """

    config: Mapping[str, Any]
    family: str
    _seen: set[str] = field(default_factory=set)

    def need(self, name: str) -> Any:
        """Returns the value of a field that must be there."""
        value = self.get(name)
        if value is None:
            raise ArgumentError(f"a {self.family} configuration needs {name!r}; this one has {sorted(self.config)}")
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a field; a missing field and None give the default."""
        self._seen.add(name)
        value = self.config.get(name)
        return default if value is None else value

    def allow_only(self, **values: object) -> None:
        """Refuses another value of these fields than the one given; a missing field and None pass.

        A tuple gives several values that pass.
        """
        for name, value in values.items():
            self._seen.add(name)
            stated = self.config.get(name)
            allowed = value if isinstance(value, tuple) else (value,)
            if stated is not None and stated not in allowed:
                raise UnsupportedError(
                    f"this {self.family} checkpoint has {name} = {stated!r}; the stock module that is loaded "
                    f"computes {' or '.join(repr(v) for v in allowed)} only"
                )

    def ignore(self, *names: str) -> None:
        """Marks fields that do not change the forward."""
        self._seen.update(names)

    def refuse_unread(self) -> None:
        """Refuses fields that were not read, since their effect is unknown."""
        idle = self._seen | _IDLE
        if self.config.get("quantization_config") is not None:
            raise UnsupportedError(f"this {self.family} checkpoint is quantised; load one in floating point")
        stated = [n for n, value in self.config.items() if value is not None and n not in idle]
        left = [n for n in stated if not n.startswith(("_", "init_", "unsloth"))]
        left = [n for n in left if not n.endswith(("_token_id", "_token_ids"))]
        if left:
            raise UnsupportedError(
                f"this {self.family} configuration has fields that are not known here and may change the model: "
                f"{', '.join(sorted(left))}. If they change nothing, remove them from config.json"
            )

    def rotary(self) -> dict[str, Any]:
        """Returns plain rotary embedding parameters, from either way of writing them; other kinds are refused."""
        stated = self.get("rope_parameters") or self.get("rope_scaling") or {}
        self.ignore("rope_parameters", "rope_scaling", "rope_theta")
        kind = stated.get("rope_type", stated.get("type", "default"))
        extra = set(stated) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if kind != "default" or extra:
            raise UnsupportedError(f"this {self.family} checkpoint has scaled rotary embeddings {dict(stated)}")
        theta = stated.get("rope_theta") or self.need("rope_theta")
        return {"rope_type": "default", "rope_theta": float(theta)}


def shared_settings(fields: Fields) -> dict[str, Any]:
    """Reads the settings that most configurations name like transformers."""
    heads = fields.need("num_attention_heads")
    return {
        "vocab_size": fields.need("vocab_size"),
        "hidden_size": fields.need("hidden_size"),
        "num_hidden_layers": fields.need("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("num_key_value_heads") or heads,
        "hidden_act": fields.get("hidden_act", "silu"),
        "rms_norm_eps": fields.need("rms_norm_eps"),
        "rope_parameters": fields.rotary(),
        "tie_word_embeddings": bool(fields.get("tie_word_embeddings", False)),
        "eos_token_id": fields.get("eos_token_id"),
    }


def new_names(names: Mapping[str, str]) -> dict[str, tuple[WeightPlace, ...]]:
    """Maps whole tensors, by the checkpoint's names to the module's."""
    return {name: (WeightPlace(target=target),) for name, target in names.items()}


def same_names(names: Iterable[str]) -> dict[str, tuple[WeightPlace, ...]]:
    """Maps tensors that keep their names."""
    return new_names({name: name for name in names})


def stock_layer(prefix: str, *, norms: bool, bias: Iterable[str] = (), mlp: bool = True) -> list[str]:
    """Lists the names of a Llama-like layer's tensors in transformers.

    Args:
        prefix: such as "model.layers.0.".
        norms: q_norm and k_norm are there.
        bias: projections of the attention that have one.
        mlp: gate_proj, up_proj and down_proj are there (a mixture of experts has others).
    """
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names += [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    names += [f"self_attn.{p}_proj.bias" for p in bias]
    names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if norms else []
    names += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")] if mlp else []
    return [prefix + name for name in names]


def experts(prefix: str, count: int, width: int) -> dict[str, tuple[WeightPlace, ...]]:
    """Stacks single experts' tensors: transformers keeps gate and up of all experts in one, and down in another.

    Args:
        prefix: that of the names, in the checkpoint as in the module, such as "model.layers.1.mlp.experts.".
        count: experts.
        width: rows of gate_proj and of up_proj.
    """
    places = {}
    for e in range(count):
        for name, index in (("gate", (e, slice(0, width))), ("up", (e, slice(width, 2 * width)))):
            places[f"{prefix}{e}.{name}_proj.weight"] = (WeightPlace(target=f"{prefix}gate_up_proj", index=index),)
        places[f"{prefix}{e}.down_proj.weight"] = (WeightPlace(target=f"{prefix}down_proj", index=(e,)),)
    return places


def expert_layers(layers: int, count: int, width: int) -> dict[str, tuple[WeightPlace, ...]]:
    """Maps the layers of a Qwen3-MoE under its own names; `count` experts of `width` rows each."""
    places = {}
    for prefix in (f"model.layers.{layer}." for layer in range(layers)):
        places |= same_names([*stock_layer(prefix, norms=True, mlp=False), f"{prefix}mlp.gate.weight"])
        places |= experts(f"{prefix}mlp.experts.", count, width)
    return places


def outer_weights(tied: bool) -> dict[str, tuple[WeightPlace, ...]]:
    """Maps weights outside the layers; an output embedding `tied` to the input is not in the file."""
    return same_names(["model.embed_tokens.weight", "model.norm.weight", *([] if tied else ["lm_head.weight"])])


#: A family's loader: from the fields of ``config.json`` to the way into a stock module. It raises UnsupportedError for
#: a field that is unknown or has a value the stock module does not compute, and ArgumentError for one that is missing.
Loader = Callable[[Mapping[str, Any]], Rekeying]

"""Runs on every rank: language models cut over ranks, against the same models whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.distributed.tensor import DTensor
from transformers import BertConfig, BertForMaskedLM

from partsong import LayerPipeline, ShardedWeights, TensorParallel, TokenExperts, Ulysses
from partsong.kernels.speculation import costs
from partsong.kernels.speculation.registry import drafters_of
from partsong.ledger import Ledger
from partsong.parallel import Adapter, Mesh, Strategy, mesh_for, parallelize, predict, predict_memory
from partsong.parallel.token_experts.placement import measure_placement
from partsong.samplers.text import SpeculativeDecoder, decode, load_text_model
from partsong.samplers.text.causal import speculator_of
from partsong.samplers.text.runner import StockTextModel
from tests.newer_names import or_reason
from tests.parallel.ranks import error, gathered, refusal
from tests.tiny_models.diffusion_gemma import CANVAS, diffusion_gemma
from tests.tiny_models.text import causal_model

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
_DEEP = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
#: Families with what they need besides the usual sizes; three heads of keys do not divide by two ranks.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "olmo2": {},
    "phi3": {},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 12},
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "glm4_moe": _DEEP | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}
_SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
    "eos_token_id": None,
}
DENSE = ("llama", "qwen2", "qwen3", "gemma", "olmo2", "phi3", "gpt_neox")
#: How a model with a mask token is decoded: LLaDA and SDAR are re-keyed onto these.
MASKED = {"llada": ("llama", "mdlm"), "sdar": ("qwen3", "bd3")}
STRATEGIES: dict[str, Strategy] = {
    "tensor": TensorParallel(),
    "sharded": ShardedWeights(),
    "layers": LayerPipeline(smallest=1),
    "experts": TokenExperts(),
}
#: What transformers has no plan for.
REFUSED = {("olmoe", "layers"), *((family, "experts") for family in DENSE)}
#: Those that masked models and drafts are tried with.
DECODING = ("tensor", "layers")
RULES = ("entropy-bound", "kl-stable", "soft-tokens")
IDS = torch.tensor([[3, 5, 7, 9, 11, 2, 4], [6, 8, 10, 12, 14, 3, 5]])
NEW = 6


def model_of(family: str) -> Any:
    """A random model of three layers in float64."""
    model = causal_model(family, **_SIZES | FAMILIES[family])
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # others have no float64
    return model


def texts(model: Any, **options: Any) -> list[Any]:
    """What is decoded greedily and with noise."""
    return [decode(model, IDS, max_new_tokens=NEW, temperature=t, seed=3, **options).tokens for t in (0.0, 1.0)]


@torch.no_grad()
def held(model: Any) -> tuple[int, int]:
    """Bytes of a model's weights here, and of what a call leaves: logits, and keys and values."""
    out = model(IDS, use_cache=True)
    kept = [each for layer in out.past_key_values.layers for each in (layer.keys, layer.values)]
    # torch gives every rank memory for as many rows as the first one has, and the last ones use fewer.
    weights = [
        weight.to_local().untyped_storage().nbytes() if isinstance(weight, DTensor) else weight.nbytes
        for weight in model.parameters()
    ]
    return sum(weights), sum(each.nbytes for each in (out.logits, *kept))


@torch.no_grad()
def sent_by_routing(model: Any, ranks: int) -> list[int]:
    """Bytes that each rank sends for a call up to its states, counted token by token, where it has a run of experts."""
    seen: list[torch.Tensor] = []
    layers = [part for part in model.modules() if hasattr(part, "num_experts") and hasattr(part, "gate_up_proj")]
    hooks = [part.register_forward_pre_hook(lambda part, given: seen.append(given[1])) for part in layers]
    model.base_model(IDS)
    for hook in hooks:
        hook.remove()
    numbers = IDS.numel() * 48
    whole = [numbers * (ranks - 1)] * ranks  # a sum of all tokens
    if ranks > 2:
        shares = [numbers // ranks + (rank < numbers % ranks) for rank in range(ranks)]
        whole = [numbers - share + share * (ranks - 1) for share in shares]
    found = list(whole)  # the embeddings
    for chosen in seen:
        counts = [4 // ranks + (rank < 4 % ranks) for rank in range(ranks)]
        owner = [rank for rank, count in enumerate(counts) for _ in range(count)]
        tokens = [{owner[expert] for expert in token} for token in chosen.tolist()]
        results = [sum(rank in token for token in tokens) * 48 * (ranks - 1) for rank in range(ranks)]
        moved = results if max(results) <= min(whole) else whole
        found = [before + more for before, more in zip(found, moved, strict=True)]
    return [8 * numbers for numbers in found]


@torch.no_grad()
def placed(mesh: Mesh, file: str) -> dict[str, Any]:
    """Compares a model whose experts lie as a file says, and counts bytes with and without."""
    model = model_of("qwen3_moe")
    want, sent = model(IDS).logits, {}
    measure_placement(model, IDS, mesh.world_size, file)
    for name, placement in (("in order", None), ("placed", file)):
        with parallelize(model, TokenExperts(placement=placement), mesh=mesh):
            logits = model(IDS).logits
            model(IDS)
            with Ledger() as ledger:
                model.base_model(IDS)
        sent[name] = ledger.summary()["bytes_sent"], error(logits, want)
    return sent | {"after": error(model(IDS).logits, want)}


@torch.no_grad()
def compared(family: str, strategy: Strategy, mesh: Mesh) -> dict[str, Any]:
    """Compares logits and texts, counts bytes, and takes the plan off again."""
    model = model_of(family)
    routed = sent_by_routing(model, mesh.world_size)
    want, alone, weights = model(IDS).logits, texts(model), sum(weight.numel() for weight in model.parameters())
    with parallelize(model, strategy, mesh=mesh) as plan:
        for _ in range(2):  # calls in which the ranks compare what they read
            model(IDS)
        with Ledger() as ledger:
            model.base_model(IDS)
        sent = ledger.summary()["bytes_sent"]
        with Ledger() as whole:
            model(IDS)
        compares = 4 * 8 * (mesh.world_size - 1)  # four numbers to every other rank
        found = {
            "logits": error(model(IDS).logits, want),
            "same": texts(model) == alone,
            "sent": sent - compares,
            "predicted": plan.bytes_sent(IDS.numel()),
            "by routing": routed[mesh.rank],
            "share": sum(weight.numel() for weight in model.parameters()) / weights,
            "said": plan.explain(),
            "sent in a call": whole.summary()["bytes_sent"],
            "held": held(model),
        }
    prediction = predict(model, strategy, ranks=mesh.world_size, input_ids=IDS)
    found["predicted of a call"] = prediction.bytes_per_step[mesh.rank]
    memory = predict_memory(model, strategy, ranks=mesh.world_size, rank=mesh.rank, input_ids=IDS, use_cache=True)
    found["predicted to be held"] = memory.weights, memory.kept
    return found | {"after": error(model(IDS).logits, want)}


@torch.no_grad()
def masked(name: str, mesh: Mesh, rule: str, strategy: Strategy) -> bool:
    """Whether a masked model decodes the same texts over ranks, by a rule."""
    family, adapter = MASKED[name]
    model = model_of(family)
    model.config.mask_token_id = 60
    options = {"adapter": adapter, "rule": rule}
    alone = texts(model, **options)
    with parallelize(model, strategy, mesh=mesh):
        return texts(model, **options) == alone


def speculated(mesh: Mesh, strategy: Strategy) -> bool:
    """Whether ``generate`` with drafts writes the same over ranks."""
    model, drafted = model_of("llama"), SpeculativeDecoder()
    alone = model.generate(IDS, max_new_tokens=NEW, custom_generate=drafted, pad_token_id=0).tolist()
    with parallelize(model, strategy, mesh=mesh):
        return model.generate(IDS, max_new_tokens=NEW, custom_generate=drafted, pad_token_id=0).tolist() == alone


def costs_of_guesses(mesh: Mesh) -> tuple[float, ...]:
    """What guesses cost by this rank, where one rank has more and the other less than a small model."""
    model = model_of("llama")
    few = sum(weight.numel() for weight in model.parameters()) // 2
    with pytest.MonkeyPatch.context() as patch, parallelize(model, LayerPipeline(), mesh=mesh):
        patch.setattr(costs, "_SMALL", few)
        stock = load_text_model(model)
        assert isinstance(stock, StockTextModel)
        return speculator_of(stock, drafters_of("ngram")).costs


@torch.no_grad()
def others(mesh: Mesh) -> dict[str, float]:
    """Distances of a model with a LoRA under TensorParallel, and of an encoder under ShardedWeights."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    llama = inject_adapter_in_model(lora, model_of("llama")).double().eval()
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    bert = BertForMaskedLM(BertConfig(vocab_size=20, **sizes)).double().eval()
    found = {}
    for name, model, strategy in (("lora", llama, TensorParallel()), ("bert", bert, ShardedWeights())):
        want = model(IDS).logits
        with Mesh(**mesh_for((strategy,), mesh.world_size)) as own, parallelize(model, strategy, mesh=own):
            found[name] = error(model(IDS).logits, want)
    return found


@torch.no_grad()
def in_two_stacks(mesh: Mesh) -> dict[str, Any]:
    """Compares DiffusionGemma, whose encoder and decoder have their weights in common, under TensorParallel."""
    model, prompts = diffusion_gemma(num_global_key_value_heads=2), [IDS[0].tolist(), [3, 4]]
    encoder: Any = model.get_submodule("model.encoder.language_model")

    def states() -> tuple[torch.Tensor, torch.Tensor]:
        canvas = model(input_ids=IDS[:1], decoder_input_ids=IDS[:1, :CANVAS]).logits
        return encoder(input_ids=IDS[:1]).last_hidden_state, canvas

    def canvases() -> list[Any]:
        options: dict[str, Any] = {"max_new_tokens": 2 * CANVAS, "rule": "renoise:max_steps=3"}
        return [decode(model, prompts, seed=seed, **options).tokens for seed in (2, 3)]

    want, alone, weights = states(), canvases(), sum(each.numel() for each in model.parameters())
    with parallelize(model, TensorParallel(), mesh=mesh) as plan:
        distance, same = max(map(error, states(), want)), canvases() == alone
        share = sum(each.numel() for each in model.parameters()) / weights
        with Ledger() as ledger:
            encoder(input_ids=IDS[:1])
        sent = ledger.summary()["bytes_sent"] - 4 * 8 * (mesh.world_size - 1)
        predicted = plan.bytes_sent(IDS.shape[1])
    after = max(map(error, states(), want))
    return {"error": distance, "same": same, "share": share, "sent": sent, "predicted": predicted, "after": after}


def refusals(mesh: Mesh) -> dict[str, str]:
    """What is refused, by what was asked."""
    wide, narrow = TensorParallel(), causal_model("llama", num_key_value_heads=1)
    staged, few = Mesh(pipe=mesh.world_size), Mesh(expert=mesh.world_size)
    sharded = Mesh(**mesh_for((ShardedWeights(),), mesh.world_size))
    one_expert = causal_model("mixtral", num_local_experts=1, num_experts_per_tok=1)
    llama = model_of("llama")
    other = {"wrong ids": IDS + (mesh.rank == 1)}

    def differs() -> None:
        with parallelize(llama, wide, mesh=mesh), torch.no_grad():
            llama(other["wrong ids"])

    def twice() -> None:
        with parallelize(llama, wide, mesh=mesh):
            parallelize(llama, wide, mesh=mesh)

    def with_gradients() -> None:
        with parallelize(model_of("llama"), wide, mesh=mesh) as plan, torch.enable_grad():
            plan.target(IDS)

    def asks_for_states() -> None:
        with parallelize(llama, LayerPipeline(), mesh=staged), torch.no_grad():
            llama(IDS, output_hidden_states=True)

    return {
        "twice": refusal(twice),
        "gradients": refusal(with_gradients),
        "adapter": refusal(lambda: parallelize(llama, wide, mesh=mesh, adapter=Adapter(family="mine", model="Mine"))),
        "one head of keys": refusal(lambda: parallelize(narrow, wide, mesh=mesh)),
        "no plan": refusal(lambda: parallelize(causal_model("gpt2"), wide, mesh=mesh)),
        "another strategy": refusal(lambda: parallelize(llama, Ulysses(), mesh=Mesh(ulysses=mesh.world_size))),
        "other tokens": refusal(differs),
        "two stacks": or_reason(
            lambda: refusal(lambda: parallelize(diffusion_gemma(), ShardedWeights(), mesh=sharded))
        ),
        "no plan for stages": refusal(lambda: parallelize(model_of("olmoe"), LayerPipeline(), mesh=staged)),
        "too few layers": refusal(
            lambda: parallelize(causal_model("llama", num_hidden_layers=1), LayerPipeline(), mesh=staged)
        ),
        "other layers": refusal(lambda: parallelize(llama, LayerPipeline(layers=(2, 2)), mesh=staged)),
        "states": refusal(asks_for_states),
        "no experts": refusal(lambda: parallelize(llama, TokenExperts(), mesh=few)),
        "too few experts": refusal(lambda: parallelize(one_expert, TokenExperts(), mesh=few)),
        "no placement": refusal(lambda: parallelize(model_of("mixtral"), TokenExperts(placement="nowhere"), mesh=few)),
    }


def loaded(folder: str, strategy: Strategy, mesh: Mesh, dtype: torch.dtype | None) -> dict[str, Any]:
    """Reads a checkpoint whole and in shares, and decodes with both."""
    whole = load_text_model(folder, dtype=dtype)
    model = load_text_model(folder, dtype=dtype, strategies=[strategy], mesh=mesh)
    assert isinstance(whole, StockTextModel) and isinstance(model, StockTextModel) and model.plan is not None
    options: dict[str, Any] = {"max_new_tokens": NEW, "seed": 3, "temperature": 1.0}
    same = decode(model, IDS, **options).tokens == decode(whole, IDS, **options).tokens
    # Views of whole weights would keep their memory.
    held = sum(weight.untyped_storage().nbytes() for weight in set(map(local, model.module.parameters())))
    share = held / sum(weight.nbytes for weight in whole.module.parameters())
    model.plan.undo()
    if isinstance(strategy, ShardedWeights):
        return {"same": same, "share": share, "undone": ""}
    return {"same": same, "share": share, "undone": refusal(lambda: decode(model, IDS, **options))}


def local(weight: Any) -> torch.Tensor:
    """This rank's part of a weight that torch shares out, or the weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def run_loaded(folders: dict[str, str]) -> list[dict[str, Any]]:
    """Every checkpoint under every strategy on two ranks."""
    found: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        with Mesh(**mesh_for((strategy,), 2)) as mesh:
            for key, folder in folders.items():
                if name == "experts" and key not in ("llada2", "mixtral"):
                    continue
                found[f"{key}, {name}"] = loaded(folder, strategy, mesh, None if "bfloat16" in key else torch.float64)
    with Mesh(data=2):
        return gathered(found)


def run(nproc: int, families: list[str], names: list[str], folder: str) -> list[dict[str, Any]]:
    """Every family under every strategy, and what else there is on two ranks."""
    found: dict[str, Any] = {}
    for name in names:
        strategy = STRATEGIES[name]
        with Mesh(**mesh_for((strategy,), nproc)) as mesh:
            known = [family for family in families if (family, name) not in REFUSED]
            found |= {f"{family}, {name}": compared(family, strategy, mesh) for family in known}
            if name in DECODING and nproc == 2:
                for rule in RULES:
                    found |= {f"{each}, {rule}, {name}": masked(each, mesh, rule, strategy) for each in MASKED}
                found[f"speculated, {name}"] = speculated(mesh, strategy)
            if name == "layers" and nproc == 2:
                found["costs"] = costs_of_guesses(mesh)
            if name == "experts" and nproc == 2:
                found["placed"] = placed(mesh, f"{folder}/placement of rank {mesh.rank}.json")
    with Mesh(tensor=nproc) as mesh:
        if nproc == 2:
            found["others"] = others(mesh)
            found["in two stacks"] = or_reason(lambda: in_two_stacks(mesh))
        found["refused"] = refusals(mesh)
        return gathered(found)

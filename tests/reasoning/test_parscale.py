"""ParScale on stock models: one stream is the base model to the bit, several are what plain loops work out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, StaticCache

from partsong.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from partsong.reasoning.local import LocalEngine
from partsong.reasoning.parscale.model import ParScale
from partsong.reasoning.parscale.weights import FAMILIES, StreamWeights, aggregate, smooth
from tests.reasoning.local_models import tokenizer
from tests.reasoning.parscale_reference import BUILT_LIKE_LLAMA, plain_logits, streams, tiny


def texts(num: int = 3, length: int = 7) -> Tensor:
    return torch.randint(3, 61, (num, length), generator=torch.Generator().manual_seed(1))


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_one_stream_is_the_base_model_to_the_bit(family: str) -> None:
    model, ids = tiny(family).float(), texts()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    before = model(ids).logits, model(ids, attention_mask=mask).logits, generated(model, ids)
    with ParScale(model, streams(model, 4)) as parscale:
        assert not torch.equal(model(ids).logits, before[0])
        with parscale.using(1):
            assert torch.equal(model(ids).logits, before[0])
            assert torch.equal(generated(model, ids), before[2])
        assert torch.equal(model(ids, past_key_values=parscale.cache(1)).logits, before[0])
        padded = model(ids, attention_mask=mask, past_key_values=parscale.cache(1)).logits
        assert torch.equal(padded, before[1])
        assert torch.equal(generated(model, ids, past_key_values=parscale.cache(1)), before[2])
    with ParScale(model):
        assert torch.equal(model(ids).logits, before[0])
    assert torch.equal(model(ids).logits, before[0])


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("family", BUILT_LIKE_LLAMA)
@torch.inference_mode()
def test_streams_equal_plain_loops(family: str, num: int) -> None:
    model, ids = tiny(family), texts()
    weights = streams(model, num)
    wanted = torch.stack([plain_logits(model, weights, row.tolist()) for row in ids])
    for kind in ("sdpa", "eager"):
        model.set_attn_implementation(kind)
        with ParScale(model, weights):
            found = model(ids).logits
        # Eager attention takes its softmax in float32, whatever the model's type.
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10 if kind == "sdpa" else 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_every_family_equals_itself_stream_by_stream(family: str) -> None:
    """The prefix in transformers' own cache, and masks and positions written out."""
    ids, num = texts(), 4
    model: Any = tiny(family)
    weights = streams(model, num)
    length, (rows, tokens) = weights.prefix_length, ids.shape
    mask = torch.ones(tokens, length + tokens, dtype=torch.bool).tril(length).expand(rows, 1, -1, -1)
    hidden = []
    for stream in range(num):
        cache = DynamicCache()
        for layer in range(2):
            part = (own[layer][stream].expand(rows, -1, -1, -1) for own in (weights.prefix_k, weights.prefix_v))
            cache.update(*part, layer)
        places = torch.arange(tokens)[None]
        out: Any = model.base_model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
        hidden.append(out.last_hidden_state)
    with ParScale(model.base_model, weights):  # a decoder alone is a model as well
        found: Any = model.base_model(ids).last_hidden_state
    close(found, weights.aggregate(torch.cat(hidden)))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_streams_begin_as_prompts(family: str) -> None:
    """Each stream is the model behind its prompt, and their first weights are equal."""
    ids, prompts, hidden = texts(), torch.tensor([[5, 9, 2], [40, 8, 8], [3, 60, 7], [11, 12, 13]]), []
    model: Any = tiny(family)
    for prompt in prompts:
        whole = torch.cat([prompt.expand(len(ids), -1), ids], dim=1)
        counted = model.base_model(whole).last_hidden_state[:, 3:]
        hidden.append(model.base_model(whole, position_ids=torch.arange(-3, 7)[None]).last_hidden_state[:, 3:])
        # Only distances between tokens count, but angles are worked out in float32.
        torch.testing.assert_close(hidden[-1], counted, rtol=0, atol=1e-5)
    head = model.get_output_embeddings()
    scale = getattr(model.config, "logits_scaling", 1.0)
    model.train()
    with ParScale(model, StreamWeights.from_prompts(model, prompts)) as parscale:
        assert model.training
        close(model.eval()(ids).logits, head(torch.stack(hidden).mean(0)) / scale)
        with pytest.raises(UnsupportedError, match="undo"):
            StreamWeights.from_prompts(model, prompts)
        parscale.undo()
    one = StreamWeights.from_prompts(model, prompts[:1], prefix_length=8, spread=0.5)
    fresh = StreamWeights.new(model, 1, prefix_length=8, spread=0.5)
    assert torch.equal(one.prefix_k[0][:, :, :5], fresh.prefix_k[0][:, :, :5])
    assert not torch.equal(one.prefix_v[1][:, :, 5:], fresh.prefix_v[1][:, :, 5:])
    for wrong in (prompts[0], prompts.double(), prompts[:, :0]):
        with pytest.raises(ArgumentError, match="token ids"):
            StreamWeights.from_prompts(model, wrong)
    with pytest.raises(ArgumentError, match="prefix_length=2"):
        StreamWeights.from_prompts(model, prompts, prefix_length=2)


@torch.inference_mode()
def test_tokens_may_come_in_any_pieces() -> None:
    model, ids = tiny("qwen3"), texts(2, 9)
    with ParScale(model, streams(model, 4)) as parscale:
        whole = model(ids).logits
        for pieces in ([1] * 9, [1, 8], [4, 5], [3, 1, 5], [9]):
            cache, found = parscale.cache(), []
            for piece in ids.split(pieces, dim=1):
                found.append(model(piece, past_key_values=cache).logits)
            close(torch.cat(found, dim=1), whole)
            assert cache.get_seq_length() == 9
        cache.crop(-4)
        close(model(ids[:, 5:], past_key_values=cache).logits, whole[:, 5:])
        cache.reset()
        close(model(ids, past_key_values=cache).logits, whole)
        with pytest.raises(ArgumentError, match="holds 9 tokens"):
            cache.crop(-10)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@torch.inference_mode()
def test_padding_on_the_left_changes_nothing(kind: str) -> None:
    model, lengths = tiny("llama"), (7, 3, 1)
    model.set_attn_implementation(kind)
    ids, mask = texts(), torch.ones(3, 7, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : 7 - length], mask[row, : 7 - length] = 0, 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with ParScale(model, streams(model, 2)) as parscale:
        found = model(ids, attention_mask=mask, position_ids=places).logits
        written = generated(model, ids, attention_mask=mask)
        for row, length in enumerate(lengths):
            alone = model(ids[row : row + 1, -length:]).logits
            torch.testing.assert_close(found[row, -length:], alone[0], rtol=0, atol=1e-10 if kind == "sdpa" else 1e-4)
            assert written[row, 7:].tolist() == generated(model, ids[row : row + 1, -length:])[0, length:].tolist()
        cache = parscale.cache()
        pieces = [
            model(ids[:, a:b], attention_mask=mask[:, :b], position_ids=places[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 2), (2, 6), (6, 7))
        ]
        kept = mask.bool()
        torch.testing.assert_close(torch.cat(pieces, dim=1)[kept], found[kept], rtol=0, atol=1e-4)


def generated(model: Any, ids: Tensor, **more: Any) -> Tensor:
    return model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **more})


@torch.inference_mode()
def test_generate_writes_what_a_loop_without_cache_writes() -> None:
    model, ids = tiny("qwen2"), texts()
    with ParScale(model, streams(model, 4), streams(model, 2)) as parscale:
        for num in (4, 2, 1):
            said = ids
            for _ in range(6):
                with parscale.using(num):
                    said = torch.cat([said, model(said, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            assert torch.equal(generated(model, ids, past_key_values=parscale.cache(num)), said)
            with parscale.using(num):
                assert torch.equal(generated(model, ids), said)
                assert torch.equal(generated(model, ids, prefill_chunk_size=2), said)
                assert torch.equal(generated(model, ids[:1], prompt_lookup_num_tokens=2), said[:1])


@torch.inference_mode()
def test_beams_and_samples_do_not_depend_on_the_cache() -> None:
    """Without a cache nothing is reordered, so equal beams mean every stream followed its row."""
    model, ids = tiny("llama"), texts()
    how: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    with ParScale(model, streams(model, 4)):
        for more in ({"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 4, "length_penalty": 2.0}):
            with_cache, without = (generated_all(model, ids, use_cache=use, **how, **more) for use in (True, False))
            assert torch.equal(with_cache.sequences, without.sequences)
            close(with_cache.sequences_scores, without.sequences_scores)
            assert {0, 1, 2} & set((with_cache.beam_indices % 3).flatten().tolist()), "some beam must have moved"
        for more in ({"do_sample": True, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5}):
            drawn = []
            for use in (True, False):
                torch.manual_seed(7)
                drawn.append(generated(model, ids, use_cache=use, **more))
            assert torch.equal(*drawn)


def generated_all(model: Any, ids: Tensor, **more: Any) -> Any:
    return generated(model, ids, **more)


@torch.inference_mode()
def test_a_cache_follows_its_rows_in_every_stream() -> None:
    model, ids = tiny("llama"), texts(3, 6)
    weights = streams(model, 2)
    order, mask = torch.tensor([2, 0, 0, 1]), torch.tensor([True, False, True])
    with ParScale(model, weights) as parscale:
        for change, rows in (
            (lambda cache: cache.reorder_cache(order[:3]), ids[order[:3]]),
            (lambda cache: cache.batch_select_indices(order), ids[order]),
            (lambda cache: cache.batch_select_indices(mask), ids[mask]),
            (lambda cache: cache.batch_repeat_interleave(2), ids.repeat_interleave(2, 0)),
        ):
            cache = parscale.cache()
            change(cache)  # an empty cache has nothing to follow
            model(ids[:, :4], past_key_values=cache)
            change(cache)
            close(model(rows[:, 4:], past_key_values=cache).logits, model(rows).logits[:, 4:])


@torch.inference_mode()
def test_embeddings_and_tuples_go_the_same_way() -> None:
    model, ids = tiny("llama"), texts()
    with ParScale(model, streams(model, 2)):
        logits = model(ids).logits
        embedded = model.get_input_embeddings()(ids)
        close(model(inputs_embeds=embedded).logits, logits)
        close(model(ids, return_dict=False)[0], logits)
        decoder: Any = model.base_model
        close(model.lm_head(decoder(ids, None)[0]), logits)
        whole = model(ids, output_hidden_states=True, position_ids=torch.arange(7)[None])
        close(whole.logits, logits)
        assert all(len(each) == 2 * len(ids) for each in whole.hidden_states)
        found = model(ids, use_cache=False)
        assert found.past_key_values is None
        close(found.logits, logits)


def test_undo_leaves_the_model_as_it_was() -> None:
    model, ids = tiny("llama"), texts()
    modules, names = [type(m) for m in model.modules()], list(model.state_dict())
    before = model(ids).logits
    parscale = ParScale(model, streams(model, 2))
    cache = parscale.cache()
    assert list(model.state_dict()) == names and [type(m) for m in model.modules()] == modules
    parscale.undo()
    parscale.undo()
    assert not model.base_model._forward_hooks and not model.base_model._forward_pre_hooks
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(UnsupportedError, match="no ParScale attached"):
        model(ids, past_key_values=cache)


def test_weights_are_smoothed_and_sum_to_one() -> None:
    shares = torch.tensor([0.7, 0.3, 0.0], dtype=torch.float64)
    close(smooth(shares, 0.3), torch.tensor([0.49 + 0.1, 0.21 + 0.1, 0.1], dtype=torch.float64))
    assert torch.equal(smooth(shares, 0.0), shares)
    close(smooth(shares, 1.0), torch.full((3,), 1 / 3, dtype=torch.float64))
    fresh = StreamWeights.new(tiny("llama"), 3)
    hidden = torch.randn(6, 5, 32, dtype=torch.float64)
    joined, weights = aggregate(hidden, fresh.aggregate_layer, 3, 0.2)
    close(weights, torch.full((2, 5, 3), 1 / 3, dtype=torch.float64))
    close(joined, torch.stack([hidden[row::2].mean(0) for row in range(2)]))
    half = aggregate(hidden.bfloat16(), fresh.aggregate_layer.bfloat16(), 3, 0.0)
    assert half[0].dtype == torch.bfloat16 and half[1].dtype == torch.float32


def test_fresh_weights_follow_their_seed() -> None:
    model = tiny("llama")
    first, same, other = (StreamWeights.new(model, 2, seed=seed) for seed in (0, 0, 1))
    state, again, another = (each.state_dict() for each in (first, same, other))
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    assert not torch.equal(state["prefix_k.0"], another["prefix_k.0"])
    assert not torch.equal(state["prefix_k.0"], state["prefix_v.0"])
    assert first.prefix_k[0].dtype == torch.float64
    assert first.prefix_k[0].shape == (2, 2, 48, 8)
    wide = StreamWeights.new(model, 2, prefix_length=400, spread=0.5)
    assert abs(float(wide.prefix_v[1].detach().std()) - 0.5) < 0.02


def refusals() -> list[Any]:
    return [
        pytest.param(lambda: ParScale(object()), ArgumentTypeError, "object", id="no model"),  # type: ignore[arg-type]
        pytest.param(lambda: ParScale(gpt2()), UnsupportedError, "'gpt2'", id="family"),
        pytest.param(lambda: ParScale(tiny("mistral", sliding_window=9)), UnsupportedError, "window of 9", id="window"),
        pytest.param(
            lambda: ParScale(tiny("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)),
            UnsupportedError,
            "sliding_attention",
            id="some windows",
        ),
        pytest.param(lambda: ParScale(long_rope()), UnsupportedError, "longrope", id="rotary"),
        pytest.param(lambda: attached(num_streams=3), ArgumentError, "weights for 1, 2;", id="no such streams"),
        pytest.param(lambda: attached(num_streams=True), ArgumentError, "num_streams=True", id="no number"),
        pytest.param(lambda: attached().cache(8), ArgumentError, "8 streams asked for", id="no such cache"),
        pytest.param(lambda: ParScale(tiny("llama"), 2), ArgumentTypeError, "int", id="no weights"),  # type: ignore[arg-type]
        pytest.param(
            lambda: ParScale(tiny("llama"), streams(tiny("llama", num_hidden_layers=3), 2)),
            ArgumentError,
            "num_layers 3 against 2",
            id="other sizes",
        ),
        pytest.param(
            lambda: ParScale(tiny("llama"), streams(tiny("llama"), 2), streams(tiny("llama"), 2)),
            ArgumentError,
            "two weights for 2",
            id="twice the same number",
        ),
        pytest.param(lambda: streams(tiny("llama"), 0), ArgumentError, "num_streams=0; use a positive", id="no stream"),
        pytest.param(
            lambda: streams(tiny("llama"), 2, prefix_length=0), ArgumentError, "prefix_length=0", id="no prefix"
        ),
        pytest.param(lambda: streams(tiny("llama"), 2, smoothing=1.5), ArgumentError, "smoothing=1.5", id="smoothing"),
    ]


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8))


def long_rope() -> Any:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
    return tiny("phi3", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors})


def attached(**more: Any) -> ParScale:
    model = tiny("llama")
    return ParScale(model, streams(model, 2), **more)


@pytest.mark.parametrize(("make", "kind", "said"), refusals())
def test_what_cannot_be_attached_is_refused(make: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        make()


def test_a_second_attachment_is_refused() -> None:
    parscale = attached()
    with pytest.raises(UnsupportedError, match="undo"):
        ParScale(parscale.model)


def test_calls_that_would_be_wrong_are_refused() -> None:
    parscale, ids = attached(), texts()
    model: Any = parscale.model
    filled, offloaded, other, stranger = DynamicCache(), DynamicCache(), attached(), attached()
    offloaded.offloading = True  # made so, it asks for a stream, which a torch for GPUs lacks where there are none
    with parscale.using(1):
        model(ids, past_key_values=filled)
    with pytest.raises(UnsupportedError, match="DynamicCache of 7 tokens"):
        model(ids, past_key_values=filled)
    with pytest.raises(UnsupportedError, match="StaticCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(UnsupportedError, match="OffloadedCache|DynamicCache"):
        model(ids, past_key_values=offloaded)
    with pytest.raises(ArgumentError, match="belongs to other weights"):
        model(ids, past_key_values=stranger.cache())
    stranger.undo()
    stranger = ParScale(stranger.model, streams(stranger.model, 8))
    with pytest.raises(ArgumentError, match="8 streams asked for"):
        model(ids, past_key_values=stranger.cache())
    given = DynamicCache()
    following = model(ids, past_key_values=given).past_key_values
    assert following.get_seq_length() == 7
    with pytest.raises(ArgumentError, match="was replaced"):
        model(ids[:, :1], past_key_values=given)
    with pytest.raises(UnsupportedError, match="marks padding"):
        model(ids, attention_mask=torch.ones(3, 1, 7, 7, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="packed"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(UnsupportedError, match="gradient checkpointing"):
        model(ids)
    model.gradient_checkpointing_disable()
    model.eval()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedError, match="flex_attention"):
        model(ids)
    other.undo()


def test_the_engine_does_not_run_streams_wrong() -> None:
    """LocalEngine lays all texts in one row, which streams cannot be told apart in."""
    parscale = attached()
    engine: Any = LocalEngine(parscale.model, tokenizer=tokenizer())
    import asyncio

    from tests.reasoning.local_models import all_of, request

    with pytest.raises(UnsupportedError, match="partsong_local"):
        asyncio.run(all_of(engine, [request("abc")]))

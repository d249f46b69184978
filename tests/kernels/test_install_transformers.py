"""transformers with partsong's attention: real tiny models give the numbers they give with their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partsong.errors import ArgumentError, UnsupportedError
from partsong.kernels.install import install
from partsong.kernels.install_transformers import transformers_attention
from tests.kernels.oracle import inputs, oracle


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}


def tiny(name: str, **options):
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    heads = {"Bert": "BertModel", "T5": "T5ForConditionalGeneration"}
    return getattr(transformers, heads.get(name, f"{name}ForCausalLM"))(config).eval()


def left_padded():
    ids = torch.randint(1, 61, (3, 11))
    mask = torch.ones_like(ids)
    for row, empty in enumerate((4, 0, 7)):
        mask[row, :empty] = ids[row, :empty] = 0
    return ids, mask


def logits(model, implementation: str, ids, mask=None, **options):
    model.set_attn_implementation(implementation)
    return model(ids, attention_mask=mask, **options)[0]


def worst(result, expected, mask=None) -> float:
    keep = slice(None) if mask is None else mask.bool()
    return float((result[keep] - expected[keep]).abs().max())


@pytest.mark.parametrize(("peer", "dtype", "error"), [("sdpa", torch.float64, 1e-10), ("eager", torch.float32, 2e-6)])
def test_transformers_grouped_heads_and_left_padding(peer, dtype, error) -> None:
    """eager is no peer in float64: it masks with that dtype's minimum, takes its softmax in float32, and gets NaN."""
    model = tiny("Llama").to(dtype)
    ids, mask = left_padded()
    with install(transformers=True):
        for padding in (None, mask):
            result = logits(model, "partsong", ids, padding)
            assert worst(result, logits(model, peer, ids, padding), padding) <= error


def test_transformers_generates_with_a_cache() -> None:
    model = tiny("Llama")
    ids, mask = left_padded()

    def sample(implementation: str, **options) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        return model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, **options)

    with install(transformers=True):
        expected = sample("eager")
        assert expected.shape == (3, 20)
        assert torch.equal(sample("partsong"), expected)
        assert torch.equal(sample("partsong", use_cache=False), expected)


@pytest.mark.parametrize("steps", [(6, 1, 4), (1, 10), (11,)])
def test_transformers_caches_of_both_kinds(steps) -> None:
    """A growing cache, and a static one whose unused end must not be seen, in chunks of several tokens."""
    from transformers import DynamicCache, StaticCache

    model = tiny("Llama").double()
    ids, _ = left_padded()
    with install(transformers=True):
        expected = logits(model, "sdpa", ids)
        model.set_attn_implementation("partsong")
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
            parts, start = [], 0
            for step in steps:
                where = torch.arange(start, start + step)
                part = ids[:, start : start + step]
                parts.append(model(part, past_key_values=cache, position_ids=where[None]).logits)
                start += step
            assert worst(torch.cat(parts, 1), expected) <= 1e-10, type(cache).__name__


def test_transformers_sliding_window() -> None:
    model = tiny("Mistral", sliding_window=4).double()
    ids, mask = left_padded()
    with install(transformers=True):
        result = logits(model, "partsong", ids, mask)
        assert worst(result, logits(model, "sdpa", ids, mask), mask) <= 1e-10
        model.config.sliding_window = 16
        assert worst(logits(model, "partsong", ids, mask), result, mask) > 1e-4


def test_transformers_attention_sinks() -> None:
    options = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    model = tiny("GptOss", **options)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    ids, mask = left_padded()
    with install(transformers=True):
        result = logits(model, "partsong", ids, mask)
        assert worst(result, logits(model, "eager", ids, mask), mask) <= 2e-6


def test_transformers_encoders_see_both_ways() -> None:
    model = tiny("Bert", num_key_value_heads=None).double()
    ids, mask = left_padded()
    with install(transformers=True):
        for padding in (None, mask):
            result = logits(model, "partsong", ids, padding)
            assert worst(result, logits(model, "sdpa", ids, padding), padding) <= 1e-10
            assert worst(result, logits(model, "eager", ids, padding), padding) <= 1e-6


def test_transformers_position_biases_and_cross_attention() -> None:
    """T5 adds a learned bias to the logits, in an encoder, a causal decoder with a cache, and across the two."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    model = tiny("T5", **sizes).double()
    ids, mask = left_padded()
    with install(transformers=True):
        target = ids[:, :5]
        result = logits(model, "partsong", ids, mask, decoder_input_ids=target)
        assert worst(result, logits(model, "eager", ids, mask, decoder_input_ids=target)) <= 1e-6
        one = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        model.set_attn_implementation("partsong")
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False), one)


def test_transformers_values_of_another_head_size() -> None:
    q, k, v = inputs(2, 4, 2, 5, 5, 8)
    for values in (v[..., :3], torch.cat([v, v], -1)):
        result, weights = transformers_attention(nn.Identity(), q, k, values, None, is_causal=True)
        causal = torch.ones(5, 5, dtype=torch.bool).tril()
        columns = [oracle(q, k, part, mask=causal)[0] for part in torch.tensor_split(pad_to(values, 16), 2, -1)]
        expected = torch.cat(columns, -1)[..., : values.shape[-1]].transpose(1, 2)
        assert weights is None
        assert result.is_contiguous()
        assert float((result - expected).abs().max()) <= 1e-12


def pad_to(x: torch.Tensor, width: int) -> torch.Tensor:
    return nn.functional.pad(x, (0, width - x.shape[-1]))


REFUSED = {
    "dropout 0.1": {"dropout": 0.1},
    "softcap=30.0": {"softcap": 30.0},
    "attention weights": {"output_attentions": True},
    "paged cache": {"cache": object()},
    "3 sinks for 4 heads": {"s_aux": torch.zeros(3)},
    "window of 4 over 7 keys": {"sliding_window": 4},
    "packed sequences": {"cu_seq_lens_q": torch.tensor([0, 2, 5])},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_transformers_ignores_nothing_silently(reason) -> None:
    q, k, v = inputs(1, 4, 2, 5, 7, 8)
    with pytest.raises(UnsupportedError, match=reason):
        transformers_attention(nn.Identity(), q, k, v, None, **REFUSED[reason])
    if reason in ("window of 4 over 7 keys", "packed sequences"):  # a mask says what these do
        mask = torch.ones(1, 1, 5, 7, dtype=torch.bool)
        out, _ = transformers_attention(nn.Identity(), q, k, v, mask, **REFUSED[reason])
        assert float((out.transpose(1, 2) - oracle(q, k, v)[0]).abs().max()) <= 1e-12


@pytest.mark.parametrize("given", [None, True, False])
def test_transformers_no_mask_is_causal_at_the_last_key(given) -> None:
    q, k, v = inputs(2, 4, 2, 5, 7, 8)
    module = nn.Identity()
    module.is_causal = given is None  # the module's own word holds where none is given
    out, _ = transformers_attention(module, q, k, v, None, is_causal=given)
    causal = None if given is False else torch.ones(5, 7, dtype=torch.bool).tril(2)
    assert float((out.transpose(1, 2) - oracle(q, k, v, mask=causal)[0]).abs().max()) <= 1e-12
    out, _ = transformers_attention(module, q[:, :, :1], k, v, None, is_causal=given)
    assert float((out.transpose(1, 2) - oracle(q[:, :, :1], k, v)[0]).abs().max()) <= 1e-12


def test_transformers_refuses_more_causal_queries_than_keys() -> None:
    q, k, v = inputs(1, 2, 2, 7, 5, 8)
    with pytest.raises(UnsupportedError, match="7 queries to 5 keys"):
        transformers_attention(nn.Identity(), q, k, v, None)


def test_transformers_softcapped_models_raise() -> None:
    model = tiny("Gemma2", head_dim=8)
    with install(transformers=True):
        model.set_attn_implementation("partsong")
        with pytest.raises(UnsupportedError, match="softcap"):
            model(torch.ones(1, 3, dtype=torch.long))


def test_transformers_forgets() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    before = [dict(table._global_mapping) for table in (AttentionInterface, AttentionMaskInterface)]
    model, (ids, _) = tiny("Llama"), left_padded()
    installed = install(transformers=True)
    assert installed.places == ("transformers",)
    with pytest.raises(ArgumentError, match="already"):
        install(transformers=True)
    model.set_attn_implementation("partsong")
    installed.undo()
    installed.undo()
    assert installed.places == ()
    assert [dict(table._global_mapping) for table in (AttentionInterface, AttentionMaskInterface)] == before
    with pytest.raises(KeyError, match="partsong"):
        model(ids)
    model.set_attn_implementation("sdpa")
    model(ids)


def test_transformers_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.AttentionMaskInterface, "_global_mapping", None)
    with pytest.raises(UnsupportedError, match="in another form than 5.23"):
        install(transformers=True)
    assert "partsong" not in transformers.AttentionInterface._global_mapping

"""Plans for language models: bytes, memory and seconds against what can be counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from partsong.cli import main
from partsong.planner.hardware import Machine
from partsong.planner.machines import machine_named
from partsong.planner.texts import TextAdvice, plan_texts

LAYERS, WIDTH, INNER, HEADS, KEYS, VOCABULARY, PROMPT, ROWS = 6, 256, 640, 8, 4, 512, 48, 3
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}
#: Numbers of one layer's weights: attention, feed-forward, two norms.
LAYER = WIDTH * (2 * WIDTH + 2 * WIDTH * KEYS // HEADS) + 3 * WIDTH * INNER + 2 * WIDTH


def machine(devices: str, **changes: float) -> Machine:
    """A machine whose operators begin at once, so that seconds are those of memory and arithmetic."""
    found = machine_named(devices, "pcie4")
    return replace(found, device=replace(found.device, **{"dispatch": 0.0, "least": 0.0, "cache": 0.0, **changes}))


def advice(devices: str, **changes: float) -> TextAdvice:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().eval()
    return plan_texts(model, machine(devices, **changes), prompt=PROMPT, rows=ROWS)


def test_a_token_reads_the_weights_and_keys_of_one_device() -> None:
    serial = advice("1x4090").serial
    keys = 2 * LAYERS * ROWS * PROMPT * KEYS * (WIDTH // HEADS) * 2
    weights = 2 * (LAYERS * LAYER + 2 * VOCABULARY * WIDTH + WIDTH)
    assert (serial.weights, serial.keys) == (weights, keys)
    read = (weights - 2 * VOCABULARY * WIDTH + keys) / machine(
        "1x4090"
    ).device.bandwidth  # a few rows of the embeddings
    assert read <= serial.seconds <= 3 * read
    assert serial.tokens_per_second == pytest.approx(ROWS / serial.seconds)
    assert serial.memory >= weights + keys


def test_ranks_hold_and_send_what_is_counted_by_hand() -> None:
    rows = {row.strategy: row for row in advice("2x4090").rows}
    alone = advice("1x4090").serial
    states, logits = ROWS * WIDTH * 2, ROWS * VOCABULARY // 2 * 2
    # Two ranks swap what they add up: the embeddings, and twice in a layer; comparisons are two numbers and more.
    assert 0 <= rows["tensor-parallel"].bytes_sent - ((2 * LAYERS + 1) * states + logits) <= 64
    assert 0 <= rows["layer-pipeline"].bytes_sent - (2 * states + logits) <= 64
    for name in ("tensor-parallel", "layer-pipeline"):
        norms = 2 * (2 * LAYERS + 1) * WIDTH
        assert alone.weights / 2 <= rows[name].weights <= alone.weights / 2 + norms
        assert rows[name].keys == alone.keys // 2
    assert rows["layer-pipeline"].seconds > alone.seconds
    assert rows["tensor-parallel"].prompt_seconds > 0
    assert alone.seconds < rows["sharded-weights"].seconds


def test_what_fits_decides() -> None:
    small = advice("2x4090", memory=advice("1x4090").serial.weights)
    assert not small.fits_serial and small.choice is not None and small.choice.strategy != "serial"
    assert "one device would need 0.0 GB" in small.sentence
    nothing = advice("2x4090", memory=1e5)
    assert nothing.choice is None and nothing.sentence.startswith("Nothing fits")
    assert {each.strategy for each in nothing.refused} >= {"tensor-parallel", "layer-pipeline", "sharded-weights"}
    reasons = {each.strategy: each.reason for each in nothing.refused}
    assert "it has no layers of experts" in reasons["token-experts"] and "GB on a device" in reasons["layer-pipeline"]


def test_a_token_reads_only_the_experts_that_it_chose() -> None:
    experts, chosen = 8, 2
    with torch.device("meta"):
        config = MixtralConfig(**SIZES, num_local_experts=experts, num_experts_per_tok=chosen)
        model = MixtralForCausalLM(config).bfloat16().eval()
    found = plan_texts(model, machine("2x4090"), prompt=PROMPT)
    expert, bandwidth = 2 * 3 * WIDTH * INNER, machine("2x4090").device.bandwidth
    assert found.serial.weights > LAYERS * experts * expert
    assert LAYERS * chosen * expert / bandwidth < found.serial.seconds < LAYERS * experts * expert / bandwidth
    rows = {row.strategy: row for row in found.rows}
    assert rows["token-experts"].weights < 0.6 * found.serial.weights


def test_the_command_says_it_and_refuses_what_is_for_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    asked = ["plan", "--model", str(tmp_path), "--gpus", "2x4090"]
    out = tmp_path / "plan.json"
    assert run([*asked, "--prompt", str(PROMPT), "--batch", str(ROWS), "--json", str(out)]) == 0
    result, said = json.loads(out.read_text(encoding="utf-8")), capsys.readouterr().out
    assert result["prompt_tokens"] == PROMPT
    assert {"serial", "tensor-parallel"} <= {row["strategy"] for row in result["rows"]}
    assert "ms a token" in said and f"partsong text PROMPT --model {tmp_path}" in said
    for more, why in (
        (["--steps", "3"], "is a language model, which takes --prompt and --batch"),
        (["--prompt", "256"], "has 256 positions; use at most 255"),
    ):
        assert run([*asked, *more]) == 2
        assert why in capsys.readouterr().err


def run(arguments: list[str]) -> Any:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code

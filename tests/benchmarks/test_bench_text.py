"""The benchmark of text decoding: all sides of a contest make the same tokens in as many forwards."""

from __future__ import annotations

from benchmarks.text.contests import bench_text_model, run


def test_sides_agree_and_hold_less_memory() -> None:
    model = bench_text_model(width=64, layers=2, vocab=8192)
    rows = run(repeats=1, batches=(1, 3), new_tokens=32, block_size=8, steps_per_block=2, model=model)
    assert {row["side"] for row in rows if row["name"] == "masked"} == {
        "plain loop",
        "decode",
        "decode, prefix cache",
        "decode, dual cache",
    }
    for row in rows:
        assert row["forwards"] == (8 if row["name"] == "masked" else 32)
        if row["side"] in ("decode", "generate", "plain loop"):
            assert row["same_tokens"] == 1.0, row
    plain, ours = rows[:2]
    assert plain["side"] == "plain loop" and ours["side"] == "decode"
    assert ours["largest_tensor_mb"] < plain["largest_tensor_mb"] / 5

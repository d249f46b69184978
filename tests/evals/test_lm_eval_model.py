"""The lm-evaluation-harness model on local tasks, against the decoder and the likelihoods called directly.

Needs the harness and skips itself where it is not installed (``pip install 'partsong[eval]'``).
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
import tomllib
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-evaluation-harness is not installed: pip install 'partsong[eval]'", allow_module_level=True)

from lm_eval.tasks import TaskManager
from transformers import LlamaForCausalLM

from partsong.errors import ArgumentError
from partsong.evals.harness.likelihood import log_likelihood
from partsong.evals.harness.lm_eval_model import PartsongLM, main
from partsong.parallel import launch
from partsong.samplers.text import decode, load_text_model
from partsong_zoo.folders import save_folder
from partsong_zoo.lists import draw, examples
from partsong_zoo.lists.model import BOS, EOS, answer_text, build_model, build_tokenizer, token_ids


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models of random weights, large enough that their choices differ."""
    torch.manual_seed(0)
    made = {}
    for kind in ("mdlm", "ar"):
        model = build_model(kind, heads=1, depth=1)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(8.0 if weight.dim() == 2 else 1.0)
        made[kind] = tmp_path_factory.mktemp("models") / kind
        save_folder(model, build_tokenizer(), made[kind])
    return made


def load(folders: dict[str, Path], kind: str, **options: Any) -> PartsongLM:
    options = {"adapter": "mdlm" if kind == "mdlm" else None, "batch_size": 4} | options
    return PartsongLM(str(folders[kind]), **options)


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


# --- one call at a time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_likelihoods_are_those_of_the_library(folders: dict[str, Path], kind: str) -> None:
    lm = load(folders, kind)
    pairs = [(one.prompt, " " + one.answer) for one in examples(6, seed=2)]
    found = lm.loglikelihood([request(*pair) for pair in pairs])
    prompts = [[BOS, *token_ids(prompt)] for prompt, _ in pairs]
    answers = [token_ids(answer) for _, answer in pairs]
    module = LlamaForCausalLM.from_pretrained(folders[kind]).eval()
    for prompt, answer, (value, greedy) in zip(prompts, answers, found, strict=True):
        if kind == "ar":
            with torch.no_grad():
                logits = module(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            exact = float(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum())
            assert value == pytest.approx(exact, abs=1e-4)
            assert greedy == (logits.argmax(-1).tolist() == answer)
        else:
            few, many = (log_likelihood(lm.model, [prompt], [answer], num_pairs=num)[0] for num in (16, 200))
            assert abs(value - many.log_likelihood) < 5.0 * math.hypot(few.standard_error, many.standard_error) + 1e-4
    assert [lm.loglikelihood([request(*pair)])[0][0] for pair in pairs] == pytest.approx(
        [value for value, _ in found], abs=1e-4
    )
    assert ("likelihood_standard_error" in lm.get_model_info()) == (kind == "mdlm")


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_what_the_model_would_write_is_greedy(folders: dict[str, Path], kind: str) -> None:
    lm = load(folders, kind)
    prompt = draw("sort", random.Random(0), 3).prompt
    template = [[None] * 4]
    written = decode(lm.model, [[BOS, *token_ids(prompt)]], template=template, stop_token_ids=()).tokens[0]
    words = lm.tokenizer.convert_ids_to_tokens(written)
    other = "yak" if words[0] != "yak" else "ant"
    greedy = [
        taken
        for _, taken in lm.loglikelihood([request(prompt, " " + " ".join(w)) for w in (words, [other, *words[1:]])])
    ]
    assert greedy == [True, False]
    if kind == "mdlm":
        unchecked = load(folders, kind, check_greedy=False)
        assert unchecked.loglikelihood([request(prompt, " " + " ".join(words))])[0][1] is False


@pytest.mark.parametrize("kind", ["mdlm", "ar"])
def test_texts_are_those_of_the_decoder_in_any_order(folders: dict[str, Path], kind: str) -> None:
    lm = load(folders, kind, rule="quota:per_step=1", temperature=1.0, seed=3)
    prompts = [one.prompt for one in examples(5, seed=4)]
    options = [{"max_gen_toks": 6, "until": []}, {"max_gen_toks": 4, "do_sample": False, "until": "yak"}]
    asked = [request(prompt, options[index % 2]) for index, prompt in enumerate(prompts)]
    texts = lm.generate_until(asked)
    assert lm.generate_until(asked[::-1])[::-1] == texts
    for index, prompt in enumerate(prompts):
        if index % 2:
            tokens = decode(lm.model, [[BOS, *token_ids(prompt)]], rule="quota", max_new_tokens=4).tokens[0]
            assert texts[index].split() == answer_text([t for t in tokens if t > EOS]).partition("yak")[0].split()
    assert lm.generate_until([asked[0]] * 3)[0] == texts[0]
    assert len(set(lm.generate_until([asked[0]] * 8))) > 1
    info = lm.get_model_info()
    assert info["rule"] == "quota" and info["tokens_per_forward_all"] == 1.0
    assert sum(info["forwards"].values()) == info["tokens"] > 0


def on_ranks(folder: str, share: str | None) -> list[Any]:
    """What a rank answers: texts, and how likely one is."""
    lm = PartsongLM(folder, share=share, dtype="float64", temperature=1.0, seed=3)
    prompt = examples(1, seed=4)[0].prompt
    written = lm.generate_until([request(prompt, {"max_gen_toks": 6, "until": []})] * 2)
    return [written, lm.loglikelihood([request(prompt, " dog ant")])[0][0]]


@pytest.mark.parametrize("kind", [pytest.param("mdlm", marks=pytest.mark.full), "ar"])
def test_ranks_that_share_a_model_answer_as_one_does(folders: dict[str, Path], kind: str) -> None:
    texts, likely = launch(on_ranks, 2, str(folders[kind]), "sharded-weights")
    alone = on_ranks(str(folders[kind]), None)
    assert texts == alone[0] and likely == pytest.approx(alone[1], abs=1e-9)


def test_rolling_windows_cover_every_token_once(folders: dict[str, Path]) -> None:
    text = " ".join(one.answer for one in examples(12, seed=5))
    whole, cut = load(folders, "ar"), load(folders, "ar", max_length=16)
    ids = token_ids(text)
    assert len(ids) > 16
    by_hand = 0.0
    for low in range(0, len(ids), 15):
        prompt = [BOS] if low == 0 else ids[max(len(ids[: low + 15]) - 16, 0) : low]
        by_hand += log_likelihood(cut.model, [prompt], [ids[low : low + 15]])[0].log_likelihood
    assert cut.loglikelihood_rolling([request(text)])[0] == pytest.approx(by_hand, abs=1e-4)
    few = " ".join(text.split()[:10])
    assert whole.loglikelihood_rolling([request(few), request("")]) == pytest.approx(
        [log_likelihood(whole.model, [[BOS]], [token_ids(few)])[0].log_likelihood, 0.0], abs=1e-4
    )
    assert math.isfinite(load(folders, "mdlm", max_length=16).loglikelihood_rolling([request(text)])[0])


def test_encoding_puts_the_start_in_front_once(folders: dict[str, Path]) -> None:
    lm = load(folders, "ar")
    assert lm.tok_encode("ant bat") == lm.tok_encode("<bos> ant bat") == [BOS, *token_ids("ant bat")]
    assert lm.tok_encode("ant", add_special_tokens=False) == token_ids("ant")
    assert (lm.prefix_token_id, lm.eot_token_id) == (BOS, EOS) and lm.tokenizer_name
    lm.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}reply{% endif %}"
    )
    assert lm.apply_chat_template([{"role": "user", "content": "ant"}]) == "user ant reply"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rule": "dice"}, "no rule 'dice'"),
        ({"rule": "quota:per_step=2;by=up"}, "by='up'"),
        ({"cache": "prefix:radius=3"}, "no option 'radius'"),
        ({"batch_size": "auto"}, "sizes are not searched"),
        ({"max_length": 41}, "max_length=41"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"temperature": -1.0}, "temperature=-1.0"),
    ],
)
def test_refusals(folders: dict[str, Path], options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        load(folders, "mdlm", **options)


def test_requests_that_cannot_be_met_are_refused(folders: dict[str, Path]) -> None:
    lm = load(folders, "ar")
    with pytest.raises(ArgumentError, match="asks for top_p"):
        lm.generate_until([request("copy : ant =", {"temperature": 0.7, "top_p": 0.9})])
    assert lm.generate_until([request("copy : ant =", {"top_p": 0.9, "max_gen_toks": 2})])
    with pytest.raises(ArgumentError, match="max_gen_toks=99"):
        lm.generate_until([request("copy : ant =", {"max_gen_toks": 99})])
    with pytest.raises(ArgumentError, match="too many for the model"):
        lm.loglikelihood([request("copy", " ant" * 60)])
    with pytest.raises(TypeError, match="temprature"):
        load(folders, "ar", temprature=1.0)
    with pytest.raises(ArgumentError, match="needs tokenizer="):
        PartsongLM(lm.model)
    with pytest.raises(ArgumentError, match="ready to decode"):
        PartsongLM(lm.model, tokenizer=build_tokenizer(), dtype="float32")
    assert PartsongLM(lm.model, tokenizer=build_tokenizer()).max_length == 40


# --- the harness ------------------------------------------------------------------------------------------------------


def write_tasks(folder: Path, lm: PartsongLM) -> None:
    """Two tasks: writing, of which every other target is what the model writes, and choosing."""
    drawn = examples(4, seed=6, families=["copy", "sort"])
    texts = lm.generate_until([request(one.prompt, {"max_gen_toks": 6}) for one in drawn])
    docs = [
        {"q": one.prompt, "a": text if i % 2 else "no"} for i, (one, text) in enumerate(zip(drawn, texts, strict=True))
    ]
    (folder / "write.jsonl").write_text("\n".join(map(json.dumps, docs)) + "\n")
    choices = [{"q": one.prompt, "c": [one.answer, "yak yak"], "g": 0} for one in drawn]
    (folder / "choose.jsonl").write_text("\n".join(map(json.dumps, choices)) + "\n")
    head = (
        "task: {0}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {1}/{0}.jsonl}}, cache_dir: {1}/cache}}\n"
    )
    shared = head + "test_split: test\ndoc_to_text: '{{{{q}}}}'\n"
    (folder / "write.yaml").write_text(
        shared.format("write", folder) + "output_type: generate_until\n"
        "doc_to_target: '{{a}}'\ngeneration_kwargs: {until: ['#'], max_gen_toks: 6, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    (folder / "choose.yaml").write_text(
        shared.format("choose", folder) + "output_type: multiple_choice\n"
        "doc_to_choice: '{{c}}'\ndoc_to_target: '{{g}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )


def test_the_command_line_runs_local_tasks(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load(folders, "mdlm", rule="quota:per_step=2;by=entropy", num_pairs=3)
    write_tasks(tmp_path, lm)
    arguments = f"pretrained={folders['mdlm']},adapter=mdlm,rule=quota:per_step=2;by=entropy,num_pairs=3"
    command = ["lm_eval", "run", "--model", "partsong", "--model_args", arguments, "--tasks", "write,choose"]
    command += ["--include_path", str(tmp_path), "--batch_size", "4", "--output_path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", [*command, "--log_samples"])
    # The harness reads the thousands of tasks that come with it, for half a minute; ours are given.
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    # It asks twelve programs what machine this is.
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    main()
    results = json.loads(next((tmp_path / "out").rglob("results*.json")).read_text())
    assert results["results"]["write"]["exact_match,none"] == 0.5
    assert (
        results["config"]["rule"] == "quota:per_step=2,by=entropy" and results["config"]["tokens_per_forward_all"] > 1.0
    )
    samples = [json.loads(line) for line in next((tmp_path / "out").rglob("samples_choose*")).read_text().splitlines()]
    pairs = [(doc["doc"]["q"], " " + choice) for doc in samples for choice in doc["doc"]["c"]]
    direct = [value for value, _ in lm.loglikelihood([request(*pair) for pair in pairs])]
    logged = [float(one[0][0]) for doc in samples for one in doc["resps"]]
    assert logged == pytest.approx(direct, abs=1e-4)


def test_the_harness_finds_the_model() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("partsong") is PartsongLM and get_model("hf").__name__ == "HFLM"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["partsong"].partition(":")
    assert getattr(importlib.import_module(module), name) is PartsongLM


def test_models_of_transformers_are_taken_as_they_are(folders: dict[str, Path]) -> None:
    module = LlamaForCausalLM.from_pretrained(folders["ar"]).eval()
    lm = PartsongLM(module)
    assert lm.model.adapter.name == load_text_model(folders["ar"]).adapter.name == "causal"

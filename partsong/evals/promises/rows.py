"""Lists the promises that are measured: paper, promise, setting and how it is measured, a row for each."""

from __future__ import annotations

from partsong.evals.promises.evidence import Promise
from partsong.evals.promises.pictures import Forecast, Sampled
from partsong.evals.promises.thinking import Gain, Parts, Saving, Scaling

__all__ = ["PROMISES"]

_VOTE = "self-consistency:num={}"
_COUNTDOWNS = "the zoo's `sums` on fresh countdowns"
_SUMS = "the zoo's `sums` on fresh sums"
_PROGRAMS = "SmolLM2-135M on 30 problems of HumanEval"
_TWO = "two processes of one thread each on this machine"
_PREDICTED = "the planner's count or clock, nothing is computed"
#: Long videos have five times as many frames as those of training.
_LONG = ("--frames", "159")

PROMISES: tuple[Promise, ...] = (
    Promise(
        method="pdr",
        paper="Rethinking Thinking Tokens (PDR), arXiv 2510.01123",
        promise="11 points more than one chain of thought on AIME 2024, at the same length of the longest chain",
        setting=f"{_COUNTDOWNS}, against as many refinements one after another as its chain is long",
        measure=Gain(method="pdr:schedule=8-4-1", than="sequential-refinement:rounds=3", points=11),
    ),
    Promise(
        method="pdr against a vote",
        paper="Rethinking Thinking Tokens (PDR), arXiv 2510.01123",
        promise="(ours: is it worth its tokens?) more right than a vote for as many tokens",
        setting=f"{_COUNTDOWNS}, against a vote of 11, which writes as much",
        measure=Gain(method="pdr:schedule=8-4-1", than=_VOTE.format(11)),
        because="Right answers to a countdown are rare and wrong ones name no answer, which is where a vote is best.",
    ),
    Promise(
        method="rsa",
        paper="Recursive Self-Aggregation, arXiv 2509.26626",
        promise="more right than a vote of as many samples",
        setting=f"{_COUNTDOWNS}, population 8 for 3 generations against a vote of 16, which writes nearly as much",
        measure=Gain(method="rsa:population=8,generations=3", than=_VOTE.format(16)),
    ),
    Promise(
        method="deepprune",
        paper="DeepPrune, arXiv 2510.08483",
        promise="over 80 % fewer tokens within 3 points",
        setting=f"{_COUNTDOWNS}; the judge calls two beginnings of 12 tokens alike if their equations are",
        measure=Saving(
            method="deepprune:num=16,prefix_tokens=12", than=_VOTE.format(16), share=0.2, points=3, family="countdown"
        ),
        because="Texts are 25 tokens long: half is written before any can be pruned.",
    ),
    Promise(
        method="particle-filtering",
        paper="Particle-based inference scaling, arXiv 2502.01618",
        promise="4 to 16 times better scaling than search that scores whole texts",
        setting=f"{_SUMS}, 4 particles against the best of n, both by the same check of steps",
        measure=Scaling(method="particle-filtering:particles=4", than="best-of-n:num={}", factor=4, family="sum"),
    ),
    Promise(
        method="particle-filtering of 16",
        paper="Particle-based inference scaling, arXiv 2502.01618",
        promise="4 to 16 times better scaling than search that scores whole texts",
        setting=f"{_SUMS}, 16 particles against the best of n, both by the same check of steps",
        measure=Scaling(method="particle-filtering:particles=16", than="best-of-n:num={}", factor=4, family="sum"),
    ),
    Promise(
        method="beam-search",
        paper="Scaling LLM Test-Time Compute Optimally, arXiv 2408.03314",
        promise="over 4 times fewer tokens than best-of-n where budgets are small",
        setting=f"{_SUMS}, 4 beams of 4 against the best of n, both by the same check of steps",
        measure=Scaling(method="beam-search:beams=4,width=4", than="best-of-n:num={}", factor=4, family="sum"),
    ),
    Promise(
        method="compute-optimal",
        paper="Scaling LLM Test-Time Compute Optimally, arXiv 2408.03314",
        promise="over 4 times fewer tokens than best-of-n",
        setting=f"{_SUMS}; four probes choose the best of 2 to 32, against the best of n for all questions alike",
        measure=Scaling(method="compute-optimal:probes=4", than="best-of-n:num={}", factor=4, family="sum"),
    ),
    Promise(
        method="deepconf",
        paper="Deep Think with Confidence, arXiv 2508.15260",
        promise="up to 84.7 % fewer tokens than a vote, at least as right",
        setting=f"{_SUMS}, online with 8 samples to warm up of at most 32, against a vote of 32",
        measure=Saving(
            method="deepconf:num=32,warmup=8,top=0.9,group=8", than=_VOTE.format(32), share=0.153, family="sum"
        ),
    ),
    Promise(
        method="adaptive-consistency",
        paper="Let's Sample Step by Step, arXiv 2305.11860",
        promise="up to 7.9 times fewer samples than a vote, within 0.1 points",
        setting=f"{_SUMS}, against a vote of 32",
        measure=Saving(
            method="adaptive-consistency:num=32", than=_VOTE.format(32), share=1 / 7.9, points=0.1, family="sum"
        ),
    ),
    Promise(
        method="short-m",
        paper="Don't Overthink it (short-m@k), arXiv 2505.17813",
        promise="up to 40 % fewer tokens than a vote, about as right",
        setting=f"{_SUMS}, the 3 shortest of 16 against a vote of 16",
        measure=Saving(method="short-m:num=16,shortest=3", than=_VOTE.format(16), share=0.6, points=1, family="sum"),
        because="A short text here is one that has skipped a step.",
    ),
    Promise(
        method="parallel-probe",
        paper="Parallel-Probe, arXiv 2602.03845",
        promise="25.8 % fewer tokens than a vote, about as right",
        setting=f"{_SUMS}, eight samples asked every 16 tokens",
        measure=Saving(
            method="parallel-probe:num=8,interval=16",
            than=_VOTE.format(8),
            share=0.742,
            points=1,
            family="sum",
        ),
    ),
    Promise(
        method="parallel against sequential",
        paper="To Backtrack or Not to Backtrack, arXiv 2504.07052",
        promise="on countdowns parallel samples beat one search that corrects itself",
        setting=f"{_COUNTDOWNS}, a vote of 8 against 8 attempts one after another",
        measure=Gain(method=_VOTE.format(8), than="sequential-refinement:rounds=8"),
        because="`sums` never learned to go back; models trained for it are measured below.",
    ),
    Promise(
        method="decompose",
        paper="ParallelPrompt, arXiv 2506.18728",
        promise="up to 5 times sooner where a request has independent parts",
        setting=f"{_SUMS}, eight of them in a request, one after another and at once on one thread",
        measure=Parts(num=8, factor=5),
        because="Whether a model finds the parts of a request (75 % in the paper) is not measured here.",
    ),
    Promise(
        method="particle-gibbs",
        paper="Particle-based inference scaling, arXiv 2502.01618",
        promise="passes over a swarm, of which one text is held, gain over one pass",
        setting=f"{_SUMS}, 3 passes of 4 particles against one of 12, by the same check of steps",
        measure=Gain(
            method="particle-gibbs:particles=4,iterations=3", than="particle-filtering:particles=12", family="sum"
        ),
    ),
    Promise(
        method="plan-search",
        paper="PlanSearch, arXiv 2409.03733",
        promise="of 200 programs one is right for 77 % of LiveCodeBench's problems, 60.6 % without plans",
        setting=f"{_PROGRAMS}, four plans, against the best of 4, both by the examples in the prompts",
        measure=Gain(
            method="plan-search:observations=4,combine=1,num=4,critique=false",
            than="best-of-n:num=4",
            family="humaneval",
        ),
        because="A model that solves one problem in thirty has nothing to plan with.",
    ),
    Promise(
        method="edit-test-select (CodeMonkeys)",
        paper="CodeMonkeys, arXiv 2501.14723",
        promise="57.4 % of SWE-bench Verified, by edits, tests of its own and a choice among programs",
        setting=f"{_PROGRAMS}, four programs of two runs each, against the best of 4 by the examples in the prompts",
        measure=Gain(method="edit-test-select:trajectories=4,iterations=2", than="best-of-n:num=4", family="humaneval"),
        because="A model that solves one problem in thirty writes no test that tells programs apart.",
    ),
    Promise(
        method="displaced-patch (DistriFusion)",
        paper="DistriFusion, arXiv 2402.19481",
        promise="6.1x on eight A100s for SDXL at 3840 x 3840",
        setting=f"SDXL, eight A100s with NVLink; {_PREDICTED}",
        measure=Forecast(
            model="sdxl",
            strategy="displaced-patch",
            than="",
            gpus="8xa100",
            link="nvlink",
            size=3840,
            counts="seconds",
            share=1 / 6.1,
        ),
    ),
    Promise(
        method="displaced-patch on two ranks",
        paper="DistriFusion, arXiv 2402.19481",
        promise="pictures as good, faster; at the paper's share of the limit 1.5x on two",
        setting=f"`shapes`, {_TWO}",
        measure=Sampled(command="image", model="shapes", strategy="displaced-patch", factor=1.5, points=1),
        because="Pictures of 64 tokens are small work: a step of one rank takes 17 ms.",
    ),
    Promise(
        method="partial-patch (PCPP)",
        paper="PCPP, arXiv 2412.02962",
        promise="70 % fewer bytes than DistriFusion at eight devices",
        setting=f"SDXL on eight H100s; {_PREDICTED}",
        measure=Forecast(
            model="sdxl",
            strategy="partial-patch",
            than="displaced-patch",
            gpus="8xh100",
            link="nvlink",
            counts="bytes_sent",
            share=0.3,
        ),
    ),
    Promise(
        method="latent-parallel",
        paper="Latent Parallelism, arXiv 2512.07350",
        promise="up to 97 % fewer bytes than the baselines",
        setting=f"Wan 14B on four 4090s, against Ulysses; {_PREDICTED}",
        measure=Forecast(
            model="wan-14b", strategy="latent-parallel", than="ulysses", gpus="4x4090", counts="bytes_sent", share=0.03
        ),
    ),
    Promise(
        method="ulysses",
        paper="DeepSpeed Ulysses, arXiv 2309.14509",
        promise="2.5x faster than the sharded baseline of its time, at constant bytes a device",
        setting=f"HunyuanVideo on eight H100s, against one; {_PREDICTED}",
        measure=Forecast(
            model="hunyuan-video",
            strategy="ulysses",
            than="",
            gpus="8xh100",
            link="nvlink",
            counts="seconds",
            share=1 / 6,
        ),
        because="The paper's baseline is not built here; one device is, and 6x of 8 is asked.",
    ),
    Promise(
        method="usp",
        paper="USP, arXiv 2405.07719",
        promise="ring between machines and Ulysses within them beats either alone",
        setting=f"HunyuanVideo on two machines of eight H100s with 100 Gbit/s, against Ring; {_PREDICTED}",
        measure=Forecast(
            model="hunyuan-video",
            strategy="usp:ulysses_degree=8,ring_degree=2",
            than="ring",
            gpus="16xh100",
            link="nvlink",
            per_node=8,
            across="100gbit",
            counts="seconds",
            share=1.0,
        ),
    ),
    Promise(
        method="token-ring",
        paper="TokenRing, arXiv 2412.20501",
        promise="lower latency than a ring where links carry both ways",
        setting=f"Flux on four 4090s; {_PREDICTED}",
        measure=Forecast(
            model="flux-dev", strategy="token-ring", than="ring", gpus="4x4090", counts="seconds", share=1.0
        ),
        because="The gain is within what the planner can tell; its page says where it cannot win.",
    ),
    Promise(
        method="tensor-parallel (Megatron-LM)",
        paper="Megatron-LM, arXiv 1909.08053",
        promise="models that one device cannot hold, 76 % of linear scaling",
        setting=f"Flux on eight H100s with NVLink, against one; {_PREDICTED}",
        measure=Forecast(
            model="flux-dev",
            strategy="tensor-parallel",
            than="",
            gpus="8xh100",
            link="nvlink",
            counts="seconds",
            share=1 / (0.76 * 8),
        ),
    ),
    Promise(
        method="sharded-weights (ZeRO)",
        paper="ZeRO, arXiv 1910.02054",
        promise="weights of a device fall with the number of devices",
        setting=f"Flux on eight H100s, memory against one; {_PREDICTED}",
        measure=Forecast(
            model="flux-dev",
            strategy="sharded-weights",
            than="",
            gpus="8xh100",
            link="nvlink",
            counts="memory",
            share=0.5,
        ),
        because="Text encoders, activations and two gathered layers stay.",
    ),
    Promise(
        method="clip-parallel (Video-Infinity)",
        paper="Video-Infinity, arXiv 2406.16260",
        promise="long videos many times sooner than before, in step with the number of devices",
        setting=f"159 frames of `motion`, {_TWO}, against the same method on one",
        measure=Sampled(
            command="video", model="motion", strategy="clip-parallel:window=8", factor=1.6, points=0, options=_LONG
        ),
        because="Seconds are of the whole sampling; about one of them (texts, decoding, first calls) is not shared "
        "out. A step alone is 1.7x.",
    ),
    Promise(
        method="dual-parallel (DualParal)",
        paper="Minute-Long Videos with Dual Parallelisms, arXiv 2505.21070",
        promise="6.5x lower latency on eight devices; at that share of the limit 1.6x on two",
        setting=f"159 frames of `motion`, {_TWO}, against the same method on one",
        measure=Sampled(
            command="video",
            model="motion",
            strategy="dual-parallel:block_frames=8,context=8",
            factor=1.6,
            options=_LONG,
        ),
        because="Seconds are of the whole sampling, with the first block, which waits, and decoding.",
    ),
    Promise(
        method="timestep-pipeline (Live Avatar)",
        paper="Live Avatar, arXiv 2512.04677",
        promise="a step for each device, so frames as many times faster",
        setting=f"159 frames of `motion-causal`, {_TWO}, against the same method on one",
        measure=Sampled(
            command="video", model="motion-causal", strategy="timestep-pipeline", factor=1.6, options=_LONG
        ),
        because="Two seconds in all, with the pipeline's filling and decoding; steady streaming was 1.89x on another "
        "machine.",
    ),
    Promise(
        method="structure-guidance (ASGDiffusion)",
        paper="ASGDiffusion, arXiv 2412.06163",
        promise="patches of a large picture in parallel, so sooner with more devices",
        setting=f"`shapes` at twice its size, {_TWO}, against the same method on one",
        measure=Sampled(
            command="image",
            model="shapes",
            strategy="structure-guidance",
            factor=1.6,
            options=("--height", "128", "--width", "128"),
        ),
    ),
    Promise(
        method="time-parallel",
        paper="Solving nonlinear equations in parallel (Picard and ParaDiGMS), arXiv 2305.16317",
        promise="2 to 4x by steps in parallel, within a tolerance",
        setting=f"`shapes`, {_TWO}",
        measure=Sampled(
            command="image", model="shapes", strategy="time-parallel:window=2,tolerance=0.05", factor=2, points=1
        ),
        because="Two ranks compute two steps at a time; the paper has eight devices.",
    ),
    Promise(
        method="ulysses on two ranks",
        paper="DeepSpeed Ulysses, arXiv 2309.14509",
        promise="exact, and as many times faster as there are devices where work is large",
        setting=f"`shapes`, {_TWO}",
        measure=Sampled(command="image", model="shapes", strategy="ulysses", factor=1.6),
        because="Pictures of 64 tokens are small work: a step of one rank takes 17 ms.",
    ),
)

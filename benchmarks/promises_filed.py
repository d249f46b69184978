"""Lists promises whose measurement is older and still holds, a row for each with its file."""

from __future__ import annotations

from dataclasses import dataclass

from partsong.evals.promises.evidence import Verdict

__all__ = ["FILED", "Filed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Filed:
    """Holds a row of the table of promises that a dated file has measured.

    Attributes:
        method: by the name it has here.
        paper: title and number.
        promise: what the paper says of its method.
        measured: what the file says.
        verdict: whether the promise holds.
        because: why.
        file: the file, in ``benchmarks/results``.
    """

    method: str
    paper: str
    promise: str
    measured: str
    verdict: Verdict
    because: str
    file: str


FILED: tuple[Filed, ...] = (
    Filed(
        method="partial-patch, facts",
        paper="PCPP, arXiv 2412.02962",
        promise="pictures as good as DistriFusion's",
        measured="`shapes`, 100 captions: 96.2 % of the facts on 2 ranks, 95.9 % on 4 (serial 96.3 %), 53 % and 41 % "
        "of the bytes of `displaced-patch`",
        verdict="holds in part",
        because="0.1 and 0.4 points are within the error; a UNet loses more.",
        file="drift/2026-11-24-zoo-partial-patch",
    ),
    Filed(
        method="few steps (rCM)",
        paper="rCM, arXiv 2510.08431",
        promise="1 to 4 steps, 15 to 50 times faster, as good",
        measured="200 captions: 4 calls 98.3 ± 0.4 % of the facts, 2 calls 95.1 ± 0.7, 1 call 92.7 ± 0.9; the teacher "
        "with 56 calls 96.0 ± 0.6; 5.8x to 19.1x faster",
        verdict="holds",
        because="Four calls read better than their teacher's 56.",
        file="steps/2026-11-26-few-steps",
    ),
    Filed(
        method="any order (LPD)",
        paper="Locality-aware Parallel Decoding, arXiv 2507.01957",
        promise="256 tokens in 20 steps without loss",
        measured="`tiles`, 200 captions: 64 tokens in 8 steps 77.2 ± 1.3 % of the facts, in 64 steps 78.2 ± 1.4; 5.73x",
        verdict="holds",
        because="Its order by locality is within the error of a random one at 12 steps.",
        file="any-order/2026-11-25",
    ),
    Filed(
        method="expert-parallel (Decentralized Diffusion)",
        paper="Decentralized Diffusion Models, arXiv 2501.05450",
        promise="experts trained apart beat one model",
        measured="100 captions: four experts 96.9 ± 0.7 % of the facts, one model 95.5 ± 0.8",
        verdict="holds in part",
        because="Ahead by 1.4 points, which is within the error.",
        file="experts/2026-11-26-all",
    ),
    Filed(
        method="lagged-layers (AsyncDiff)",
        paper="AsyncDiff, arXiv 2406.06911",
        promise="half the latency with two components, as good",
        measured="100 captions: 15 rounds for 28 steps, 96.3 % of the facts (serial 96.3 %), 44.1 dB",
        verdict="holds",
        because="Rounds are counted, not timed.",
        file="drift/2026-11-24-lagged-layers",
    ),
    Filed(
        method="block verification of drafts (Jacobi)",
        paper="Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving, arXiv 2002.03629",
        promise="2.1x to 26x",
        measured="1.41 to 1.69 tokens a forward on small models, 1.21x to 1.40x by the clock, 0 texts differ",
        verdict="holds in part",
        because="A language model's tokens depend on each other more than a layer's neurons.",
        file="speculation/2026-11-23-heads",
    ),
    Filed(
        method="MTP heads",
        paper="Your LLM Knows the Future, arXiv 2507.11851",
        promise="about 5x on code and mathematics, 2.5x in chats",
        measured="2.9 to 3.2 tokens a forward; by the clock 1.55x to 1.59x for one text, 1.01x to 1.13x for eight",
        verdict="holds in part",
        because="Tokens a forward hold for such small models; eight texts already fill the processor.",
        file="speculation/2026-11-26-heads-sums",
    ),
    Filed(
        method="layer-parallel drafts (EasySpec)",
        paper="EasySpec, arXiv 2502.02493",
        promise="drafting 1.62x faster, up to 4.17x in all",
        measured="0 answers differ; of 4 guesses 3.73 kept in groups of 2 layers, 2.64 in groups of 4",
        verdict="holds in part",
        because="Exact, and most guesses are kept; its seconds want devices that two cores are not.",
        file="speculation/2026-11-24-layer-parallel",
    ),
    Filed(
        method="speculation over ranks (Saguaro)",
        paper="Speculative Speculative Decoding, arXiv 2603.03251",
        promise="up to 2x over speculative decoding",
        measured="4,000 tokens: 529 hits, 421 deepened, 137 misses, 0 tokens differ; 1.21x of plain decoding, 2.03x "
        "by the same drafter in one process",
        verdict="not here",
        because="On two shared cores preparing drafts takes time from the verifier.",
        file="speculation/2026-11-29-over-ranks",
    ),
    Filed(
        method="variation-bound (DEMASK)",
        paper="DEMASK, arXiv 2604.02560",
        promise="1.7x to 2.2x at equal accuracy, under a bound on total variation",
        measured="tasks with exact dependences: 3.73 tokens a forward at 99.8 % valid with drafts verified, 2.43 alone",
        verdict="holds in part",
        because="With the exact dependences; a trained head of 19,000 parameters gains little on `lists-mdlm`.",
        file="oracle/2026-11-29-variation",
    ),
    Filed(
        method="dParallel",
        paper="dParallel, arXiv 2509.26488",
        promise="8.5x fewer steps on GSM8K, 10.5x on MBPP, as right",
        measured="three seeds: sorting 1.27x to 1.34x, which its teacher reaches too; additions and chains none for "
        "two seeds of three",
        verdict="not here",
        because="The teacher already decodes what is independent at once, and what is left depends on each other.",
        file="text/2026-11-26-distil-lists",
    ),
    Filed(
        method="dParallel, one answer of many",
        paper="dParallel, arXiv 2509.26488",
        promise="certainty along the teacher's own likeliest texts, where its guesses are undecided among several",
        measured="two seeds, texts with the likeliest of many right answers: removing any item 1.47x the teacher's "
        "tokens a forward (plain training on the same texts 1.21x), inserting 1.28x (1.13x), replacing 1.16x at 90 % "
        "right (1.04x), shuffling none",
        verdict="holds in part",
        because="With one or two free choices a text, 300 steps settle them; an order of all items stays undecided.",
        file="text/2026-11-30-collapsed",
    ),
    Filed(
        method="ReDiff",
        paper="From Denoising to Refining (ReDiff), arXiv 2510.19871",
        promise="fewer errors when many tokens are decoded at once",
        measured="three seeds: additions 64.7 % of the teacher's 66.0, chains 35.0 of 64.0, sorting 71.3 of 100",
        verdict="not here",
        because="Students that learn to mend lose what they knew, on models of this size.",
        file="text/2026-11-26-distil-lists",
    ),
    Filed(
        method="ParScale",
        paper="Parallel Scaling Law, arXiv 2505.10475",
        promise="P streams are like log P times the parameters, at a small part of their memory and latency",
        measured="prices, five seeds: four streams 98.7 % (98.4 to 99.0), as many parameters without them 89.0 % (87.6 "
        "to 90.4), as much computing 97.4 % (96.5 to 98.4); bytes of code: no gain",
        verdict="holds in part",
        because="It needs a task on which more computing a token helps, and texts of code are none at this size.",
        file="parscale/2026-11-22-prices",
    ),
    Filed(
        method="ParScale, cost",
        paper="Parallel Scaling Law, arXiv 2505.10475",
        promise="22 times less memory growth and 6 times less latency growth than parameters, at eight streams",
        measured="computed for an H100 and one text: +3.5 % of memory and +3.3 % of latency against +72.7 % of both",
        verdict="holds",
        because="21x and 22x less by the planner's clock; at 64 texts nothing is left of it.",
        file="parscale/2026-11-22-cost",
    ),
    Filed(
        method="fork-join (Multiverse)",
        paper="Multiverse, arXiv 2506.09991",
        promise="up to 2x by threads inside one text, as right",
        measured="1008 products: 97.5 % (96.4 to 98.3) against 94.9 % (93.4 to 96.1) after more training, 1.44 times "
        "fewer tokens one after another, 1.26x by the clock for one text",
        verdict="holds in part",
        because="On models of 0.9 M parameters made for it.",
        file="threads/2026-11-22",
    ),
    Filed(
        method="fork-join (ThreadWeaver)",
        paper="ThreadWeaver, arXiv 2512.07843",
        promise="1.53x lower latency, as right",
        measured="1008 products: a chain 1.44 times shorter; up to 1.74 at the largest size",
        verdict="holds",
        because="In tokens one after another; by the clock of one thread 1.26x.",
        file="threads/2026-11-22",
    ),
    Filed(
        method="reinforced threads (Parallel-R1)",
        paper="Parallel-R1, arXiv 2509.07980",
        promise="8.4 points more than a model that was trained on one chain",
        measured="504 products, twins with room to learn and 20 batches of 128 draws each: greedy, threads 78.6 % "
        "(74.8 to 81.9) before and 76.2 % (72.3 to 79.7) after, one chain 49.4 % (45.1 to 53.8) and 46.2 % (41.9 to "
        "50.6); draws at temperature 1, threads +0.6 points (-1.4 to +2.6), one chain +1.0 (-1.4 to +3.4)",
        verdict="not here",
        because="Threads end 30.0 points (25.8 to 34.1) ahead, but were as far ahead before: the gain is that of their "
        "training texts. So few batches move neither; 200 did not move "
        "[a model near its ceiling](../benchmarks/results/threads/2026-11-22-reinforced.md) either.",
        file="threads/2026-11-30-reinforced",
    ),
    Filed(
        method="shared caches (ParaThinker)",
        paper="ParaThinker, arXiv 2509.04475",
        promise="eight paths at 7.1 % more latency",
        measured="eight answers of SmolLM2 to one prompt in 5.38 s, one after another by `generate` in 39.78 s",
        verdict="holds in part",
        because="Latency holds (7.4x).",
        file="threads/2026-11-22-kv-fork",
    ),
    Filed(
        method="a summary of paths (ParaThinker)",
        paper="ParaThinker, arXiv 2509.04475",
        promise="from eight paths 12.3 points more than from one, 4.3 more than a vote of them, at 7.1 % more latency",
        measured=(
            "`sums` taught paths, 200 fresh problems each. Sums: eight paths 18.5 %, +6.1 points (+1.1 to +11.3) over "
            "one and -3.0 (-9.5 to +3.5) over a vote; countdowns: 28.5 %, -1.2 (-6.3 to +4.0) and -8.0 (-15.0 to "
            "-1.0); 1.26x the time of one path"
        ),
        verdict="holds in part",
        because=(
            "One seed and 1,300 steps: the summary was still learning to find the right path, which one of eight is "
            "for 40.5 and 62.0 % of the problems."
        ),
        file="threads/2026-12-01-paths",
    ),
    Filed(
        method="Hogwild",
        paper="Hogwild! Inference, arXiv 2504.06261",
        promise="workers that read each other's text, without training",
        measured="eight workers: 2.54x fewer seconds a step than by copying keys, drift 1.5e-6",
        verdict="holds in part",
        because="The cost holds; what it brings to accuracy is not measured.",
        file="threads/2026-11-22-hogwild",
    ),
    Filed(
        method="parallel answers against a written search",
        paper="To Backtrack or Not to Backtrack, arXiv 2504.07052",
        promise="at equal computing, direct answers side by side beat a search written out with its dead ends on "
        "countdowns, and the search wins on sudokus",
        measured="200 fresh problems each, twins trained on as many tokens. Countdowns of three numbers: a search of "
        "134 tokens 51.5 % (44.5 to 58.5), the best of 5 direct answers, 127 tokens, 87.1 % (83.9 to 90.1). Sudokus of "
        "4 x 4 cells: a search of 46 tokens 89.0 % (84.5 to 93.0), one direct answer 83.2 % (79.7 to 86.5), the best "
        "of 2, 49 tokens, 91.5 % (88.7 to 94.0)",
        verdict="holds in part",
        because="Countdowns as promised. Sudokus of this size are not deep: the likeliest direct answer is right in "
        "90 %, and the two are even. Deeper ones take more training than there was.",
        file="thinking/2026-11-30-backtrack",
    ),
    Filed(
        method="thinking on GSM8K",
        paper="Self-Consistency, arXiv 2203.11171",
        promise="17.9 points more than one chain on GSM8K",
        measured="SmolLM2-135M, 100 problems: greedy 1.0 % (0.2 to 5.4), a vote of 8 1.0 % (0.2 to 5.4)",
        verdict="not here",
        because="A model that answers 1 % has nothing to vote on; the hint of `partsong think` says so.",
        file="thinking/2026-11-22-gsm8k",
    ),
    Filed(
        method="step-cache (LLIA, TeaCache)",
        paper="Timestep Embedding Tells, arXiv 2411.19108",
        promise="half of the blocks left out without loss",
        measured="`shapes`, 100 captions: 53.6 % of the blocks 95.0 % of the facts (serial 95.4 %), 47.1 dB",
        verdict="holds",
        because="Half as many steps do as well here.",
        file="steps/2026-11-24-step-cache",
    ),
    Filed(
        method="ring (Ring Attention)",
        paper="Ring Attention, arXiv 2310.01889",
        promise="exact, and hidden behind computing where it is long enough",
        measured="a Flux-like model, 1,024 tokens, two processes: 2.04x of a limit of 2.03x; 64 tokens: 1.44x of 1.94x",
        verdict="holds",
        because="Even at 1,024 tokens its messages are hidden.",
        file="image/2026-11-25-fit",
    ),
)

"""Rules that verify drafts, by enumeration: the text is distributed as the model's own, and wrong rules are caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from partsong.kernels.speculation.ratio import Acceptance, accept_block, accept_chain, accept_one_of

Rule = Callable[[Tensor, Tensor, Sequence[int], Sequence[float]], Acceptance]
Text = tuple[int, ...]
#: Tokens of the vocabulary, and drafted tokens.
VOCABULARY, DRAFTED = 3, 2
#: A number that fails every test that can be failed.
FAILS = 1.0 - 2**-53
#: For each rule, the numbers given to the tests before the one at work, and whether a verdict says that it was passed.
READ: dict[Rule, tuple[float, Callable[[Acceptance, int], bool]]] = {
    accept_chain: (0.0, lambda verdict, place: verdict.accepted > place),
    accept_block: (FAILS, lambda verdict, place: verdict.accepted == place + 1),
    accept_one_of: (FAILS, lambda verdict, place: verdict.accepted == place),
}


def tables(seed: int, heat: float = 1.5) -> dict[Text, Tensor]:
    """A distribution after every text of up to `DRAFTED` tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = [text for n in range(DRAFTED + 1) for text in itertools.product(range(VOCABULARY), repeat=n)]
    logits = {text: torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) for text in texts}
    return {text: (heat * row).softmax(dim=0) for text, row in logits.items()}


def chance_of_passing(rule: Rule, given: tuple[Tensor, Tensor, Sequence[int]], place: int) -> float:
    """Below which number the test at a place is passed, found by halving."""
    before, is_passed = READ[rule]
    after = [FAILS] * (len(given[2]) - place - 1)

    def passes(number: float) -> bool:
        return is_passed(rule(*given, [before] * place + [number, *after]), place)

    if passes(FAILS):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return high


def verdicts(rule: Rule, target: Tensor, draft: Tensor, tokens: Sequence[int]) -> Iterator[tuple[float, Acceptance]]:
    """Every verdict that some numbers give, with its probability."""
    ends = [chance_of_passing(rule, (target, draft, tokens), place) for place in range(len(tokens))]
    for passed in itertools.product((True, False), repeat=len(tokens)):
        chance, numbers = 1.0, list[float]()
        for is_passed, end in zip(passed, ends, strict=True):
            chance *= end if is_passed else 1.0 - end
            numbers.append(end / 2 if is_passed else (1.0 + end) / 2)
        if chance > 0:
            yield chance, rule(target, draft, tokens, numbers)


def texts_of(target: dict[Text, Tensor], begin: Text, chance: float) -> dict[Text, float]:
    """Plain decoding to one token more than were drafted."""
    if len(begin) > DRAFTED:
        return {begin[: DRAFTED + 1]: chance}
    found: dict[Text, float] = {}
    for token, share in enumerate(target[begin].tolist()):
        for text, mass in texts_of(target, (*begin, token), chance * share).items():
            found[text] = found.get(text, 0.0) + mass
    return found


def decoded(
    rule: Rule,
    target: dict[Text, Tensor],
    draws: dict[Text, Tensor],
    told: dict[Text, Tensor],
    rest_of: Callable[[Tensor], Tensor] = lambda rest: rest,
) -> tuple[dict[Text, float], float]:
    """The texts that drafts and a rule give, with their probabilities, and how many drafted tokens are kept.

    Drafts are drawn from `draws`, and the rule is told that they were drawn from `told`.
    """
    found: dict[Text, float] = {}
    kept = 0.0
    for tokens in itertools.product(range(VOCABULARY), repeat=DRAFTED):
        beginnings = [tokens[:n] for n in range(DRAFTED + 1)]
        drawn = 1.0
        for text, token in zip(beginnings, tokens, strict=False):
            drawn *= float(draws[text][token])
        if not drawn:
            continue
        rows = torch.stack([target[text] for text in beginnings])
        guessed = torch.stack([told[text] for text in beginnings[:-1]])
        for chance, verdict in verdicts(rule, rows, guessed, tokens):
            kept += drawn * chance * verdict.accepted
            for token, share in enumerate(rest_of(verdict.rest).tolist()):
                begin = (*tokens[: verdict.accepted], token)
                for text, mass in texts_of(target, begin, drawn * chance * share).items():
                    found[text] = found.get(text, 0.0) + mass
    return found, kept


def apart(found: dict[Text, float], target: dict[Text, Tensor]) -> float:
    """Total variation from plain decoding."""
    plain = texts_of(target, (), 1.0)
    return sum(abs(found.get(text, 0.0) - mass) for text, mass in plain.items()) / 2


@pytest.mark.parametrize("rule", [accept_chain, accept_block])
@pytest.mark.parametrize("seed", range(4))
def test_a_verified_draft_is_distributed_as_plain_decoding(rule: Rule, seed: int) -> None:
    target, draft = tables(seed), tables(seed + 100)
    found, _ = decoded(rule, target, draft, draft)
    assert apart(found, target) <= 1e-12
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)


def test_a_perfect_draft_is_kept() -> None:
    target = tables(1)
    for rule in (accept_chain, accept_block):
        assert decoded(rule, target, target, target)[1] == pytest.approx(DRAFTED, abs=1e-12)


def test_blocks_keep_more_than_chains() -> None:
    """At least 4 % more over a number of models, and never less."""
    pairs = []
    for seed in range(12):
        target, draft = tables(seed), tables(seed + 100)
        chain, block = (decoded(rule, target, draft, draft)[1] for rule in (accept_chain, accept_block))
        assert block >= chain - 1e-12
        pairs.append((chain, block))
    assert sum(block for _, block in pairs) >= 1.04 * sum(chain for chain, _ in pairs)


def test_one_of_several_drafts_without_replacement() -> None:
    for seed in range(6):
        target, draft = tables(seed)[()], tables(seed + 100)[()]
        found = torch.zeros(VOCABULARY, dtype=torch.float64)
        for tokens in itertools.permutations(range(VOCABULARY), 2):
            left = draft.clone()
            left[tokens[0]] = 0
            drawn = float(draft[tokens[0]] * left[tokens[1]] / left.sum())
            for chance, verdict in verdicts(accept_one_of, target, draft, tokens):
                if verdict.accepted >= 0:
                    found[tokens[verdict.accepted]] += drawn * chance
                else:
                    found += drawn * chance * verdict.rest
        assert float((found - target).abs().sum()) <= 1e-12


def _best_two(row: Tensor) -> Tensor:
    kept = torch.where(row >= row.sort(descending=True).values[1], row, 0.0)
    return kept / kept.sum()


def _greedy(row: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(row.argmax(), VOCABULARY).double()


@pytest.mark.parametrize("rule", [accept_chain, accept_block])
@pytest.mark.parametrize(
    ("draws", "rest_of"),
    [
        (_best_two, lambda rest: rest),
        (_greedy, lambda rest: rest),
        (lambda row: row, lambda rest: rest ** (1 / 0.7) / (rest ** (1 / 0.7)).sum()),
    ],
    ids=["told all, drawn of the two likeliest", "told its softmax, drawn greedily", "tempered twice"],
)
def test_wrong_rules_are_caught(
    rule: Rule, draws: Callable[[Tensor], Tensor], rest_of: Callable[[Tensor], Tensor]
) -> None:
    target, draft = tables(3), tables(103)
    drawn = {text: draws(row) for text, row in draft.items()}
    found, _ = decoded(rule, target, drawn, draft, rest_of)
    assert apart(found, target) > 1e-3


def test_the_rest_drawn_with_the_noise_of_the_draft_is_caught() -> None:
    """Shared noise and a ratio must never meet: with noise of its own, the same draws are right."""
    generator = torch.Generator().manual_seed(0)
    size, count = 8, 400_000
    target, draft = (torch.randn(size, generator=generator, dtype=torch.float64).mul(1.5).softmax(0) for _ in range(2))
    noise, fresh = -(-torch.rand(2, count, size, generator=generator, dtype=torch.float64).log()).log()
    drafted = (draft.log() + noise).argmax(dim=1)
    fails = torch.rand(count, generator=generator, dtype=torch.float64) * draft[drafted] >= target[drafted]
    rest = (target - draft).clamp(min=0).log()
    distances = []
    for used in (fresh, noise):
        tokens = torch.where(fails, (rest + used).argmax(dim=1), drafted)
        distances.append(float((torch.bincount(tokens, minlength=size) / count - target).abs().sum()) / 2)
    assert distances[0] < 0.003
    assert distances[1] > 0.006

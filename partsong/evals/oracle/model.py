"""Defines a language model with the exact conditionals of equally likely texts.

With it every error is the decoding rule's own. When a rule has written tokens that do not go together, no text
of the set matches any more. The model then gives the conditionals of the whole set, and the text is invalid anyway.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.samplers.text.model import Head, KeyStore, TextAdapter
from partsong.samplers.text.rule import Rule
from partsong.samplers.text.views import Probe

__all__ = ["OracleModel", "Support"]

#: Used as the logarithm of 0: such a token is never drawn and adds nothing to an entropy.
_LOG_OF_ZERO = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """Holds all valid texts, which are equally likely.

    Attributes:
        name: of the task.
        texts: int64 `[M, n]`, all different; token ids count from 0 without gaps.
    """

    name: str
    texts: Tensor

    @property
    def length(self) -> int:
        """Returns n, the number of tokens of a text."""
        return self.texts.shape[1]

    @property
    def vocab_size(self) -> int:
        """Returns the number of tokens that occur, and one more for the mask."""
        return int(self.texts.max()) + 2

    def contains(self, texts: Tensor) -> Tensor:
        """Returns bool `[N]`: whether each of the texts `[N, n]` is valid."""
        return self.number(texts) >= 0

    def number(self, texts: Tensor) -> Tensor:
        """Returns int64 `[N]`: the number of the valid text that each is, or -1."""
        known = {text: number for number, text in enumerate(map(tuple, self.texts.tolist()))}
        return torch.tensor([known.get(tuple(text), -1) for text in texts.tolist()])

    def total_variation(self, texts: Tensor) -> float:
        """Returns the distance, 0 to 1, of drawn texts `[N, n]` from the uniform distribution over valid ones.

        With N draws a perfect sampler is about sqrt(M / (2 pi N)) away.
        """
        number = self.number(texts)
        counts = torch.bincount(number[number >= 0], minlength=len(self.texts)) / len(texts)
        invalid = float((number < 0).double().mean())
        return (float((counts - 1 / len(self.texts)).abs().sum()) + invalid) / 2

    def marginals(self, tokens: Tensor) -> Tensor:
        """Returns the exact conditionals `[n, V]` given one text `[n]`, in which the mask token is undecided."""
        texts = self._matching(tokens)
        counts = torch.zeros(self.length, self.vocab_size, dtype=torch.float64)
        counts.scatter_add_(1, texts.T, torch.ones(texts.T.shape, dtype=torch.float64))
        return counts / len(texts)

    def mutual_information(self, tokens: Tensor) -> Tensor:
        """Returns the exact pairwise mutual information `[n, n]` in nats, given one text `[n]`; 0 on the diagonal."""
        texts = self._matching(tokens)
        shared = torch.zeros(self.length, self.length, dtype=torch.float64)
        single = [_entropy(texts[:, i]) for i in range(self.length)]
        for i, j in itertools.combinations(range(self.length), 2):
            joint = _entropy(texts[:, i] * self.vocab_size + texts[:, j])
            shared[i, j] = shared[j, i] = max(single[i] + single[j] - joint, 0.0)
        return shared

    def dependence(self, tokens: Tensor) -> Tensor:
        """Returns the exact pairwise dependence `[n, n]`, 0 to 1, given one text `[n]`; 0 on the diagonal.

        It is the total variation between two positions' tokens drawn together and drawn apart.
        """
        texts, size = self._matching(tokens), self.vocab_size
        is_token = torch.nn.functional.one_hot(texts, size).double().flatten(1)
        apart = torch.outer(is_token.mean(0), is_token.mean(0))
        differs = (is_token.T @ is_token / len(texts) - apart).abs() / 2
        shared = differs.view(self.length, size, self.length, size).sum((1, 3))
        return shared - torch.diag_embed(shared.diagonal())

    def _matching(self, tokens: Tensor) -> Tensor:
        """Returns the texts that agree with the decided tokens, or all texts if none does."""
        known = tokens != self.vocab_size - 1
        matches = (self.texts[:, known] == tokens[known]).all(1)
        return self.texts[matches] if matches.any() else self.texts


def _entropy(values: Tensor) -> float:
    share = values.unique(return_counts=True)[1].double() / len(values)
    return float(-(share * share.log()).sum())


class OracleModel:
    """Decodes a `Support` as a `TextModel` with full attention and masks, without a prompt or an end of text.

    Args:
        support: the texts.

    >>> model = OracleModel(Support("pairs", torch.tensor([[0, 0], [1, 1]])))
    >>> model.vocab_size, model.mask_token_id
    (3, 2)
    """

    adapter = TextAdapter(name="oracle", attention="full", keeps_keys=False)

    def __init__(self, support: Support) -> None:
        self.support = support
        self.vocab_size, self.mask_token_id = support.vocab_size, support.vocab_size - 1
        self.eos_token_ids: tuple[int, ...] = ()
        self.max_positions: int | None = support.length
        self.device = torch.device("cpu")
        # The last number of a state says what text it is of, for the probes; the head does not read it.
        self.head = Head(weight=torch.eye(self.vocab_size, self.vocab_size + 1, dtype=torch.float64))
        self._numbers: dict[tuple[int, ...], int] = {}
        self._states: list[Tensor] = []
        self._measured: dict[tuple[str, int], Tensor] = {}

    def key_store(self, rows: int, slots: int) -> KeyStore | None:
        """Returns None, because the model has no keys."""
        return None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        visible: Tensor,
        keys: KeyStore | None,
        rows: Tensor | None = None,
        *,
        clean: bool = False,
    ) -> Tensor:
        """Returns log-probabilities and the number of the text, `[B, Q, V + 1]`.

        For a token after the text, a shadow, its own place is masked.
        """
        n = self.support.length
        out = torch.empty(*tokens.shape, self.vocab_size + 1, dtype=torch.float64)
        # Many rows hold the same few texts.
        texts, place_of = tokens[:, :n].unique(dim=0, return_inverse=True)
        out[:, :n] = torch.stack([self._state(text) for text in texts])[place_of]
        for row, (text, extra) in enumerate(zip(tokens[:, :n], positions[:, n:].tolist(), strict=True)):
            for place, position in enumerate(extra):
                hidden = text.clone()
                hidden[position] = self.mask_token_id
                out[row, n + place] = self._state(hidden)[position]
        return out

    def _state(self, text: Tensor) -> Tensor:
        key = tuple(text.tolist())
        if key not in self._numbers:
            marginals = self.support.marginals(text)
            logs = torch.where(marginals > 0, marginals.log(), _LOG_OF_ZERO)
            number = torch.full_like(logs[:, :1], len(self._states))
            self._numbers[key] = len(self._states)
            self._states.append(torch.cat([logs, number], 1))
        return self._states[self._numbers[key]]

    def probe_of(self, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Returns the pairwise mutual information `[B, K, K]` of some positions, as a probe for `Dependency`."""
        return self._measure("mutual_information", hidden, positions)

    def dependence_of(self, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Returns the pairwise dependence `[B, K, K]` of some positions, as a probe for `VariationBound`."""
        return self._measure("dependence", hidden, positions)

    def probe_for(self, rule: Rule) -> Probe | None:
        """Returns the probe that a rule needs, or None."""
        return self.probe_of if rule.probes else self.dependence_of if rule.weighs else None

    def _measure(self, what: str, hidden: Tensor, positions: Tensor) -> Tensor:
        """Measures pairs in the texts that states `[B, K, V + 1]` are of."""
        texts = list(self._numbers)
        parts = list[Tensor]()
        for number, places in zip(hidden[:, 0, -1].long().tolist(), positions, strict=True):
            if (what, number) not in self._measured:
                measure = getattr(self.support, what)
                self._measured[what, number] = measure(torch.tensor(texts[number]))
            parts.append(self._measured[what, number][places][:, places])
        return torch.stack(parts)

    def flops(self, queries: int, keys: int) -> float:
        """Returns one per position, so that all forwards cost the same."""
        return float(queries)

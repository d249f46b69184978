"""A language model that is never wrong: exact conditionals of a uniform distribution over listed texts.

With it the error of a decoding rule is the rule's own. Texts that no listed one matches any more (a rule wrote tokens
that do not go together) get the conditionals of all listed texts, and are invalid whatever follows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from partsong.samplers.text.model import Head, KeyStore, TextAdapter

__all__ = ["OracleModel", "Support"]

#: Stands for the logarithm of 0: never drawn, and adds nothing to an entropy.
_NOTHING = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """All valid texts, each as likely as any other.

    Attributes:
        name: of the task.
        texts: int64 `[M, n]`, no text twice; token ids from 0 without gaps.
    """

    name: str
    texts: Tensor

    @property
    def length(self) -> int:
        """n, tokens of a text."""
        return self.texts.shape[1]

    @property
    def vocab_size(self) -> int:
        """Tokens that occur, and one more to mask with."""
        return int(self.texts.max()) + 2

    def contains(self, texts: Tensor) -> Tensor:
        """Bool `[N]`: whether texts `[N, n]` are valid."""
        return self.number(texts) >= 0

    def number(self, texts: Tensor) -> Tensor:
        """Int64 `[N]`: which valid text each is; -1 for none."""
        known = {text: number for number, text in enumerate(map(tuple, self.texts.tolist()))}
        return torch.tensor([known.get(tuple(text), -1) for text in texts.tolist()])

    def total_variation(self, texts: Tensor) -> float:
        """Distance of drawn texts `[N, n]` from the uniform distribution, invalid ones included: 0 to 1.

        With N draws a perfect sampler is about sqrt(M / (2 pi N)) away.
        """
        number = self.number(texts)
        counts = torch.bincount(number[number >= 0], minlength=len(self.texts)) / len(texts)
        invalid = float((number < 0).double().mean())
        return (float((counts - 1 / len(self.texts)).abs().sum()) + invalid) / 2

    def marginals(self, tokens: Tensor) -> Tensor:
        """Exact conditionals `[n, V]` given one text `[n]`; the mask token is undecided."""
        known = tokens != self.vocab_size - 1
        fits = (self.texts[:, known] == tokens[known]).all(1)
        texts = self.texts[fits] if fits.any() else self.texts
        counts = torch.zeros(self.length, self.vocab_size, dtype=torch.float64)
        counts.scatter_add_(1, texts.T, torch.ones(texts.T.shape, dtype=torch.float64))
        return counts / len(texts)

    def mutual_information(self, tokens: Tensor) -> Tensor:
        """Exact pairwise mutual information `[n, n]` in nats, given one text `[n]`; 0 on the diagonal."""
        known = tokens != self.vocab_size - 1
        fits = (self.texts[:, known] == tokens[known]).all(1)
        texts = self.texts[fits] if fits.any() else self.texts
        found = torch.zeros(self.length, self.length, dtype=torch.float64)
        single = [_entropy(texts[:, i]) for i in range(self.length)]
        for i, j in itertools.combinations(range(self.length), 2):
            joint = _entropy(texts[:, i] * self.vocab_size + texts[:, j])
            found[i, j] = found[j, i] = max(single[i] + single[j] - joint, 0.0)
        return found


def _entropy(values: Tensor) -> float:
    share = values.unique(return_counts=True)[1].double() / len(values)
    return float(-(share * share.log()).sum())


class OracleModel:
    """A `TextModel` of a `Support`: full attention, masks, no prompt, no end of text.

    Args:
        support: the texts.

    >>> model = OracleModel(Support("pairs", torch.tensor([[0, 0], [1, 1]])))
    >>> model.vocab_size, model.mask_token_id
    (3, 2)
    """

    def __init__(self, support: Support) -> None:
        self.support = support
        self.adapter = TextAdapter(name="oracle", attention="full", keeps_keys=False)
        self.vocab_size, self.mask_token_id = support.vocab_size, support.vocab_size - 1
        self.eos_token_ids: tuple[int, ...] = ()
        self.max_positions: int | None = support.length
        self.device = torch.device("cpu")
        self.head = Head(weight=torch.eye(self.vocab_size, dtype=torch.float64))
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        self._tokens: Tensor | None = None

    def key_store(self, rows: int, slots: int) -> KeyStore | None:
        """None: there are no keys."""
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
        """Log-probabilities `[B, Q, V]`; what a token sees beyond the text (shadows) is answered for it alone."""
        n, self._tokens = self.support.length, tokens[:, : self.support.length]
        out = torch.empty(*tokens.shape, self.vocab_size, dtype=torch.float64)
        for row, (text, extra) in enumerate(zip(self._tokens, positions[:, n:].tolist(), strict=True)):
            out[row, :n] = self._log_marginals(text)
            for place, position in enumerate(extra):
                hidden = text.clone()
                hidden[position] = self.mask_token_id
                out[row, n + place] = self._log_marginals(hidden)[position]
        return out

    def _log_marginals(self, text: Tensor) -> Tensor:
        key = tuple(text.tolist())
        if key not in self._known:
            found = self.support.marginals(text)
            self._known[key] = (torch.where(found > 0, found.log(), _NOTHING), None)
        return self._known[key][0]

    def probe_of(self, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Pairwise mutual information `[B, K, K]` of the positions asked for: a probe for `Dependency`."""
        assert self._tokens is not None
        out = torch.zeros(*positions.shape, positions.shape[1], dtype=torch.float64)
        for row, (text, places) in enumerate(zip(self._tokens, positions, strict=True)):
            out[row] = self._mutual_information(text)[places][:, places]
        return out

    def _mutual_information(self, text: Tensor) -> Tensor:
        key = tuple(text.tolist())
        marginals, shared = self._known[key]
        if shared is None:
            shared = self.support.mutual_information(text)
            self._known[key] = (marginals, shared)
        return shared

    def flops(self, queries: int, keys: int) -> float:
        """One per position: all forwards cost the same."""
        return float(queries)

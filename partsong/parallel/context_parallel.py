"""Cuts long prompts of causal language models over ranks (context parallelism, arXiv 2407.21783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from partsong.knobs import Count
from partsong.parallel.protocols import TextShards
from partsong.parallel.ranks.mesh import Mesh
from partsong.parallel.text_only import TextOnly

__all__ = ["ContextParallel"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextParallel(TextOnly):
    """Cuts long prompts of causal language models over ranks, each of which computes some of their tokens. Exact.

    A prompt is cut into twice as many pieces as there are ranks. A rank computes one from the front and the one as far
    from the end, so that all have as many keys to attend to. In every layer ranks give each other the keys and values
    of their tokens, and every rank keeps all of them. So weights and keys are whole on every rank, and the tokens that
    follow the prompt are computed on each.

    Use it when prompts are long and answers short: it shortens the time to the first token.

    Args:
        degree: number of ranks; None takes all ranks that other strategies leave.
        shortest: tokens of the shortest call that is cut. Shorter calls, and those with masks of their own, such as
            batches with padding or several texts in a row, are computed whole on every rank.

    Source: section 3.3.2 of The Llama 3 Herd of Models, arXiv 2407.21783.

    Example:
        >>> ContextParallel(shortest=1024).kind
        'exact'
    """

    axes: ClassVar[tuple[str, ...]] = ("ring",)
    instead: ClassVar[str] = "it cuts the prompts of language models; use Ring or Ulysses"

    degree: Count | None = None
    shortest: Count = 512

    def text_shards(self, model: Any, mesh: Mesh) -> TextShards | None:
        """Returns what cuts the calls of a model.

        Raises:
            UnsupportedError: its tokens see tokens after them, or not all before them.
        """
        from partsong.parallel.text.context import TextContext

        return TextContext(model, mesh.axis("ring"), self.shortest)

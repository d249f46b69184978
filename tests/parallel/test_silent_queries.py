"""Keys that every rank holds whole become shares with queries of their own, and masks keep what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from partsong.parallel.cuts.whole_views import with_silent_queries

BATCH, HEADS, TEXT, OWN = 2, 3, 5, (4, 3)
SIZES = (3, 2)


def of_every_query(keys: Tensor, queries: int) -> Tensor:
    """A mask as diffusers before 0.41 gives it to PRX: the same row for all heads and queries."""
    return keys.expand(-1, HEADS, queries, -1)


FORMS = {
    "keys": lambda keys, queries: keys,
    "a row of all queries": of_every_query,
    "rows": lambda keys, queries: of_every_query(keys, queries).contiguous(),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_the_shares_of_all_ranks_attend_like_the_whole(form: str, first: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    text_keys, text_values = torch.randn(2, BATCH, HEADS, TEXT, 4, generator=draw)
    parts = [torch.randn(3, BATCH, HEADS, own, 4, generator=draw) for own in OWN]
    said = torch.rand(BATCH, 1, 1, TEXT, generator=draw) > 0.4

    def both(text: Tensor, own: Tensor, dim: int) -> Tensor:
        return torch.cat([text, own] if first else [own, text], dim=dim)

    shares = []
    for rank, (query, key, value) in enumerate(parts):
        mask = FORMS[form](both(said, torch.ones(BATCH, 1, 1, OWN[rank], dtype=torch.bool), 3), OWN[rank])
        whole = both(text_keys, key, 2), both(text_values, value, 2)
        shares.append(with_silent_queries(query, *whole, mask, sizes=SIZES, index=rank, first=first))
    assert [share[0].shape[2] for share in shares] == [size + own for size, own in zip(SIZES, OWN, strict=True)]
    keys, values = (torch.cat([share[place] for share in shares], dim=2) for place in (1, 2))
    masks = [share[3] for share in shares]
    assert all(mask.shape[2] in (1, share[0].shape[2]) for mask, share in zip(masks, shares, strict=True))
    assert form == "rows" or all(mask.shape[1:3] == (1, 1) for mask in masks)
    seen = torch.cat([mask[:, :1, :1] for mask in masks], dim=3)
    all_keys, all_values = (
        torch.cat([text, *(part[place] for part in parts)], dim=2) for place, text in ((1, text_keys), (2, text_values))
    )
    all_seen = torch.cat([said, torch.ones(BATCH, 1, 1, sum(OWN), dtype=torch.bool)], dim=3)
    for rank, (query, _, _) in enumerate(parts):
        out = scaled_dot_product_attention(shares[rank][0], keys, values, seen)
        out = out.narrow(2, SIZES[rank] if first else 0, OWN[rank])
        torch.testing.assert_close(out, scaled_dot_product_attention(query, all_keys, all_values, all_seen))

"""Lists as granules: where the coarse keys of each cell go, the table, and the attention over it.

Granules of leaves come first in the table, then those of coarse keys, list by list. How long lists
are is known on the device only: there is room for so many (`room`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forest import Forest
from ..kernels import selection
from ..kernels.blocklist import GRANULE, block_list_attention, block_list_gradients
from ..kernels.language import power_of_two
from ..kernels.placing import taken
from ..selection import Column

WIDEST_BLOCK = 128  # queries that one program attends for
LARGEST = 6e4  # entry of a token in 16 bits: beyond, it is alone whatever its scores are exactly


class Listed(NamedTuple):
    """Blocks with the lists of their cells."""

    query: Tensor  # [blocks, size, d]
    rows: Tensor  # [blocks, size]
    mean: Tensor  # [cells, d]
    owner: Tensor | None  # [blocks]: cell of each block; None: blocks are their own cells
    coarse: Column  # of cells
    exact: Column


class Placed(NamedTuple):
    """Where the coarse keys of every cell are, and the list of every block that a program takes."""

    owner: Tensor  # [programs]: the cell of each
    granules: Tensor  # [cells]: of coarse keys
    base: Tensor  # [cells]: the first of them, counted from the first of all these lists
    offsets: Tensor  # [programs + 1]: of the lists
    sizes: Tensor  # granules of coarse keys, and entries of lists, in all

    @staticmethod
    def of(listed: Listed, width: int, dtype: torch.dtype) -> Placed:
        """For values that have ``width`` entries."""
        owner = _owners(listed, width, dtype)
        granules = (listed.coarse.count + (GRANULE - 1)) // GRANULE
        last = granules.cumsum(0)
        ends = (granules + listed.exact.count)[owner].cumsum(0)
        offsets = F.pad(ends, (1, 0)).int()
        sizes = torch.stack([last[-1], ends[-1]])
        return Placed(owner, granules, last - granules, offsets, sizes)


def none_unless(fits: Tensor, listed: Listed, placed: Placed) -> tuple[Listed, Placed]:
    """Lists as they are, or nothing in any of them."""
    coarse, exact = (replace(x, count=x.count * fits) for x in (listed.coarse, listed.exact))
    return (
        listed._replace(coarse=coarse, exact=exact),
        placed._replace(granules=placed.granules * fits, offsets=placed.offsets * fits),
    )


class Filled(NamedTuple):
    """Lists for which there is room."""

    base: Tensor  # [cells]: the first granule of coarse keys
    last: int  # granules before those of the next lists
    offsets: Tensor
    indices: Tensor

    @staticmethod
    def of(
        leaves: int, found: Sequence[tuple[Listed, Placed]], sizes: Sequence[Sequence[int]]
    ) -> list[Filled]:
        """Lists after one another in a table of so many leaves; ``sizes`` as in `Placed`, or
        larger."""
        filled, last = [], leaves
        for (listed, placed), (granules, length) in zip(found, sizes, strict=True):
            base, last = placed.base + last, last + granules
            indices = torch.empty(length, dtype=torch.int32, device=base.device)
            selection.write_lists(
                placed.owner, placed.granules, base, listed.exact, placed.offsets, indices
            )
            filled.append(Filled(base, last, placed.offsets, indices))
        return filled


def attended(
    forest: Forest,
    found: Sequence[tuple[Listed, Placed]],
    sizes: Sequence[Sequence[int]],
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """Output [rows, dv] and lse [rows] of all places of all blocks."""
    if not found:
        return []
    tokens = token_dtype(dtype)
    lists = Filled.of(len(forest.leaf_key), found, sizes)
    table = _table(forest, lists[-1].last, tokens, dtype)
    results = []
    for (listed, _), filled in zip(found, lists, strict=True):
        selection.write_tilted(
            forest, listed.mean, listed.coarse, filled.base, table, largest_entry(tokens)
        )
        query = short(listed.query, tokens)
        results.append(attend(query, table, filled.offsets, filled.indices))
    return results


def token_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of queries and keys, for inputs of a dtype."""
    return torch.float32 if dtype == torch.float32 else torch.float16


def _owners(listed: Listed, width: int, dtype: torch.dtype) -> Tensor:
    """The cell of every block that a program takes; values have ``width`` entries."""
    blocks, size, dim = listed.query.shape
    owner = listed.owner
    if owner is None:
        owner = torch.arange(blocks, device=listed.rows.device)
    parts = -(-size // _block_of(size, max(width, dim), dtype))
    return owner.repeat_interleave(parts) if parts > 1 else owner


def _block_of(size: int, width: int, dtype: torch.dtype) -> int:
    """Queries of a program for blocks of so many; a longer block is several programs."""
    most = WIDEST_BLOCK
    if dtype == torch.float32:
        most = min(most, 64, 64 * 128 // power_of_two(width))
    return min(power_of_two(size), most)


def _table(forest: Forest, granules: int, *dtypes: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and log-weights in granules, the leaves first; room for coarse keys."""
    leaves, size, d = forest.leaf_key.shape
    device, dv = forest.leaf_key.device, forest.leaf_value.shape[2]
    key = torch.empty(granules, GRANULE, d, dtype=dtypes[0], device=device)
    value = torch.empty(granules, GRANULE, dv, dtype=dtypes[1], device=device)
    weight = torch.empty(granules, GRANULE, device=device)
    key[:leaves, :size] = short(forest.leaf_key, dtypes[0])
    value[:leaves, :size] = forest.leaf_value
    weight[:leaves, :size] = forest.leaf_weight
    if size < GRANULE:
        key[:leaves, size:], value[:leaves, size:] = 0.0, 0.0
        weight[:leaves, size:] = -math.inf
    return key, value, weight


def short(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens in a dtype, with no entry that it cannot hold."""
    if tokens.dtype == dtype:
        return tokens
    largest = largest_entry(dtype)
    return (tokens if largest == math.inf else tokens.clamp(-largest, largest)).to(dtype)


def largest_entry(dtype: torch.dtype) -> float:
    return LARGEST if dtype == torch.float16 else math.inf


def attend(
    query: Tensor, table: tuple[Tensor, ...], offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention of blocks [blocks, size, d] over their lists, in blocks that a program takes."""
    (blocks, size), block = query.shape[:2], _block_for(query, table)
    query = F.pad(query, (0, 0, 0, -size % block))
    key, value, weight = (x.flatten(0, 1)[None, None] for x in table)
    output, lse = block_list_attention(
        query.reshape(1, 1, -1, query.shape[2]), key, value, offsets, indices,
        log_weight=weight, scale=1.0, block=block,
    )  # fmt: skip
    output, lse = (x[0, 0].unflatten(0, (blocks, -1)) for x in (output, lse))
    return output[:, :size].flatten(0, 1), lse[:, :size].flatten()


def pulled_back(
    forest: Forest,
    listed: Listed,
    filled: Filled,
    rows: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the queries [blocks, size, d] of some lists, and of keys, values and log-weights
    of their granules [granules, 16, ...]; ``rows`` are the gradient of the output, lse, and what
    scores subtract (`block_list_gradients`), of all rows."""
    tokens, (grad, lse, delta) = token_dtype(dtype), rows
    table = _table(forest, filled.last, tokens, dtype)
    selection.write_tilted(
        forest, listed.mean, listed.coarse, filled.base, table, largest_entry(tokens)
    )
    query = short(listed.query, tokens)
    (blocks, size), block = query.shape[:2], _block_for(query, table)
    missing = -size % block
    query = F.pad(query, (0, 0, 0, missing))
    at = F.pad(listed.rows, (0, missing), value=-1).flatten()
    real, slope = at.clamp(min=0), taken(grad, at, grad.dtype, math.inf)
    key, value, weight = (x.flatten(0, 1)[None, None] for x in table)
    to_query, *made = block_list_gradients(
        query.reshape(1, 1, -1, query.shape[2]), key, value, filled.offsets, filled.indices,
        slope[None, None], torch.where(at >= 0, lse[real], math.inf)[None, None],
        delta[real][None, None], log_weight=weight, scale=1.0, block=block,
    )  # fmt: skip
    to_key, to_value, to_weight = (x[0, 0].unflatten(0, (-1, GRANULE)) for x in made)
    return to_query[0, 0].unflatten(0, (blocks, -1))[:, :size], to_key, to_value, to_weight


def _block_for(query: Tensor, table: tuple[Tensor, ...]) -> int:
    """Queries of a program that attends for blocks [blocks, size, d]."""
    return _block_of(query.shape[1], max(query.shape[2], table[1].shape[2]), query.dtype)

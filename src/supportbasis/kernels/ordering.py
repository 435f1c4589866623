"""Trees on a device: the order of `supportbasis.tree.order`, without waiting for it.

Nodes that fit into one program are split by it whole: tokens are read once, the axis is found and
projections are compared where they are. Larger nodes take their axis from a sample of their
tokens, evenly spaced along the axis before. One integer holds the node of a token and where it lies
along the axis, and PyTorch sorts the integers of all nodes at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree import ITERATIONS, Split, signs
from . import ordering_kernels as kernels
from .language import cdiv, power_of_two

ENTRIES = 16384  # of tokens that one program holds
MOST = 128  # tokens that one program puts in order: it compares all of them with each other
SAMPLED = 256  # tokens of a larger node that its axis is found from
COUNTED = 16  # tokens that the others are compared with at a time
TILE = 128  # tokens that one program projects
FINEST = 22  # logarithm of the steps from the middle of a node to its end


def order(x: Tensor, depth: int, *, splits: bool = True) -> tuple[Tensor, list[Split]]:
    """Positions of the tokens ``x`` [segments, tokens, dim] in the order of the tree's leaves, and
    how every level was split, if that is wanted."""
    segments, tokens, dim = x.shape
    x = x.float().contiguous()
    sign, width = signs(x).contiguous(), power_of_two(dim, 1)
    most = min(MOST, ENTRIES // width)
    position = torch.arange(tokens, device=x.device, dtype=torch.int32)
    position = position.expand(segments, tokens).contiguous()
    made: list[Split] = []
    for level in range(depth):
        size, nodes = tokens >> level, segments << level
        shape, axis = (size, tokens, tokens, dim), x.new_empty(nodes, dim)
        if size <= most:
            ordered, held = torch.empty_like(position), power_of_two(size, 2)
            kernels.split[(nodes,)](
                x, position, sign, axis, torch.empty_like(position), ordered, *shape, width, held,
                min(held, COUNTED), ITERATIONS, num_warps=_warps(held * width),
            )  # fmt: skip
            position = ordered
            if splits:
                made.append(_split(x, position, axis))
            continue
        sampled = min(size, SAMPLED, ENTRIES // width)
        held = power_of_two(sampled, 2)
        middle, unit = x.new_empty(nodes), x.new_empty(nodes)
        kernels.axes[(nodes,)](
            x, position, sign, axis, middle, unit, *shape[:3], sampled, dim, width, held,
            ITERATIONS, num_warps=_warps(held * width),
        )  # fmt: skip
        ranked = torch.empty_like(position)
        steps = 1 << min(FINEST, 30 - nodes.bit_length())
        kernels.project[(cdiv(size, TILE), nodes)](
            x, position, axis, middle, unit, ranked, *shape, steps, width, TILE
        )
        index = ranked.flatten().sort(stable=True).indices
        position = position.flatten()[index].view(segments, tokens)
        if splits:
            made.append(_split(x, position, axis))
    return position.long(), made


def _split(x: Tensor, position: Tensor, axis: Tensor) -> Split:
    """What lies between the halves of nodes that are in order: between the two tokens where they
    meet."""
    segments, tokens, dim = x.shape
    size = segments * tokens // len(axis)
    ends = position.view(segments, -1, size)[:, :, size // 2 - 1 : size // 2 + 1].flatten(1).long()
    pair = x.gather(1, ends.unsqueeze(2).expand(-1, -1, dim)).view(-1, 2, dim)
    return Split(axis.unsqueeze(2), (pair @ axis.unsqueeze(2)).squeeze(2).mean(1))


def _warps(entries: int) -> int:
    return min(8, max(1, entries // 1024))

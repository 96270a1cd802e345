"""Plans of layouts that no family has so far: transposed matrices, whose columns may be interleaved by head."""

import torch
from torch import nn

from lineate.models.families.builder import Part, PlanBuilder, interleaved
from lineate.models.files.checkpoint import Checkpoint, save
from lineate.models.files.loading import load
from lineate.models.presets import preset

HEADS, WIDTHS, HIDDEN = 3, (2, 2, 5), 7


def loaded(folder, tensors, parts):
    """Return the weight of a linear layer that is filled with these parts."""
    save(folder, tensors, {})
    checkpoint = Checkpoint.open(folder)
    builder = PlanBuilder(preset("tiny"), checkpoint.shapes)
    builder.stack("weight", parts)
    rows = sum(last - first for first, last in (part.rows or (0, part.shape[0]) for part in parts))
    model = nn.Linear(HIDDEN, rows, bias=False, device="meta")
    load(model, builder.plan(), checkpoint, torch.float32, progress=False)
    return model.weight.detach(), builder.pieces["weight"]


def test_interleaved_rows_and_columns(tmp_path):
    """q | k | v of the first head, then of the second, ... are rows of (out, in), or columns of (in, out)."""
    q, k, v = (torch.randn(HEADS, width, HIDDEN) for width in WIDTHS)
    ours = torch.cat([x.flatten(0, 1) for x in (q, k, v)])
    stored = torch.cat((q, k, v), 1).flatten(0, 1)
    for turned in (False, True):
        parts = interleaved("x", HEADS, WIDTHS, (HIDDEN,), turned)
        got, pieces = loaded(tmp_path / str(turned), {"x": stored.t().contiguous() if turned else stored}, parts)
        assert torch.equal(got, ours)
        assert len(pieces) == (1 if turned else 3 * HEADS)  # columns are read at once


def test_some_columns_between_those_of_another_tensor(tmp_path):
    x, y, z = torch.randn(6, HIDDEN), torch.randn(4, HIDDEN), torch.randn(2, HIDDEN)
    parts = [
        Part("x", (6, HIDDEN), (3, 6), True),
        Part("y", (4, HIDDEN), turned=True),
        Part("x", (6, HIDDEN), (0, 3), True),
    ]
    tensors = {"x": x.t().contiguous(), "y": y.t().contiguous(), "z": z}
    got, _ = loaded(tmp_path, tensors, [*parts, Part("z", (2, HIDDEN))])
    assert torch.equal(got, torch.cat((x[3:], y, x[:3], z)))

"""Adapters in full precision learn on frozen quantised weights."""

import pytest
import torch
from torch import Tensor, nn

from lineate.models import HybridLM, preset
from lineate.quantised import QuantisedWeight, shrink


class Adapted(nn.Module):
    """y = layer(x) + up(down(x)), as LoRA has it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_adapters_learn_on_frozen_quantised_weights(form: str) -> None:
    torch.manual_seed(0)
    model = HybridLM(preset("tiny", pattern="GKMA", vocab_size=64))
    ids = torch.randint(0, 64, (4, 32))
    shrink(model, form)
    model.requires_grad_(False)
    before = {name: x.decoded() for name, x in model.named_parameters() if isinstance(x, QuantisedWeight)}
    for block in model.layers:
        for owner, name in ((block.mixer, "in_proj"), (block.mixer, "out_proj"), (block.feed, "down_proj")):
            setattr(owner, name, Adapted(getattr(owner, name)))
    learnt = [x for x in model.parameters() if x.requires_grad]
    assert len(learnt) == 2 * 3 * 4
    optimizer = torch.optim.AdamW(learnt, 1e-2)
    losses = []
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    after = {name.replace(".layer", ""): x for name, x in model.named_parameters() if isinstance(x, QuantisedWeight)}
    assert before.keys() == after.keys() and all(torch.equal(after[name].decoded(), x) for name, x in before.items())
    with torch.no_grad():  # a step calls the adapters
        state = model(ids[:, :-1]).state
        step, whole = model(ids[:, -1:], state=state).logits, model(ids).logits[:, -1:]
    assert (step - whole).abs().max() < 0.02 * whole.abs().max()

"""A hybrid of your own: three Gated DeltaNet layers to one of softmax attention, trained on the bytes of a text.

python examples/build_a_hybrid.py [FILE]
"""

import sys
from pathlib import Path

import torch

from lineate.models import AttentionConfig, FeedConfig, HybridConfig, HybridLM, LinearConfig

torch.manual_seed(0)
config = HybridConfig(
    vocab_size=256,
    hidden_size=64,
    n_layers=4,
    pattern="GGGA",  # one letter a layer: L, R, D, G, K keep a memory of fixed size, A and M all tokens
    linear=LinearConfig(heads=2, value_heads=4, key_dim=16, value_dim=16),
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=16, rotary_dim=8),
    feed=FeedConfig(size=128),
)
model = HybridLM(config)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters, layers {config.letters}")

path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "README.md"
text = torch.tensor(list(path.read_bytes()))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
losses = []
for step in range(1, 61):
    starts = torch.randint(len(text) - 64, (8, 1))
    batch = text[starts + torch.arange(64)]  # b t
    loss = model(batch, labels=batch).loss  # next-token cross-entropy, in nats a byte
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step:2d}: mean loss of the last 15 {sum(losses[-15:]) / 15:.2f}, at first {losses[0]:.2f}")

# Generation: the state replaces all previous tokens, so each step reads one token.
model.eval()
made = list(b"Every op ")
with torch.no_grad():
    out = model(torch.tensor([made]))
    for _ in range(60):
        made.append(int(torch.multinomial((out.logits[0, -1] / 0.5).softmax(-1), 1)))
        out = model(torch.tensor([made[-1:]]), state=out.state)
print(f"sample: {bytes(made).decode(errors='replace')!r}")

for tokens in (1000, 100_000):
    growing = sum(spec.nbytes(tokens) for spec in model.state_spec[3])  # keys and values of the attention layer
    fixed = model.state_nbytes(tokens=tokens) - growing
    print(f"state after {tokens:,} tokens: {fixed / 1e3:.0f} kB in three layers, {growing / 1e3:,.0f} kB in the fourth")

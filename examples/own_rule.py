"""A rule of your own, like Mamba-2's: S = e^(-exp(A_log) dt) S + dt B x^T, y = S^T C + D x; q = C, k = B, v = x."""

import torch

from lineate.call import Inputs
from lineate.explore.command import PictureArguments, run_picture
from lineate.layers import LinearMixer, MixerKind, register
from lineate.models import FeedConfig, HybridConfig, HybridLM, LinearConfig
from lineate.planning import plan_flops, read_model


class OwnMamba(LinearMixer):
    gates = ("values", "heads")  # in_proj is C | B | x | z | a, and dt = softplus(a + dt_bias)

    def add_gates(self):
        ones = torch.ones(self.value_heads)
        self.A_log, self.dt_bias, self.D = (torch.nn.Parameter(x * ones) for x in (0.0, -3.0, 1.0))

    def rule_inputs(self, q, k, v, gates):
        dt = torch.nn.functional.softplus((gates[1] + self.dt_bias).float())
        return Inputs(q, k, (v * dt[..., None]).to(v.dtype), log_decay=-self.A_log.float().exp() * dt)

    def attend(self, q, k, v, *others):
        (y, memory), z = super().attend(q, k, v, *others)
        return (y + (self.D[:, None] * v).to(y.dtype), memory), z


register(MixerKind("Z", "own", "own Mamba", LinearConfig, OwnMamba.from_config, trace=OwnMamba.trace))
if __name__ == "__main__":
    model = HybridLM(HybridConfig(256, 64, 2, "Z", feed=FeedConfig(128), mixers={"own": LinearConfig(2, 2, 32, 32)}))
    ids, optimizer = torch.tensor([list(__doc__.encode())]), torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(20):
        (loss := model(ids, labels=ids).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained("out/own_rule")
    print(f"loss {loss:.2f}, {plan_flops(read_model(model.config)).decode(4096):,} operations a token after 4096")
    assert torch.equal(HybridLM.from_pretrained("out/own_rule")(ids).logits, model(ids).logits)
    run_picture(PictureArguments("state", model="out/own_rule"))

"""Papers and models that the documentation names, by short keys; docs/references.md is rendered from here."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Reference:
    """One paper, book, model or program."""

    key: str
    """The key that texts cite in square brackets."""
    authors: str
    year: int
    title: str
    where: str = ""
    """The venue."""
    arxiv: str = ""
    """The arXiv identifier; empty if there is none, or if it is not known."""

    @property
    def line(self) -> str:
        """The reference in one line of plain text."""
        arxiv = f"arXiv {self.arxiv}" if self.arxiv else ""
        return ". ".join(x for x in (f"{self.authors} ({self.year})", self.title, self.where, arxiv) if x) + "."


GROUPS: dict[str, tuple[Reference, ...]] = {
    "Softmax attention": (
        Reference("Vaswani2017", "Vaswani and others", 2017, "Attention is all you need", "NeurIPS 2017", "1706.03762"),
        Reference(
            "Milakov2018", "Milakov and Gimelshein", 2018, "Online normalizer calculation for softmax", "", "1805.02867"
        ),
        Reference(
            "Dao2022", "Dao, Fu, Ermon, Rudra and Ré", 2022,
            "FlashAttention: Fast and memory-efficient exact attention with IO-awareness", "NeurIPS 2022", "2205.14135",
        ),
        Reference(
            "Su2021", "Su and others", 2021, "RoFormer: Enhanced transformer with rotary position embedding", "",
            "2104.09864",
        ),
        Reference(
            "Press2021", "Press, Smith and Lewis", 2021,
            "Train short, test long: Attention with linear biases enables input length extrapolation", "ICLR 2022",
            "2108.12409",
        ),
        Reference(
            "Kazemnejad2023", "Kazemnejad and others", 2023,
            "The impact of positional encoding on length generalization in transformers", "NeurIPS 2023", "2305.19466",
        ),
        Reference(
            "Xiao2024", "Xiao, Tian, Chen, Han and Lewis", 2024,
            "Efficient streaming language models with attention sinks", "ICLR 2024", "2309.17453",
        ),
        Reference(
            "Qiu2025", "Qiu and others", 2025,
            "Gated attention for large language models: Non-linearity, sparsity, and attention-sink-free",
            "NeurIPS 2025", "2505.06708",
        ),
        Reference(
            "DeepSeek2024", "DeepSeek-AI", 2024,
            "DeepSeek-V2: A strong, economical, and efficient mixture-of-experts language model (MLA)",
            "", "2405.04434",
        ),
    ),
    "Linear attention, decay and the delta rule": (
        Reference(
            "Katharopoulos2020", "Katharopoulos, Vyas, Pappas and Fleuret", 2020,
            "Transformers are RNNs: Fast autoregressive transformers with linear attention", "ICML 2020", "2006.16236",
        ),
        Reference(
            "Schlag2021", "Schlag, Irie and Schmidhuber", 2021,
            "Linear transformers are secretly fast weight programmers (DeltaNet)", "ICML 2021", "2102.11174",
        ),
        Reference(
            "Sun2023", "Sun and others", 2023,
            "Retentive network: A successor to transformer for large language models (RetNet)", "", "2307.08621",
        ),
        Reference(
            "Yang2024a", "Yang, Wang, Shen, Panda and Kim", 2024,
            "Gated linear attention transformers with hardware-efficient training (GLA)", "ICML 2024", "2312.06635",
        ),
        Reference(
            "Qin2024", "Qin and others", 2024, "HGRN2: Gated linear RNNs with state expansion", "COLM 2024",
            "2404.07904",
        ),
        Reference(
            "MiniMax2025", "MiniMax", 2025,
            "MiniMax-01: Scaling foundation models with lightning attention", "", "2501.08313",
        ),
        Reference(
            "Dao2024", "Dao and Gu", 2024,
            "Transformers are SSMs: Generalized models and efficient algorithms through structured state space duality "
            "(Mamba-2)", "ICML 2024", "2405.21060",
        ),
        Reference(
            "Yang2024b", "Yang, Wang, Zhang, Shen and Kim", 2024,
            "Parallelizing linear transformers with the delta rule over sequence length", "NeurIPS 2024", "2406.06484",
        ),
        Reference(
            "Yang2025", "Yang, Kautz and Hatamizadeh", 2025,
            "Gated delta networks: Improving Mamba2 with delta rule (Gated DeltaNet)", "ICLR 2025", "2412.06464",
        ),
        Reference(
            "Kimi2025", "Kimi Team", 2025,
            "Kimi Linear: An expressive, efficient attention architecture (Kimi Delta Attention)", "", "2510.26692",
        ),
        Reference(
            "Grazzi2025", "Grazzi and others", 2025,
            "Unlocking state-tracking in linear RNNs through negative eigenvalues", "ICLR 2025", "2411.12537",
        ),
        Reference(
            "Siems2025", "Siems and others", 2025,
            "DeltaProduct: Improving state-tracking in linear RNNs via Householder products", "", "2502.10297",
        ),
        Reference(
            "Peng2024", "Peng and others", 2024,
            "Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence (RWKV-6)", "", "2404.05892",
        ),
        Reference(
            "Peng2025", "Peng and others", 2025, 'RWKV-7 "Goose" with expressive dynamic state evolution', "",
            "2503.14456",
        ),
        Reference(
            "Hu2025", "Hu and others", 2025, "Comba: Improving bilinear RNNs with closed-loop control", "", "2506.02475"
        ),
        Reference(
            "Lei2025", "Lei, Zhang and Poria", 2025,
            "Error-free linear attention is a free lunch: Exact solution from continuous-time dynamics (EFLA)", "",
            "2512.12602",
        ),
        Reference(
            "Tumma2026", "Tumma, Loo and Rus", 2026,
            "Preconditioned DeltaNet: Curvature-aware sequence modeling for linear recurrences", "", "2604.21100",
        ),
        Reference("Zou2026", "Zou, Ren and Liu", 2026, "Kaczmarz linear attention", "", "2605.08587"),
        Reference(
            "Hatamizadeh2026", "Hatamizadeh, Choi and Kautz", 2026,
            "Gated DeltaNet-2: Decoupling erase and write in linear attention (GDN-2)", "", "2605.22791",
        ),
        Reference(
            "Arora2024", "Arora and others", 2024,
            "Zoology: Measuring and improving recall in efficient language models", "ICLR 2024", "2312.04927",
        ),
    ),
    "Memories that learn": (
        Reference(
            "Oswald2023", "von Oswald and others", 2023, "Uncovering mesa-optimization algorithms in transformers", "",
            "2309.05858",
        ),
        Reference(
            "Oswald2025", "von Oswald and others", 2025,
            "MesaNet: Sequence modeling by locally optimal test-time training", "", "2506.05233",
        ),
        Reference(
            "Sun2024", "Sun and others", 2024,
            "Learning to (learn at test time): RNNs with expressive hidden states (TTT)", "", "2407.04620",
        ),
        Reference(
            "Behrouz2025", "Behrouz, Zhong and Mirrokni", 2025, "Titans: Learning to memorize at test time", "",
            "2501.00663",
        ),
        Reference("Zhang2025", "Zhang and others", 2025, "Test-time training done right (LaCT)", "", "2505.23884"),
        Reference(
            "Jordan2024", "Jordan and others", 2024,
            "Muon: An optimizer for hidden layers in neural networks", "https://kellerjordan.github.io/posts/muon",
        ),
    ),
    "Ancestors": (
        Reference(
            "Kaczmarz1937", "Kaczmarz", 1937, "Angenäherte Auflösung von Systemen linearer Gleichungen",
            "Bulletin International de l'Académie Polonaise des Sciences et des Lettres",
        ),
        Reference("Hebb1949", "Hebb", 1949, "The organization of behavior", "Wiley"),
        Reference("Plackett1950", "Plackett", 1950, "Some theorems in least squares", "Biometrika 37"),
        Reference(
            "Sherman1950", "Sherman and Morrison", 1950,
            "Adjustment of an inverse matrix corresponding to a change in one element of a given matrix",
            "Annals of Mathematical Statistics 21",
        ),
        Reference(
            "Woodbury1950", "Woodbury", 1950, "Inverting modified matrices",
            "Statistical Research Group, Princeton University",
        ),
        Reference(
            "Widrow1960", "Widrow and Hoff", 1960, "Adaptive switching circuits", "IRE WESCON Convention Record"
        ),
        Reference(
            "Kalman1960", "Kalman", 1960, "A new approach to linear filtering and prediction problems",
            "Journal of Basic Engineering 82",
        ),
        Reference(
            "Rescorla1972", "Rescorla and Wagner", 1972,
            "A theory of Pavlovian conditioning: Variations in the effectiveness of reinforcement and nonreinforcement",
            "In Classical Conditioning II",
        ),
        Reference(
            "Hopfield1982", "Hopfield", 1982,
            "Neural networks and physical systems with emergent collective computational abilities", "PNAS 79",
        ),
        Reference(
            "Schreiber1989", "Schreiber and Van Loan", 1989,
            "A storage-efficient WY representation for products of Householder transformations",
            "SIAM Journal on Scientific and Statistical Computing 10",
        ),
        Reference(
            "Schmidhuber1992", "Schmidhuber", 1992,
            "Learning to control fast-weight memories: An alternative to dynamic recurrent networks",
            "Neural Computation 4",
        ),
        Reference(
            "Ramsauer2020", "Ramsauer and others", 2020, "Hopfield networks is all you need", "ICLR 2021", "2008.02217"
        ),
    ),
    "Parts of models, and training": (
        Reference("Loshchilov2019", "Loshchilov and Hutter", 2019,
                  "Decoupled weight decay regularization (AdamW)", "ICLR 2019", "1711.05101"),
        Reference("Zhang2019", "Zhang and Sennrich", 2019, "Root mean square layer normalization (RMSNorm)",
                  "NeurIPS 2019", "1910.07467"),
        Reference("Shazeer2020", "Shazeer", 2020, "GLU variants improve transformer (SwiGLU)", "", "2002.05202"),
        Reference("Zhao2023", "Zhao and others", 2023,
                  "PyTorch FSDP: Experiences on scaling fully sharded data parallel", "VLDB 2023", "2304.11277"),
        Reference("Leviathan2023", "Leviathan, Kalman and Matias", 2023,
                  "Fast inference from transformers via speculative decoding", "ICML 2023", "2211.17192"),
    ),
    "Models and programs": (
        Reference("QwenNext2025", "Qwen Team", 2025, "Qwen3-Next-80B-A3B",
                  "models on the hub: Qwen/Qwen3-Next-80B-A3B-*"),
        Reference("Qwen2026", "Qwen Team", 2026, "Qwen3.5", "models on the hub: Qwen/Qwen3.5-*"),
        Reference("KimiLinear2025", "Moonshot AI", 2025, "Kimi-Linear-48B-A3B",
                  "models on the hub: moonshotai/Kimi-Linear-48B-A3B-*; the paper is [Kimi2025]"),
        Reference("OlmoHybrid2026", "Allen Institute for AI", 2026, "Olmo Hybrid: From theory to practice and back",
                  "models on the hub: allenai"),
        Reference("Fla2024", "Yang and Zhang", 2024, "flash-linear-attention",
                  "https://github.com/fla-org/flash-linear-attention"),
        Reference("FlashQla2026", "Qwen Team", 2026, "FlashQLA", "https://github.com/QwenLM/FlashQLA"),
        Reference("TitansPytorch2025", "Wang", 2025, "titans-pytorch", "https://github.com/lucidrains/titans-pytorch"),
    ),
}  # fmt: skip
"""The references by subject."""

REFERENCES = {reference.key: reference for group in GROUPS.values() for reference in group}
"""The references by key."""
CITATION = re.compile(r"\[([A-Z][A-Za-z]+\d{4}[a-z]?)\](?!\()")
"""A key in square brackets that is not a link already."""


def cited(text: str) -> list[Reference]:
    """Return the references that a text cites, in the order of their first citation."""
    keys = dict.fromkeys(key for key in CITATION.findall(text) if key in REFERENCES)
    return [REFERENCES[key] for key in keys]


def group_of(key: str) -> str:
    """Return the subject of a reference."""
    return next(name for name, group in GROUPS.items() if REFERENCES[key] in group)

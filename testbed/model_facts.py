"""Architecture facts of published models, by name: what a measurement's file names and leaves out.

Numbers are those of each model's public ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4, "fp8": 1, "int8": 1}
"""Bytes of a number of each precision, by the names that engines use."""


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with gated MLP, unless told."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    gated: bool = True

    @property
    def parameters(self) -> int:
        """Weights, biases and norms of the decoder left out but for two norms a layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + mlp + 2 * self.hidden) + embeddings + self.hidden

    def kappa(self, precision_bytes: float) -> float:
        """Nominal bytes per cached token (Theory A4), over all ranks."""
        return 2.0 * self.layers * self.kv_heads * self.head_dim * precision_bytes

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture | None:
        """From a Hugging Face ``config.json``; None when it lacks a field."""
        try:
            hidden = int(config["hidden_size"])
            heads = int(config["num_attention_heads"])
            head_dim = config.get("head_dim") or hidden // heads
            return cls(
                layers=int(config["num_hidden_layers"]),
                hidden=hidden,
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(head_dim),
                intermediate=int(config.get("intermediate_size") or config["ffn_dim"]),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                gated="ffn_dim" not in config,
            )
        except (KeyError, TypeError, ValueError):
            return None


_LLAMA_3 = 128256
_QWEN = 151936

KNOWN: dict[str, Architecture] = {
    "llama-3.1-8b": Architecture(32, 4096, 32, 8, 128, 14336, _LLAMA_3),
    "llama-3.1-70b": Architecture(80, 8192, 64, 8, 128, 28672, _LLAMA_3),
    "llama-3.1-405b": Architecture(126, 16384, 128, 8, 128, 53248, _LLAMA_3),
    "llama-3.2-1b": Architecture(16, 2048, 32, 8, 64, 8192, _LLAMA_3, tied=True),
    "llama-3.2-3b": Architecture(28, 3072, 24, 8, 128, 8192, _LLAMA_3, tied=True),
    "llama-3.3-70b": Architecture(80, 8192, 64, 8, 128, 28672, _LLAMA_3),
    "llama-3-8b": Architecture(32, 4096, 32, 8, 128, 14336, _LLAMA_3),
    "llama-3-70b": Architecture(80, 8192, 64, 8, 128, 28672, _LLAMA_3),
    "llama-2-7b": Architecture(32, 4096, 32, 32, 128, 11008, 32000),
    "llama-2-13b": Architecture(40, 5120, 40, 40, 128, 13824, 32000),
    "llama-2-70b": Architecture(80, 8192, 64, 8, 128, 28672, 32000),
    "mistral-7b": Architecture(32, 4096, 32, 8, 128, 14336, 32768),
    "mistral-nemo": Architecture(40, 5120, 32, 8, 128, 14336, 131072),
    "qwen2.5-0.5b": Architecture(24, 896, 14, 2, 64, 4864, _QWEN, tied=True),
    "qwen2.5-1.5b": Architecture(28, 1536, 12, 2, 128, 8960, _QWEN, tied=True),
    "qwen2.5-3b": Architecture(36, 2048, 16, 2, 128, 11008, _QWEN, tied=True),
    "qwen2.5-7b": Architecture(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-14b": Architecture(48, 5120, 40, 8, 128, 13824, 152064),
    "qwen2.5-32b": Architecture(64, 5120, 40, 8, 128, 27648, 152064),
    "qwen2.5-72b": Architecture(80, 8192, 64, 8, 128, 29568, 152064),
    "qwen3-0.6b": Architecture(28, 1024, 16, 8, 128, 3072, _QWEN, tied=True),
    "qwen3-1.7b": Architecture(28, 2048, 16, 8, 128, 6144, _QWEN, tied=True),
    "qwen3-4b": Architecture(36, 2560, 32, 8, 128, 9728, _QWEN, tied=True),
    "qwen3-8b": Architecture(36, 4096, 32, 8, 128, 12288, _QWEN),
    "qwen3-14b": Architecture(40, 5120, 40, 8, 128, 17408, _QWEN),
    "qwen3-32b": Architecture(64, 5120, 64, 8, 128, 25600, _QWEN),
    "phi-3-mini": Architecture(32, 3072, 32, 32, 96, 8192, 32064),
    "opt-13b": Architecture(40, 5120, 40, 40, 128, 20480, 50272, tied=True, gated=False),
    "opt-66b": Architecture(64, 9216, 72, 72, 128, 36864, 50272, tied=True, gated=False),
    "opt-175b": Architecture(96, 12288, 96, 96, 128, 49152, 50272, tied=True, gated=False),
}


def known_architecture(model: str) -> Architecture | None:
    """Facts of a model by its name or path; a suffix such as ``-Instruct`` does not matter.

    >>> known_architecture("meta-llama/Llama-3.1-8B-Instruct").layers
    32
    """
    name = PurePath(model).name.lower().replace("meta-", "")
    fitting = [key for key in KNOWN if name == key or name.startswith(f"{key}-")]
    return KNOWN[max(fitting, key=len)] if fitting else None

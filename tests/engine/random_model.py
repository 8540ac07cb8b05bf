"""A small Llama with weights of realistic spread: its greedy text is not constant."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 512


def make_random_llama(folder: Path, seed: int = 0) -> Path:
    """Save a float32 Llama of two layers under ``folder`` and return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        torch_dtype="float32",
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder, safe_serialization=True)
    return folder


def greedy(folder: Path, tokens: list[int], count: int) -> list[int]:
    """What Hugging Face generates greedily in float32, without any cache of earlier requests."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    ids = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(tokens) :]

"""SGLang platform plugin for a machine without a GPU.

SGLang's own CPU platform needs compiled kernels that its package does not carry. This plugin
offers an out-of-tree platform instead that computes with plain torch operators. It stays inactive
where CUDA is there, and importing it costs nothing.
"""

from __future__ import annotations

_OPERATORS: list[object] = []
"""Declared operators live as long as the library that declared them."""


def activate() -> str | None:
    """Dotted path of the platform class, or None where CUDA is available."""
    import torch

    if torch.cuda.is_available():
        return None
    declare_torchvision_operators()
    return "testbed_sglang_cpu.platform.TorchCpuPlatform"


def declare_torchvision_operators() -> None:
    """Let torchvision be imported beside a torch for which it has no compiled operators.

    SGLang imports torchvision for images; serving token ids never calls it. Its import fails
    without the two operators for which it registers shapes, so they are declared, not defined.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in (
        ("nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"),
        (
            "qnms",
            "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        ),
    ):
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + schema)
    _OPERATORS.append(library)

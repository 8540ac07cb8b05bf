"""Build the records of this folder from the published files that they are derived from.

``python -m calibration.devices.build DATA`` where DATA holds

- ``rtx4090-llama-3.1-8b``: a folder of LLMServingSim's bench (``meta.json``, ``requests.jsonl``,
  ``profile/``; casys-kaist/LLMServingSim, MIT);
- ``a100-opt``: DistServe's profile of the A100 (LLMServe/DistServe, Apache-2.0).

The files themselves are not part of the package; their hashes are in each record.
"""

from __future__ import annotations

import sys
from pathlib import Path

from calibration.importers import import_calibration
from calibration.record import Calibration, MemoryRecord
from testbed.model_facts import known_architecture
from testbed.outcome import dump_json, write_atomically

HERE = Path(__file__).parent
SHARE, RUNTIME_BYTES = 0.9, 2.0e9
"""Of a device's memory: what vLLM takes by default, less activations and libraries."""
BLOCK = 16


def rtx4090(data: Path) -> Calibration:
    """RTX 4090, Llama-3.1-8B, bfloat16: operators, engine and pool as measured."""
    return import_calibration("llmservingsim", data / "rtx4090-llama-3.1-8b")


def a100(data: Path) -> Calibration:
    """A100 80 GB, OPT-13B, float16: step times as published, engine and pool derived."""
    record = import_calibration(
        "distserve", data / "a100-opt", model="facebook/opt-13b", tensor_parallel=1
    )
    architecture = known_architecture("opt-13b")
    assert architecture is not None and record.device.memory_bytes is not None
    kappa = architecture.kappa(2.0)
    weights = architecture.parameters * 2.0
    free = record.device.memory_bytes * SHARE - weights - RUNTIME_BYTES
    blocks = int(free // (kappa * BLOCK))
    note = (
        f"KV pool not in the source: {record.device.memory_bytes / 1e9:g} GB x {SHARE:g} - "
        f"{weights / 1e9:.1f} GB weights - {RUNTIME_BYTES / 1e9:g} GB activations and libraries; "
        "block size, token budget and most sequences are vLLM's defaults"
    )
    return record.model_copy(
        update={
            "source": record.source.model_copy(update={"notes": (*record.source.notes, note)}),
            "engine": record.engine.model_copy(
                update={
                    "block_size": BLOCK,
                    "num_blocks": blocks,
                    "token_budget": 2048,
                    "max_sequences": 256,
                    "max_model_len": 2048,
                }
            ),
            "memory": MemoryRecord(
                pool_bytes=(blocks - 1) * BLOCK * kappa,
                kappa_nominal=kappa,
                block_size=BLOCK,
                num_blocks=blocks,
                source="derived, see the notes",
            ),
        }
    )


def portable(record: Calibration, data: Path) -> Calibration:
    """The record without this machine in it: paths within the data folder, no environment."""
    files = tuple(
        f.model_copy(update={"path": str(Path(f.path).relative_to(data))})
        for f in record.source.files
    )
    return record.model_copy(
        update={
            "source": record.source.model_copy(update={"files": files}),
            "environment": {},
        }
    )


def main(data: str) -> None:
    folder = Path(data)
    for name, build in {"rtx4090-llama-3.1-8b": rtx4090, "a100-opt-13b": a100}.items():
        record = portable(build(folder), folder)
        # One line: the tables are long.
        text = dump_json(record.model_dump(mode="json", exclude_none=True)) + b"\n"
        write_atomically(HERE / f"{name}.json", text)
        print(f"{name}.json: {len(text) / 1e3:.0f} kB, {record.engine.num_blocks} blocks")


if __name__ == "__main__":
    main(*sys.argv[1:])

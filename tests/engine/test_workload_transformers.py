"""Chat traces through a tokenizer directory of the transformers library."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import TraceError
from testbed.workload.trace import read_trace

WORDS = ["[UNK]", "SYS", "USER", "be", "brief", "hi"]


def test_a_model_directory_brings_its_own_template(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not there")
    transformers = pytest.importorskip("transformers", reason="transformers is not there")
    vocabulary = {w: i for i, w in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]")
    own.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ {'system': 'SYS', 'user': 'USER'}[m.role] }} "
        "{{ m.content }} {% endfor %}"
    )
    own.save_pretrained(tmp_path / "model")
    path = tmp_path / "chat.jsonl"
    path.write_text(
        '{"timestamp": 0, "output_tokens": 4, "messages": [{"role": "system", "content": '
        '"be brief"}, {"role": "user", "content": "hi"}]}\n'
        '{"timestamp": 1, "output_tokens": 4, "messages": [{"role": "tool", "content": "?"}]}\n'
    )
    with pytest.raises(TraceError, match=r"chat\.jsonl:2: .* refuses the messages: no tools"):
        read_trace(path, tokenizer=tmp_path / "model")
    trace = read_trace(path, tokenizer=tmp_path / "model", skip_bad=True)
    assert trace.tokens(0).tolist() == [vocabulary[w] for w in ["SYS", "be", "brief", "USER", "hi"]]
    assert trace.facts.notes["chat_template"] == "own"
    assert trace.facts.dropped == {"malformed": 1}

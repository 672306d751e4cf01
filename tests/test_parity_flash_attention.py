"""The command that runs FlashAttention's tests, on a file that looks like one of theirs."""

from collections import Counter

import pytest

from parity import flash_attention
from parity.__main__ import main
from parity.flash_attention_plugin import Settings, select

THEIRS = """
import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache, get_scheduler_metadata
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

is_sm90 = torch.cuda.get_device_capability("cuda") == (9, 0)


@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(3, 5), (7, 2), (4096, 4096)])
def test_output(seqlen_q, seqlen_k, dropout_p):
    device = "cuda"
    q = torch.randn(1, seqlen_q, 2, 8, device=device)
    out = flash_attn_func(q, q[:, :1], q[:, :1], dropout_p)
    assert torch.allclose(out, q[:, :1].expand_as(out)), "one key"


def test_padding():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    packed, indices, cu_seqlens, longest, used = unpad_input(torch.arange(12).view(2, 3, 2), mask)
    assert packed.tolist() == [[0, 1], [4, 5]] and cu_seqlens.tolist() == [0, 2, 2] and longest == 2
    assert pad_input(packed, indices, 2, 3).tolist() == [[[0, 1], [0, 0], [4, 5]], [[0, 0]] * 3]
    assert used.tolist() == [2, 0]


def test_refused():
    q = torch.randn(1, 3, 2, 8)
    flash_attn_func(q, q, q, qv=q)


@pytest.mark.parametrize("new_kv", [False, True])
@pytest.mark.parametrize("rotary_fraction", [0.0, 0.5])
@pytest.mark.parametrize("has_leftpad", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("d", [128])
def test_kvcache(d, alibi, has_leftpad, rotary_fraction, new_kv):
    q, cache = torch.randn(1, 1, 2, d, device="cuda"), torch.ones(1, 8, 2, d, device="cuda")
    lengths = torch.tensor([3], dtype=torch.int32, device="cuda")
    new = (torch.ones_like(q), torch.ones_like(q)) if new_kv else (None, None)
    metadata = get_scheduler_metadata(1, 1, 8, 2, 2, d, lengths, q.dtype)
    out = flash_attn_with_kvcache(q, cache, cache.clone(), *new, cache_seqlens=lengths, scheduler_metadata=metadata)
    assert torch.allclose(out, torch.ones_like(q)) and d == 64


def test_splitkv():
    raise AssertionError


def test_broken():
    q = torch.randn(1, 3, 2, 8)
    assert flash_attn_func(q, q, q, causal=True)[0, 0, 0, 0] == 100
"""


def test_it_tells_how_each_case_ended(tmp_path, capsys):
    path = tmp_path / "test_theirs.py"
    path.write_text(THEIRS)
    assert main(["flash-attention", str(path), "--device", "cpu"]) == 1
    told = capsys.readouterr().out
    counts = {line.split()[0]: line.split()[1:4] for line in told.splitlines() if line.startswith("test_")}
    assert counts == {
        "test_output": ["2", "0", "0"],
        "test_kvcache": ["2", "0", "0"],
        "test_padding": ["1", "0", "0"],
        "test_refused": ["0", "0", "1"],
        "test_broken": ["0", "1", "0"],
    }
    assert "flash_attn_func: qv: got a tensor of shape [1, 3, 2, 8]; allowed None" in told
    assert "3  dropout" in told
    assert "1  too large for a CPU" in told
    for feature, cases in {"rotary embedding": 8, "left padding": 4, "alibi over a cache": 2}.items():
        assert f"{cases}  {feature}" in told
    assert told.endswith("5 passed, 1 failed, 1 skipped\n")
    assert path.read_text() == THEIRS


SETTINGS = Settings(backend="auto", each=3, small=False, without=(), shard=0, shards=1, deadline=0.0, results="")


def test_the_same_cases_are_chosen_each_time():
    axes = [(["d"], [32, 64]), (["seqlen_q", "seqlen_k"], [(1, 2), (3, 4)]), (["dropout_p"], [0.0, 0.17])]
    chosen, left_out = select("test_output", axes, SETTINGS)
    assert chosen == select("test_output", axes, SETTINGS)[0]
    assert len(chosen) == 3
    assert all(len(values) == 4 and values[-1] == 0.0 for values in chosen)
    assert left_out == Counter({"dropout": 4, "not chosen": 1})


def test_another_version_of_flash_attention_3_is_told(tmp_path):
    (tmp_path / "test_util.py").touch()
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "test_flash_attn.py"
    path.write_text("from flash_attn_interface import flash_attn_func\n")
    with pytest.raises(ValueError, match="got another version of FlashAttention 3's tests; allowed one that has"):
        flash_attention.copy_tests(path, tmp_path / "elsewhere", on_cpu=True)

"""PyTorch's own attention, and what is built on it, by our kernels; what these refuse, by PyTorch's as before."""

import logging
import os

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import multiattn.integrations.torch as provider
from multiattn.integrations import overrides, sdpa

BATCH, HEADS, HEADS_KV, HEAD_DIM = 2, 4, 2, 32


def qkv(seq_q=24, seq_kv=24, dtype=torch.bfloat16, width_v=HEAD_DIM):
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, seq_q, HEAD_DIM), *((BATCH, HEADS_KV, seq_kv, it) for it in (HEAD_DIM, width_v)))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(inputs, attention=F.scaled_dot_product_attention, **options):
    """Out and the gradients."""
    out = attention(*inputs, enable_gqa=True, **options)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)


def truth(inputs, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return results([it.detach().double().requires_grad_() for it in inputs], **options)


def assert_near(found, expected, tolerance=0.01):
    """As near as bf16 is; an error of the mask, the scale or a head is fifty times that."""
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(24, 24), (24, 40), (40, 24)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_is_what_it_was(ran, is_causal, seq_q, seq_kv):
    """On a CPU their causal mask is from the top left: with two lengths it is another one than ours."""
    inputs, options = qkv(seq_q, seq_kv), {"is_causal": is_causal, "scale": 0.3}
    assert_near(results(inputs, **options), truth(inputs, **options))
    assert ran == ["forward", "backward"]


@pytest.mark.parametrize("width_v", [HEAD_DIM, 16, 48])
def test_the_ops_of_a_gpu_are_causal_from_the_bottom_right(width_v):
    """`torch.nn.attention.bias.causal_lower_right` asks them for that, and nobody for another with two lengths.

    PyTorch asks its other kernels where v has a width of its own; who calls the ops by name gets it.
    """
    q, k, v = (it.detach() for it in qkv(24, 40, width_v=width_v))
    out, lse, *rest = sdpa.flash_attention(q, k, v, 0.0, True, scale=0.3)
    gradients = sdpa.flash_attention_backward(2 * out, q, k, v, out, lse, *rest[:4], 0.0, True, *rest[4:6], scale=0.3)
    mask = torch.ones(24, 40, dtype=torch.bool).tril(40 - 24)
    assert_near((out, *gradients), truth((q, k, v), attn_mask=mask, scale=0.3))
    out, lse = sdpa.flash_attention_for_cpu(q, k, v, 0.0, True, scale=0.3)
    gradients = sdpa.flash_attention_for_cpu_backward(2 * out, q, k, v, out, lse, 0.0, True, scale=0.3)
    assert_near((out, *gradients), truth((q, k, v), is_causal=True, scale=0.3))


def test_a_backend_is_chosen_by_name(ran):
    provider.use("triton")
    inputs = qkv()
    assert_near(results(inputs, is_causal=True), truth(inputs, is_causal=True))
    assert ran == ["forward", "backward"]
    with pytest.raises(ValueError, match="backend"):
        provider.use("fastest")


def assert_promised(name, arguments, results):
    """Results are laid out as the op of this name says on fakes, which need no GPU."""
    device = "cpu" if "cpu" in name else "cuda"
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(it.shape, it.stride(), dtype=it.dtype, device=device) if torch.is_tensor(it) else it
            for it in arguments
        ]
        promised = getattr(torch.ops.aten, name)(*fakes)
    for found, expected in zip(results, promised, strict=True):
        if torch.is_tensor(expected):
            assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        else:
            assert found == expected


LAYOUTS = {
    "contiguous": lambda it: it,
    "sequence first": lambda it: it.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda it: F.pad(it.transpose(1, 2), (0, 8)).transpose(1, 2)[..., :-8],
    "batch inside": lambda it: it.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_laid_out_as_fakes_promise(layout):
    """Compiled code asserts what the meta kernels of PyTorch say, of each op on each device."""
    q, k, v = (LAYOUTS[layout](it.detach()) for it in qkv(seq_kv=40))
    out, lse = sdpa.flash_attention_for_cpu(q, k, v, 0.0, True)
    on_gpu = sdpa.flash_attention(q, k, v, 0.0, True)
    lengths = q.new_empty(0), q.new_empty(0), *on_gpu[4:6]
    of_gpu = (out, q, k, v, *on_gpu[:2], *lengths, 0.0, True, *on_gpu[6:8])
    of_cpu = (out, q, k, v, out, lse, 0.0, True)
    calls = {
        "_scaled_dot_product_flash_attention": ((q, k, v, 0.0, True), sdpa.flash_attention),
        "_scaled_dot_product_flash_attention_backward": (of_gpu, sdpa.flash_attention_backward),
        "_scaled_dot_product_flash_attention_for_cpu": ((q, k, v, 0.0, True), sdpa.flash_attention_for_cpu),
        "_scaled_dot_product_flash_attention_for_cpu_backward": (of_cpu, sdpa.flash_attention_for_cpu_backward),
    }
    for name, (arguments, ours) in calls.items():
        assert_promised(name, arguments, ours(*arguments))
    assert {*calls, *OF_TWO_WIDTHS, *(f"{it}_backward" for it in OF_TWO_WIDTHS)} == {
        *sdpa.KERNELS["CUDA"],
        *sdpa.KERNELS["CPU"],
    }


# ---------------------------------------------------------------- ops of a GPU for values of another width

OF_TWO_WIDTHS = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention")


@pytest.fixture
def on_cpu(ran):
    """`ran`, where our kernels of a GPU's ops run on a CPU, too, so that autograd and compilers find them."""
    handle = overrides.Overrides({"CPU": sdpa.KERNELS["CUDA"]})
    yield ran
    handle.remove()


def op_of_two_widths(name):
    """The op as an attention, which its backward may follow."""
    op = getattr(torch.ops.aten, name)
    return lambda *inputs, is_causal=False, scale=None: op(*inputs, None, True, 0.0, is_causal, scale=scale)[0]


@pytest.mark.parametrize("width_v", [16, 48])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(24, 24), (24, 40), (40, 24)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", OF_TWO_WIDTHS)
def test_values_of_another_width(on_cpu, name, is_causal, seq_q, seq_kv, width_v):
    """Causal is from the top left in these ops, and autograd hands their results on to their backwards."""
    inputs, options = qkv(seq_q, seq_kv, width_v=width_v), {"is_causal": is_causal, "scale": 0.3}
    found = results(inputs, lambda *it, enable_gqa, **asked: op_of_two_widths(name)(*it, **asked), **options)
    assert_near(found, truth(inputs, **options))
    assert on_cpu == ["forward", "backward"]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", OF_TWO_WIDTHS)
def test_values_of_another_width_compiled(on_cpu, name, backend):
    """The fake of the memory-efficient backward takes k and v to have as many heads as q."""
    torch._dynamo.reset()
    q, *of_keys = (it.detach() for it in qkv(width_v=48))
    repeats = HEADS // HEADS_KV if "efficient" in name else 1
    inputs = [it.requires_grad_() for it in (q, *(it.repeat_interleave(repeats, 1) for it in of_keys))]
    compiled = torch.compile(op_of_two_widths(name), fullgraph=True, backend=backend)
    found = results(inputs, lambda *it, enable_gqa, **asked: compiled(*it, **asked), is_causal=True)
    assert_near(found, truth(inputs, is_causal=True))
    assert on_cpu == ["forward", "backward"]


@pytest.mark.parametrize("wants_lse", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width_v", [16, 48])
def test_values_of_another_width_are_laid_out_as_fakes_promise(width_v, layout, wants_lse):
    q, k, v = (LAYOUTS[layout](it.detach()) for it in qkv(seq_kv=40, width_v=width_v))
    k, v = (it.repeat_interleave(HEADS // HEADS_KV, 1) for it in (k, v))
    forward = (q, k, v, None, wants_lse, 0.0, True)
    of_cudnn, of_efficient = sdpa.cudnn_attention(*forward), sdpa.efficient_attention(*forward)
    assert_promised(OF_TWO_WIDTHS[0], forward, of_cudnn)
    assert_promised(OF_TWO_WIDTHS[1], forward, of_efficient)
    if wants_lse:
        out, lse, cum_q, cum_kv, seq_q, seq_kv, seed, offset, _ = of_cudnn
        backward = (out, q, k, v, out, lse, seed, offset, None, cum_q, cum_kv, seq_q, seq_kv, 0.0, True)
        assert_promised(f"{OF_TWO_WIDTHS[0]}_backward", backward, sdpa.cudnn_attention_backward(*backward))
        out, *rest = of_efficient
        backward = (out, q, k, v, None, out, *rest, 0.0, [True, True, True, False], True)
        assert_promised(f"{OF_TWO_WIDTHS[1]}_backward", backward, sdpa.efficient_attention_backward(*backward))


@pytest.mark.parametrize("ours", [sdpa.cudnn_attention, sdpa.efficient_attention])
@pytest.mark.parametrize("why", ["one width", "a bias", "dropout"])
def test_other_calls_of_those_ops_stay_pytorchs(why, ours):
    """Nothing is said of those that PyTorch gives to them for another reason."""
    q, k, v = (it.detach() for it in qkv(width_v=HEAD_DIM if why == "one width" else 48))
    bias = torch.zeros(24, 24) if why == "a bias" else None
    with pytest.raises(overrides.Refused) as refused:
        ours(q, k, v, bias, True, 0.5 if why == "dropout" else 0.0)
    assert refused.value.kind == ("dropout" if why == "dropout" else "")


# ---------------------------------------------------------------- refusals


REFUSED = {"attn_mask": {"attn_mask": torch.ones(24, 24, dtype=torch.bool).tril()}, "dtype": {"dtype": torch.float32}}


@pytest.mark.parametrize("which", REFUSED)
def test_what_we_refuse_runs_as_before_and_says_why_once(which, caplog):
    options = dict(REFUSED[which])
    inputs = qkv(dtype=options.pop("dtype", torch.bfloat16))
    expected = results(inputs, **options)
    activate_flash_attention_impl(provider.NAME)
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert all(map(torch.equal, results(inputs, **options), expected))
    finally:
        restore_flash_attention_impl()
    assert [record.getMessage().count(f"refused: {which}: got") for record in caplog.records] == [1, 1]  # each op


def test_dropout_on_a_cpu_is_said_once(ran, caplog):
    """PyTorch then takes an op that is not FlashAttention's, so that other calls of that op must stay silent."""

    def run(dropout_p):
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.MATH):
            return results(qkv(), dropout_p=dropout_p)

    quiet = run(0.0)
    assert not caplog.records
    told = [run(0.5) for _ in range(2)]
    restore_flash_attention_impl()
    assert all(map(torch.equal, (*quiet, *told[0], *told[1]), (*run(0.0), *run(0.5), *run(0.5))))
    (record,) = caplog.records
    assert "_scaled_dot_product_attention_math runs PyTorch's own kernel" in record.getMessage()
    assert "dropout_p: got 0.5; allowed 0.0" in record.getMessage()


def test_a_refusal_for_a_backend_is_one_too(ran, caplog):
    provider.use("triton")
    q, k, v = (it[..., :31].contiguous() for it in qkv())
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert ran == []
    assert "head_dim: got 31" in caplog.text


def test_where_pytorch_has_no_kernel_a_refusal_is_an_error():
    handle = overrides.Overrides({"CPU": sdpa.KERNELS["CUDA"]})
    try:
        with pytest.raises(NotImplementedError, match="no kernel of PyTorch's for CPU, and multiattn refused: dropout"):
            torch.ops.aten._scaled_dot_product_flash_attention(*qkv(), 0.1)
    finally:
        handle.remove()
    with pytest.raises(NotImplementedError, match="CPU") as error:
        torch.ops.aten._scaled_dot_product_flash_attention(*qkv(), 0.1)
    assert "multiattn refused" not in str(error.value)


def test_restoring_undoes_all(ran):
    assert provider.NAME in list_flash_attention_impls()
    assert current_flash_attention_impl() == provider.NAME
    restore_flash_attention_impl()
    results(qkv())
    assert ran == []
    activate_flash_attention_impl(provider.NAME)
    results(qkv())
    assert ran == ["forward", "backward"]


# ---------------------------------------------------------------- what is built on it


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled(ran, backend):
    torch._dynamo.reset()
    inputs = [LAYOUTS["sequence first"](it).detach().requires_grad_() for it in qkv()]
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend=backend)
    assert_near(results(inputs, compiled, is_causal=True), truth(inputs, is_causal=True))
    assert ran == ["forward", "backward"]


def test_autocast(ran):
    inputs = qkv(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(inputs, is_causal=True)
    assert found[0].dtype == torch.bfloat16
    assert found[1].dtype == torch.float32
    assert_near(found, truth(inputs, is_causal=True))
    assert ran == ["forward", "backward"]


def test_multihead_attention(ran):
    module = torch.nn.MultiheadAttention(64, 2, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    found, _ = module(x, x, x, need_weights=False)
    assert ran == ["forward"]
    restore_flash_attention_impl()
    torch.testing.assert_close(found, module(x, x, x, need_weights=False)[0], rtol=0.02, atol=0.02)


def test_native_flash_of_diffusers(ran):
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    q, k, v = (it.detach().repeat_interleave(HEADS // it.shape[1], 1).transpose(1, 2) for it in qkv())
    with dispatch.attention_backend("_native_flash"):
        found = dispatch.dispatch_attention_fn(q, k, v, is_causal=True)
    assert ran == ["forward"]
    (expected, *_) = truth(qkv(), is_causal=True)
    assert_near([found.transpose(1, 2)], [expected])


def test_fully_sharded(ran, tmp_path):
    """FSDP2, of one rank."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{os.fspath(tmp_path)}/store", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        module = torch.nn.TransformerEncoderLayer(64, 2, 64, dropout=0.0, batch_first=True, dtype=torch.bfloat16)
        distributed.fsdp.fully_shard(module, mesh=mesh)
        module(torch.randn(2, 16, 64, dtype=torch.bfloat16)).float().square().sum().backward()
        assert ran == ["forward", "backward"]
        assert module.self_attn.in_proj_weight.grad.to_local().norm() > 0
    finally:
        distributed.destroy_process_group()

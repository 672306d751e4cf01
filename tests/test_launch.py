"""Launches by the driver itself, and a thread's CUDA context: the bytes of parameters are those of a Binding."""

import contextlib
import ctypes
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import driver_fakes
import pytest
import torch

from multiattn.operands import Indices, Operands
from multiattn.plan import abi
from multiattn.run import compat, counters
from multiattn.run import driver as driver_module
from multiattn.run import execute as launching
from multiattn.run.driver import CUlaunchAttribute, CUlaunchConfig, load_kernel
from multiattn.run.launch import ByPresence, DriverLauncher, LoadedKernel, Workspace, fresh_memory

TENSORS = ("q", "k", "v", "out", "lse")
BOX = abi.Box(extents=(1, 1, 64, 64), swizzle=3, dtype=9)
WIDE = abi.Box(extents=(1, 1, 128, 64), swizzle=3, dtype=9)
FUNCTION = (1 << 40) + 7  # wider than an int


def tensor_map(name, box=BOX):
    return abi.TensorMap(tensor=name, shape=(2, 3, 4, 64), strides=(1536, 512, 128), box=box)


def params(*, maps=("q", "k"), pointers=True, workspace=False):
    """A struct of which `maps` are at the front, the addresses behind, then a number and the workspace's address."""
    at = 128 * len(maps)
    data = bytes(at + 40) + struct.pack("<qQ", -5, 0) + bytes(8)
    places = {at + 8 * index: name for index, name in enumerate(TENSORS)} if pointers else {}
    if workspace:
        places[at + 48] = abi.WORKSPACE
    return abi.Struct(data=data, pointers=places, maps={128 * i: tensor_map(name) for i, name in enumerate(maps)})


BINDINGS = {
    "pointers and numbers": [
        *(abi.Pointer(tensor=name) for name in TENSORS),
        abi.Number(kind="f32", value=0.125),
        abi.Number(kind="i32", value=-3),
        abi.Number(kind="i8", value=1),
        abi.Number(kind="i64", value=-(1 << 40)),
        *[abi.Pointer(tensor=None)] * 2,
    ],
    "pointers out of order": [abi.Pointer(tensor=name) for name in ("lse", "q", "q", "out")],
    "captured tensors in part, sums of gradients, lists": [
        abi.Pointer(tensor=name)
        for name in ("captured1", "q", "page_table", "dcaptured0", "captured4", "dcaptured2", "full_q_indices")
    ],
    "tensor maps": [
        abi.Pointer(tensor="q"),
        tensor_map("k"),
        abi.Number(kind="i32", value=2),
        tensor_map("v"),
        abi.Pointer(tensor="lse"),
    ],
    "eight tensor maps and a counter": [
        *(tensor_map(name, box) for box in (BOX, WIDE) for name in ("q", "k", "v", "out")),
        *(abi.Pointer(tensor=name) for name in TENSORS),
        abi.Pointer(tensor=abi.WORKSPACE),
        abi.Number(kind="f32", value=1.5),
    ],
    "a struct": [params(maps=())],
    "a struct with maps and a counter": [params(workspace=True)],
    "a struct behind others": [abi.Number(kind="i32", value=9), params(maps=("out",)), abi.Pointer(tensor="k")],
    "nothing of the tensors": [params(maps=("v",), pointers=False), abi.Number(kind="i32", value=1)],
}


def binding_of(arguments, **image):
    image = abi.Image(**{"threads": 384, "dynamic_smem_bytes": 1000, **image})
    return abi.Binding(arguments=tuple(arguments), grid=(24, 5, 1), image=image, constants={})


AREAS = {abi.WORKSPACE: 0, "delta": 0, "dq_sum": 256}
LENT = 4096


def make(monkeypatch, *sequence, lend=lambda stream: (LENT, None), **options):
    """A driver that knows the sizes of each kernel's parameters, and a launcher of these kernels, one after another."""
    sizes = {FUNCTION + i: [abi.size_of(it) for it in arguments] for i, arguments in enumerate(sequence)}
    driver = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver(sizes))
    kernels = [LoadedKernel(function=FUNCTION + i, binding=binding_of(it), **options) for i, it in enumerate(sequence)]
    areas = {name: AREAS[name] for it in kernels for name in abi.names_of(it.binding) if name in AREAS}
    workspace = Workspace(lend=lend, areas=areas) if areas else None
    return driver, DriverLauncher(kernels, driver_fakes.DEVICE, workspace)


def tensors():
    q, k, v = (torch.zeros(2, 3, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    captured, sums = (tuple(torch.zeros(2) for _ in range(count)) for count in (6, 3))
    indices = Indices(page_table=torch.zeros(2), full_q_indices=torch.zeros(2))
    own = {"captured": captured, "dcaptured": sums, "indices": indices}
    return Operands(q, k, v, torch.empty_like(q), torch.empty(2, 3, 4), **own)


def wanted(arguments, given, base=LENT):
    addresses = {name: it.data_ptr() for name, it in given.named.items()}
    addresses |= {name: base + at for name, at in AREAS.items()}
    return tuple(abi.pack(argument, addresses, driver_fakes.encode) for argument in arguments)


@pytest.mark.parametrize("case", BINDINGS)
def test_parameters_are_the_bytes_of_the_binding(monkeypatch, case):
    arguments = BINDINGS[case]
    driver, launch = make(monkeypatch, arguments)
    one, two = tensors(), tensors()
    for given in (one, one, two, one._replace(k=two.k, out=two.out, captured=two.captured), one):
        launch(given)
        assert driver.launched[-1].parameters == wanted(arguments, given)
    for launched in driver.launched:
        for place, argument in zip(launched.places, arguments, strict=True):
            assert place % abi.alignment_of(argument) == 0


def test_a_launch_is_what_the_image_says(monkeypatch):
    for overlaps in (False, True):
        driver, launch = make(monkeypatch, BINDINGS["a struct"], overlaps=overlaps)
        for driver.stream in (0, 1 << 45, 0):
            launch(tensors())
        for launched, stream in zip(driver.launched, (0, 1 << 45, 0), strict=True):
            assert (launched.function, launched.stream, launched.overlaps) == (FUNCTION, stream, overlaps)
            assert (launched.grid, launched.block, launched.smem_bytes) == ((24, 5, 1), (384, 1, 1), 1000)


def test_structs_are_laid_out_as_in_cuda_h():
    assert (ctypes.sizeof(CUlaunchAttribute), CUlaunchAttribute.value.offset) == (72, 8)
    assert (ctypes.sizeof(CUlaunchConfig), CUlaunchConfig.stream.offset, CUlaunchConfig.count.offset) == (56, 32, 48)
    names = pytest.importorskip("cuda.bindings.driver")
    assert names.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == driver_module._OVERLAP
    limit = names.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert limit == driver_module._DYNAMIC_SMEM
    assert names.CUresult.CUDA_ERROR_INVALID_CONTEXT == driver_module.INVALID_CONTEXT


def test_only_what_is_new_is_encoded_and_what_is_known_is_not_encoded_again(monkeypatch):
    driver, launch = make(monkeypatch, BINDINGS["tensor maps"])
    one, two = tensors(), tensors()
    for given in (one, one, two, one, two):
        launch(given)
    assert [address for address, *_ in driver.encoded] == [it.data_ptr() for it in (*one[1:3], *two[1:3])]


def test_launches_at_a_time_have_a_slot_each_and_others_share(monkeypatch):
    driver, launch = make(monkeypatch, BINDINGS["eight tensor maps and a counter"])
    given = [tensors() for _ in range(4)]
    for each in given:
        launch(each)
    assert len(launch._free) == 1
    inner, launched_by_driver = iter(given), driver.cuLaunchKernelEx

    def launch_another(*arguments):
        """As another thread would, while the driver has the parameters of this one."""
        if (other := next(inner, None)) is not None:
            launch(other)
        return launched_by_driver(*arguments)

    launch._launch = launch_another
    launch._free[0].launches.clear()
    launch(given[0])
    assert len(launch._free) == 5
    found = [launched.parameters for launched in driver.launched[4:]]
    assert found == [wanted(BINDINGS["eight tensor maps and a counter"], each) for each in (*given[::-1], given[0])]


def test_a_fresh_thread_gets_the_context_of_the_device(monkeypatch):
    driver, launch = make(monkeypatch, BINDINGS["a struct"])
    driver.refuse = 1
    launch(tensors())
    assert (driver.contexts[-1], len(driver.launched)) == (driver_fakes.DEVICE, 1)
    driver.refuse = 2
    with pytest.raises(RuntimeError, match="CUDA driver: cuLaunchKernelEx: CUDA_ERROR_INVALID_CONTEXT: its words"):
        launch(tensors())
    driver.refuse, driver.status = 0, 719
    with pytest.raises(RuntimeError, match="CUDA driver: cuLaunchKernelEx: CUDA_ERROR_OTHER: its words"):
        launch(tensors())
    driver.status = 0
    launch(tensors())
    assert len(launch._free) == 1


def test_streams_that_are_kept_are_bounded(monkeypatch):
    driver, launch = make(monkeypatch, BINDINGS["a struct"])
    streams = (*range(2, 202, 2), 2)
    for driver.stream in streams:
        launch(tensors())
    assert [len(slot.launches) <= 64 for slot in launch._free] == [True]
    assert tuple(launched.stream for launched in driver.launched) == streams


@pytest.mark.parametrize(
    ("names", "areas", "message"),
    [
        (["workspace"], None, r"memory: got \[\]; allowed \['workspace'\]"),
        (["q"], ["workspace"], r"memory: got \['workspace'\]; allowed \[\]"),
        (["q", "delta"], ["delta", "dq_sum"], r"memory: got \['delta', 'dq_sum'\]; allowed \['delta'\]"),
        (["bias"], None, r"allowed \['bias'\]"),
    ],
)
def test_a_workspace_has_what_kernels_take_and_no_more(monkeypatch, names, areas, message):
    driver_fakes.install(monkeypatch, driver_fakes.FakeDriver())
    workspace = areas and Workspace(lend=lambda stream: (0, None), areas=dict.fromkeys(areas, 0))
    kernel = LoadedKernel(function=FUNCTION, binding=binding_of([abi.Pointer(tensor=name) for name in names]))
    with pytest.raises(ValueError, match=message):
        DriverLauncher([kernel], driver_fakes.DEVICE, workspace)


def test_code_is_loaded_once_and_allowed_its_shared_memory(monkeypatch):
    driver = driver_fakes.install(monkeypatch, driver_fakes.FakeDriver())
    first = load_kernel(b"code", "name", driver_fakes.DEVICE)
    assert load_kernel(b"code", "name", driver_fakes.DEVICE, dynamic_smem_bytes=70_000) == first
    assert load_kernel(b"other", "name", driver_fakes.DEVICE) != first
    assert driver.loaded == [b"code", b"other"]
    assert driver.attributes == [(8, 70_000, first, driver_fakes.DEVICE)]
    assert driver.resident == []
    load_kernel(b"code", "name", driver_fakes.DEVICE, is_resident=True)
    assert driver.resident == [first]


# ---------------------------------------------------------------- several kernels, one workspace

SEQUENCE = [
    [abi.Pointer(tensor=name) for name in ("out", "dout", "lse", "delta", "dq_sum")]
    + [abi.Number(kind="i32", value=0)],
    [
        abi.Pointer(tensor="q"),
        tensor_map("dout"),
        tensor_map("dq_sum"),
        *(abi.Pointer(tensor=it) for it in ("dv", "dk")),
    ],
    [abi.Pointer(tensor="dq_sum"), abi.Pointer(tensor="dq"), abi.Number(kind="f32", value=0.5)],
]
GAPPED = abi.Struct(data=bytes(64), pointers={0: "q", 8: "dout", 24: "delta", 40: "dk"})


def backward_tensors(dlse=None):
    q, k, v, out, lse, *_ = tensors()
    return Operands(q, k, v, out, lse, torch.empty_like(out), dlse, *map(torch.empty_like, (q, k, v)))


@pytest.mark.parametrize("sequence", [SEQUENCE, [[GAPPED], [GAPPED, abi.Pointer(tensor="v")]]], ids=["bare", "structs"])
def test_kernels_run_in_order_each_with_its_arguments(monkeypatch, sequence):
    bases = iter((4096, 4096, 8192))
    driver, launch = make(monkeypatch, *sequence, lend=lambda stream: (next(bases), None))
    one, two = backward_tensors(), backward_tensors()
    for given, base in ((one, 4096), (two, 4096), (one, 8192)):
        driver.launched.clear()
        launch(given)
        assert [it.function for it in driver.launched] == [FUNCTION + i for i in range(len(sequence))]
        assert [it.parameters for it in driver.launched] == [wanted(it, given, base) for it in sequence]


def test_memory_is_fresh_for_each_launch_and_held_over_all_of_its_kernels(monkeypatch):
    driver, launch = make(monkeypatch, *SEQUENCE)
    made, held = [], []

    class Memory:
        def __init__(self, *of):
            made.append(of)
            held.append(len(made))

        def data_ptr(self):
            return 1024 * len(made)

        def __del__(self):
            held.pop()

    monkeypatch.setattr(compat, "allocator", lambda layouts, device: lambda: [Memory(*it, device) for it in layouts])
    launch._lend = fresh_memory(driver_fakes.DEVICE, 512)
    inner = launch._launch

    def launch_it(*of):
        assert len(held) == 1
        return inner(*of)

    launch._launch = launch_it
    given = backward_tensors()
    for base in (1024, 2048):
        driver.launched.clear()
        launch(given)
        assert held == []
        assert [it.parameters for it in driver.launched] == [wanted(it, given, base) for it in SEQUENCE]
    assert made == [((512,), (1,), torch.uint8, torch.device("cuda", driver_fakes.DEVICE))] * 2


def test_a_kernel_or_a_tensor_map_that_fails_ends_the_launch_and_spoils_no_later_one(monkeypatch):
    driver, launch = make(monkeypatch, *SEQUENCE)
    inner, left = launch._launch, iter((0, 719))
    launch._launch = lambda *of: next(left, 0) or inner(*of)
    given = backward_tensors()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OTHER"):
        launch(given)
    assert len(driver.launched) == 1
    other = backward_tensors()
    with monkeypatch.context() as patch:
        patch.setattr(driver_fakes.FakeDriver, "cuTensorMapEncodeTiled", lambda *arguments: 1)
        with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled"):
            launch(other)
    for each in (given, other):
        driver.launched.clear()
        launch(each)
        assert [it.parameters for it in driver.launched] == [wanted(it, each) for it in SEQUENCE]


def test_threads_with_streams_of_their_own_never_mix(monkeypatch):
    driver, launch = make(monkeypatch, *SEQUENCE)
    local = threading.local()
    launch._stream_of = lambda device: local.stream
    given = [backward_tensors() for _ in range(4)]

    def many(index):
        local.stream = 16 * (index + 1)
        for _ in range(100):
            launch(given[index])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(many, range(4)))
    expected = {16 * (index + 1): [wanted(it, each) for it in SEQUENCE] for index, each in enumerate(given)}
    assert len(driver.launched) == 1200
    for launched in driver.launched:
        assert launched.parameters == expected[launched.stream][launched.function - FUNCTION]


def test_a_launcher_is_made_for_the_operands_that_are_there():
    made, launched = [], []

    def make_one(has_dlse):
        made.append(has_dlse)
        return lambda operands: launched.append(has_dlse)

    launch = ByPresence(make_one)
    assert made == [False]
    given = backward_tensors()
    for dlse in (None, given.lse, None, given.lse):
        launch(given._replace(dlse=dlse))
    assert (made, launched) == ([False, True], [False, True, False, True])


# ---------------------------------------------------------------- counters


def test_the_default_stream_is_asked_once_and_others_each_time(driver, monkeypatch):
    lend = counters.counter_lender(driver_fakes.DEVICE, 16)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", None)
        first = lend(0)
    driver.did.clear()
    assert lend(0) is first
    assert driver.did == []
    (other, _), (again, _) = lend(80), lend(80)
    assert other == again != first[0]
    assert driver.did == ["id", "clear", "id"]


def test_a_captured_launch_has_a_counter_of_its_own(driver):
    lend = counters.counter_lender(driver_fakes.DEVICE, 16)
    shared, nobody = lend(80)
    driver.capturing = True
    (one, memory), (two, other) = lend(80), lend(80)
    assert nobody is None
    assert (one, two) == (memory.data_ptr(), other.data_ptr())
    assert len({shared, one, two}) == 3
    assert driver.cleared[1:] == [(one, 0, 16, 80), (two, 0, 16, 80)]
    driver.capturing = False
    assert lend(80) == (shared, None)


def test_lenders_of_a_device_share_its_counters(driver, monkeypatch):
    shared = counters.Counters()
    monkeypatch.setattr(counters, "counters_of", lambda device: shared)
    one, two = (counters.counter_lender(driver_fakes.DEVICE, 16) for _ in range(2))
    for stream in (0, 80):
        assert one(stream)[0] == two(stream)[0]
    assert len(driver.cleared) == 2


def test_where_there_is_no_counter_left_even_the_default_stream_brings_its_own(driver):
    driver.memory = None
    lend = counters.counter_lender(driver_fakes.DEVICE, 16)
    for stream in (0, 80, 0):
        address, memory = lend(stream)
        assert memory.data_ptr() == address
    assert [size for _, _, size, _ in driver.cleared] == [16] * 3


def test_a_counter_that_is_too_large_is_refused(driver):
    with pytest.raises(ValueError, match="counter: got 129 bytes; allowed up to 128"):
        counters.counter_lender(driver_fakes.DEVICE, 129)


# ---------------------------------------------------------------- contexts


def test_a_thread_without_a_context_gets_that_of_pytorch_once(driver):
    """One that is there stays unless another is asked for."""
    driver_module.ensure_context(0)
    assert driver.contexts == ["current?"]
    driver_module.make_context_current(1)
    assert driver.contexts[1:] == [1]
    driver.current = 0
    with ThreadPoolExecutor(1) as other:
        for _ in range(3):
            other.submit(driver_module.ensure_context, 1).result()
    assert driver.contexts[2:] == ["current?", 1]


def test_without_a_driver_nothing_happens_unless_it_must(monkeypatch):
    driver_fakes.install(monkeypatch, None)
    driver_module.ensure_context(0)
    with pytest.raises(OSError, match="no NVIDIA driver"):
        driver_module.make_context_current(0)


def test_an_error_has_the_drivers_words(driver):
    driver.context_status = 3
    with pytest.raises(RuntimeError, match="cuCtxGetCurrent: CUDA_ERROR_OTHER: its words"):
        driver_module.ensure_context(0)


def test_every_launch_sees_to_it(monkeypatch):
    seen = []
    monkeypatch.setattr(launching, "ensure_context", lambda index: seen.append(f"context {index}"))
    monkeypatch.setattr(compat, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "device", lambda device: contextlib.nullcontext(seen.append(f"device {device.index}"))
    )
    for device in (torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 0)):
        with launching.on_device(device):
            seen.append(f"body {device}")
    assert seen == ["body cpu", "context 1", "body cuda:1", "device 0", "context 0", "body cuda:0"]

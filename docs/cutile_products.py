"""Two products that do not depend on each other, in cuTile for sm_90: the order of HGMMA and of its waits in the SASS.

``python docs/cutile_products.py``; needs cuda-tile, tileiras and cuobjdump, and no GPU. docs/cutile-backward-report.md
says what it is about.
"""

import io
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cuda.tile as ct
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, export_kernel

M, N, D, STEPS = 64, 64, 64, 64
SHOWN = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(HGMMA\S*|WARPGROUP\.\S+|MUFU\.EX2|BAR\.\S+)(.*?);", re.M
)


def apart(a: ct.Array, b: ct.Array, c: ct.Array, out: ct.Array) -> None:
    """The backward's first half: s and dp need nothing of each other, and could be under way together."""
    block = ct.bid(0)
    mine, other = ct.load(a, (block, 0), (2 * M, D)), ct.load(a, (block + 1, 0), (2 * M, D))
    none = ct.full((2 * M, N), 0.0, dtype=ct.float32)
    acc = ct.full((2 * M, D), 0.0, dtype=ct.float32)
    for step in range(STEPS):
        q, dout = ct.load(b, (step, 0), (N, D)), ct.load(c, (step, 0), (N, D))
        s = ct.mma(mine, q.transpose(), none)
        dp = ct.mma(other, dout.transpose(), none)
        ds = ct.exp2(s) * dp
        acc = ct.mma(ds.astype(a.dtype), q, acc)
    ct.store(out, (block, 0), acc.astype(out.dtype))


def carried(a: ct.Array, b: ct.Array, c: ct.Array, out: ct.Array) -> None:
    """The same with s of the next step made in this one, to be under way while this one's exponentials are."""
    block = ct.bid(0)
    mine, other = ct.load(a, (block, 0), (2 * M, D)), ct.load(a, (block + 1, 0), (2 * M, D))
    none = ct.full((2 * M, N), 0.0, dtype=ct.float32)
    acc = ct.full((2 * M, D), 0.0, dtype=ct.float32)
    s = ct.mma(mine, ct.load(b, (0, 0), (N, D)).transpose(), none)
    for step in range(STEPS):
        q, dout = ct.load(b, (step, 0), (N, D)), ct.load(c, (step, 0), (N, D))
        following = ct.mma(mine, ct.load(b, (step + 1, 0), (N, D)).transpose(), none)
        dp = ct.mma(other, dout.transpose(), none)
        ds = ct.exp2(s) * dp
        acc = ct.mma(ds.astype(a.dtype), q, acc)
        s = following
    ct.store(out, (block, 0), acc.astype(out.dtype))


def sass_of(function: Any) -> str:
    """The machine code of a kernel for row-major bf16 arrays."""
    array = ArrayConstraint(
        ct.bfloat16, 2, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False,
        shape_divisible_by=(128, 64), stride_constant=(None, 1), stride_divisible_by=(64, 1),
        base_addr_divisible_by=128,
    )  # fmt: skip
    convention = CallingConvention.cutile_python_v2()
    signature = KernelSignature([array] * 4, convention).with_mangled_symbol(function.__name__)
    buffer = io.BytesIO()
    kernel = ct.kernel(function, num_worker_warps=8)
    export_kernel(kernel, [signature], buffer, gpu_code="sm_90", output_format="cubin")
    tool = shutil.which("cuobjdump")
    if tool is None:
        raise SystemExit("no cuobjdump on PATH: it is in the wheel nvidia-cuda-cuobjdump and in every CUDA toolkit")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(buffer.getvalue())
        return subprocess.run([tool, "-sass", str(cubin)], check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Print both."""
    for function in (apart, carried):
        print(f"\n{function.__name__}:")
        last, count = "", 0
        for name, operands in (*SHOWN.findall(sass_of(function)), ("", "")):
            word = f"{name} {operands.strip()}" if "DEPBAR" in name else name
            if word != last and count:
                print(f"  {last}" + (f"  x{count}" if count > 1 else ""))
            last, count = word, count + 1 if word == last else 1


if __name__ == "__main__":
    main()

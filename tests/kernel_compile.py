"""Check of test_kernels that must not run under the interpreter: every kernel variant, compiled for sm_90."""

from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hispec.decode import kernels

HOPPER = GPUTarget("cuda", 90, 32)
# What one thread block may have on Hopper.
SHARED_BYTES = 227 * 1024
ELEMENTS = {"bf16": 2, "fp16": 2, "fp32": 4}


def type_of(name: str, element: str) -> str:
    if name in ("positions", "row_starts", "tables", "chosen", "owners"):
        return "*i32"
    if name.startswith("part"):
        return "*fp32"
    if name in ("out", "q", "k", "v", "keys", "values"):
        return f"*{element}"
    return "fp32" if name in ("scale", "cap") else "i32"


def compile_for_hopper(kernel: Any, element: str, constants: dict[str, Any], **options: int) -> Any:
    """The compiled kernel, specialised as a launch specialises it: all pointers and strides are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, element) for name in names}
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith(("_head", "_token"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=HOPPER, options=options)
    assert compiled.asm["cubin"].startswith(b"\x7fELF") and ".target sm_90" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_BYTES, (element, constants, compiled.metadata.shared)
    return compiled


def attend(element: str, size: int, n_rows: int, split: int, capped: bool, windowed: bool) -> Any:
    sizes = kernels.tiles(n_rows, size, size, ELEMENTS[element])
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    constants = sizes | {
        "KV_HEADS": 8, "GROUP": 4, "KEY_SIZE": size, "VALUE_SIZE": size, "PAGE": 16, "SPLIT": split, "CAPPED": capped,
        "WINDOWED": windowed,
    }  # fmt: skip
    return compile_for_hopper(kernels.attend_kernel, element, constants, **options)


def main() -> None:
    for size, (n_rows, split) in product((64, 80, 96, 128, 256), ((4, kernels.SPLIT), (24, kernels.SPLIT), (64, 0))):
        ptx = attend("bf16", size, n_rows, split, False, False).asm["ptx"]
        assert "cp.async" in ptx, "keys are fetched ahead"
        assert ("wgmma" if n_rows == 64 else "mma.sync") in ptx, "products run on the tensor cores"
    for element, capped, windowed in (("fp16", False, True), ("bf16", True, False), ("bf16", True, True)):
        attend(element, 128, 4, kernels.SPLIT, capped, windowed)
        attend(element, 128, 64, 0, capped, windowed)
    attend("fp32", 128, 4, kernels.SPLIT, False, False)
    for element, size, windowed in product(("bf16", "fp32"), (80, 128), (False, True)):
        pad = triton.next_power_of_2(size)
        compile_for_hopper(
            kernels.join_kernel, element,
            {
                "HEADS": 32, "VALUE_SIZE": size, "VALUE_PAD": pad, "SPLIT": kernels.SPLIT, "CHUNK": 16,
                "WINDOWED": windowed,
            },
        )  # fmt: skip
        compile_for_hopper(
            kernels.write_kernel, element,
            {
                "KV_HEADS": 8, "KEY_SIZE": size, "VALUE_SIZE": size, "KEY_PAD": pad, "VALUE_PAD": pad, "PAGE": 16,
                "BLOCK_H": 8,
            },
        )  # fmt: skip


if __name__ == "__main__":
    main()
    print("compiled: as wanted")

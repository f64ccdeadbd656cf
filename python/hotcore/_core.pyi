# The extension module (python/bindings). Arrays are DLPack arrays or capsules; outputs are written
# in place. Errors: ValueError, NotImplementedError, RuntimeError.
from collections.abc import Sequence
from typing import Any, Literal

_Array = Any
_Key = tuple[int, int, int, int]

def version() -> str: ...
def built_with_cuda() -> bool: ...
def cuda_architectures() -> str: ...
def cuda_wgmma() -> bool: ...
def judge_device(
    major: int, minor: int, architectures: str, wgmma: bool
) -> tuple[Literal["none", "slow", "full"], str]: ...
def cuda_device_verdict(device: int) -> tuple[Literal["none", "slow", "full"], str]: ...
def best_isa() -> str: ...

class CoreContext:
    def __init__(
        self,
        threads: int = 0,
        isa: str = "",
        device: int = -1,
        stream: int = 0,
        openmp: int = 0,
        sm_margin: int = 0,
    ) -> None: ...
    @property
    def sm_margin(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def cuda(self) -> bool: ...

class Spec:
    def __init__(self, **fields: Any) -> None: ...  # fields of config_fields()

class ForwardLinearSpec:
    def __init__(self, *, hadamard_block: int = 64) -> None: ...
    @property
    def hadamard_block(self) -> int: ...

def config_fields() -> list[tuple[Any, ...]]: ...  # rows for config.Field
def recipe(name: str) -> dict[str, Any]: ...
def recipe_names() -> list[str]: ...
def saved_format(spec: Spec) -> int: ...
def weight_format(spec: Spec) -> int: ...
def fwht(context: CoreContext, x: _Array, axis: int, block: int, out: _Array) -> None: ...
def hla(
    context: CoreContext,
    x: _Array,
    basis: str,
    block: int,
    rank: int,
    rows: Sequence[int],
    grid_h: int,
    grid_w: int,
    prefix_tokens: int,
    side: str,
    key: _Key,
    out: _Array,
) -> None: ...
def hla_rows(
    tokens: int,
    basis: str,
    block: int,
    rank: int,
    rows: Sequence[int],
    grid_h: int,
    grid_w: int,
    prefix_tokens: int,
) -> int: ...
def basis_order(basis: str, block: int) -> list[int]: ...
def quantize(
    context: CoreContext,
    x: _Array,
    bits: int,
    scale: str,
    rounding: str,
    key: _Key,
    q: _Array,
    scale_out: _Array,
) -> None: ...
def dequantize(
    context: CoreContext, q: _Array, scale: _Array, granularity: str, out: _Array
) -> None: ...
def pack_int4(context: CoreContext, q: _Array, out: _Array) -> None: ...
def unpack_int4(context: CoreContext, packed: _Array, out: _Array) -> None: ...
def encode_blocks(
    context: CoreContext, x: _Array, rounding: str, key: _Key, wire: _Array
) -> None: ...
def sum_blocks(context: CoreContext, wire: _Array, factor: float, out: _Array) -> None: ...
def gemm_workspace(context: CoreContext, m: int, n: int, k: int) -> int: ...
def gemm_int8(
    context: CoreContext,
    a: _Array,
    b: _Array,
    a_scale: _Array | None,
    b_scale: _Array | None,
    divisor: int,
    accumulate: bool,
    out: _Array,
    workspace: _Array | None = None,
) -> None: ...
def gemm_int4(
    context: CoreContext,
    a: _Array,
    b: _Array,
    k: int,
    a_scale: _Array | None,
    b_scale: _Array | None,
    divisor: int,
    accumulate: bool,
    out: _Array,
    workspace: _Array | None = None,
) -> None: ...
def saved_layout(
    tokens: int, in_features: int, spec: Spec
) -> tuple[int, int, int, int, int, int, int, int]: ...
def compress_activation_workspace(
    context: CoreContext, tokens: int, in_features: int, spec: Spec
) -> int: ...
def compress_activation(
    context: CoreContext,
    x: _Array,
    spec: Spec,
    key: _Key,
    saved: _Array,
    workspace: _Array | None = None,
) -> None: ...
def decompress_activation(
    context: CoreContext,
    saved: _Array,
    tokens: int,
    in_features: int,
    saved_key: _Key,
    first: int,
    last: int,
    spec: Spec,
    out: _Array,
) -> None: ...
def quantized_weight_bytes(out_features: int, in_features: int, spec: Spec) -> int: ...
def quantize_weight_workspace(
    context: CoreContext, out_features: int, in_features: int, spec: Spec
) -> int: ...
def quantize_weight(
    context: CoreContext, w: _Array, spec: Spec, out: _Array, workspace: _Array | None = None
) -> None: ...
def backward_linear_workspace(
    context: CoreContext,
    tokens: int,
    out_features: int,
    in_features: int,
    spec: Spec,
    need_gx: bool,
    need_gw: bool,
) -> int: ...
def backward_linear(
    context: CoreContext,
    gy: _Array,
    w: _Array | None,
    saved: _Array | None,
    tokens: int,
    in_features: int,
    saved_key: _Key,
    spec: Spec,
    key: _Key,
    gx: _Array | None,
    gw: _Array | None,
    gb: _Array | None,
    accumulate: bool,
    workspace: _Array | None = None,
    quantized_weight: _Array | None = None,
) -> None: ...
def supported(
    context: CoreContext, tokens: int, out_features: int, in_features: int, spec: Spec
) -> tuple[bool, str]: ...
def forward_weight_format(spec: ForwardLinearSpec) -> int: ...
def forward_weight_bytes(out_features: int, in_features: int, spec: ForwardLinearSpec) -> int: ...
def quantize_forward_weight(
    context: CoreContext, w: _Array, spec: ForwardLinearSpec, out: _Array
) -> None: ...
def forward_input_format(spec: ForwardLinearSpec) -> int: ...
def forward_input_bytes(tokens: int, in_features: int, spec: ForwardLinearSpec) -> int: ...
def quantize_forward_input(
    context: CoreContext,
    x: _Array,
    spec: ForwardLinearSpec,
    out: _Array,
    kept: Spec | None = None,
    key: _Key = ...,
    saved: _Array | None = None,
    workspace: _Array | None = None,
    exponents: _Array | None = None,
) -> None: ...
def weight_int4_format(spec: ForwardLinearSpec, group: int) -> int: ...
def weight_int4_bytes(
    out_features: int, in_features: int, spec: ForwardLinearSpec, group: int
) -> int: ...
def quantize_weight_int4(
    context: CoreContext,
    w: _Array,
    exponents: _Array | None,
    spec: ForwardLinearSpec,
    group: int,
    out: _Array,
) -> None: ...
def expand_weight_int4(
    context: CoreContext,
    w: _Array,
    out_features: int,
    in_features: int,
    spec: ForwardLinearSpec,
    group: int,
    out: _Array,
) -> None: ...
def dequantize_weight(
    context: CoreContext,
    w: _Array,
    out_features: int,
    in_features: int,
    spec: ForwardLinearSpec,
    out: _Array,
    exponents: _Array | None = None,
    group: int = 0,
    workspace: _Array | None = None,
) -> None: ...
def dequantize_weight_workspace(
    context: CoreContext, out_features: int, in_features: int, spec: ForwardLinearSpec, group: int
) -> int: ...
def forward_linear_workspace(
    context: CoreContext,
    tokens: int,
    out_features: int,
    in_features: int,
    spec: ForwardLinearSpec,
    quantized_weight: bool,
    quantized_input: bool = False,
    group: int = 0,
) -> int: ...
def forward_linear(
    context: CoreContext,
    x: _Array | None,
    w: _Array | None,
    bias: _Array | None,
    spec: ForwardLinearSpec,
    y: _Array,
    workspace: _Array | None = None,
    quantized_weight: _Array | None = None,
    quantized_input: _Array | None = None,
    in_features: int = 0,
    group: int = 0,
) -> None: ...
def forward_supported(
    context: CoreContext, tokens: int, out_features: int, in_features: int, spec: ForwardLinearSpec
) -> tuple[bool, str]: ...
def explain_devices() -> list[str]: ...
def explain(
    device: str,
    tokens: int,
    out_features: int,
    in_features: int,
    spec: Spec,
    dtype: str,
    gw_dtype: str,
    compress: bool,
    gx: bool,
    gw: bool,
    gb: bool,
    accumulate: bool,
    quantized_weight: bool,
    wgmma: bool,
    forward: ForwardLinearSpec | None = None,
    bias: bool = True,
    bias_dtype: str = "float32",
    quantized_forward_weight: bool = False,
) -> dict[str, Any]: ...
def explain_gemm(
    device: str, m: int, n: int, k: int, out_dtype: str, int4: bool, accumulate: bool, wgmma: bool
) -> dict[str, Any]: ...

# ---- operators of torch in C++ (python/bindings/torch_ops.cpp) ----
def torch_operators() -> bool: ...
def torch_learn(
    json: str,
    spec: Spec,
    forward: ForwardLinearSpec,
    int8: bool,
    context: CoreContext,
    device: int,
    handle: int,
) -> None: ...
def torch_unknown() -> bool: ...
def torch_forget_codes(key: int) -> None: ...
def torch_forget(forked: bool = False) -> None: ...

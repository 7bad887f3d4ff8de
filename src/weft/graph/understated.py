"""Operators whose schemas say less than the operators do, and which schemas are believed at all.

Contract: the one list of exceptions. `tests/conformance` runs the operators of torch and compares what happens with
what Weft believes; an entry here that is not needed, or one that is missing, fails there.

A schema is believed for operators that torch ships and that were checked so, and for custom operators with torch's tag
`pt2_compliant_tag`: `torch.library.custom_op` sets it, and authors in C++ set it to promise that the schema is true.
Any other operator is a barrier that may write what it takes.
"""

from __future__ import annotations

from weft.compat import FUNCTIONAL

# By the name without overload: arguments that are written although the schema does not say so.
WRITES: dict[str, tuple[str, ...]] = {
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
    "aten::_copy_from": ("dst",),
    "aten::_copy_from_and_resize": ("dst",),
    "aten::batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::instance_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "inductor::resize_storage_bytes_": ("variable",),
}

# By the name without overload: arguments whose memory the results may share although the schema does not say so.
SHARES: dict[str, tuple[str, ...]] = {
    f"{FUNCTIONAL}::_wrap_tensor_autograd": ("input",),
    f"{FUNCTIONAL}::wait_tensor": ("tensor",),
    f"{FUNCTIONAL}::wait_tensors": ("tensors",),
    "aten::_copy_from": ("dst",),
    "aten::_copy_from_and_resize": ("dst",),
    "aten::_unsafe_view": ("self",),
    "aten::set_": ("self", "source"),
    "aten::set_data": ("self", "new_data"),
    "aten::unsafe_split": ("self",),
    "aten::unsafe_split_with_sizes": ("self",),
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "inductor::_alloc_from_pool": ("self",),
    "inductor::_reinterpret_tensor": ("self",),
    "inductor::resize_storage_bytes_": ("variable",),
}

# Namespaces of torch whose schemas are believed but for the exceptions above.
BELIEVED = frozenset(
    {
        FUNCTIONAL,
        FUNCTIONAL + "_autograd",
        "_dtensor",
        "_native",
        "_quantized",
        "aten",
        "fsdp",
        "mkl",
        "mkldnn",
        "onednn",
        "prims",
        "profiler",
        "quantization",
        "quantized",
        "quantized_decomposed",
        "rngprims",
        "sparse",
        "weft",
    }
)

# Operators of other namespaces that were checked one by one.
BELIEVED_OPERATORS = frozenset(
    {
        "symm_mem::_low_contention_all_gather",
        "symm_mem::_low_contention_reduce_scatter",
        "symm_mem::fused_all_gather_matmul",
        "symm_mem::fused_all_gather_scaled_matmul",
        "symm_mem::fused_matmul_reduce_scatter",
        "symm_mem::fused_scaled_matmul_reduce_scatter",
    }
)

# Namespaces and operators that are barriers even with the tag: they act on streams, gradients, processes or files.
NEVER_BELIEVED = frozenset({"c10d", "c10d_functional", "debugprims", "streams", "symm_mem"})
NEVER_BELIEVED_OPERATORS = frozenset({"inductor::accumulate_grad_"})

# Operators that return nothing and declare no write, and still do nothing but check, print or mark. Any other such
# operator must do something that its schema does not say.
MARKS = frozenset(
    {
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::_cufft_clear_plan_cache",
        "aten::_cufft_set_plan_cache_max_size",
        "aten::_linalg_check_errors",
        "aten::_print",
        "aten::_validate_compressed_sparse_indices",
        "aten::_validate_sparse_bsc_tensor_args",
        "aten::_validate_sparse_bsr_tensor_args",
        "aten::_validate_sparse_compressed_tensor_args",
        "aten::_validate_sparse_coo_tensor_args",
        "aten::_validate_sparse_csc_tensor_args",
        "aten::_validate_sparse_csr_tensor_args",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
        "debug_mode_ops::annotate",
        "prims::_sink_tokens",
        "profiler::_record_function_exit",
    }
)

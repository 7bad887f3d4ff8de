"""Operators with effects that their schemas do not declare, and the list of schemas that Weft trusts.

Contract: this is the only list of exceptions. `tests/conformance` runs torch's operators and compares the observed
effects with `operator_effects`; a missing entry fails there.

Weft trusts the schemas of operators that torch ships and the conformance tests cover, and of custom operators with
torch's tag `pt2_compliant_tag`: `torch.library.custom_op` sets it, and C++ authors set it to promise a correct schema.
Any other operator is a barrier that may write its arguments.
"""

from __future__ import annotations

from weft.compat import FUNCTIONAL

# By the name without overload: arguments that are written although the schema does not declare it.
WRITES: dict[str, tuple[str, ...]] = {
    "aten::_batch_norm_impl_index": ("running_mean", "running_var"),
    "aten::_copy_from": ("dst",),
    "aten::_copy_from_and_resize": ("dst",),
    "aten::batch_norm": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten::batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "aten::batch_norm_update_stats": ("running_mean", "running_var"),
    "aten::cov": ("self",),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::instance_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::set_": ("source",),  # a view beyond the end of the storage resizes it
    "fsdp::all_gather_copy_in": ("all_gather_output",),
    "inductor::resize_storage_bytes_": ("variable",),
}

# By the name without overload: arguments whose memory the results may share although the schema does not declare it.
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

# By the name without overload: arguments whose memory the results share in some calls and not in others. Metadata
# decides if a call has any.
MAY_SHARE: dict[str, tuple[str, ...]] = {
    "aten::_cast_Byte": ("self",),
    "aten::_cast_Char": ("self",),
    "aten::_cast_Double": ("self",),
    "aten::_cast_Float": ("self",),
    "aten::_cast_Half": ("self",),
    "aten::_cast_Int": ("self",),
    "aten::_cast_Long": ("self",),
    "aten::_cast_Short": ("self",),
    "aten::_foobar": ("self",),
    "aten::_remove_batch_dim": ("self",),
    "aten::_reshape_from_tensor": ("self",),
    "aten::_saturate_weight_to_fp16": ("weight",),
    "aten::_test_optional_filled_intlist": ("values",),
    "aten::_test_optional_floatlist": ("values",),
    "aten::_test_optional_intlist": ("values",),
    "aten::_test_parallel_materialize": ("self",),
    "aten::_test_string_default": ("dummy",),
    "aten::_to_cpu": ("tensors",),
    "aten::alpha_dropout": ("input",),
    "aten::atleast_1d": ("self", "tensors"),
    "aten::atleast_2d": ("self", "tensors"),
    "aten::atleast_3d": ("self", "tensors"),
    "aten::broadcast_tensors": ("tensors",),
    "aten::cartesian_prod": ("tensors",),
    "aten::conj_physical": ("self",),
    "aten::cumprod_backward": ("grad",),
    "aten::data": ("self",),
    "aten::dequantize": ("self", "tensors"),
    "aten::dropout": ("input",),
    "aten::einsum": ("tensors",),
    "aten::feature_alpha_dropout": ("input",),
    "aten::feature_dropout": ("input",),
    "aten::flatten_dense_tensors": ("tensors",),
    "aten::histogramdd": ("bins",),
    "aten::lift": ("self",),
    "aten::meshgrid": ("tensors",),
    "aten::set": ("self", "source"),
    "aten::sum_to_size": ("self",),
    "aten::to_dense": ("self",),
    "aten::to_dense_backward": ("grad",),
    "aten::to_mkldnn_backward": ("grad",),
    "aten::type_as": ("self",),
    "aten::unflatten_dense_tensors": ("flat",),
    "aten::unsafe_chunk": ("self",),
    "prims::device_put": ("a",),
}

# Operators whose results share one new storage.
ONE_MEMORY = frozenset({"aten::nonzero_numpy"})

# Operators that draw from a generator without torch's tag for it.
DRAWS = frozenset({"prims::inductor_randint"})

# Operators that read data on the host without torch's tag for it.
READS_ON_HOST = frozenset(
    {
        "aten::_choose_qparams_per_tensor",
        "aten::fbgemm_linear_quantize_weight",
        "aten::is_nonzero",
        "prims::item",
        "weft::copy_to_host",
    }
)

# Namespaces of torch whose schemas are trusted, apart from the exceptions above.
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

# Operators that return nothing and declare no write because they only check, print or mark. Any other such operator
# must have an effect that its schema does not declare.
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
